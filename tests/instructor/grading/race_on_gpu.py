"""Race the catalogue of cheats and honest files on this machine's GPU: `python -m tests.instructor.grading.race_on_gpu`.

A row is written for each run as soon as it is known: the verdict, and for those that count their times.
"""

import argparse
import json
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import torch

from instructor.build import build_lab
from instructor.grading.race.race import Race, in_order, model_answer, table
from instructor.points import lab_path
from tests.instructor.grading.race_cheats import CHEATS, HONEST
from utils.machine.environment import environment


def main() -> None:
    """Race every honest file, then every cheat."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--pairs", type=int, default=6)
    chosen = parser.parse_args()
    began = time.monotonic()
    model = model_answer(build_lab(lab_path("lab3_gluon")))
    race = Race(model, chosen.pairs)
    record = {"machine": torch.cuda.get_device_name(), "environment": environment(), "reference": "the model answer"}
    record |= {"pairs": chosen.pairs, "cheats": [], "honest": []}
    honest = {f.name: f.text(model) for f in HONEST}
    cheats = {f.name: f for f in CHEATS}
    results, wrong = [], []

    def run(name: str, stage: str) -> None:
        started = time.monotonic()
        result = race.run(name, kernels[name])
        if bool(result.refused) != bool(stage):
            wrong.append(f"{name}: {result.refused or 'not refused'}")
        row = {**asdict(result), "stage": stage, "seconds": round(time.monotonic() - started, 2)}
        record["cheats" if stage else "honest"].append(row)
        record["wrong"] = wrong
        if not stage:
            results.append(result)

    def save() -> None:
        chosen.out.write_text(json.dumps(record, indent=1))

    try:
        texts = honest | {name: f.text(model) for name, f in cheats.items()}
        kernels = race.prepare_all(texts)
        record["seconds to compile"] = time.monotonic() - began
        for name in honest:
            run(name, "")
        for name, file in cheats.items():
            run(name, file.stage)
            save()
    finally:
        save()
        race.close()
    counted = Counter(bool(r.refused) for r in results)
    print(f"{time.monotonic() - began:.0f} s, {record['seconds to compile']:.0f} of them to compile")
    print(f"{sum(bool(r['refused']) for r in record['cheats'])} of {len(record['cheats'])} cheats refused")
    print(f"{counted[True]} of {len(results)} honest runs of {len({r.student for r in results})} files refused")
    print("\n".join(line[:200] for line in table(in_order(results))[1][:12]))
    print("\n".join(["wrong verdicts:", *(line[:300] for line in wrong[:12])]))


if __name__ == "__main__":
    main()
