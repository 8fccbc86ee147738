"""Time the Gluon backward and the peers at shapes of training that are drawn by seed, and at the table's; forward excluded.

    python -m tools.record.backward_shapes --fa3 ~/fa3/_C.so --out build/backward-shapes --seconds 140
    python -m tools.record.backward_shapes --out build/backward-shapes --join assets/results/h200/backward_shapes.json

First a process for each kernel compiles it and compares its gradients with float64 at a small shape. Then several processes
prepare side by side: each has some of the shapes, and compares the default with float64 at one head of keys and its query
heads, and the others with the default. Then one process at a time has the GPU and times its shapes, the contenders of a
shape in random order with a cold L2. Writes `shape-N.json` for each shape into the folder; shapes that are
there already are not measured again. `--predict` prints what the schedule of `balance.py` gives, and needs no GPU.
"""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from tools.record.attention_ratios import relative_difference
from tools.record.backward import maker_of
from tools.record.backward_variants import LIMIT, PEERS, add_contenders, load_fa3
from tools.record.common import arguments_parser, to_text
from tools.record.turns import Turns, run_parts
from utils.benchmark.measuring import measure_together
from utils.files import write_whole
from utils.machine.environment import environment

SEED, COUNT = 17, 24
# Of a tile of queries and 128 keys, from the rates at 16384 tokens in `backward_random_order_third.json`.
TILE_US = {(64, True): 2.42, (64, False): 2.27, (128, True): 2.06, (128, False): 2.13}
KNOWN = [  # batch, heads, heads of keys, length, head dimension, causal: read under 0.90 of the best peer before
    (1, 24, 3, 3056, 64, False),
    (2, 8, 8, 4128, 64, True),
    (2, 8, 8, 4128, 128, True),
    (7, 24, 3, 914, 128, True),
]
TABLE = [
    (16384 // length, 2048 // d, 2048 // d, length, d, causal)
    for length in (16384, 4096)
    for d in (64, 128)
    for causal in (True, False)
]
Shape = tuple[int, int, int, int, int, bool]


def random_shapes(seed: int = SEED, count: int = COUNT) -> list[Shape]:
    """Draw shapes of training: 300 to 8000 tokens, batch 1 to 8, 4 to 32 heads, 1 to 8 of which share a head of keys."""
    draw = random.Random(seed)
    found: list[Shape] = []
    for i in range(count):
        length = round(math.exp(draw.uniform(math.log(300), math.log(8000))))
        batch = min(draw.randint(1, 8), max(1, 32768 // length))
        group = draw.choice((1, 1, 2, 4, 8))
        kv_heads = draw.choice([n for n in (1, 2, 3, 4, 8, 12, 16, 32) if 4 <= n * group <= 32])
        found.append((batch, kv_heads * group, kv_heads, length, (64, 128)[i % 2], i % 4 < 2))
    return found


def all_shapes() -> list[Shape]:
    """Return the known shapes, the drawn ones and the table's points, in the order in which they are timed."""
    return [*KNOWN, *random_shapes(), *TABLE]


def make_inputs(shape: Shape) -> tuple[torch.Tensor, ...]:
    """Draw q, k, v and the gradient of the output."""
    batch, heads, kv_heads, length, head_dim, _ = shape
    torch.manual_seed(0)
    q, dout = (torch.randn(batch, heads, length, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    k, v = (torch.randn(batch, kv_heads, length, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return q, k, v, dout


def errors(gradients, shape: Shape, tensors) -> list[float]:
    """Return the relative errors of dQ, dK and dV against float64, of the last sequence's last head of keys."""
    from utils.attention.reference import reference_gradients

    batch, heads, kv_heads, _length, _, causal = shape
    group = heads // kv_heads
    q, k, v, dout = (x[batch - 1 :, -(group if n in (0, 3) else 1) :] for n, x in enumerate(tensors))
    _, expected = reference_gradients(q, k, v, dout, causal=causal)
    dq, dk, dv = gradients
    own = dq[batch - 1 :, -group:], dk[batch - 1 :, -1:], dv[batch - 1 :, -1:]
    return [relative_difference(x, y) for x, y in zip(own, expected, strict=True)]


def names_of(shape: Shape, options) -> list[str]:
    """Return the contenders of a shape."""
    own = getattr(options, f"{'causal' if shape[5] else 'full'}{shape[4]}")
    return ["gluon", *(name for name in own.split(";") if name), *options.peers.split(",")]


Kernel = tuple[
    str, int, bool, bool, bool
]  # contender, head dimension, causal, whether keys have a tail, more than 4096


def kernel_of(name: str, shape: Shape) -> Kernel:
    """Return what a contender's kernel is compiled for at a shape; the default's step depends on the length, too."""
    length, head_dim, causal = shape[3:]
    return name, head_dim, causal, length % 128 != 0, name == "gluon" and length > 4096


def file_of_kernel(folder: Path, kernel: Kernel) -> Path:
    """Name the file that says whether a kernel is right."""
    name = "".join(x if x.isalnum() or x == "_" else "-" for x in kernel[0])
    return folder / f"kernel-{name}-{'-'.join(str(int(x)) for x in kernel[1:])}.json"


def check_kernel(kernel: Kernel, folder: Path) -> None:
    """Compile a kernel and compare its gradients with float64, in a process of its own."""
    from utils.attention.reference import reference_gradients

    name, head_dim, causal, tail, long = kernel
    length = (4224 if long else 1024) - (30 if tail else 0)
    row: dict = {"kernel": list(kernel), "right": False}
    try:
        tensors = make_inputs((1, 4, 2, length, head_dim, causal))
        _, expected = reference_gradients(*tensors, causal=causal)
        call = maker_of(name)(*tensors, causal)
        row["errors"] = [0.0] * 3
        for _ in range(5):
            found = [relative_difference(x, y) for x, y in zip(call(), expected, strict=True)]
            row["errors"] = [max(pair) for pair in zip(found, row["errors"], strict=True)]
        row["right"] = max(row["errors"]) < LIMIT
    except Exception as error:
        row["refused"] = f"{type(error).__name__}: {error}"[:400]
    write_whole(file_of_kernel(folder, kernel), json.dumps(row) + "\n")


def check_kernels(command: list[str], options) -> None:
    """Check all kernels side by side; one that does not come to its end is wrong."""
    peers = options.peers.split(",")
    names = [(name, shape) for shape in all_shapes() for name in names_of(shape, options) if name not in peers]
    kernels = sorted({kernel_of(name, shape) for name, shape in names})

    def run(kernel: Kernel) -> None:
        if file_of_kernel(options.out, kernel).exists():
            return
        try:
            subprocess.run([*command, "--kernel", json.dumps(kernel)], check=False, timeout=100)
        except subprocess.TimeoutExpired:
            row = {"kernel": list(kernel), "right": False, "refused": "no end"}
            write_whole(file_of_kernel(options.out, kernel), json.dumps(row) + "\n")

    with ThreadPoolExecutor(options.workers) as pool:
        list(pool.map(run, kernels))


def is_right(kernel: Kernel, folder: Path) -> bool:
    """Whether a kernel was found right."""
    path = file_of_kernel(folder, kernel)
    return path.exists() and json.loads(path.read_text(encoding="utf-8"))["right"]


def prepare_shape(shape: Shape, options) -> dict:
    """Make the contenders of a shape, call each, and compare it with float64: calls, errors, and why others refused."""
    tensors = make_inputs(shape)
    ready: dict = {"shape": list(shape), "calls": {}, "errors": {}, "refused": {}}
    first = None
    for name in names_of(shape, options):
        if name not in options.peers.split(",") and not is_right(kernel_of(name, shape), options.out):
            ready["refused"][name] = "its kernel is not right, or was not checked"
            continue
        try:
            call = maker_of(name)(*tensors, shape[5])
            gradients = call()
            if name.startswith("fa"):
                gradients = tuple(x.transpose(1, 2) for x in gradients)
            if first is None:
                # One float64 reference a shape: it takes longer than all calls. The others are compared with the first one.
                first = gradients
                ready["errors"][name] = errors(gradients, shape, tensors)
            else:
                ready["errors"][name] = [
                    ((x.float() - y.float()).norm() / y.float().norm()).item()
                    for x, y in zip(gradients, first, strict=True)
                ]
            if max(ready["errors"][name]) < LIMIT:
                ready["calls"][name] = call
            else:
                ready["refused"][name] = f"wrong: {ready['errors'][name]}"
        except Exception as error:
            ready["refused"][name] = f"{type(error).__name__}: {error}"[:300]
    torch.cuda.synchronize()
    return ready


def predicted_us(shape: Shape) -> dict[str, float]:
    """Return what the schedule gives: where programs take blocks, with `even`, and for the sections of before entry 42."""
    from utils.attention.gluon.backward.balance import Order, block_order, blocks_of, even_order, schedule_tiles
    from utils.attention.gluon.backward.plan import plan_for

    batch, heads, kv_heads, length, head_dim, causal = shape
    plan = plan_for(6, head_dim, causal)
    blocks = blocks_of(plan, length, length, batch * kv_heads, heads // kv_heads, 132, causal=causal)
    orders = {
        "blocks": block_order(blocks, plan.split),
        "even": even_order(blocks),
        "before": Order(min(blocks.fit, blocks.heads), blocks.count, blocks.count),
    }
    # The kernels before and behind: O and dO are read, sums of dQ written and read, dQ written, at 4 TB/s.
    rows = -(-length // 128) * 128
    around = batch * heads * rows * head_dim * 14 / 4.0e6 + 6
    return {name: around + TILE_US[head_dim, causal] * schedule_tiles(blocks, order) for name, order in orders.items()}


def time_shape(ready: dict, pairs: int) -> dict:
    """Time the contenders of a shape."""
    batch, heads, _, length, head_dim, causal = ready["shape"]
    flops = 10.0 * batch * heads * length * length * head_dim * (0.5 if causal else 1.0)
    calls = ready["calls"]
    results = measure_together(
        list(calls.values()),
        labels=list(calls),
        warmup=2,
        iterations=pairs,
        device="cuda",
        flops=flops,
        l2="cold",
        seed=0,
    )
    times = {name: result.median_ms for name, result in zip(calls, results, strict=True)}
    row = {key: ready[key] for key in ("shape", "errors", "refused")} | {"ms": times}
    row["tflops"] = {name: flops / ms / 1e9 for name, ms in times.items()}
    peers = [ms for name, ms in times.items() if name in PEERS]
    if peers:
        row["ratios"] = {name: min(peers) / ms for name, ms in times.items()}
    return row


def worker(options) -> None:
    """Prepare some of the shapes, and time them when it is this process' turn."""
    load_fa3(options.fa3)
    turns = Turns(options.out / f"turns-{options.round}", options.workers, options.prepare)
    own = list(enumerate(all_shapes()))[options.part :: options.workers]
    own = [(i, shape) for i, shape in own if not (options.out / f"shape-{i}.json").exists()]
    prepared: list[tuple[int, dict]] = []
    for i, shape in own:
        if not turns.time_left():
            break
        prepared.append((i, prepare_shape(shape, options)))
        print(f"ready {i} {shape} {prepared[-1][1]['refused']}", flush=True)
    turns.wait_for_all(str(options.part))
    for i, ready in prepared:
        with turns.alone():
            row = time_shape(ready, options.pairs)
        write_whole(options.out / f"shape-{i}.json", json.dumps(row | {"environment": environment("cuda")}) + "\n")
        print(i, row["shape"], {name: round(rate) for name, rate in row["tflops"].items()}, flush=True)


def join(folder: Path) -> dict:
    """Return the record of a folder: a row for each shape, and geometric means of the ratios to the best peer."""
    rows = []
    for i in range(len(all_shapes())):
        path = folder / f"shape-{i}.json"
        if path.exists():
            rows.append(json.loads(path.read_text(encoding="utf-8")))
    if not rows:
        raise ValueError(f"{folder} has no shape-N.json. Measure first, with --out {folder}.")
    environments = [row.pop("environment") for row in rows]
    for row in rows:
        row["ms"] = {name: round(ms, 5) for name, ms in row["ms"].items()}
        row["tflops"] = {name: round(rate, 1) for name, rate in row["tflops"].items()}
        row["ratios"] = {name: round(x, 4) for name, x in row.get("ratios", {}).items()}
        row["errors"] = {name: [round(x, 6) for x in values] for name, values in row["errors"].items()}
    means = {}
    for head_dim in (64, 128):
        for causal in (True, False):
            ratios = [
                row["ratios"]["gluon"]
                for row in rows
                if row["shape"][4:] == [head_dim, causal] and "gluon" in row["ratios"]
            ]
            if ratios:
                key = f"D={head_dim} {'causal' if causal else 'full'}"
                means[key] = round(math.exp(sum(map(math.log, ratios)) / len(ratios)), 4)
    what = "backward at training shapes: batch, heads, heads of keys, length, head dimension, causal; ratios to the best peer"
    checks = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("kernel-*.json"))]
    return {
        "what": what,
        "environment": environments[0],
        "complete": len(rows) == len(all_shapes()),
        "geometric_means": means,
        "rows": rows,
        "checks": [row | {"errors": [round(x, 6) for x in row.get("errors", [])]} for row in checks],
    }


def main() -> None:
    """Time all shapes, or join the rows of a folder."""
    parser = arguments_parser(__doc__, pairs=11)
    add_contenders(parser)
    parser.add_argument("--round", type=int, default=0)
    parser.add_argument("--prepare", type=float, default=40, help="seconds to prepare the timing")
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--part", type=int)
    parser.add_argument("--kernel", help="check this kernel")
    parser.add_argument(
        "--predict", action="store_true", help="print what the schedules give, in us, and measure nothing"
    )
    parser.add_argument("--join", type=Path, help="write the record of the folder `--out`, and measure nothing")
    options = parser.parse_args()
    if options.predict:
        for i, shape in enumerate(all_shapes()):
            print(i, *shape, {name: round(us, 1) for name, us in predicted_us(shape).items()})
        return
    options.out.mkdir(parents=True, exist_ok=True)
    if options.join:
        write_whole(options.join, to_text(join(options.out)))
        return
    if options.kernel:
        check_kernel(tuple(json.loads(options.kernel)), options.out)
        return
    if options.part is not None:
        worker(options)
        return
    began = time.monotonic()
    command = [sys.executable, "-m", "tools.record.backward_shapes", *sys.argv[1:]]
    check_kernels(command, options)
    print(f"checked after {time.monotonic() - began:.0f} s", flush=True)
    run_parts([[*command, "--part", str(i)] for i in range(options.workers)], began + options.seconds)


if __name__ == "__main__":
    main()
