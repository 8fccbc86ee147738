"""Running a plan: verify, prove, time, profile, case after case, with valid results on the disk after each."""

from __future__ import annotations

import datetime
import logging
import os
import re
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from utils.bench import results as res
from utils.bench.errors import BenchError, Refused, VerificationError, WrongRun, did_you_mean, first_line
from utils.bench.profiles import profile_side
from utils.bench.targets import SIDES, Plan
from utils.bench.targets.base import Built, Case, Target
from utils.bench.targets.proof import launched_by
from utils.bench.verify import Verification, verify
from utils.bench.workload import DTYPES, arithmetic, check_fits
from utils.benchmark.cuda_timer import CAPTURE_FAILED
from utils.benchmark.measuring import compare, measure
from utils.benchmark.roofs import machine_roofs
from utils.files import write_whole
from utils.machine.environment import HARMLESS_REASONS, environment, gpu_state

PROFILES = ("none", "minimal", "roofline", "deep_dive")
FORMATS = ("json", "markdown", "both")
CACHES = ("warm", "cold")
STEPS = ("build", "verify", "time", "profile")

log = logging.getLogger("labs.bench")


@dataclass
class Options:
    """How a plan is run; None leaves warm-up and iterations to each target's protocol."""

    profile: str = "none"
    iterations: int | None = None
    warmup: int | None = None
    l2: str = "warm"  # "cold": the cache is flushed before every sample
    graph: bool = False  # time CUDA graph replays
    target_interval: float | None = None  # sample on until the interval is within plus or minus this share
    max_seconds: float | None = None  # time budget of each case's timing
    run_id: str | None = None
    artifacts_dir: Path = Path("artifacts")
    profiles_dir: Path = Path("benchmark_profiles")
    format: str = "both"
    command: list[str] = field(default_factory=list)

    def check(self, device_type: str = "cuda") -> None:
        """Refuse options that cannot be, before anything runs."""
        for name, value, allowed in (
            ("--profile", self.profile, PROFILES),
            ("--format", self.format, FORMATS),
            ("--l2", self.l2, CACHES),
        ):
            if value not in allowed:
                raise BenchError(
                    f"{name} is {value!r}; it must be one of {', '.join(allowed)}." + did_you_mean(value, allowed)
                )
        for name, value, least in (("--iterations", self.iterations, 1), ("--warmup", self.warmup, 0)):
            if value is not None and value < least:
                raise BenchError(f"{name} is {value}; it must be a whole number, {least} or more.")
        if self.graph and device_type != "cuda":
            raise BenchError("--graph replays CUDA graphs, and this runs on a CPU: leave it out.")
        if self.target_interval is not None and not 0.0 < self.target_interval < 1.0:
            raise BenchError(
                f"--target-interval is {self.target_interval:g}; it is a share between 0 and 1: 0.01 asks "
                "for plus or minus 1%."
            )
        if self.max_seconds is not None and not 0.0 < self.max_seconds < float("inf"):
            raise BenchError(f"--max-seconds is {self.max_seconds:g}; it must be a number of seconds above 0.")
        if self.run_id is None:
            self.run_id = f"{datetime.datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", self.run_id):
            raise BenchError(f"--run-id is {self.run_id!r}; it names a folder: letters, digits, dot, dash, underscore.")
        if (self.artifacts_dir / self.run_id).exists():
            raise BenchError(
                f"{self.artifacts_dir / self.run_id} is there already and results are never overwritten; "
                "choose another --run-id."
            )

    def timing(self) -> dict:
        """How this run times, as it stands in its results; None for what is left to each target."""
        return {
            name: getattr(self, name)
            for name in ("l2", "graph", "warmup", "iterations", "target_interval", "max_seconds")
        }


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


class Interrupted(Exception):
    """Ctrl-C, with the results so far in `document`."""

    def __init__(self, document: dict):
        super().__init__("interrupted")
        self.document = document


class Runner:
    """One run: its document, its folder, its log."""

    def __init__(
        self,
        plans: Sequence[Plan],
        options: Options,
        device: torch.device,
        on_step: Callable[[Case, str], None] = lambda case, step: None,
    ):
        options.check(device.type)
        self.plans, self.options, self.device, self.on_step = plans, options, device, on_step
        self.folder = options.artifacts_dir / options.run_id
        self.document = {
            "schema": res.SCHEMA,
            "version": res.VERSION,
            "run_id": options.run_id,
            "status": "running",
            "started": _now(),
            "finished": None,
            "command": options.command,
            "device": str(device),
            "profile": options.profile,
            "timing": options.timing(),
            "environment": environment(device),
            "gpu_state": gpu_state(device) if device.type == "cuda" else None,
            "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
            "targets": [{"target": plan.target.name, "sides": list(plan.sides)} for plan in plans],
            "cases": [],
        }
        self.fatal = ""

    def run(self) -> dict:
        """All cases; the document. A kernel fault ends the run; Ctrl-C raises Interrupted. Both leave valid results."""
        self.folder.mkdir(parents=True)
        handler = logging.FileHandler(self.folder / res.LOG_FILE, encoding="utf-8")
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        log.propagate = False
        log.info(
            "run %s on %s: %s", self.options.run_id, res.machine_name(self.document), " ".join(self.options.command)
        )
        self.save()
        status = "complete"
        try:
            for plan in self.plans:
                for case in plan.cases:
                    self._case(plan, case)
                    self.save()
        except KeyboardInterrupt:
            status = "interrupted"
            raise Interrupted(self.document) from None
        finally:
            if status == "complete" and sys.exc_info()[0] is not None:
                status = "failed"
            if self.fatal:
                status = "ended by a GPU fault"
            self.document["status"], self.document["finished"] = status, _now()
            self.save()
            log.info("%s: %s", status, counts(self.document))
            log.removeHandler(handler)
            handler.close()
            self._manifest()
        return self.document

    def save(self) -> None:
        """Write what there is, in the formats asked for."""
        if self.options.format in ("json", "both"):
            write_whole(self.folder / res.RESULTS_FILE, res.to_json(self.document))
        if self.options.format in ("markdown", "both"):
            from utils.bench.report import markdown

            write_whole(self.folder / res.REPORT_FILE, markdown(self.document))

    def _manifest(self) -> None:
        import hashlib

        files = [
            {"file": path.name, "bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
            for path in sorted(self.folder.iterdir())
            if path.name != res.MANIFEST_FILE
        ]
        keys = ("run_id", "status", "started", "finished", "command", "device", "environment", "targets")
        profiles = sorted(
            {file for case in self.document["cases"] for side in case["profiles"].values() for file in side["files"]}
        )
        write_whole(
            self.folder / res.MANIFEST_FILE,
            res.to_json(
                {
                    "schema": "labs-bench-manifest",
                    "version": 1,
                    **{key: self.document[key] for key in keys},
                    "counts": counts(self.document),
                    "files": files,
                    "profiles": profiles,
                }
            ),
        )

    def _case(self, plan: Plan, case: Case) -> None:
        """Run one case into the document; only Ctrl-C leaves by an exception."""
        record = {
            "target": plan.target.name,
            "label": case.label,
            "sides_asked": list(plan.sides),
            "workload": case.workload.to_dict(),
            "knobs": case.knobs_record(),
            "device": str(self.device),
            "timing": self.options.timing(),
            "status": res.NOT_RUN,
            "reason": "",
            "cost": {
                "flops": case.workload.cost.flops,
                "bytes": case.workload.cost.bytes,
                "mask_density": case.workload.density,
            },
            "verification": {},
            "ran": {},
            "sides": {},
            "comparison": None,
            "profiles": {},
            "notes": [],
        }
        self.document["cases"].append(record)
        if self.fatal:
            record["reason"] = self.fatal
            return
        began = time.perf_counter()
        log.info("%s: %s", plan.target.name, case.label)
        try:
            self._measure_case(plan, case, record)
            record["status"] = res.OK
        except KeyboardInterrupt:
            record["status"], record["reason"] = res.INTERRUPTED, "Ctrl-C; what was done before it is kept."
            raise
        except Refused as error:
            record["status"], record["reason"] = res.REFUSED, str(error)
        except (VerificationError, WrongRun) as error:
            record["status"], record["reason"] = res.FAILED, str(error)
        except Exception as error:
            self._exception(record, error)
        finally:
            record["seconds"] = time.perf_counter() - began
            line = f"{plan.target.name}: {case.label}: {record['status']}"
            log.info("%s%s", line, f": {record['reason']}" if record["reason"] else "")
            self._leave_gpu(record)

    def _exception(self, record: dict, error: Exception) -> None:
        log.error("traceback", exc_info=error)
        notes = " ".join(getattr(error, "__notes__", []))
        told = f"{type(error).__name__}: {first_line(error)}" + (f" ({notes})" if notes else "")
        if isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error):
            record["status"] = res.OUT_OF_MEMORY
            record["reason"] = f"{told} Choose a smaller --batch, --heads or --seq-len."
            return
        record["status"], record["reason"] = res.FAILED, told

    def _leave_gpu(self, record: dict) -> None:
        """Free the case's memory. A kernel fault, whoever met it first, leaves no usable CUDA context: the run ends."""
        if self.device.type != "cuda" or self.fatal:
            return
        try:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        except Exception as fault:
            self.fatal = f"the GPU context was lost by {record['target']} ({record['label']}): {first_line(fault)}"
            record["status"], record["reason"] = res.FAILED, record["reason"] or self.fatal

    def _measure_case(self, plan: Plan, case: Case, record: dict) -> None:
        target, sides = plan.target, plan.sides
        for side in reversed(sides):  # the optimized side's reason tells more
            support = target.support(case, side)
            if not support:
                raise Refused(self._refusal(target, case, side, sides, support))
        needed = check_fits(case.workload, max(target.score_buffers(case, side) for side in sides), self.device)
        record["memory_estimate_bytes"] = needed
        self.on_step(case, "build")
        if "torch._dynamo" in sys.modules:
            torch._dynamo.reset()  # beyond eight shapes a compiled function falls back to eager without a word
        warmup, iterations = target.protocol[self.device.type]
        warmup = warmup if self.options.warmup is None else self.options.warmup
        iterations = iterations if self.options.iterations is None else self.options.iterations
        record["timing"] |= {"warmup": warmup, "iterations": iterations}
        with torch.no_grad():
            inputs = target.inputs(case)
            built = {side: target.build(case, side, *inputs) for side in sides}
            self.on_step(case, "verify")
            expected = target.expected(case, *inputs)
            precision = arithmetic(case.workload.dtype, self.device)
            for side in sides:
                record["verification"][side] = check_side(case, built[side], expected, precision, side).to_dict()
            del expected
            for side in sides:
                launched = launched_by(built[side].fn)
                ran = target.prove(case, side, built[side], launched)
                record["ran"][side] = {
                    "asked": built[side].provider,
                    "provider": ran,
                    "implementation": built[side].implementation,
                    "range": target.range_name(side, ran),
                    "kernels": list(launched.kernels),
                    "launches": launched.launches,
                    "operators": list(launched.operators)[:40],
                    **target.facts(case, side, built[side]),
                }
                record["notes"] += record["ran"][side].pop("notes", [])
            self.on_step(case, "time")
            self._time(case, built, precision, record)
            for side in sides:
                built[side].after()
            if self.options.profile != "none":
                self.on_step(case, "profile")
                for side in sides:
                    record["profiles"][side] = profile_side(self, plan.target, case, side, built[side], record)

    def _refusal(self, target: Target, case: Case, side: str, sides: Sequence[str], support) -> str:
        other = [name for name in sides if name != side and target.support(case, name)]
        also = f" Its other side runs here: {target.side_name(other[0])}." if other else ""
        return f"{target.side_name(side)} does not run here: {support.reason} {support.remedy}".strip() + also

    def _time(self, case: Case, built: dict[str, Built], precision: str, record: dict) -> None:
        cost, roofs = case.workload.cost, machine_roofs()
        if precision not in roofs.tflops:
            record["notes"].append(f"the roofs of {roofs.name} have no {precision} peak: no share of a roof is given.")
            roofs = None
        common = dict(
            device=self.device, flops=cost.flops, bytes=cost.bytes, roofs=roofs, dtype=precision, **record["timing"]
        )
        labels = {side: record["ran"][side]["range"] for side in built}
        try:
            if len(built) == 2:
                pair = compare(
                    *(built[side].fn for side in SIDES), labels=tuple(labels[side] for side in SIDES), **common
                )
                told = pair.to_dict()
                record["comparison"] = {
                    key: told[key] for key in ("speedup", "interval", "verdict", "same_within", "method")
                }
                found = {"baseline": pair.a, "optimized": pair.b}
            else:
                found = {side: measure(one.fn, label=labels[side], **common) for side, one in built.items()}
        except Exception as error:
            if any(CAPTURE_FAILED in note for note in getattr(error, "__notes__", ())):
                raise Refused(
                    f"{' and '.join(labels.values())} cannot be timed as CUDA graphs "
                    f"({first_line(error)}): leave --graph out."
                ) from error
            raise
        for side, measurement in found.items():
            # The run's environment holds for all of its measurements.
            record["sides"][side] = {**measurement.to_dict(), "environment": {}}
            record["notes"] += [f"{side}: {text}." for text in measurement.method["notes"]]
            if measurement.method["cut_by_time_budget"]:
                record["notes"].append(f"{side}: {measurement.method['stopped']}.")
            for happened, text in (
                (
                    measurement.over_roof,
                    "is faster than the roof allows: data came from the cache or the roof is too low",
                ),
                (measurement.below_floor, "is as short as an empty call"),
            ):
                if happened:
                    record["notes"].append(f"{side} {text}.")
        after = next(iter(found.values())).method.get("gpu_after") or {}
        if held := sorted(set(after.get("throttle_reasons") or ()) - HARMLESS_REASONS):
            record["notes"].append(f"clocks were held back after the timing: {', '.join(held)}.")


def check_side(case: Case, built: Built, expected: torch.Tensor | dict, precision: str, side: str) -> Verification:
    """Verify a side's own call against the reference, before it is timed: of several tensors the worst."""
    for _ in range(2):  # compiled functions may replay a CUDA graph from the third call on: that is what is verified
        built.fn()
    output = built.fn()
    named = expected if isinstance(expected, dict) else {"output": expected}
    outputs = output if isinstance(output, tuple) else (output,)
    found = []
    for one, (name, right) in zip(outputs, named.items(), strict=True):
        if isinstance(one, torch.Tensor) and one.numel() == right.numel():
            one = one.reshape(right.shape)
        which = "" if name == "output" else f", {name}"
        found.append(
            verify(
                one,
                right,
                precision,
                dtype=DTYPES[case.workload.dtype],
                what=f"{side} ({built.provider}) of {case.target}{which}",
                gradient=name.startswith("gradient"),
            )
        )
    return max(found, key=lambda one: one.whole)


def counts(document: dict) -> dict[str, int]:
    """How many cases ended in each status."""
    found: dict[str, int] = {}
    for case in document["cases"]:
        found[case["status"]] = found.get(case["status"], 0) + 1
    return found


def exit_code(document: dict) -> int:
    """0 if something ran and nothing failed, 1 otherwise; a refusal beside cases that ran is no failure."""
    found = counts(document)
    failed = any(found.get(status) for status in (res.FAILED, res.OUT_OF_MEMORY, res.INTERRUPTED, res.NOT_RUN))
    return 1 if failed or not found.get(res.OK) else 0
