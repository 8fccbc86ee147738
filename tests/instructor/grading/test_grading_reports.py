"""A class in tables: rosters, statistics by question, similar answers."""

import pytest

from instructor.grading.class_.late import LateDays
from instructor.grading.class_.platforms import canvas_rows, gradescope_results, moodle_rows
from instructor.grading.class_.report import (
    Student,
    as_csv,
    draw_class,
    kind_of_mistake,
    question_rows,
    statistics_rows,
)
from instructor.grading.class_.roster import Person, find_people, read_roster
from instructor.grading.class_.similarity import alike, all_grams, fingerprints
from instructor.grading.submission.results import GradingError

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


def test_a_message_is_a_kind_of_mistake_without_its_numbers():
    assert kind_of_mistake("\nQuestion 2.3: the result is 1,234.5 off\n  in f, line 3") == "the result is # off"
    assert kind_of_mistake("") == "no words"


def test_a_picture_of_the_class(tmp_path):
    draw_class(CLASS, "lab1", tmp_path / "class.svg")
    text = (tmp_path / "class.svg").read_text()
    assert "who got what" in text and "median" in text and "waits for a person" in text


def test_the_forms_of_platforms():
    table = question_rows(CLASS)
    assert table[2]["Question 1.2"] == "waits" and table[1]["points"] == 2.0 and table[0]["bonus"] == 4.0
    assert moodle_rows(CLASS)[1]["Identifier"] == "Participant 17" and moodle_rows(CLASS)[2]["Grade"] == -1.0
    possible, *rows = canvas_rows(CLASS, "lab1")
    assert possible["lab1"] == 8.0 and rows[1]["ID"] == "17"
    results = gradescope_results(CLASS[2])
    assert results["score"] == -1.0 and "lateness" in results["output"]
    assert [t.get("status") for t in results["tests"]] == ["failed", None, "failed"]
    assert as_csv([{"student": "=cmd()"}]) == "student\n'=cmd()\n"


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
    assert alike(class_, all_grams(CODE) | all_grams(renamed)) == []
    assert alike({name: {"q1": CODE} for name in "abcdefgh"}, set()) == []  # what everybody has is nobody's own
    assert fingerprints("x =") == set() and fingerprints("def f(:\n '''") == set()
