"""How much a student reads before, between and after the answers of each lab, counted in the students' notebooks.

    python tools/reading.py

Words are those with a letter or a digit in prose that is not folded (`<details>`); hints, points and rules in a fold do not count.
"""

import re
import statistics
from dataclasses import astuple, dataclass, fields
from pathlib import Path

import nbformat

ROOT = Path(__file__).resolve().parent.parent
FOLDED = re.compile(r"<details>.*?</details>", re.DOTALL)
FIGURE = re.compile(r"!\[[^\]]*\]\([^)]*\)")
NOT_PROSE = re.compile(r"```.*?```|!\[[^\]]*\]\([^)]*\)", re.DOTALL)
QUESTION = re.compile(r"^#+ (?:Bonus )?Question ", re.MULTILINE)
RULE = re.compile(
    r"\b(forbid\w*|refus\w+|allowed|must|may not|no more than|at most|under any name|grad(?:er|ing|es|ed)|waits? for|"
    r"a person|is counted|are counted|counts its|accepted|judged|without points|limit(?:s|ed)|leave|nothing else)\b",
    re.IGNORECASE,
)
DRAWS = re.compile(r"\b(plt\.show|\w*\.plot|\w*plot_\w+|\w*draw_\w+|show_timeline)\(")


@dataclass(frozen=True)
class Reading:
    """The counts of one lab, each the smaller the better but the last."""

    before_first_answer: int  # words
    median_question: float  # words
    longest_question: int  # words
    rule_sentences: int
    test_share: float  # of the lines of code that are not folded, those of test cells
    code_lines: int  # of the student's file
    pictures: float  # a thousand words: figures, and cells that draw


def count_words(text: str) -> int:
    """Count the words of prose that is not folded; code blocks and figures are none."""
    return sum(any(map(str.isalnum, word)) for word in NOT_PROSE.sub(" ", FOLDED.sub(" ", text)).split())


def read(notebook: Path) -> Reading:
    """Count one student's notebook."""
    cells = nbformat.read(notebook, as_version=4).cells
    before, words, questions, rules, figures, tests, lines, shown = None, 0, [], 0, 0, 0, 0, 0
    for cell in cells:
        meta = cell.metadata.get("nbgrader", {})
        if meta.get("solution") and before is None:
            before = words
        if cell.cell_type == "code":
            count = len(cell.source.splitlines())
            folded = cell.metadata.get("jupyter", {}).get("source_hidden", False)
            lines, shown = lines + count, shown + count * (not folded)
            is_test = meta.get("grade") and not meta.get("solution")
            tests += count * bool(is_test and not folded)
            figures += not is_test and meta.get("grade_id") != "setup" and bool(DRAWS.search(cell.source))
        elif not meta.get("solution"):
            words += count_words(cell.source)
            figures += len(FIGURE.findall(cell.source))
            prose = NOT_PROSE.sub(" ", FOLDED.sub(" ", cell.source))
            rules += sum(bool(RULE.search(sentence)) for sentence in re.split(r"(?<=[.!?:])\s+|\n\s*\n", prose))
            pieces = QUESTION.split(cell.source)
            questions += [count_words(piece) for piece in pieces[1:]]
    return Reading(
        before or 0,
        statistics.median(questions or [0]),
        max(questions, default=0),
        rules,
        round(tests / max(shown, 1), 2),
        lines,
        round(1000 * figures / max(words, 1), 2),
    )


def main() -> None:
    """Print a line for each notebook."""
    paths = sorted(ROOT.glob("lab*.ipynb"))
    print(f"{'':24}" + "".join(f"{field.name.replace('_', ' '):>21}" for field in fields(Reading)))
    for path in paths:
        print(f"{path.stem:24}" + "".join(f"{value:>21,}" for value in astuple(read(path))))


if __name__ == "__main__":
    main()
