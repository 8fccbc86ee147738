"""Race the catalogue of cheats and honest files on this machine's GPU: `python -m tests.instructor.grading.race_on_gpu`.

It writes a row for each file as soon as it is known: the verdict, and for those that count their times.
"""

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path

from instructor.grading.race.race import Entry, Race, expect_gpu, in_order, lines_of, model_answer
from tests.instructor.grading.race_cheats import CHEATS, HONEST
from utils.files import ROOT


def main() -> None:
    """Race everything once; honest files again until the time is over."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=50.0)
    parser.add_argument("--pairs", type=int, default=6)
    chosen = parser.parse_args()
    began = time.monotonic()
    model = model_answer((ROOT / "instructor/labs/lab3_gluon.py").read_text())
    record = {**expect_gpu(), "pairs": chosen.pairs, "cheats": [], "honest": []}
    race = Race(model, pairs=chosen.pairs)
    files = {f.name: f for f in (HONEST[0], *CHEATS, *HONEST[1:])}
    try:
        kernels = race.prepare_all([Entry(name, f.text(model)) for name, f in files.items()])
        record["seconds to compile"] = time.monotonic() - began
        results, wrong = [], []
        for name, f in files.items():
            if not f.stage and results and time.monotonic() - began > chosen.seconds:
                continue
            started = time.monotonic()
            result = race.run(name, kernels[name])
            if bool(result.refused) != bool(f.stage):
                wrong.append(f"{name}: {result.refused or 'not refused'}")
            row = {**asdict(result), "stage": f.stage, "seconds": round(time.monotonic() - started, 2)}
            record["cheats" if f.stage else "honest"].append(row)
            record["wrong"] = wrong
            chosen.out.write_text(json.dumps(record, indent=1))
            if not f.stage:
                results.append(result)
    finally:
        race.close()
    print(f"{time.monotonic() - began:.0f} s, {record['seconds to compile']:.0f} of them to compile")
    print(f"{sum(bool(r['refused']) for r in record['cheats'])} of {len(record['cheats'])} cheats refused")
    print("\n".join(line[:200] for line in lines_of(in_order(results))))
    print("\n".join(["wrong verdicts:", *(line[:300] for line in wrong)]))


if __name__ == "__main__":
    main()
