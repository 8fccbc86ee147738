"""Which SDPA backend is best where: a resumable sweep, and what it says.

The sweep writes one JSON file, whole after every shape:

    {"schema": "labs-sdpa-grid", "version": 1, "status": "complete", "environment": {...}, "method": {...},
     "sessions": [{...}], "rows": [{...}, ...]}                  pandas.DataFrame(document["rows"])

A sweep that was stopped and went on has several sessions; each says when it ran, how many shapes it measured, at which
commit, and what clocks and temperature the GPU began with. A row is one shape x one provider:

    shape     set ("grid" or "held-out"), kind ("training", "prefill", "decode"), label, batch, heads, kv_heads,
              seq_len_q, seq_len_kv, head_dim, dtype, causal, pass ("forward", or "both": forward plus backward)
    who       backend ("cudnn", "flash", "efficient", "math", or a provider of the registry), default (the backend that
              torch picks for this shape when nothing is pinned), is_default
    outcome   status ("ok", "refused", "failed", "out of memory"), refused (torch's reason in words, else null)
    time      ms (median), ms_low, ms_high (95% of the median), samples_ms, first_call_ms (the first call on this shape,
              host clock: a plan may be built in it)
    rates     flops, bytes (the least that must move), tflops, gb_s
    memory    peak_mb (what a call adds, 1e6 bytes, its results included), workspace_mb (less its results)
    proof     launches, kernels (their names without arguments; on a CPU the SDPA operators)
    error     error (relative, against float64: the worst of the output and the gradients), error_of (which of them),
              heads_checked

Times are those of the device alone, launches hidden behind a full queue (as in a CUDA graph), L2 as the calls leave
it, all providers of a shape interleaved. Providers slower than NEAR times the fastest get few samples. Nothing is
timed before its result was held against float64 and its kernels were seen.
"""

from __future__ import annotations

import datetime
import functools
import gc
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from utils.attention import Refused as BackendRefused
from utils.attention import find_backend, make_problem
from utils.attention.choosing import kind_of
from utils.attention.problem import NO_OPTIONS
from utils.bench import results as res
from utils.bench.errors import BenchError, VerificationError, WrongRun, first_line
from utils.bench.targets import sdpa
from utils.bench.targets.proof import launched_by, prove
from utils.bench.targets.sdpa import BACKENDS as SDPA_BACKENDS
from utils.bench.targets.sdpa import SdpaWorkload
from utils.bench.verify import verify
from utils.bench.workload import DTYPES, arithmetic
from utils.benchmark.measuring import measure_together
from utils.files import write_whole
from utils.machine.environment import available_memory_bytes, environment, gpu_state

SCHEMA, VERSION = "labs-sdpa-grid", 1
NEAR = 1.6  # providers within this many times the fastest get all samples
SCOUT_SAMPLES = 3
CHECKED_SCORES = 1 << 27  # beyond so many scores a head of K and V one head is held against float64, else two
SAME_MACHINE = {"cuda": ("gpu", "torch", "cudnn", "cuda"), "cpu": ("gpu", "cpu", "torch")}


def shape_fields(workload: SdpaWorkload) -> dict:
    return {
        "kind": kind_of(workload.seq_len, workload.sk, workload.direction != "forward"),
        "label": workload.label,
        "batch": workload.batch,
        "heads": workload.heads,
        "kv_heads": workload.hkv,
        "seq_len_q": workload.seq_len,
        "seq_len_kv": workload.sk,
        "head_dim": workload.head_dim,
        "dtype": workload.dtype,
        "causal": workload.causal,
        "pass": workload.direction,
    }


# ---- one shape ---------------------------------------------------------------------------------------------


def _other_call(workload: SdpaWorkload, name: str, inputs: sdpa.Inputs) -> tuple[Callable | None, str]:
    """Return (call, why not) of a backend that is not SDPA's: its forward pass alone."""
    if workload.direction != "forward":
        return None, "it is timed in its forward pass alone."
    if name == "triton" and inputs.q.device.type == "cpu":
        return None, "Triton's interpreter runs it on a CPU, and that time says nothing."
    problem = make_problem(*inputs.qkv, **workload.attention_arguments)
    backend = find_backend(name)
    if not (able := backend.support(problem)):
        return None, able.reason
    try:
        bound = backend.bind(problem, NO_OPTIONS)
        (bound.first or bound.call)(*inputs.qkv)
    except BackendRefused as refusal:
        return None, str(refusal)
    return functools.partial(bound.call, *inputs.qkv), ""


def _call(workload: SdpaWorkload, name: str, inputs: sdpa.Inputs) -> tuple[Callable | None, str]:
    """Return (the call that is timed, why not)."""
    if name not in SDPA_BACKENDS:
        return _other_call(workload, name, inputs)
    if not (machine := find_backend(name).machine()):
        return None, machine.reason
    if reason := sdpa.why_not(workload, name, inputs):
        return None, reason
    return sdpa.bind(workload, name, inputs), ""


def _free_bytes(device: torch.device) -> float:
    if device.type == "cuda":
        return (
            torch.cuda.mem_get_info(device)[0]
            + torch.cuda.memory_reserved(device)
            - torch.cuda.memory_allocated(device)
        )
    return available_memory_bytes() or math.inf


def _checked(workload: SdpaWorkload, inputs: sdpa.Inputs) -> list[tuple[slice, slice, slice, dict]]:
    """Which heads are checked, (batch, query heads, K and V heads), and what is right there: the first and the last
    head of K and V, of large shapes the last alone. Heads are independent of each other.
    """
    group = workload.heads // workload.hkv
    pairs = [(0, 0), (workload.batch - 1, workload.hkv - 1)]
    if group * workload.seq_len * workload.sk > CHECKED_SCORES:
        pairs = pairs[-1:]
    found = []
    for b, h in dict.fromkeys(pairs):
        at, query, key = slice(b, b + 1), slice(h * group, (h + 1) * group), slice(h, h + 1)
        dout = None if inputs.dout is None else inputs.dout[at, query]
        right = sdpa.reference(workload, inputs.q[at, query], inputs.k[at, key], inputs.v[at, key], dout)
        found.append((at, query, key, right))
    return found


def _error(workload: SdpaWorkload, call: Callable, checked: list, name: str, device: torch.device) -> dict:
    """Hold a call's results against float64: the largest relative error and whose it is; raises if it is too large."""
    results = call()
    results = results if isinstance(results, tuple) else (results,)
    precision, worst, heads = arithmetic(workload.dtype, device), (-1.0, ""), 0
    for at, query, key, right in checked:
        heads += query.stop - query.start
        for tensor, (which, exact) in zip(results, right.items(), strict=True):
            part = tensor[at, query if which in ("output", "gradient of q") else key]
            one = verify(
                part,
                exact,
                precision,
                dtype=DTYPES[workload.dtype],
                what=f"{which} of {name}",
                gradient=which.startswith("gradient"),
            )
            worst = max(worst, (one.whole, which))
    bad = sum(int((~torch.isfinite(tensor)).sum()) for tensor in results)
    if bad:
        raise VerificationError(f"{name} gives {bad} values that are NaN or infinite.")
    return {"error": worst[0], "error_of": worst[1], "heads_checked": heads}


def bare_name(kernel: str) -> str:
    """A kernel's name without its template and call arguments: they can fill a page."""
    text, kept, depth = kernel.removeprefix("void ").replace("(anonymous namespace)::", ""), [], 0
    for letter in text:
        depth += letter in "<("
        if not depth:
            kept.append(letter)
        depth -= letter in ">)"
    return "".join(kept).strip()


def _prepared(workload: SdpaWorkload, name: str, inputs: sdpa.Inputs, checked: list) -> tuple[dict, Callable | None]:
    """A row without times, and the call if it may be timed: taken, right, proved."""
    device = inputs.q.device
    row: dict[str, Any] = {"backend": name, "status": res.REFUSED, "refused": None}
    scores = 3.0 if name == "math" else 0.0
    needed, free = workload.bytes_needed(scores), _free_bytes(device)
    if needed > free:
        return row | {
            "status": res.OUT_OF_MEMORY,
            "refused": f"it needs about {needed / 1e9:.3g} GB and {free / 1e9:.3g} GB are free: not tried.",
        }, None
    try:
        begin = time.perf_counter()
        call, reason = _call(workload, name, inputs)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        first_ms = 1e3 * (time.perf_counter() - begin)
        if call is None:
            return row | {"refused": reason}, None
        row |= {"first_call_ms": first_ms} | _error(workload, call, checked, name, device)
        launched = launched_by(call)
        prove(name, launched, workload.direction)
        shown = launched.kernels or [one for one in launched.operators if "::_scaled_dot" in one or "::_soft" in one]
        memory = sdpa.memory(call)
    except torch.OutOfMemoryError as error:
        torch.cuda.empty_cache()
        return row | {"status": res.OUT_OF_MEMORY, "refused": first_line(error)}, None
    except (VerificationError, WrongRun, RuntimeError) as error:
        return row | {"status": res.FAILED, "refused": first_line(error)}, None
    row |= {
        "status": res.OK,
        "launches": launched.launches or None,
        "kernels": list(dict.fromkeys(map(bare_name, shown))),
        "peak_mb": memory["peak_bytes"] / 1e6,
        "workspace_mb": memory["workspace_bytes"] / 1e6,
    }
    return row, call


def default_backend(workload: SdpaWorkload, inputs: sdpa.Inputs) -> str:
    """Return the backend that torch picks when nothing is pinned, by the operators that the call launches."""
    return prove("auto", launched_by(sdpa.bind(workload, "auto", inputs)), workload.direction)


def measure_shape(
    workload: SdpaWorkload, providers: Sequence[str], device: torch.device, *, seed: int, samples: int = 21
) -> list[dict]:
    """The rows of one shape: each provider checked, proved, then all timed interleaved."""
    gc.freeze()  # what lives now need not be looked at by each of the memory measurements' collections
    try:
        inputs = sdpa.make_inputs(workload, device, seed)
        checked = _checked(workload, inputs)
        rows, calls = [], {}
        for name in providers:
            row, call = _prepared(workload, name, inputs, checked)
            rows.append(row)
            if call is not None:
                calls[name] = call
        del checked
        default = default_backend(workload, inputs)
        times = {}
        if calls:
            scouted = measure_together(
                list(calls.values()),
                labels=list(calls),
                warmup=1,
                iterations=SCOUT_SAMPLES,
                device=device,
                max_seconds=2.0,
            )
            times = {one.label: one for one in scouted}
            best = min(one.median_ms for one in scouted)
            near = {name: call for name, call in calls.items() if times[name].median_ms <= NEAR * best}
            final = measure_together(
                list(near.values()), labels=list(near), warmup=2, iterations=samples, device=device, max_seconds=4.0
            )
            times |= {one.label: one for one in final}
        cost = workload.cost
        for row in rows:
            row |= {"default": default, "is_default": row["backend"] == default}
            if (one := times.get(row["backend"])) is not None:
                low, high = one.interval_ms
                row |= {
                    "ms": one.median_ms,
                    "ms_low": low,
                    "ms_high": high,
                    "samples_ms": [float(f"{value:.5g}") for value in one.samples_ms],
                    "tflops": cost.flops / one.median_ms / 1e9,
                    "gb_s": cost.bytes / one.median_ms / 1e6,
                }
        fields = shape_fields(workload) | {"flops": cost.flops, "bytes": cost.bytes}
        return [fields | row for row in rows]
    finally:
        gc.unfreeze()
        if device.type == "cuda":
            del inputs
            torch.cuda.empty_cache()


# ---- the sweep ---------------------------------------------------------------------------------------------


def to_text(document: dict) -> str:
    """The document as JSON, a row a line."""
    head = {key: value for key, value in document.items() if key != "rows"}
    rows = ",\n".join("  " + json.dumps(res._jsonable(row), allow_nan=False) for row in document["rows"])
    start = json.dumps(res._jsonable(head), indent=1, allow_nan=False).rstrip("}").rstrip()
    return f'{start},\n "rows": [\n{rows}\n ]\n}}\n'


def load_grid(path: str | os.PathLike) -> dict:
    """A sweep's document; a file that is truncated, foreign or of another version is refused by name."""
    document = res.read_document(Path(path), SCHEMA, VERSION, ("status", "environment", "method", "sessions", "rows"))
    needed = {"set", "kind", "label", "backend", "status", "default"}
    for number, row in enumerate(document["rows"]):
        if missing := needed - set(row):
            raise BenchError(f"{path} is damaged: row {number} (counted from 0) lacks {', '.join(sorted(missing))}.")
    return document


def _begin(path: Path, device: torch.device, method: dict) -> dict:
    """The document to go on with: that of `path` if it is of this machine, else a new one."""
    here = environment(device)
    if not path.exists():
        return {
            "schema": SCHEMA,
            "version": VERSION,
            "status": "running",
            "started": _now(),
            "finished": None,
            "environment": here,
            "method": method,
            "sessions": [],
            "rows": [],
        }
    document = load_grid(path)
    differ = [
        f"{key} {document['environment'].get(key)} (here {here.get(key)})"
        for key in SAME_MACHINE[device.type]
        if document["environment"].get(key) != here.get(key)
    ]
    if differ:
        raise BenchError(
            f"{path} was begun elsewhere: {', '.join(differ)}. A sweep goes on where it began; choose another --out."
        )
    if differ := [
        f"{key} {document['method'].get(key)} (now {value})"
        for key, value in method.items()
        if document["method"].get(key) != value
    ]:
        raise BenchError(
            f"{path} was begun with other settings: {'; '.join(differ)}. Ask for the same, or choose another --out."
        )
    return document


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def sweep(
    shapes: Sequence[tuple[str, SdpaWorkload]],
    path: Path,
    device: torch.device,
    *,
    providers: Sequence[str] = SDPA_BACKENDS,
    samples: int = 21,
    seed: int = 0,
    max_seconds: float = math.inf,
    on_shape: Callable[[int, str], None] = lambda done, label: None,
) -> dict:
    """Measure ("grid" or "held-out", shape) pairs into `path`, which is valid after every one; what it holds already
    is not measured again. Ctrl-C and `max_seconds` leave it with the status "interrupted" and "stopped".
    """
    begin = time.monotonic()
    method = {
        "providers": list(providers),
        "samples": samples,
        "seed": seed,
        "timing": "device time of interleaved calls, launches hidden, L2 warm"
        if device.type == "cuda"
        else "host time of interleaved calls",
    }
    document = _begin(path, device, method)
    done = {row["label"] for row in document["rows"]}
    here = environment(device)
    session = {
        "started": _now(),
        "finished": None,
        "shapes": 0,
        "commit": here["commit"],
        "dirty": here["dirty"],
        "gpu_state": gpu_state(device) if device.type == "cuda" else None,
    }
    status = "complete"
    try:
        for number, (which, workload) in enumerate(shapes):
            on_shape(number, workload.label)
            if workload.label in done:
                continue
            if time.monotonic() - begin > max_seconds:
                status = "stopped"
                break
            document["rows"] += [
                {"set": which} | row
                for row in measure_shape(workload, providers, device, seed=seed + number, samples=samples)
            ]
            if not session["shapes"]:
                document["sessions"].append(session)
            session["shapes"] += 1
            document["status"] = "running"
            write_whole(path, to_text(document))
    except BaseException as error:
        status = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
        raise
    finally:
        document["status"], document["finished"] = status, _now()
        session["finished"] = document["finished"]
        write_whole(path, to_text(document))
    on_shape(len(shapes), "")
    return document


def shapes_done(document: dict, shapes: Iterable[tuple[str, SdpaWorkload]]) -> int:
    """How many of the shapes a document holds."""
    done = {row["label"] for row in document["rows"]}
    return sum(one.label in done for _, one in shapes)
