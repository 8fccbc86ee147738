"""A class in tables: rosters, statistics by question, similar answers."""

import csv
import re
from datetime import UTC, datetime
from xml.etree import ElementTree

import pytest

from instructor.course import Course
from instructor.grading.class_.feedback import finish_pages, finished_page, question_titles
from instructor.grading.class_.intake import suggestion
from instructor.grading.class_.late import LateDays
from instructor.grading.class_.platforms import canvas_rows, export_gradebook, moodle_rows, platform_notes
from instructor.grading.class_.report import (
    Student,
    _take_messages,
    as_csv,
    class_picture,
    class_rows,
    kind_of_mistake,
    statistics_rows,
)
from instructor.grading.class_.roster import Person, find_people, read_roster
from instructor.grading.class_.similarity import alike, fingerprints
from instructor.grading.submission.plan import question_of
from instructor.grading.submission.results import CellResult, GradingError, SubmissionResult

ADA, ZOE = Person("ada", "Ada", "Lovelace", "ada@x.org"), Person("4712", "Zoe\u0308", "Li", "zoe@x.org")


def _student(name, points, **more):
    return Student(name, None, points, dict.fromkeys(points, 4.0), **more)


CLASS = [
    _student("ada", {"q1_1": 4.0, "q1_2": 4.0, "bonus_2_1": 4.0}),
    _student(
        "ben_17", {"q1_1": 0.0, "q1_2": 2.0, "bonus_2_1": 0.0}, messages={"q1_1": "Question 1.1: got 12.5, not 13"}
    ),
    _student(
        "cy",
        {"q1_1": 0.0, "q1_2": 0.0, "bonus_2_1": 0.0},
        messages={"q1_1": "Question 1.1: got -3e4, not 13"},
        waiting={"q1_2"},
        missing={"bonus_2_1"},
        penalty=1.0,
    ),
]


def test_statistics_count_everybody_once_and_name_the_commonest_mistake():
    first, second, bonus = statistics_rows(CLASS)
    assert (first["full"], first["none"], first["part"], first["mean"]) == (1, 2, 0, 1.33)
    assert first["commonest mistake"] == "got #, not #" and first["times"] == 2
    assert (second["full"], second["part"], second["waits"], second["mean"]) == (1, 1, 1, 3.0)
    assert bonus["question"] == "Bonus 2.1" and bonus["missing"] == 1
    for row in (first, second, bonus):
        assert sum(row[state] for state in ("full", "part", "none", "missing", "waits")) == len(CLASS)


def test_an_answer_cell_as_it_was_released_is_no_answer():
    """Of two answers to a question one may be there; a call of another question's answer is a mistake of this one."""
    said = {
        "q1_1_tests": "Question 1.1 is not answered yet.",
        "q1_5_tests": "Question 1.5: not answered yet: 2 of 2 gaps in gemm_triton.py still say raise NotImplementedError().",
        "q2_1_tests": "Question 2.1 calls tile, which is not answered yet.",
        "q2_2_tests": "Question 2.2: got 3, not 4",
        "q2_2_bytes_tests": "Question 2.2 is not answered yet.",
    }
    cells = {name: CellResult(0.0, "failed", message) for name, message in said.items()}
    cells["q2_3_tests"] = CellResult(0.0, "missing", "")
    cells["q3_1_pairs_tests"] = CellResult(4.0, "passed", "")
    cells["q3_1_cost_tests"] = CellResult(0.0, "failed", "Question 3.1 is not answered yet.")
    student = _student("ada", {question_of(name): 0.0 for name in cells} | {"q3_1": 2.0})
    _take_messages(student, SubmissionResult("ada", "lab1", cells, (), {}, ""))
    states = {question: student.state(question) for question in student.most}
    assert states == {
        "q1_1": "missing",
        "q1_5": "missing",
        "q2_1": "none",
        "q2_2": "none",
        "q2_3": "missing",
        "q3_1": "part",
    }


def test_a_message_is_a_kind_of_mistake_without_its_numbers():
    assert kind_of_mistake("\nQuestion 2.3: the result is 1,234.5 off\n  in f, line 3") == "the result is # off"
    assert kind_of_mistake("") == "no words"


def test_a_picture_of_the_class():
    text = class_picture(CLASS, "lab1")
    assert ElementTree.fromstring(text).tag.endswith("svg")
    assert "who got what" in text and "median" in text and "waits for a person" in text


def test_the_forms_of_platforms():
    table = class_rows(CLASS)
    assert table[2]["Question 1.2"] == "waits" and table[1]["points"] == 2.0 and table[0]["bonus"] == 4.0
    possible, *rows = canvas_rows(CLASS, "lab1")
    assert possible["lab1"] == 8.0 and rows[1]["ID"] == "17"
    late = moodle_rows(CLASS)[2]
    assert late["Grade"] == 0.0 and "lateness" in late["Feedback comments"]  # a penalty takes no more than there is
    assert as_csv([{"student": "=cmd()"}]) == "student\n'=cmd()\n"


def test_nbgraders_own_table_runs_nothing_in_a_spreadsheet(tmp_path):
    course = Course(tmp_path)
    with course.gradebook() as book:
        book.add_assignment("lab1")
        book.add_student("ada", last_name='=HYPERLINK("http://x/","y")')
    assert export_gradebook(course, tmp_path / "grades.csv") == []
    assert "'=HYPERLINK" in (tmp_path / "grades.csv").read_text()


def test_moodle_takes_every_row_of_its_form(tmp_path):
    """As `mod/assign/feedback/offline` of Moodle reads it: three columns it needs, no grade below 0, none above the maximum."""
    read = list(csv.DictReader(as_csv(moodle_rows(CLASS)).splitlines()))
    assert {"Identifier", "Grade", "Last modified (grade)"} <= set(read[0])
    changed = datetime.strptime(read[1]["Last modified (grade)"], "%Y-%m-%d %H:%M:%S %z")
    assert abs((datetime.now(UTC) - changed).total_seconds()) < 60
    assert read[1]["Identifier"] == "Participant 17" and [float(row["Grade"]) for row in read] == [12.0, 2.0, 0.0]
    assert read[1]["Feedback comments"] == "Question 1.1: got 12.5, not 13"
    waits, above, nameless = platform_notes(CLASS, "moodle")
    assert "1 student (cy) wait" in waits
    assert "1 student (ada)" in above and "maximum grade to 12 before" in above
    assert "2 students (ada, cy)" in nameless
    assert platform_notes(CLASS, "canvas") == [waits] and platform_notes(CLASS[1:2], "moodle") == []


def test_a_name_that_is_not_there_is_answered_with_those_that_are_close():
    known = ["O'Brien Ada_101", "Jos\u00e9 N\u00fa\u00f1ez_102", "ben_17"]
    assert suggestion(["ada"], known) == ' Did you mean "O\'Brien Ada_101"?'
    assert suggestion(["bne_17"], known) == " Did you mean 'ben_17'?" and suggestion(["zoe"], known) == ""


def test_people_are_found_for_the_folders_of_platforms(tmp_path):
    path = tmp_path / "roster.csv"
    path.write_text("id,first_name,last_name,email\nada,Ada,Lovelace,ada@x.org\n4712,Zoe\u0308,Li,zoe@x.org\n")
    people = read_roster(path)
    assert people == [ADA, ZOE]
    folders = ["ada", "Ada Lovelace_99", "Zo\u00eb Li_3", "lizo\u00eb_4_5", "somebody_4712", "nobody"]
    assert find_people(people, folders) == {"ada": ADA, folders[1]: ADA, folders[2]: ZOE, folders[4]: ZOE}
    assert find_people([*people, Person("x", "Ada", "Lovelace")], ["Ada Lovelace_99"]) == {}


@pytest.mark.parametrize(
    ("text", "words"), [("name\nx\n", "no column id"), ("id\na\na\n", "there twice"), ("id,email\n,x\n", "is empty")]
)
def test_a_roster_that_cannot_be_read_says_where(tmp_path, text, words):
    (tmp_path / "roster.csv").write_text(text)
    with pytest.raises(GradingError, match=words):
        read_roster(tmp_path / "roster.csv")


def test_late_days_cost_a_share_for_each_day_that_has_begun():
    plugin = LateDays(free_days=1, percent_a_day=10)
    hour = 3600
    seconds = {0: 0, 24 * hour: 0, 25 * hour: 5, 49 * hour: 10, 10_000 * hour: 50}
    assert {s: plugin.late_submission_penalty("ada", 50.0, s) for s in seconds} == seconds


CODE = """
def tile_product(a, b, size):
    out = torch.zeros(a.shape[0], b.shape[1])
    for i in range(0, a.shape[0], size):
        for j in range(0, b.shape[1], size):
            part = torch.zeros(min(size, a.shape[0] - i), min(size, b.shape[1] - j))
            for k in range(0, a.shape[1], size):
                part += (a[i:i + size, k:k + size, None] * b[None, k:k + size, j:j + size]).sum(1)
            out[i:i + size, j:j + size] = part
    return out
"""
OTHER = """
def tile_product(a, b, size):
    rows, columns = a.split(size), b.split(size, dim=1)
    return torch.cat([torch.cat([sum((x.unsqueeze(-1) * y).sum(-2)
        for x, y in zip(row.split(size, 1), column.split(size, 0))) for column in columns], 1) for row in rows])
"""


def test_renamed_code_is_alike_and_other_or_given_code_is_not():
    renamed = (
        CODE.replace("part", "acc").replace("size", "t").replace("\n    out", "  # mine\n    out").replace("i", "ii")
    )
    class_ = {"ada": {"q1": CODE}, "ben": {"q1": renamed}, "cy": {"q1": OTHER}, "dan": {"q1": "x = 1"}}
    (pair,) = alike(class_, set())
    assert (pair.one, pair.other, pair.cells) == ("ada", "ben", ["q1"]) and pair.share > 0.6
    assert alike(class_, fingerprints(CODE) | fingerprints(renamed)) == []
    assert alike({name: {"q1": CODE} for name in "abcdefgh"}, set()) == []  # what everybody has is nobody's own
    assert fingerprints("x =") == set() and fingerprints("def f(:\n '''") == set()


# ---- feedback ------------------------------------------------------------------------------------------------------

PAGE = """<html><head><title>lab4_sdpa</title></head><body>
<h4>lab4_sdpa (Score: 9.0 / 17.0)</h4>
<div id="toc">
<ol>
<li><a href="#q1_1_part_tests">Test cell</a> (Score: 3.0 / 3.0)</li>
<li><a href="#q1_1_tests">Test cell</a> (Score: 1.0 / 1.0)</li>
<li><a href="#q2_3">Written response</a> (Score: 0.0 / 5.0)</li>
<li><a href="#bonus_2_4_tests">Test cell</a> (Score: 5.0 / 8.0)</li>
</ol>
</div>
<p><img alt="x" src="assets/lab4_dispatcher.svg"/><img src="assets/../pyproject.toml"/><img src="https://a.b/c.png"/></p>
<a name="comment-q2_3"></a><a name="q2_3"></a><div class="panel-heading"><span>Student's answer</span><span>
      Score: 0.0 / 5.0 <a href="#top">(Top)</a></span></div>
<p><a href="#q1_1_tests">Test cell</a> (Score: 99.0 / 99.0)</p>
</body></html>"""


def test_feedback_names_questions_and_counts_no_waiting_answer_as_nothing():
    student = Student(
        "ada",
        None,
        {"q1_1": 4.0, "q2_3": 0.0, "bonus_2_4": 5.0},
        {"q1_1": 4.0, "q2_3": 5.0, "bonus_2_4": 8.0},
        {"q2_3"},
    )
    page = finished_page(PAGE, "lab4_sdpa", student, {"q1_1": "Which <backend>?", "q2_3": "Explain"})
    assert "4 of 9 points, 5 of 8 bonus points; 1 answer waits for a person and can add to this" in page
    first, *others = re.findall(r'<tr><td><a href="#(\w+)">([^<]*)</a></td><td class="points">([^<]*)</td></tr>', page)
    assert first == ("q1_1_part_tests", "Question 1.1: Which &lt;backend&gt;?", "4 of 4")
    assert [(name, points) for _, name, points in others] == [
        ("Question 2.3: Explain", "waits, 5"),
        ("Bonus 2.4", "5 of 8"),
    ]
    assert "Waits for a person, 5.0 points" in page and "(Score: 99.0 / 99.0)" in page  # a student's own text stays
    assert "Content-Security-Policy" in page and "overflow-wrap: anywhere" in page


def test_feedback_holds_the_labs_own_pictures_and_no_other_file():
    page = finished_page(PAGE, "lab4_sdpa", Student("ada", None), {})
    assert page.count("data:image/svg+xml;base64,") == 1
    assert 'src="assets/../pyproject.toml"' in page and 'src="https://a.b/c.png"' in page


def test_titles_come_from_the_labs_source():
    assert question_titles("lab4_sdpa")["q1_1"] == "Which backend ran?" and question_titles("lab9") == {}


def test_every_page_gets_its_policy_once_whatever_an_answer_says(tmp_path):
    folder = tmp_path / "ada" / "lab4_sdpa"
    folder.mkdir(parents=True)
    said = PAGE.replace(
        "<p><img", '<p>my Content-Security-Policy: &lt;meta http-equiv="Content-Security-Policy"</p><p><img'
    )
    (folder / "lab4_sdpa.html").write_text(said)
    for _ in range(2):
        finish_pages(tmp_path, "lab4_sdpa", [])
        page = (folder / "lab4_sdpa.html").read_text()
        assert page.count('<head><meta http-equiv="Content-Security-Policy" content="default-src') == 1
        assert page.count("Content-Security-Policy") == 3
