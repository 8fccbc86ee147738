"""Call the backward many times in several processes at once, and compare the sums of dQ, dQ, dK and dV of each call.

    python -m tools.record.backward_soak --out build/soak --seconds 30

Processes that share a GPU take turns on it, and a kernel is stopped and continued in the middle. Before each call the sums
of dQ are filled with nan, so that a place which is not cleared is seen, and dQ with 7, so that a place that is not written
is. Each call is compared with the first call of its process, piece by piece (64 queries x 64 columns of the sums): sums in
another order differ by 1e-6, and a piece that differs by more than 1e-3 is wrong. Writes `soak-N.json`, a row for each process.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace

import torch

from tools.record.common import arguments_parser
from utils.files import write_whole
from utils.machine.environment import environment

# Step, head dimension, causal, heads, tokens, changes of the plan.
CASES = [
    ("step6", 64, True, 32, 8192, {}),
    ("step5", 64, True, 32, 8192, {}),
    ("step6", 64, True, 32, 8192, {"queue": False}),
    ("step5", 64, True, 32, 8192, {"by_tma": True, "producer_first": False}),
    ("step6", 128, False, 16, 8192, {}),
    ("step4", 128, False, 16, 8192, {}),
    ("step6", 64, False, 32, 8192, {"queue": False, "split": False}),
    ("step6", 64, True, 32, 8192, {"storer_fences": False, "named": False, "queue": False}),
    ("step6", 64, True, 32, 8192, {"by_tma": False, "storer_fences": False, "producer_first": True, "queue": False}),
    ("step5", 128, False, 16, 8192, {}),
    ("step3", 128, False, 16, 8192, {}),
    ("step6", 64, True, 32, 8192, {"storer_fences": False}),
]


def bad_pieces(found: torch.Tensor, expected: torch.Tensor, size: int) -> list[dict]:
    """Return the pieces of `size` numbers that differ from what is expected, the first twelve, and what they hold."""
    found, expected = found.float().reshape(-1, size), expected.float().reshape(-1, size)
    norm = expected.norm(dim=1).clamp_min(1e-3)
    wrong = ((found - expected).norm(dim=1) / norm > 1e-3) | found.isnan().any(dim=1)
    pieces = wrong.nonzero()[:, 0].tolist()
    rows = []
    for piece in pieces[:12]:
        x, y = found[piece], expected[piece]
        nan = x.isnan()
        at = nan.nonzero()[:, 0]
        differs = ~nan & ((x - y).abs() > 1e-2 * y.norm() / size**0.5)
        where = differs.nonzero()[:, 0]
        rows.append(
            {
                "piece": piece,
                "nan": int(nan.sum()),
                "nan_first": at[:8].tolist(),
                "nan_last": at[-2:].tolist(),
                "sevens": int((x == 7).sum()),
                "differ": int(differs.sum()),
                "differ_first": where[:8].tolist(),
                "differ_last": where[-2:].tolist(),
                "found": x[where[:4]].tolist(),
                "expected": y[where[:4]].tolist(),
            }
        )
    return [{"count": len(pieces), "of": len(found)}, *rows] if pieces else []


def soak(case, seconds: float) -> dict:
    """Call one case for some time."""
    from utils.attention.gluon.backward.arguments import Gradients
    from utils.attention.gluon.backward.launch import launch
    from utils.attention.gluon.backward.plan import plan_for
    from utils.attention.gluon.launch import forward

    name, head_dim, causal, heads, length, changes = case
    step = int(name[-1])
    plan = replace(plan_for(step, head_dim, causal), **changes)
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(1, heads, length, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    out, lse = forward(q, k, v, causal=causal, return_lse=True)
    row: dict = {"case": list(case), "calls": 0, "bad": [], "again": 0}
    first: dict = {}
    began = time.monotonic()
    while time.monotonic() - began < seconds:
        g = Gradients(dout, q, k, v, out, lse, None, causal, 0, head_dim**-0.5, plan, False)
        g.dq_sums.fill_(float("nan"))
        g.dq.fill_(7.0)
        launch(step, g)
        results = {"sums": (g.dq_sums, 4096), "dq": (g.dq, 64 * head_dim), "dk": (g.dk, 64 * head_dim)}
        results["dv"] = (g.dv, 64 * head_dim)
        row["calls"] += 1
        if not first:
            first = {key: x.clone() for key, (x, _) in results.items()}
            row["first_nan"] = {key: int(x.isnan().sum()) for key, x in first.items()}
            continue
        found = {key: bad_pieces(x, first[key], size) for key, (x, size) in results.items()}
        if any(found.values()) and len(row["bad"]) < 6:
            row["bad"].append({"call": row["calls"]} | found)
        row["again"] += any(found.values())
    return row


def main() -> None:
    """Run the cases side by side, then each of three by itself."""
    parser = arguments_parser(__doc__, pairs=1)
    parser.add_argument("--case", type=int)
    parser.add_argument("--each", type=float, default=12.0, help="seconds of each process")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.case is not None:
        case = CASES[options.case % 100]
        try:
            row = soak(case, options.each)
        except Exception as error:
            row = {"case": list(case), "refused": f"{type(error).__name__}: {error}"[:400]}
        row["environment"] = environment("cuda")
        write_whole(options.out / f"soak-{options.case}.json", json.dumps(row) + "\n")
        print({key: value for key, value in row.items() if key != "environment"}, flush=True)
        return
    command = [sys.executable, "-m", "tools.record.backward_soak", "--out", str(options.out)]
    # Compiled first, so that all of them run at the same time.
    for each, cases in ((0.2, range(len(CASES))), (options.each, range(len(CASES)))):
        numbers = [case + (200 if each < 1 else 0) for case in cases]
        processes = [subprocess.Popen([*command, "--case", str(n), "--each", str(each)]) for n in numbers]
        for process in processes:
            process.wait(90)
    for case in (0, 2, 4):
        subprocess.run([*command, "--case", str(100 + case), "--each", str(options.each / 2)], check=False, timeout=60)


if __name__ == "__main__":
    main()
