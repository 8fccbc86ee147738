"""How large the house is: lines of Python by folder against the budget in `pyproject.toml`; exit status 1 above it.

    python tools/size.py

A budget counts the files below its folders that belong to no longer entry: `utils/attention/gluon` is not counted again
under `utils/attention`. A number is lowered when it is beaten, and raised only in a commit that says why.
"""

import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LONG = 400  # lines


def tracked_files(root: Path) -> list[str]:
    """List the files that git tracks or would track."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout.split("\n")
    return [name for name in names if name and (root / name).is_file()]


def measure_sizes(root: Path, budget: dict) -> dict[str, int]:
    """Return what each entry of the budget amounts to: lines of a folder's Python, long files, words of the documents."""
    files = tracked_files(root)
    lines = {name: (root / name).read_bytes().count(b"\n") for name in files if name.endswith(".py")}
    folders = sorted(budget["lines"], key=len, reverse=True)
    sizes = dict.fromkeys(budget["lines"], 0)
    for name, count in lines.items():
        owner = next((folder for folder in folders if name.startswith(f"{folder}/")), None)
        if owner is not None:
            sizes[owner] += count
    documents = [name for name in files if name.endswith(".md") and name.startswith(("docs/", "CHANGELOG"))]
    results = [root / name for name in files if name.startswith("assets/results/")]
    return sizes | {
        f"files over {LONG} lines": sum(count > LONG for name, count in lines.items() if not name.startswith("tests/")),
        "words in docs and CHANGELOG": sum(len((root / name).read_text("utf-8").split()) for name in documents),
        "files in assets/results": len(results),
        "KB in assets/results": sum(path.stat().st_size for path in results) // 1000,
    }


def main() -> int:
    """Print the table; return 1 if a folder is over its budget."""
    budget = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["size"]
    allowed = budget["lines"] | budget["other"]
    sizes = measure_sizes(ROOT, budget)
    for name, most in allowed.items():
        print(f"{name:<32}{sizes[name]:>9,} of {most:>9,}{'   over the budget' * (sizes[name] > most)}")
    over = [name for name, most in allowed.items() if sizes[name] > most]
    if over:
        print(
            f"error: over the budget of [tool.size] in pyproject.toml: {', '.join(over)}; make them smaller.",
            file=sys.stderr,
        )
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
