"""What `labs build` refuses beside the source's form: points that do not add up, and hidden checks that do not exist."""

from __future__ import annotations

import ast
import json
from pathlib import Path

from instructor.build import Built
from instructor.points import number_text

REGULAR_POINTS = 100  # of each lab, without its bonus questions
CHECKS = Path(__file__).resolve().parent / "checks"


def refusals(built: Built, checks: Path = CHECKS) -> list[str]:
    """Say in a sentence each what of a lab does not fit together; an empty list if everything does.

    Args:
        built: the lab.
        checks: the folder with a package of hidden checks for each lab.
    """
    return [*_wrong_sum(built), *_wrong_numbers(built), *_missing_checks(built, checks / built.name)]


def _wrong_sum(built: Built) -> list[str]:
    regular = sum(question.points for question in built.questions if not question.bonus)
    if regular == REGULAR_POINTS:
        return []
    return [
        f"{built.name} has {number_text(regular)} points without its bonus questions, and should have {REGULAR_POINTS}: "
        "take from one question what another gets, or make the new one a bonus question."
    ]


def _wrong_numbers(built: Built) -> list[str]:
    """A question's number follows the number before: the next one of its part, or the first of the next part."""
    problems, before = [], (0, 0)
    for question in built.questions:
        part, number = map(int, question.number.split("."))
        if (part, number) not in ((before[0], before[1] + 1), (before[0] + 1, 1)):
            problems.append(
                f"{built.name}: {question.name} follows Question {before[0]}.{before[1]}; "
                f"it should be {before[0]}.{before[1] + 1} or {before[0] + 1}.1."
            )
        before = (part, number)
    return problems


def _missing_checks(built: Built, folder: Path) -> list[str]:
    """Each `hidden.name(...)` of a test cell is a name that the lab's package of checks imports or defines."""
    package = folder / "__init__.py"
    tree = ast.parse(package.read_text(encoding="utf-8") if package.is_file() else "")
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    known = {alias.asname or alias.name for node in imports for alias in node.names}
    known |= {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    return [
        f"{built.name}, cell {cell}: there is no hidden check {name}; write it in instructor/checks/{built.name}/ and import "
        "it in __init__.py there."
        for cell, name in _hidden_names(built)
        if name not in known
    ]


def _hidden_names(built: Built) -> list[tuple[str, str]]:
    """Find (id of a test cell, name of a hidden check that it calls)."""
    found = []
    for cell in json.loads(built.instructor)["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "code" and cell["metadata"].get("nbgrader", {}).get("grade") and "hidden." in source:
            for node in ast.walk(ast.parse(source)):
                if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "hidden":
                    found.append((cell["id"], node.attr))
    return found
