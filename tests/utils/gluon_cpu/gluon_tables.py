"""Write the simulator's two tables: the planted bugs that it finds, and how its results compare with a GPU's.

    python tests/utils/gluon_cpu/gluon_tables.py bugs                   # assets/results/gluon_planted_bugs.json
    python tests/utils/gluon_cpu/gluon_tables.py simulate cases.pt      # on any machine: inputs and simulated outputs
    python tests/utils/gluon_cpu/gluon_tables.py agree cases.pt         # on a Hopper GPU: the same launches, compared

Agreement covers the correct kernels of the tests, the five steps of the attention ladder, and the model answers of
lab 3. Every GPU launch gets the very inputs that were simulated.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

HERE, ROOT = Path(__file__).resolve().parent, Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT), str(HERE)]

import torch  # noqa: E402

ROUNDING = {torch.float32: 3e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.int32: 0.0}
DRAWS = 5  # random shapes of each small kernel and lab answer
LADDER = 3  # and of each step of the ladder


# ---- planted bugs --------------------------------------------------------------------------------------------------


def planted_bugs() -> list[dict]:
    """Return a row for each bug: its name, and the simulator's reports in each of four timings."""
    import test_gluon_planted_bugs as tests

    from utils import gluon_cpu

    def refused(bug: str, seed) -> None:
        x, y = torch.zeros(200), torch.zeros(200)
        with gluon_cpu.simulate(max_steps=50_000, seed=seed):
            tests.bugs.refused[(1,)](x, y, 64, bug)

    families = (
        ("TMA ring", tests.PIPELINE, lambda bug, seed: tests.run_pipeline(bug, seed)),
        ("wgmma", tests.PRODUCT, lambda bug, seed: tests.run_product(bug, seed, **tests.PRODUCT[bug][2])),
        ("cp.async", tests.BUFFERED, lambda bug, seed: tests.run_buffered(bug, seed)),
        ("language and layouts", tests.REFUSED, refused),
    )
    rows = []
    for family, table, run in families:
        for bug in table:
            reports = []
            for seed in tests.SEEDS:
                torch.manual_seed(0)
                try:
                    run(bug, seed)
                    reports.append(None)
                except gluon_cpu.SimulationError as error:
                    reports.append(error.report)
            first = next((r for r in reports if r), None)
            rows.append(
                {
                    "kernel": family,
                    "planted": bug,
                    "found": sum(r is not None for r in reports),
                    "runs": len(reports),
                    "kinds": sorted({r.kind for r in reports if r}),
                    "line": first and first.site.text,
                    "report": first and " ".join(first.message.split()),
                }
            )
    return rows


# ---- agreement -----------------------------------------------------------------------------------------------------


def lab_answers() -> dict[str, str]:
    """Return {file: text} of lab 3's model answers, from the lab's source."""
    text = (ROOT / "instructor" / "labs" / "lab3_gluon.py").read_text()
    cells = re.split(r"^# %%(?!writefile)[^\n]*\n", text, flags=re.MULTILINE)
    found = [re.match(r"# %%writefile (\S+)\n(.*)", cell, flags=re.DOTALL) for cell in cells]
    return {m[1]: m[2] for m in found if m}


def lab_launches() -> dict:
    """Return {name: function from a Draw to a Launch} of the model answers."""
    from utils.checking import gluon_launches as launches

    def causal(draw):
        sq, extra = draw.size(65, 150), draw.size(0, 90)
        q, k, v, _ = launches.attention_inputs(2, sq, sq + extra, normal=draw.normal)
        return launches.causal_launch(q, k, v)[0]

    def attend(file, rows, **constants):
        def make(draw):
            sq, sk, d = draw.size(33, 150), draw.size(20, 250), draw.choice((64, 128))
            inputs = launches.attention_inputs(2, sq, sk, d, normal=draw.normal)
            return launches.attention_launch(file, rows, *inputs, **constants)[0]

        return make

    def overlap(draw):
        inputs = launches.attention_inputs(2, draw.size(33, 150), draw.size(20, 250), 128, normal=draw.normal)
        return launches.overlap_launch(*inputs, block_n=draw.choice((64, 128)))[0]

    def tma_ring(draw):
        return launches.tma_ring_launch(draw.size(1, 60), 8 * draw.size(1, 60), 3, normal=draw.normal)[0]

    def wgmma(draw):
        sizes = draw.size(1, 150), 8 * draw.size(1, 20), 8 * draw.size(1, 30)
        return launches.wgmma_launch(*sizes, normal=draw.normal)[0]

    return {
        "lab 3: transpose": lambda d: launches.transpose_launch(d.size(1, 90), d.size(1, 90), d.normal)[0],
        "lab 3: cp.async": lambda d: launches.async_copy_launch(d.size(1, 4000), 4, 3, normal=d.normal)[0],
        "lab 3: TMA ring": tma_ring,
        "lab 3: wgmma": wgmma,
        "lab 3: softmax": attend("lab3_softmax.py", 64),
        "lab 3: producer, consumers": attend("lab3_specialized.py", 128, STAGES=2),
        "lab 3: overlap": overlap,
        "lab 3: causal": causal,
    }


def lab_case(name: str, start: int, device: str, tensors: dict | None = None):
    """Return (inputs by argument, outputs by argument) of a model answer."""
    from instructor.checks.common import Draw
    from utils.checking.kernel_exercises import Tile, load_kernels, simulate_launch

    launch = lab_launches()[name](Draw(start))
    for argument, value in launch.args.items():
        x = value.tensor if isinstance(value, Tile) else value
        if tensors and isinstance(x, torch.Tensor):
            x.copy_(tensors[argument])
    source = lab_answers()[launch.file]
    inputs = {n: (a.tensor if isinstance(a, Tile) else a) for n, a in launch.args.items()}
    inputs = {n: x for n, x in inputs.items() if isinstance(x, torch.Tensor)}
    if device == "cuda":
        return inputs, launch.run(load_kernels(source, launch), "cuda")
    return inputs, simulate_launch(source, launch, seed=start)[0]


def small_case(name: str, start: int, device: str, tensors: dict | None = None):
    """Return the same for a small kernel of the tests, with arguments by position."""
    from tests.utils.gluon_cpu.gluon_launches import LAUNCHES, Tile
    from utils import gluon_cpu

    torch.manual_seed(start)
    launch = LAUNCHES[name](random.Random(start))
    found = {i: (a.matrix if isinstance(a, Tile) else a) for i, a in enumerate(launch.args)}
    inputs = {i: x for i, x in found.items() if isinstance(x, torch.Tensor)}
    for i, x in inputs.items():
        if tensors:
            x.copy_(tensors[i])
    if device == "cuda":
        outputs = launch.run("cuda")
    else:
        with gluon_cpu.simulate(seed=start):
            outputs = launch.run("cpu")
    return inputs, dict(zip(launch.outputs, outputs, strict=True))


def ladder_case(name: str, start: int, device: str, tensors: dict | None = None):
    """Return the same for a step of the attention ladder, such as "ladder step 3"."""
    from utils import gluon_cpu
    from utils.attention.gluon import launch as ladder

    step, rng = int(name[-1]), random.Random(start)
    torch.manual_seed(start)
    d, group, kv_heads = rng.choice((64, 128)), rng.choice((1, 2)), rng.choice((1, 2))
    sq = rng.randint(20, 200)
    sk, causal = sq + rng.randint(0, 90), rng.random() < 0.5
    window = rng.choice((0, rng.randint(20, 100)))
    inputs = {
        n: torch.randn(1, h, s, d).bfloat16()
        for n, h, s in (("q", group * kv_heads, sq), ("k", kv_heads, sk), ("v", kv_heads, sk))
    }
    for n, x in inputs.items():
        if tensors:
            x.copy_(tensors[n])
    q, k, v = (inputs[n].to(device) for n in "qkv")
    out, lse = torch.empty_like(q), torch.empty(q.shape[:3], device=device)
    c = d**-0.5 * math.log2(math.e)
    if device == "cuda":
        ladder._launch(step, q, k, v, out, lse, causal, c, window, True)
    else:
        before, ladder._multiprocessors = ladder._multiprocessors, lambda device: 4
        try:
            with gluon_cpu.simulate(seed=start):
                ladder._launch(step, q, k, v, out, lse, causal, c, window, True)
        finally:
            ladder._multiprocessors = before
    return inputs, {"out": out.cpu(), "lse": lse.cpu()}


def case_of(name: str):
    return ladder_case if name.startswith("ladder") else lab_case if name.startswith("lab") else small_case


def names() -> list[str]:
    from tests.utils.gluon_cpu.gluon_launches import LAUNCHES

    return [*LAUNCHES, *(f"ladder step {step}" for step in range(1, 6)), *lab_launches()]


def simulate_all(seed: int) -> list[dict]:
    """Simulate every kernel on random shapes, and keep inputs and outputs."""
    rng, cases = random.Random(seed), []
    for name in names():
        for _ in range(LADDER if name.startswith("ladder") else DRAWS):
            start = rng.randrange(10**6)
            inputs, outputs = case_of(name)(name, start, "cpu")
            cases.append({"name": name, "start": start, "inputs": inputs, "outputs": outputs})
        print(name, flush=True)
    return cases


def compare_on_gpu(cases: list[dict]) -> list[dict]:
    """Return a row for each case of a kernel: shapes, largest differences, tolerance."""
    from tests.utils.gluon_cpu.gluon_launches import LAUNCHES

    rows = []
    for case in cases:
        name, start = case["name"], case["start"]
        shapes = [list(x.shape) for x in case["inputs"].values()]
        row = {"kernel": name, "drawn from": start, "shapes": shapes}
        try:
            _, real = case_of(name)(name, start, "cuda", case["inputs"])
        except Exception as error:
            rows.append(row | {"failed": f"{type(error).__name__}: {str(error)[-400:]}"})
            continue
        for output, ours in case["outputs"].items():
            theirs = real[output]
            finite = ours.isfinite()
            same_elsewhere = bool(torch.equal(torch.nan_to_num(ours[~finite]), torch.nan_to_num(theirs[~finite])))
            ours, theirs = ours[finite].double(), theirs[finite].double()
            largest = ours.abs().max().item() if ours.numel() else 0.0
            difference = (ours - theirs).abs().max().item() if ours.numel() else 0.0
            dtype = case["outputs"][output].dtype
            if name == "product":  # an fp32 output, rounded to fp16 on the way
                dtype = LAUNCHES[name](random.Random(start)).rounding
            # The log-sum-exp and sums of squares are fp32 sums of many terms, in another order.
            sums = output == "lse" or name == "lab 3: TMA ring"
            allowed = (1e-5 if sums else ROUNDING[dtype]) * largest
            rows.append(
                row
                | {
                    "output": str(output),
                    "dtype": str(case["outputs"][output].dtype)[6:],
                    "max_abs_difference": difference,
                    "max_rel_difference": difference / (largest or 1.0),
                    "allowed": allowed,
                    "agrees": same_elsewhere and difference <= allowed,
                }
            )
    return rows


def agree(cases: list[dict]) -> dict:
    """Run all cases on this machine's GPU, each kernel in a process of its own, so that one failure costs one kernel."""
    from utils.machine.environment import environment

    groups: dict[str, list[dict]] = {}
    for case in cases:
        groups.setdefault(case["name"], []).append(case)
    rows = []
    with ProcessPoolExecutor(14, mp_context=get_context("spawn")) as pool:
        futures = {name: pool.submit(compare_on_gpu, group) for name, group in groups.items()}
        for name, future in futures.items():
            try:
                rows += future.result(timeout=60)
            except Exception as error:
                rows.append({"kernel": name, "failed": f"{type(error).__name__}: {str(error)[-400:]}"})
            good = all(r.get("agrees") for r in rows if r["kernel"] == name)
            print(name, "agrees" if good else "DIFFERS", flush=True)
    return {
        "what": "the same launches simulated by utils.gluon_cpu and run on the GPU",
        "environment": environment(),
        "agree": sum(bool(r.get("agrees")) for r in rows),
        "compared": len(rows),
        "rows": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("bugs", "simulate", "agree"))
    parser.add_argument("cases", nargs="?", type=Path, help="file of simulated cases")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seed", type=int, default=2026)
    given = parser.parse_args()
    if given.what == "bugs":
        import triton

        rows = planted_bugs()
        found = sum(r["found"] == r["runs"] for r in rows)
        table = {
            "what": "bugs planted in kernels, and what the simulator reported in four timings of each",
            "triton": triton.__version__,
            "torch": torch.__version__,
            "planted": len(rows),
            "found_in_every_timing": found,
            "rows": rows,
        }
        out = given.out or ROOT / "assets" / "results" / "gluon_planted_bugs.json"
        out.write_text(json.dumps(table, indent=1) + "\n")
        print(f"{found} of {len(rows)} found in every timing; {out}")
    elif given.what == "simulate":
        torch.save(simulate_all(given.seed), given.cases)
    else:
        table = agree(torch.load(given.cases, weights_only=True))
        out = given.out or ROOT / "assets" / "results" / "h200" / "gluon_agreement.json"
        out.write_text(json.dumps(table, indent=1) + "\n")
        print(f"{table['agree']} of {table['compared']} agree; {out}")


if __name__ == "__main__":
    main()
