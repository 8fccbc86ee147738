"""Time variants of the Gluon backward and the peers in random order, each right against float64 before, and at what clocks.

    python -m tools.record.backward_variants --fa3 ~/fa3/_C.so --out build/backward --seconds 240

Writes into the folder `--out`: `checks.json` (a row for each contender), `times.json` (a row for each point and pass) and
`clocks.json` (calls without a pause for most of a second: rate, clock and power). A process for each check and for each
head dimension and mask prepares beside the others, and one at a time has the GPU for timing. Rows that are there already
are not measured again. A contender is written as in `backward.py`: "gluon:v_left=1". One with `probe` is wrong on purpose
and is not checked. `--join FILE` measures nothing: it writes the folder's files as one record.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from tools.record.attention_ratios import HEADS, TOKENS, inputs, relative_difference
from tools.record.backward import maker_of, prepare
from tools.record.common import arguments_parser, read_record, to_text
from tools.record.turns import Turns, run_parts
from utils.benchmark.measuring import measure_together
from utils.files import write_whole
from utils.machine.environment import environment

LIMIT = 8e-3  # relative error against float64: a few roundings to bf16
PEERS = ["cudnn", "fa3", "fa4"]
LENGTHS = (16384, 4096)


def load_fa3(path: str | None) -> None:
    """Load FlashAttention 3's library, if there is one."""
    if path:
        torch.ops.load_library(str(Path(path).expanduser()))


def check(name: str, head_dim: int, causal: bool) -> dict:
    """Compare a contender with float64: two heads, 1024 tokens, full tiles as in the timed points."""
    from utils.attention.reference import reference_gradients

    torch.manual_seed(1)
    q, k, v, dout = (torch.randn(1, 2, 1024, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    _, expected = reference_gradients(q, k, v, dout, causal=causal)
    errors = [0.0] * 3
    for _ in range(5):
        gradients = maker_of(name)(q, k, v, dout, causal)()
        if name.startswith("fa"):
            gradients = tuple(x.transpose(1, 2) for x in gradients)
        errors = [
            max(e, relative_difference(*pair))
            for e, pair in zip(errors, zip(gradients, expected, strict=True), strict=True)
        ]
    return {"errors": errors, "right": max(errors) < LIMIT}


def time_point(
    names: list[str], head_dim: int, length: int, causal: bool, samples: int, seed: int, ready: dict
) -> dict:
    """Time the contenders of one point, each round in another order."""
    calls, refused = ready[length]
    flops = 10.0 * TOKENS * HEADS[head_dim] * length * head_dim * (0.5 if causal else 1.0)
    results = measure_together(
        list(calls.values()),
        labels=list(calls),
        warmup=2,
        iterations=samples,
        device="cuda",
        flops=flops,
        l2="cold",
        seed=seed,
    )
    times = {name: result.median_ms for name, result in zip(calls, results, strict=True)}
    row: dict = {"head_dim": head_dim, "length": length, "causal": causal, "seed": seed, "samples": samples}
    row |= {"ms": times, "tflops": {name: flops / ms / 1e9 for name, ms in times.items()}}
    return row | {"refused": refused} | {"all_ms": {n: list(r.samples_ms) for n, r in zip(calls, results, strict=True)}}


def differences_from_default(calls: dict) -> dict[str, float]:
    """Return how far each contender's gradients are from the default's, at the timed sizes, the largest of three."""
    expected = calls["gluon"]()
    found = {}
    for name, call in calls.items():
        got = tuple(x.transpose(1, 2) for x in call()) if name.startswith("fa") else call()
        # The norms in fp32: in fp64 these tensors would take most of the time.
        errors = [
            ((x.float() - y.float()).norm() / y.float().norm()).item() for x, y in zip(got, expected, strict=True)
        ]
        found[name] = max(errors)
    return found


def read_clock() -> tuple[float, float]:
    """Return the SM clock in MHz and the power in W."""
    command = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw.instant", "--format=csv,noheader,nounits"]
    fields = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0].split(",")
    return float(fields[0]), float(fields[1])


def sustain(call, flops: float, seconds: float) -> dict:
    """Call without a pause, and read clock and power meanwhile."""
    readings: list[tuple[float, float]] = []
    stop = threading.Event()

    def watch() -> None:
        while not stop.is_set():
            readings.append(read_clock())

    call()
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    watcher = threading.Thread(target=watch)
    begin.record()
    calls, began = 0, time.monotonic()
    while time.monotonic() - began < seconds:
        call()
        calls += 1
        if calls == 40:
            watcher.start()
        if calls % 8 == 0:
            torch.cuda.current_stream().synchronize()
    end.record()
    end.synchronize()
    stop.set()
    watcher.join()
    ms = begin.elapsed_time(end) / calls
    return {"ms": ms, "tflops": flops / ms / 1e9, "mhz": [r[0] for r in readings], "watt": [r[1] for r in readings]}


def add_contenders(parser: argparse.ArgumentParser) -> None:
    """Add the options that name contenders, peers, and the library of one of them."""
    parser.add_argument("--fa3", default=os.environ.get("FLASH_ATTENTION_3_LIBRARY"))
    for name in ("full64", "causal64", "full128", "causal128"):
        parser.add_argument(
            f"--{name}", default="", help="contenders beside the default and the peers, with semicolons"
        )
    parser.add_argument("--peers", default=",".join(PEERS))


def contenders(head_dim: int, causal: bool, options) -> list[str]:
    """Return the contenders of a head dimension and mask."""
    own = options.full64 if head_dim == 64 else options.full128
    if causal:
        own = options.causal64 if head_dim == 64 else options.causal128
    return ["gluon", *(name for name in own.split(";") if name), *options.peers.split(",")]


class Rows:
    """A recorded table that grows, in a file of its own."""

    def __init__(self, path: Path, what: str) -> None:
        """Read the rows that are there already."""
        self.path = path
        self.contents: dict = {"what": what, "environment": environment("cuda"), "rows": []}
        if path.exists():
            self.contents["rows"] = json.loads(path.read_text(encoding="utf-8"))["rows"]

    def has(self, **key) -> bool:
        """Whether there is a row with these values."""
        return any(all(row.get(k) == v for k, v in key.items()) for row in self.contents["rows"])

    def add(self, row: dict) -> None:
        """Add a row and save the file."""
        self.contents["rows"].append(row)
        write_whole(self.path, to_text(self.contents))


def check_main(options) -> None:
    """Check one contender, in a process of its own."""
    name, head_dim, causal = options.check.rsplit("|", 2)
    path = file_of_check(options.out, options.check)
    if path.exists():
        return
    key = {"name": name, "head_dim": int(head_dim), "causal": causal == "1"}
    try:
        row = check(name, int(head_dim), causal == "1") if "probe" not in name else {"right": None}
        if "probe" in name:
            q, k, v = (torch.randn(1, 2, 1024, int(head_dim), device="cuda", dtype=torch.bfloat16) for _ in range(3))
            maker_of(name)(q, k, v, torch.randn_like(q), causal == "1")()
            torch.cuda.synchronize()
    except Exception as error:
        row = {"right": False, "refused": f"{type(error).__name__}: {error}"[:400]}
    write_whole(path, json.dumps(key | row) + "\n")


def file_of_check(folder: Path, what: str) -> Path:
    """Name the file of a check, such as "gluon:queue=1|64|0"."""
    return folder / f"check-{''.join(x if x.isalnum() or x == '_' else '-' for x in what)}.json"


def run_check(command: list[str], what: str, folder: Path) -> None:
    """Check a contender in a process of its own; one that does not come to its end is not timed."""
    try:
        subprocess.run([*command, "--check", what], check=False, timeout=120)
    except subprocess.TimeoutExpired:
        name, head_dim, causal = what.rsplit("|", 2)
        row = {"name": name, "head_dim": int(head_dim), "causal": causal == "1", "right": False, "refused": "no end"}
        write_whole(file_of_check(folder, what), json.dumps(row) + "\n")


def time_main(options) -> None:
    """Time the points of one head dimension and mask, in a process of its own."""
    load_fa3(options.fa3)
    head_dim, causal = int(options.part.split("|")[0]), options.part.endswith("1")
    turns = Turns(options.out / f"turns-{options.round}", 4, options.prepare)
    wrong = set()
    for path in options.out.glob("check-*.json"):
        row = json.loads(path.read_text(encoding="utf-8"))
        if row["right"] is False and (row["head_dim"], row["causal"]) == (head_dim, causal):
            wrong.add(row["name"])
    names = [name for name in contenders(head_dim, causal, options) if name not in wrong]
    torch.manual_seed(0)
    ready = {length: prepare(names, head_dim, length, causal) for length in LENGTHS}
    differences = {length: differences_from_default(calls) for length, (calls, _) in ready.items()}
    turns.wait_for_all(options.part.replace("|", "-"))
    times = Rows(options.out / f"times-{head_dim}-{int(causal)}.json", "backward variants, random order, TFLOP/s")
    for seed, length in itertools.product(range(options.passes), LENGTHS):
        if times.has(length=length, seed=seed, round=options.round):
            continue
        with turns.alone():
            samples = options.pairs if length == 16384 else options.pairs * 2
            row = time_point(names, head_dim, length, causal, samples, seed, ready)
        row |= {"round": options.round, "differences": differences[length]}
        times.add(row)
        print(head_dim, length, causal, {name: round(rate) for name, rate in row["tflops"].items()}, flush=True)
    if not options.sustain or head_dim == 64:
        return
    clocks = Rows(options.out / f"clocks-{head_dim}-{int(causal)}.json", "backward without a pause")
    flops = 10.0 * TOKENS * HEADS[head_dim] * 16384 * head_dim * (0.5 if causal else 1.0)
    chosen = [name for name in names if name in ("fa3", "fa4", *options.sustain.split(";"))]
    ready.clear()
    for data in ("random", "zeros"):
        torch.manual_seed(0)
        q, k, v = (
            inputs(head_dim, 16384) if data == "random" else (torch.zeros_like(x) for x in inputs(head_dim, 16384))
        )
        dout = torch.randn_like(q) if data == "random" else torch.zeros_like(q)
        for name in chosen:
            if clocks.has(name=name, data=data):
                continue
            with turns.alone():
                row = sustain(maker_of(name)(q, k, v, dout, causal), flops, options.sustain_seconds)
            clocks.add({"name": name, "data": data, "head_dim": head_dim, "causal": causal} | row)
            print(name, data, row, flush=True)


def rounded(value, digits: int):
    """Round the numbers of a table's cell; what is no number stays as it is."""
    if isinstance(value, dict):
        return {key: rounded(x, digits) for key, x in value.items()}
    return round(value, digits) if isinstance(value, float) and math.isfinite(value) else value


def join(folder: Path, passes: int) -> dict:
    """Return the record of a run out of its folder: rates and differences of each point and pass, checks, and clocks."""
    kept = ("head_dim", "length", "causal", "seed", "samples")
    parts = [read_record(path) for path in sorted(folder.glob("times-*.json"))]
    rows = [
        {key: row[key] for key in kept}
        | {"tflops": rounded(row["tflops"], 1), "differences": rounded(row["differences"], 6)}
        for part in parts
        for row in part["rows"]
    ]
    points = {(row["head_dim"], row["length"], row["causal"], row["seed"]) for row in rows}
    what = f"backward: variants and peers in random order, passes: {passes}, cold L2, TFLOP/s; checks against float64"
    record = {"what": what, "environment": parts[0]["environment"], "complete": len(points) == 8 * passes}
    checks = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("check-*.json"))]
    checks = [row | {"errors": [round(x, 6) for x in row.get("errors", [])]} for row in checks]
    clocks = [
        {"length": 16384} | rounded(row, 3)
        for path in sorted(folder.glob("clocks-*.json"))
        for row in read_record(path)["rows"]
    ]
    return record | {"rows": rows, "checks": checks} | ({"clocks": clocks} if clocks else {})


def main() -> None:
    """Check all contenders side by side, then time them."""
    parser = arguments_parser(__doc__, pairs=15)
    add_contenders(parser)
    parser.add_argument("--sustain", default="", help="contenders that are called without a pause, with semicolons")
    parser.add_argument("--passes", type=int, default=2)
    parser.add_argument("--round", type=int, default=0)
    parser.add_argument("--prepare", type=float, default=60, help="seconds to prepare the timing")
    parser.add_argument("--sustain-seconds", type=float, default=0.7)
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--check")
    parser.add_argument("--part")
    parser.add_argument("--join", type=Path, help="write the record of the folder `--out`, and measure nothing")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.join:
        write_whole(options.join, to_text(join(options.out, options.passes)))
        return
    if options.check:
        check_main(options)
        return
    if options.part:
        time_main(options)
        return
    began = time.monotonic()
    command = [sys.executable, "-m", "tools.record.backward_variants", *sys.argv[1:]]
    parts = [(128, True), (128, False), (64, True), (64, False)]
    checks = [
        f"{name}|{head_dim}|{int(causal)}"
        for head_dim, causal in parts
        for name in contenders(head_dim, causal, options)
        if name not in PEERS
    ]
    with ThreadPoolExecutor(options.workers) as pool:
        list(pool.map(lambda x: run_check(command, x, options.out), checks))
    print(f"checked after {time.monotonic() - began:.0f} s", flush=True)
    for path in sorted(options.out.glob("check-*.json")):
        print(path.read_text(encoding="utf-8").strip(), flush=True)
    run_parts([[*command, "--part", f"{d}|{int(causal)}"] for d, causal in parts], began + options.seconds)


if __name__ == "__main__":
    main()
