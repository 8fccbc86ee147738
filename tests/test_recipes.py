"""The recipes of docs/contributing.md, executed: their code goes into a copy of the tree, and their commands pass there."""

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "contributing.md").read_text(encoding="utf-8")
STEP = re.compile(r"```\w*\n# (\S+), (?:(before|after) `(.+?)`|a new file|at its end)\n(.*?)```", re.DOTALL)
COPIED = ("utils", "instructor", "tests", "tools", "docs", "expectations", "README.md", "pyproject.toml")
# Recipes whose page gives no code to execute.
IN_WORDS = {"a kernel"}


def changed_files() -> dict[str, str]:
    """Apply all steps of the page: {path: the file's new text}."""
    texts: dict[str, str] = {}
    for path, where, anchor, code in STEP.findall(PAGE):
        if path not in texts:
            texts[path] = (ROOT / path).read_text(encoding="utf-8") if (ROOT / path).exists() else ""
        lines = texts[path].splitlines(keepends=True)
        if anchor:
            found = [number for number, line in enumerate(lines) if anchor in line]
            assert len(found) == 1, f"{path}: {anchor!r} of the page stands in {len(found)} lines"
            lines.insert(found[0] + (where == "after"), code)
        else:
            lines.append(code)
        texts[path] = "".join(lines)
    return texts


def test_the_steps_fit_the_files_and_leave_them_valid():
    texts = changed_files()
    assert len(texts) >= 10
    for path, text in texts.items():
        ast.parse(text, path)


def test_each_recipe_has_steps_and_a_command():
    recipes = dict(re.findall(r"^## How to add (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))
    assert {name for name, text in recipes.items() if not (STEP.search(text) and "```bash" in text)} == IN_WORDS


@pytest.mark.slow
def test_the_commands_pass_in_a_copy_of_the_tree(tmp_path):
    """The tests of all recipes run in one process: most of a process's time is importing torch."""
    for name in COPIED:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    for path, text in changed_files().items():
        (tmp_path / path).write_text(text, encoding="utf-8")
    commands = [
        shlex.split(line) for block in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()
    ]
    tests = [words for words in commands if "pytest" in words]
    files = [word for words in tests for word in words if word.startswith("tests/")]
    chosen = " or ".join(f"({words[words.index('-k') + 1]})" for words in tests)
    others = [["-m", "utils.cli", *words[1:]] for words in commands if words[0] == ".venv/bin/labs"]
    assert len(tests) + len(others) == len(commands) >= 6
    said = [run(tmp_path, *words) for words in others]
    assert "global" in said[0], "the new mask is one of --mask"
    selection = ["-k", chosen, "-m", "not gpu and not overnight"]
    said = run(tmp_path, "-m", "pytest", "-v", "-p", "no:cacheprovider", *files, *selection)
    for new in ("5090", "global_tokens", "by_head", "documented_names", "every_other"):
        assert re.search(f"{new}.* PASSED", said), new


def run(folder: Path, *words: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout[-3000:]}{done.stderr[-2000:]}"
    return done.stdout
