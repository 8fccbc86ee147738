"""Record how long the simulator takes for the attention ladder at the sizes of its tests, before and after a change.

    python -m tools.record.simulator_speed --out FILE                            this checkout
    python -m tools.record.simulator_speed --before /path/to/checkout --out FILE     beside another one, in turns

Each round is a new process for each checkout. A row has the CPU seconds of one step and one shape: of the first launch in a
process, which reads and rewrites the kernel, and of a later one; each is the least of all rounds.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
# (batch, heads, heads of keys, queries, keys, head dimension), causal, window
CASES = [
    ((2, 4, 2, 256, 256, 64), True, 0),
    ((1, 2, 1, 100, 200, 64), False, 0),
    ((1, 2, 1, 200, 200, 64), True, 40),
    ((1, 2, 2, 72, 130, 128), True, 0),
    ((1, 4, 2, 250, 300, 128), False, 0),
]
STEPS = (1, 2, 3, 4, 5)


def measure() -> None:
    """Print the CPU seconds of each step and shape, in the checkout that Python finds, as one line of JSON."""
    import torch

    from utils import gluon_cpu
    from utils.attention.gluon import launch

    torch.manual_seed(0)
    launch._multiprocessors = lambda device: 4
    found = {}
    for step in STEPS:
        for place, (shape, causal, window) in enumerate(CASES):
            batch, heads, kv_heads, sq, sk, head_dim = shape
            q = torch.randn(batch, heads, sq, head_dim).bfloat16()
            k, v = (torch.randn(batch, kv_heads, sk, head_dim).bfloat16() for _ in "kv")
            out, lse = torch.empty_like(q), torch.empty(batch, heads, sq)
            seconds = []
            for _ in range(3):
                begin = time.process_time()
                with gluon_cpu.simulate() as run:
                    launch._launch(step, q, k, v, out, lse, causal, head_dim**-0.5 * math.log2(math.e), window, True)
                seconds.append(time.process_time() - begin)
            assert run.ok
            found[f"{step}/{place}"] = {"first": seconds[0], "later": min(seconds[1:])}
    print(json.dumps(found))


def measure_in(checkout: Path) -> dict:
    """Measure a checkout in a process of its own."""
    variables = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-P", str(Path(__file__).resolve()), "measure"]
    done = subprocess.run(command, cwd=checkout, env=variables, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Measure the checkouts in turns and write the record."""
    from tools.record.common import Record, arguments_parser

    parser = arguments_parser(__doc__ or "")
    parser.add_argument("--before", type=Path, help="another checkout, which is measured as well")
    parser.add_argument("--rounds", type=int, default=3, help="new processes for each checkout")
    options = parser.parse_args()
    checkouts = {"after": ROOT} | ({"before": options.before} if options.before else {})
    method: dict = {"rounds": options.rounds, "seconds_of": "CPU time, one thread"}
    if options.before:
        command = ["git", "-C", str(options.before), "rev-parse", "HEAD"]
        method["commit_before"] = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    least: dict = {}
    for _ in range(options.rounds):
        for name, checkout in checkouts.items():
            for key, seconds in measure_in(checkout).items():
                for which, value in seconds.items():
                    place = least.setdefault(key, {})
                    place[f"{which}_{name}"] = min(value, place.get(f"{which}_{name}", math.inf))
    record = Record(
        options.out, "the simulator's CPU seconds for the attention ladder at its tests' sizes", "cpu", **method
    )

    def row(key: str) -> dict:
        step, place = map(int, key.split("/"))
        shape, causal, window = CASES[place]
        return {"step": step, "shape": list(shape), "causal": causal, "window": window} | {
            name: round(value, 3) for name, value in sorted(least[key].items())
        }

    record.fill(list(least), row, lambda row: ", ".join(f"{name} {value}" for name, value in row.items()))
    record.finish()


if __name__ == "__main__":
    measure() if sys.argv[1:] == ["measure"] else main()
