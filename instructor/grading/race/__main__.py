"""Race a folder of files: `python -m instructor.grading.race --files FOLDER --out FOLDER`.

It needs neither nbgrader nor Jupyter, so that it runs on a machine that has a GPU and little else.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from instructor.grading.race.compiling import Refused
from instructor.grading.race.race import (
    PAIRS,
    Race,
    entries_of_folder,
    expect_gpu,
    lines_of,
    model_answer,
    race_class,
    write_results,
)
from utils.files import ROOT


def main() -> None:
    """Read the command line, and race."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--files", type=Path, required=True, help="STUDENT.py, or STUDENT/lab3_overlap.py")
    parser.add_argument("--out", type=Path, default=Path("race"), help="where race.csv and race.json go")
    parser.add_argument("--pairs", type=int, default=PAIRS, help="timed pairs of each shape")
    chosen = parser.parse_args()
    if not chosen.files.is_dir():
        sys.exit(f"error: {chosen.files} is no folder.")
    entries = entries_of_folder(chosen.files)
    if not entries:
        sys.exit(f"error: {chosen.files} holds no STUDENT.py and no STUDENT/lab3_overlap.py.")
    try:
        about = expect_gpu()
        race = Race(model_answer((ROOT / "instructor/labs/lab3_gluon.py").read_text()), pairs=chosen.pairs)
    except Refused as refused:
        sys.exit(f"error: {refused}")
    try:
        results = race_class(race, entries)
    finally:
        race.close()
    print("\n".join(lines_of(results)))
    for path in write_results(chosen.out, results, about):
        print(path)


if __name__ == "__main__":
    main()
