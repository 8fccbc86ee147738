"""`labs bench choose`: time every backend of attention over a grid of shapes, and say which is best where.

The backends of a shape are timed interleaved, in an order that each round draws anew: clocks change within seconds, and
a backend would always follow the same one. A first look finds the fastest, and those that are slower than NEAR times the
fastest get few samples. A backend is timed only after its results agreed with float64 and its kernels were seen.
"""

from __future__ import annotations

import math
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from utils.attention import Refused as BackendRefused
from utils.attention import choosing as measured
from utils.attention import find_backend, make_problem
from utils.attention.problem import NO_OPTIONS
from utils.bench import results as res
from utils.bench.documents import Schema, utc_now, write_json
from utils.bench.errors import BenchError, Refused, VerificationError, WrongRun, first_line
from utils.bench.targets import sdpa
from utils.bench.targets.proof import prove
from utils.bench.verify import verify
from utils.bench.workload import DTYPES, Inputs, Workload, arithmetic, free_bytes, make_inputs, reference
from utils.benchmark.measuring import measure_together
from utils.benchmark.profiling import launched as profile_launches
from utils.benchmark.result import Measurement
from utils.machine.environment import environment

GRID = Schema("labs-sdpa-grid", 1, ("status", "environment", "method", "rows"))
NEAR = 1.6  # backends within this many times the fastest get all samples
SCOUT_SAMPLES = 3
SAME_MACHINE = {"cuda": ("gpu", "torch", "cudnn", "cuda"), "cpu": ("gpu", "cpu", "torch")}
MACHINE = ("gpu", "cpu", "torch", "cudnn", "cuda", "driver", "triton", "python", "commit", "dirty")
ARGUMENTS = re.compile(r"[(<].*")  # of a kernel's name; they can fill a page

HEADS = {64: 32, 128: 16, 256: 8}  # model width 2048
GROUPED = {64: (32, 8), 128: (32, 8), 256: (16, 4)}  # query heads, KV heads
TRAINING_FEW = ((8, 512), (4, 2048), (1, 8192))
# (batch, queries, keys). The best backend for decode changes near as many blocks of work (batch x KV heads for one
# query, batch x heads for several) as there are multiprocessors, so the grid is dense there.
DECODE_GROUPED = (
    *((batch, 1, keys) for batch in (1, 2, 4, 6, 8, 10, 12, 14, 16, 20, 24, 32, 64) for keys in (2048, 16384)),
    *((batch, 1, 512) for batch in (1, 8, 24, 64)),
    *((batch, 1, 65536) for batch in (1, 4, 8)),
    *((batch, 4, keys) for batch in (1, 2, 3, 4, 8) for keys in (1024, 8192)),
    *((1, 4, 65536), (32, 4, 2048)),
)
# Sizes (batch, tokens: at most 16k tokens, as in a step of training or in a prompt), mask, direction, grouped heads.
GPU = (
    (((32, 128), (16, 512), (8, 1024), (4, 2048), (2, 4096), (1, 8192)), "causal", "both", False),
    (TRAINING_FEW, "causal", "both", True),
    (TRAINING_FEW, "full", "both", False),
    (
        ((1, 128), (1, 512), (1, 2048), (1, 8192), (1, 16384), (8, 128), (8, 512), (8, 2048), (4, 4096)),
        *("causal", "forward", False),
    ),
    (((1, 128), (1, 512), (1, 2048), (1, 8192), (8, 512), (4, 4096)), "causal", "forward", True),
    (((1, 512), (8, 512), (4, 2048), (1, 8192)), "full", "forward", False),
    (((1, 1, 4096), (4, 1, 16384), (16, 1, 1024)), "full", "forward", False),
    (DECODE_GROUPED, "full", "forward", True),
)
CPU = (
    (((1, 128), (1, 512)), "causal", "both", False),
    (((1, 64), (1, 256), (1, 1024)), "causal", "forward", False),
    (((1, 256),), "full", "forward", False),
    (((1, 1, 512), (1, 1, 4096), (4, 1, 1024)), "full", "forward", True),
)

References = list[tuple[tuple[slice, slice, slice], dict[str, torch.Tensor]]]


def shapes(device_type: str, head_dims: Iterable[int], dtype: str) -> list[Workload]:
    """Make the grid of a device: for each head dimension 79 shapes on a GPU, 9 small ones on a CPU."""
    grid = []
    for head_dim in head_dims:
        few = max(1, 256 // head_dim)
        plain, groups = (HEADS[head_dim], GROUPED[head_dim]) if device_type == "cuda" else (few, (2 * few, few))
        for sizes, mask, direction, grouped in GPU if device_type == "cuda" else CPU:
            heads, kv_heads = groups if grouped else (plain, None)
            for batch, queries, *keys in sizes:
                sk = keys[0] if keys else None
                shape = (batch, heads, queries, head_dim, dtype, mask)
                grid.append(Workload(*shape, kv_heads=kv_heads, seq_len_kv=sk, direction=direction))
    return grid


def shape_fields(workload: Workload) -> dict:
    """Return the shape's fields of a row."""
    training = workload.direction != "forward"
    fields = {"kind": measured.kind_of(workload.seq_len, workload.sk, training), "label": workload.label}
    fields |= {name: getattr(workload, name) for name in ("batch", "heads", "head_dim", "dtype", "causal")}
    lengths = {"seq_len_q": workload.seq_len, "seq_len_kv": workload.sk}
    return fields | lengths | {"kv_heads": workload.hkv, "pass": workload.direction}


# ---- one shape ---------------------------------------------------------------------------------------------


def backend_call(workload: Workload, name: str, inputs: Inputs) -> Callable:
    """Return the call that is timed; raise Refused, with the reason, if the backend does not take it here."""
    if name == "triton" and inputs.q.device.type == "cpu":
        raise Refused("Triton's interpreter runs it on a CPU, and that time says nothing.")
    backend = find_backend(name)
    if name in sdpa.BACKENDS:
        if not (machine := backend.machine()):
            raise Refused(machine.reason)
        sdpa.refuse(workload, name, inputs)
        return sdpa.bind(workload, name, inputs)
    tensors = sdpa.leaves(workload, inputs)
    with torch.set_grad_enabled(workload.direction != "forward"):
        problem = make_problem(*tensors, **workload.attention_arguments)
        if not (able := backend.support(problem)):
            raise Refused(able.reason)
        try:
            bound = backend.bind(problem, NO_OPTIONS)
            (bound.first or bound.call)(*tensors)
        except BackendRefused as refusal:
            raise Refused(str(refusal)) from None
    return sdpa.timed_call(workload, bound.call, tensors, inputs.dout)


def references_of(workload: Workload, inputs: Inputs) -> References:
    """Compute the float64 results of the last KV head and its query heads; heads do not depend on each other."""
    group, last = workload.heads // workload.hkv, workload.hkv - 1
    batch, query, key = heads = slice(workload.batch - 1, None), slice(last * group, None), slice(last, None)
    dout = None if inputs.dout is None else inputs.dout[batch, query]
    exact = reference(workload, inputs.q[batch, query], inputs.k[batch, key], inputs.v[batch, key], dout)
    return [(heads, exact)]


def largest_error(workload: Workload, call: Callable, references: References, name: str) -> float:
    """Verify a call's results against the references; return the largest relative error."""
    results = call()
    results = results if isinstance(results, tuple) else (results,)
    if bad := sum(int((~torch.isfinite(tensor)).sum()) for tensor in results):
        raise VerificationError(f"{name} gives {bad} values that are NaN or infinite.")
    options = {"precision": arithmetic(workload.dtype, results[0].device), "dtype": DTYPES[workload.dtype]}
    errors = []
    for (batch, query, key), exact in references:
        for tensor, (what, expected) in zip(results, exact.items(), strict=True):
            part = tensor[batch, query if what in ("output", "gradient of q") else key]
            gradient = what.startswith("gradient")
            errors.append(verify(part, expected, what=f"{what} of {name}", gradient=gradient, **options).whole)
    return max(errors)


def _prepare(workload: Workload, name: str, inputs: Inputs, references: References) -> tuple[dict, Any]:
    """Return a backend's row without times, and its call if it may be timed."""
    row: dict[str, Any] = {"backend": name, "status": res.OK, "refused": None}
    try:
        needed, free = workload.bytes_needed(3.0 if name == "math" else 0.0), free_bytes(inputs.q.device)
        if needed > free:
            raise MemoryError(f"it needs about {needed / 1e9:.3g} GB and {free / 1e9:.3g} GB are free: not tried.")
        call = backend_call(workload, name, inputs)
        row["error"] = largest_error(workload, call, references, name)
        launched = profile_launches(call)
        prove(name, launched, workload.direction)
        names = launched.kernels or [operator for operator in launched.operators if "attention" in operator]
        row["kernels"] = list(dict.fromkeys(ARGUMENTS.sub("", kernel.removeprefix("void ")) for kernel in names))
        row["peak_mb"] = sdpa.memory(call)["peak_bytes"] / 1e6
        return row, call
    except Refused as error:
        row |= {"status": res.REFUSED, "refused": str(error)}
    except (MemoryError, torch.OutOfMemoryError) as error:
        torch.cuda.empty_cache()
        row |= {"status": res.OUT_OF_MEMORY, "refused": first_line(error)}
    except (VerificationError, WrongRun, RuntimeError) as error:
        row |= {"status": res.FAILED, "refused": first_line(error)}
    return row, None


def _time_calls(calls: dict[str, Callable], device: torch.device, samples: int) -> dict[str, Measurement]:
    """Time calls interleaved: all of them with a few samples, then those near the fastest with all samples."""

    def timed(names: Iterable[str], **options: Any) -> dict[str, Measurement]:
        labels = list(names)
        return dict(
            zip(labels, measure_together([calls[name] for name in labels], labels=labels, **options), strict=True)
        )

    if not calls:
        return {}
    scouted = timed(calls, device=device, warmup=1, iterations=SCOUT_SAMPLES, max_seconds=2.0)
    best = min(measurement.median_ms for measurement in scouted.values())
    near = [name for name, measurement in scouted.items() if measurement.median_ms <= NEAR * best]
    return scouted | timed(near, device=device, warmup=2, iterations=samples, max_seconds=4.0)


def measure_shape(
    workload: Workload, backends: Sequence[str], device: torch.device, *, seed: int, samples: int
) -> list[dict]:
    """Make the rows of one shape: each backend is verified and proved, then all are timed interleaved."""
    inputs = make_inputs(workload, device, seed)
    references = references_of(workload, inputs)
    prepared = [_prepare(workload, name, inputs, references) for name in backends]
    del references  # frees GPU memory for the timed calls
    default = prove("auto", profile_launches(sdpa.bind(workload, "auto", inputs)), workload.direction)
    times = _time_calls({row["backend"]: call for row, call in prepared if call is not None}, device, samples)
    rows = []
    for row, _ in prepared:
        if (found := times.get(row["backend"])) is not None:
            low, high = found.interval_ms
            row |= {"ms": found.median_ms, "ms_low": low, "ms_high": high}
            row["tflops"] = workload.cost.flops / found.median_ms / 1e9
        rows.append({"set": "grid"} | shape_fields(workload) | {"default": default} | row)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return rows


# ---- the sweep ---------------------------------------------------------------------------------------------


def _open(path: Path, device: torch.device, method: dict) -> dict:
    """Return the document of `path` if this machine began it with these settings, else a new document."""
    machine = environment(device)
    if not path.exists():
        return GRID.document(status="running", finished=None, environment=machine, method=method, rows=[])
    document = GRID.read(path)
    names = SAME_MACHINE[device.type]
    begun = {name: document["environment"].get(name) for name in names} | document["method"]
    here = {name: machine.get(name) for name in names} | method
    if different := [f"{name} {begun.get(name)} (here {here[name]})" for name in here if begun.get(name) != here[name]]:
        raise BenchError(
            f"{path} was begun elsewhere or with other settings: {', '.join(different)}. A sweep goes on only where and "
            "how it began; choose another --out."
        )
    return document


def sweep(
    shapes: Sequence[Workload],
    path: Path,
    device: torch.device,
    *,
    backends: Sequence[str],
    samples: int,
    seed: int = 0,
    max_seconds: float = math.inf,
    on_shape: Callable[[int, str], None] = lambda done, label: None,
) -> dict:
    """Measure shapes into the file `path`, which is valid after every shape, and return its document.

    Shapes that the file has already are not measured again. Ctrl-C leaves the status "interrupted", `max_seconds`
    leaves "stopped". `on_shape` is called with the number of shapes done and the next label, for a progress bar.
    """
    begin = time.monotonic()
    document = _open(path, device, {"backends": list(backends), "samples": samples, "seed": seed})
    done = {row["label"] for row in document["rows"]}
    status = "complete"
    write_json(path, document, "rows")  # a folder that cannot be written is found out before the timing
    try:
        for number, workload in enumerate(shapes):
            on_shape(number, workload.label)
            if workload.label in done:
                continue
            if time.monotonic() - begin > max_seconds:
                status = "stopped"
                break
            document["rows"] += measure_shape(workload, backends, device, seed=seed + number, samples=samples)
            write_json(path, document, "rows")
    except BaseException as error:
        status = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
        raise
    finally:
        document |= {"status": status, "finished": utc_now()}
        write_json(path, document, "rows")
    return document


# ---- what it says ------------------------------------------------------------------------------------------


def measured_shapes(document: dict) -> list[dict]:
    """Make one entry for each shape that a backend ran: its first row, {backend: ms}, the best, the default's cost."""
    by_label: dict[str, list[dict]] = {}
    for row in document["rows"]:
        if row["set"] == "grid":
            by_label.setdefault(row["label"], []).append(row)
    entries = []
    for first, *others in by_label.values():
        ms = {row["backend"]: row["ms"] for row in (first, *others) if row["status"] == res.OK}
        if ms:
            best = min(ms, key=lambda name: ms[name])
            cost = ms[first["default"]] / ms[best] if first["default"] in ms else None
            entries.append(first | {"ms": ms, "best": best, "default_cost": cost})
    return entries


def choices_document(document: dict) -> dict:
    """Make the small JSON that `use_choices` reads: the grid's shapes and times."""
    entries = measured_shapes(document)
    if not entries:
        raise BenchError("the sweep measured no shape of the grid, so there is nothing to choose by.")
    points = []
    for row in entries:
        same = {name: row[name] for name in ("batch", "heads", "kv_heads", "head_dim", "kind", "causal")}
        bits = 8 * DTYPES[row["dtype"]].itemsize
        point = measured.Point(**same, sq=row["seq_len_q"], sk=row["seq_len_kv"], bits=bits)
        points.append(asdict(point) | {"ms": {name: float(f"{ms:.4g}") for name, ms in row["ms"].items()}})
    return {
        "schema": measured.SCHEMA,
        "version": measured.VERSION,
        "machine": {key: document["environment"].get(key) for key in MACHINE},
        "measured": document["finished"],
        "status": document["status"],
        "rule": measured.RULE,
        "points": points,
    }


def geometric_mean(values: Iterable[float | None]) -> float | None:
    """Return the geometric mean of the values that are not None; None if there are none."""
    known = [value for value in values if value is not None]
    return statistics.geometric_mean(known) if known else None


def by_group(document: dict) -> list[dict]:
    """Make a row for each kind and head dimension: how often each backend is best, and what the default costs."""
    groups: dict[tuple[int, int], list[dict]] = {}
    for entry in measured_shapes(document):
        groups.setdefault((measured.KINDS.index(entry["kind"]), entry["head_dim"]), []).append(entry)
    rows = []
    for (kind, head_dim), entries in sorted(groups.items()):
        worst = max(entries, key=lambda entry: entry["default_cost"] or 0.0)
        fields = {"kind": measured.KINDS[kind], "head_dim": head_dim, "shapes": len(entries)}
        fields |= {name: dict(Counter(entry[name] for entry in entries).most_common()) for name in ("best", "default")}
        fields["default_over_best"] = geometric_mean(entry["default_cost"] for entry in entries)
        rows.append(fields | {"worst": worst["default_cost"], "worst_at": worst["label"]})
    return rows
