"""Which SDPA backend is best where: a sweep that can be resumed, and the file that it writes.

The sweep writes one JSON file, whole after every shape:

    {"schema": "labs-sdpa-grid", "version": 1, "status": "complete", "environment": {...}, "method": {...},
     "sessions": [{...}], "rows": [{...}, ...]}                  pandas.DataFrame(document["rows"])

A sweep that was stopped and resumed has several sessions. Each says when it ran, how many shapes it measured, at which
commit, and the GPU's clocks and temperature at its start. A row is one shape and one provider:

    shape     set ("grid" or "held-out"), kind ("training", "prefill", "decode"), label, batch, heads, kv_heads,
              seq_len_q, seq_len_kv, head_dim, dtype, causal, pass ("forward", or "both": forward plus backward)
    provider  backend ("cudnn", "flash", "efficient", "math", or another provider of attention), default (the backend
              that torch picks for this shape when nothing is pinned), is_default
    outcome   status ("ok", "refused", "failed", "out of memory"), refused (the reason in words, else null)
    time      ms (median), ms_low, ms_high (95% interval of the median), samples_ms, first_call_ms (the first call on
              this shape by the host's clock: it may include building a plan)
    rates     flops, bytes (the least that must move), tflops, gb_s
    memory    peak_mb (1e6 bytes that a call adds, its results included), workspace_mb (the same without its results)
    proof     launches, kernels (their names without arguments; on a CPU the SDPA operators)
    error     error (relative, against float64: the largest of the output and the gradients), error_of (which of them),
              heads_checked

Times are those of the device alone: launches are hidden behind a full queue, as in a CUDA graph. The L2 is as the calls
leave it, and all providers of a shape are interleaved. Providers slower than NEAR times the fastest get few samples.
A provider is timed only after its results agreed with float64 and its kernels were seen.
"""

from __future__ import annotations

import gc
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from utils.attention import Refused as BackendRefused
from utils.attention import find_backend, make_problem
from utils.attention.choosing import kind_of
from utils.attention.problem import NO_OPTIONS
from utils.bench import results as res
from utils.bench.choose.correctness import largest_error, references_of
from utils.bench.documents import Schema, utc_now, write_json
from utils.bench.errors import BenchError, Refused, VerificationError, WrongRun, first_line
from utils.bench.targets import sdpa
from utils.bench.targets.proof import prove
from utils.bench.targets.sdpa import BACKENDS as SDPA_BACKENDS
from utils.bench.targets.sdpa import SdpaWorkload
from utils.bench.workload import free_bytes
from utils.benchmark.measuring import measure_together
from utils.benchmark.profiling import launched as profile_launches
from utils.benchmark.result import Measurement
from utils.machine.environment import environment, gpu_state

GRID = Schema("labs-sdpa-grid", 1, ("status", "environment", "method", "sessions", "rows"))
ROW_FIELDS = {"set", "kind", "label", "backend", "status", "default"}
NEAR = 1.6  # providers within this many times the fastest get all samples
SCOUT_SAMPLES = 3
SAME_MACHINE = {"cuda": ("gpu", "torch", "cudnn", "cuda"), "cpu": ("gpu", "cpu", "torch")}


def shape_fields(workload: SdpaWorkload) -> dict:
    """Return the shape's fields of a row."""
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
    """Return (call, why not) of a backend that is not SDPA's."""
    if name == "triton" and inputs.q.device.type == "cpu":
        return None, "Triton's interpreter runs it on a CPU, and that time says nothing."
    tensors = sdpa.leaves(workload, inputs)
    with torch.set_grad_enabled(workload.direction != "forward"):
        problem = make_problem(*tensors, **workload.attention_arguments)
        backend = find_backend(name)
        if not (able := backend.support(problem)):
            return None, able.reason
        try:
            bound = backend.bind(problem, NO_OPTIONS)
            (bound.first or bound.call)(*tensors)
        except BackendRefused as refusal:
            return None, str(refusal)
    return sdpa.timed_call(workload, bound.call, tensors, inputs.dout), ""


def _call(workload: SdpaWorkload, name: str, inputs: sdpa.Inputs) -> tuple[Callable | None, str]:
    """Return (the call that is timed, why not)."""
    if name not in SDPA_BACKENDS:
        return _other_call(workload, name, inputs)
    if not (machine := find_backend(name).machine()):
        return None, machine.reason
    if reason := sdpa.why_not(workload, name, inputs):
        return None, reason
    return sdpa.bind(workload, name, inputs), ""


def bare_name(kernel: str) -> str:
    """Return a kernel's name without its template and call arguments, which can fill a page."""
    name, letters, depth = kernel.removeprefix("void ").replace("(anonymous namespace)::", ""), [], 0
    for letter in name:
        depth += letter in "<("
        if not depth:
            letters.append(letter)
        depth -= letter in ">)"
    return "".join(letters).strip()


def _first_call(workload: SdpaWorkload, name: str, inputs: sdpa.Inputs) -> tuple[Callable, float]:
    """Make the provider's call and run it once; return the call and the ms that this took."""
    begin = time.perf_counter()
    call, why_not = _call(workload, name, inputs)
    if inputs.q.device.type == "cuda":
        torch.cuda.synchronize(inputs.q.device)
    if call is None:
        raise Refused(why_not)
    return call, 1e3 * (time.perf_counter() - begin)


def _proof(workload: SdpaWorkload, name: str, call: Callable) -> dict:
    """Prove that the provider's own kernels ran, and name them."""
    launched = profile_launches(call)
    prove(name, launched, workload.direction)
    operators = [operator for operator in launched.operators if "::_scaled_dot" in operator or "::_soft" in operator]
    kernels = dict.fromkeys(bare_name(kernel) for kernel in launched.kernels or operators)
    return {"launches": launched.launches or None, "kernels": list(kernels)}


def _check_provider(workload: SdpaWorkload, name: str, inputs: sdpa.Inputs, references: list, row: dict) -> Callable:
    """Make a provider's call, verify and prove it, and fill its row; raises if it must not be timed."""
    device = inputs.q.device
    needed, free = workload.bytes_needed(3.0 if name == "math" else 0.0), free_bytes(device)
    if needed > free:
        raise MemoryError(f"it needs about {needed / 1e9:.3g} GB and {free / 1e9:.3g} GB are free: not tried.")
    call, first_ms = _first_call(workload, name, inputs)
    row |= {"first_call_ms": first_ms} | largest_error(workload, call, references, name, device)
    row |= _proof(workload, name, call)
    memory = sdpa.memory(call)
    row |= {"peak_mb": memory["peak_bytes"] / 1e6, "workspace_mb": memory["workspace_bytes"] / 1e6}
    return call


def _prepare(workload: SdpaWorkload, name: str, inputs: sdpa.Inputs, references: list) -> tuple[dict, Callable | None]:
    """Return a provider's row without times, and its call if it may be timed."""
    row: dict[str, Any] = {"backend": name, "status": res.OK, "refused": None}
    try:
        return row, _check_provider(workload, name, inputs, references, row)
    except Refused as error:
        row |= {"status": res.REFUSED, "refused": str(error)}
    except (MemoryError, torch.OutOfMemoryError) as error:
        torch.cuda.empty_cache()
        row |= {"status": res.OUT_OF_MEMORY, "refused": first_line(error)}
    except (VerificationError, WrongRun, RuntimeError) as error:
        row |= {"status": res.FAILED, "refused": first_line(error)}
    return row, None


def default_backend(workload: SdpaWorkload, inputs: sdpa.Inputs) -> str:
    """Return the backend that torch picks when nothing is pinned, by the operators that the call launches."""
    return prove("auto", profile_launches(sdpa.bind(workload, "auto", inputs)), workload.direction)


def _time_calls(calls: Mapping[str, Callable], device: torch.device, samples: int) -> dict[str, Measurement]:
    """Time calls interleaved: all of them with a few samples, then those near the fastest with all samples."""

    def timed(names: Iterable[str], **options: Any) -> dict[str, Measurement]:
        labels = list(names)
        measurements = measure_together([calls[name] for name in labels], labels=labels, device=device, **options)
        return {measurement.label: measurement for measurement in measurements}

    if not calls:
        return {}
    scouted = timed(calls, warmup=1, iterations=SCOUT_SAMPLES, max_seconds=2.0)
    best = min(measurement.median_ms for measurement in scouted.values())
    near = [name for name, measurement in scouted.items() if measurement.median_ms <= NEAR * best]
    return scouted | timed(near, warmup=2, iterations=samples, max_seconds=4.0)


def _time_fields(measurement: Measurement, flops: float, moved_bytes: float) -> dict:
    low, high = measurement.interval_ms
    return {
        "ms": measurement.median_ms,
        "ms_low": low,
        "ms_high": high,
        "samples_ms": [float(f"{value:.5g}") for value in measurement.samples_ms],
        "tflops": flops / measurement.median_ms / 1e9,
        "gb_s": moved_bytes / measurement.median_ms / 1e6,
    }


def measure_shape(
    workload: SdpaWorkload, providers: Sequence[str], device: torch.device, *, seed: int, samples: int = 21
) -> list[dict]:
    """Make the rows of one shape: each provider is verified and proved, then all are timed interleaved.

    Args:
        workload: the shape.
        providers: names of SDPA backends and of other providers of attention.
        device: where to run.
        seed: of the inputs.
        samples: timed samples of each provider near the fastest.
    """
    gc.freeze()  # the collections of the memory measurements need not visit what is alive now
    try:
        return _rows(workload, providers, sdpa.make_inputs(workload, device, seed), samples)
    finally:
        gc.unfreeze()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _rows(workload: SdpaWorkload, providers: Sequence[str], inputs: sdpa.Inputs, samples: int) -> list[dict]:
    references = references_of(workload, inputs)
    prepared = {name: _prepare(workload, name, inputs, references) for name in providers}
    del references  # frees GPU memory for the timed calls
    default = default_backend(workload, inputs)
    calls = {name: call for name, (_, call) in prepared.items() if call is not None}
    times = _time_calls(calls, inputs.q.device, samples)
    cost = workload.cost
    fields = shape_fields(workload) | {"flops": cost.flops, "bytes": cost.bytes}
    rows = []
    for name, (row, _) in prepared.items():
        row |= {"default": default, "is_default": name == default}
        if name in times:
            row |= _time_fields(times[name], cost.flops, cost.bytes)
        rows.append(fields | row)
    return rows


# ---- the sweep ---------------------------------------------------------------------------------------------


def load_grid(path: str | os.PathLike) -> dict:
    """Read a sweep's document; raise BenchError if the file is truncated, or of another schema or version."""
    document = GRID.read(Path(path))
    for number, row in enumerate(document["rows"]):
        if missing := ROW_FIELDS - set(row):
            raise BenchError(f"{path} is damaged: row {number} (counted from 0) lacks {', '.join(sorted(missing))}.")
    return document


def _mismatches(recorded: Mapping, present: Mapping, names: Iterable[str], word: str) -> list[str]:
    """List the names whose values differ: "torch 2.11.0 (here 2.13.0)", with "here" as the word."""
    return [
        f"{name} {recorded.get(name)} ({word} {present.get(name)})"
        for name in names
        if recorded.get(name) != present.get(name)
    ]


def _open(path: Path, device: torch.device, method: dict) -> dict:
    """Return the document of `path` if this machine began it with these settings, else a new document."""
    machine = environment(device)
    if not path.exists():
        return GRID.document(
            status="running", started=utc_now(), finished=None, environment=machine, method=method, sessions=[], rows=[]
        )
    document = load_grid(path)
    if different := _mismatches(document["environment"], machine, SAME_MACHINE[device.type], "here"):
        raise BenchError(
            f"{path} was begun elsewhere: {', '.join(different)}. A sweep goes on only on the machine where it began; "
            "choose another --out."
        )
    if different := _mismatches(document["method"], method, method, "now"):
        raise BenchError(
            f"{path} was begun with other settings: {'; '.join(different)}. Use the same settings, or choose another "
            "--out."
        )
    return document


def _new_session(device: torch.device) -> dict:
    machine = environment(device)
    return {
        "started": utc_now(),
        "finished": None,
        "shapes": 0,
        "commit": machine["commit"],
        "dirty": machine["dirty"],
        "gpu_state": gpu_state(device) if device.type == "cuda" else None,
    }


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
    """Measure shapes into the file `path`, which is valid after every shape, and return its document.

    Shapes that the file has already are not measured again. Ctrl-C leaves the status "interrupted", `max_seconds`
    leaves "stopped".

    Args:
        shapes: pairs of "grid" or "held-out" and a shape.
        path: the sweep's file; it is resumed if it exists.
        device: where to run.
        providers: names of SDPA backends and of other providers of attention.
        samples: timed samples of each provider near the fastest.
        seed: of the inputs.
        max_seconds: begin no further shape after this time.
        on_shape: called with the number of shapes done and the next label, for a progress bar.
    """
    begin = time.monotonic()
    on_gpu = "device time of interleaved calls, launches hidden, L2 warm"
    timing = on_gpu if device.type == "cuda" else "host time of interleaved calls"
    method = {"providers": list(providers), "samples": samples, "seed": seed, "timing": timing}
    document, session = _open(path, device, method), _new_session(device)
    done = {row["label"] for row in document["rows"]}
    status = "complete"
    try:
        for number, (which, workload) in enumerate(shapes):
            on_shape(number, workload.label)
            if workload.label in done:
                continue
            if time.monotonic() - begin > max_seconds:
                status = "stopped"
                break
            rows = measure_shape(workload, providers, device, seed=seed + number, samples=samples)
            document["rows"] += [{"set": which} | row for row in rows]
            if not session["shapes"]:
                document["sessions"].append(session)
            session["shapes"] += 1
            document["status"] = "running"
            write_json(path, document, "rows")
    except BaseException as error:
        status = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
        raise
    finally:
        document["status"] = status
        document["finished"] = session["finished"] = utc_now()
        write_json(path, document, "rows")
    on_shape(len(shapes), "")
    return document


def shapes_done(document: dict, shapes: Iterable[tuple[str, SdpaWorkload]]) -> int:
    """Count the shapes that a document has."""
    done = {row["label"] for row in document["rows"]}
    return sum(workload.label in done for _, workload in shapes)
