"""Run a plan: build, verify, prove, time and profile each case. After each case, the results on the disk are valid."""

from __future__ import annotations

import datetime
import re
import secrets
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from utils.bench import results as res
from utils.bench.documents import utc_now, write_json
from utils.bench.errors import BenchError, Refused, VerificationError, check_choice
from utils.bench.profiles import LEVELS, Request, profile_side
from utils.bench.report import markdown
from utils.bench.targets import SIDES, Plan
from utils.bench.targets.base import Built, Case
from utils.bench.verify import Verification, verify
from utils.bench.workload import DTYPES, arithmetic, check_fits
from utils.benchmark.cuda_timer import CAPTURE_FAILED
from utils.benchmark.intervals import MIN_PAIRS, NOT_ENOUGH_DATA
from utils.benchmark.measuring import compare, measure
from utils.benchmark.profiling import launched as profile_launches
from utils.benchmark.result import Measurement
from utils.benchmark.roofs import machine_roofs
from utils.benchmark.sampling import Timing
from utils.files import write_whole
from utils.machine.environment import environment, gpu_state
from utils.validation import first_line

STEPS = ("build", "verify", "time", "profile")
OPERATORS_KEPT = 40  # for each call, in the results


def new_run_id() -> str:
    """Name a run by date and time, with four random digits for runs that begin in the same second."""
    return f"{datetime.datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


@dataclass
class Options:
    """Options of a run: profiles, timing, and the folder of the results.

    `timing` has the user's options of `Timing`. Missing options come from the target's protocol and Timing's defaults.
    """

    profile: str = "none"
    timing: dict[str, Any] = field(default_factory=dict)
    run_id: str = field(default_factory=new_run_id)
    artifacts_dir: Path = Path("artifacts")
    profiles_dir: Path = Path("benchmark_profiles")
    command: list[str] = field(default_factory=list)

    @property
    def folder(self) -> Path:
        """The folder of the run's files."""
        return self.artifacts_dir / self.run_id

    def check(self, device_type: str = "cuda") -> None:
        """Raise BenchError if an option is wrong, or impossible on this kind of device."""
        check_choice("--profile", self.profile, LEVELS)
        try:
            Timing(torch.device(device_type), **self.timing)
        except ValueError as error:  # the message begins with the option's name
            raise BenchError(f"--{str(error).replace('_', '-', 1)}") from None
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", self.run_id):
            raise BenchError(f"--run-id is {self.run_id!r}; it names a folder: letters, digits, dot, dash, underscore.")
        if self.folder.exists():
            raise BenchError(f"{self.folder} exists and results are never overwritten; choose another --run-id.")


def empty_record(plan: Plan, case: Case, options: Options) -> dict:
    """Return the record of a case before its run. `CaseRun.measure` fills the empty fields."""
    protocol = dict(zip(("warmup", "iterations"), plan.target.protocol[case.device.type], strict=True))
    return {
        "target": plan.target.name,
        "label": case.label,
        "sides_asked": list(plan.sides),
        "workload": case.workload.to_dict(),
        "knobs": case.knobs_record(),
        "timing": protocol | options.timing,
        "swept": dict(case.swept),
        "status": res.NOT_RUN,
        "reason": "",
        "traceback": "",  # of an unexpected error
        "cost": {},
        **{name: {} for name in ("verification", "ran", "sides", "profiles")},  # each maps a side to its entry
        "comparison": None,
        "notes": [],
    }


class CaseRun:
    """Measures one case into its record. It raises an error if a side is refused, computes wrongly, or ran a wrong kernel."""

    def __init__(self, plan: Plan, case: Case, record: dict, options: Options, on_step: Callable[[str], None]):
        self.target, self.sides, self.case = plan.target, plan.sides, case
        self.record, self.options, self.on_step = record, options, on_step
        self.precision = arithmetic(case.workload.dtype, case.device)

    @torch.no_grad()
    def measure(self) -> None:
        """Run all steps of the case."""
        case, target = self.case, self.target
        self._refuse_unsupported()
        check_fits(case.label, max(target.bytes_needed(case, side) for side in self.sides), case.device)
        self.record["cost"] = {"flops": case.workload.cost.flops, "bytes": case.workload.cost.bytes}
        self.on_step("build")
        if "torch._dynamo" in sys.modules:
            torch._dynamo.reset()  # from the ninth shape on, a compiled function silently runs eager
        inputs = target.inputs(case)
        built = {side: target.build(case, side, *inputs) for side in self.sides}
        self.on_step("verify")
        expected = target.expected(case, *inputs)
        for side, call in built.items():
            bounds = target.bounds(case, side, self.precision, self.record["verification"])
            if (verification := check_side(case, call, expected, self.precision, side, bounds)) is not None:
                self.record["verification"][side] = verification._asdict()
        for side, call in built.items():
            self._prove(side, call)
        self.on_step("time")
        for side, measurement in self._time(built).items():
            self.record["sides"][side] = {**measurement.to_dict(), "environment": {}}  # stored once, in the run
            stopped = measurement.method["stopped"]
            cut = [stopped] * stopped.startswith("time budget")
            self.record["notes"] += [f"{side}: {text}." for text in (*measurement.doubts(), *cut)]
        for call in built.values():
            if call.prepared is not None:
                call.prepared.check()  # raises if the call was compiled again
        if self.options.profile != "none":
            self.on_step("profile")
            self._profile(built)

    def _refuse_unsupported(self) -> None:
        supports = {side: self.target.support(self.case, side) for side in self.sides}
        for side in reversed(self.sides):  # the optimized side first, because its reason says more
            if not (support := supports[side]):
                others = [self.target.side_name(name) for name, other in supports.items() if other]
                also = f" Its other side runs here: {others[0]}." if others else ""
                reason = f"{support.reason} {support.remedy}".strip()
                raise Refused(f"{self.target.side_name(side)} does not run here: {reason}{also}")

    def _prove(self, side: str, call: Built) -> None:
        """Record the backend that a side really ran, with its kernels and operators as proof."""
        launched = profile_launches(call.fn)
        provider = self.target.prove(self.case, side, call, launched)
        facts = dict(self.target.facts(self.case, side, call))
        self.record["notes"] += facts.pop("notes", [])
        self.record["ran"][side] = {
            "asked": call.provider,
            "provider": provider,
            "implementation": call.implementation,
            "range": self.target.range_name(side, provider),
            "kernels": list(launched.kernels),
            "launches": launched.launches,
            "operators": list(launched.operators)[:OPERATORS_KEPT],
            **facts,
        }

    def _timing_options(self) -> dict:
        """Return all options of the timer, with the roofs of this machine. Add a note if the roofs are doubtful."""
        cost, roofs = self.case.workload.cost, machine_roofs()
        options = {"device": self.case.device, "flops": cost.flops or None, "bytes": cost.bytes or None}
        options |= self.record["timing"] | {"dtype": self.precision}
        if roofs.busy:
            self.record["notes"].append(roofs.busy)
        if self.precision in roofs.tflops:
            options["roofs"] = roofs
        else:
            self.record["notes"].append(
                f"the roofs of {roofs.name} have no {self.precision} peak: no share of a roof is given."
            )
        return options

    def _time(self, built: Mapping[str, Built]) -> dict[str, Measurement]:
        """Time the sides. Two sides take turns."""
        options = self._timing_options()
        labels = {side: self.record["ran"][side]["range"] for side in built}
        if len(built) < 2:
            return {side: measure(call.fn, label=labels[side], **options) for side, call in built.items()}
        calls = [built[side].fn for side in SIDES]
        pair = compare(*calls, labels=tuple(labels[side] for side in SIDES), **options)
        if pair.verdict == NOT_ENOUGH_DATA:
            crossed = f"the interval crosses 1 +- {pair.same_within:.0%}"
            why = f"fewer than {MIN_PAIRS} pairs were taken" if len(pair.a.samples_ms) < MIN_PAIRS else crossed
            self.record["notes"].append(f"no verdict: {why}; more samples narrow it (--iterations, --max-seconds).")
        self.record["comparison"] = {"speedup": pair.speedup, "interval": list(pair.interval), "verdict": pair.verdict}
        return {"baseline": pair.a, "optimized": pair.b}

    def _profile(self, built: Mapping[str, Built]) -> None:
        options, record, case, l2 = self.options, self.record, self.case, res.timing_mode(self.record)["l2"]
        swept = (f"{name}-{value}" for name, value in case.swept.items())  # so that names of files differ
        folder = options.profiles_dir.joinpath(self.target.chapter, options.run_id, *swept)
        values = {key: setting.value for key, setting in case.settings.items()}
        for side, call in built.items():
            range_name = record["ran"][side]["range"]
            request = Request(case.target, side, case.label, range_name, str(case.device), values)
            record["profiles"][side] = profile_side(call.fn, request, folder, options.profile, l2)


def check_side(
    case: Case,
    built: Built,
    expected: Mapping[str, torch.Tensor],
    precision: str,
    side: str,
    bounds: tuple[float, float] | None,
) -> Verification | None:
    """Compare a side's outputs with the references; return the verification with the largest error, or None.

    The side's `fn` makes the outputs; later the same `fn` is timed. `expected` has references in the order of the outputs.
    `precision` and `bounds` are those of `verify`.
    """
    for _ in range(2):
        built.fn()  # a compiled function may replay a CUDA graph from the third call on: verify the replay
    result = built.fn()
    if not expected:
        return None
    outputs = list(result) if isinstance(result, (tuple, list)) else [result]
    if bounds is not None:  # a user's function may also return values that are no tensors
        outputs = [one for one in outputs if isinstance(one, torch.Tensor)]
        if len(outputs) != len(expected):
            raise VerificationError(f"{side} returns {len(outputs)} tensors and the reference {len(expected)}.")
    dtype = DTYPES[case.workload.dtype] if bounds is None else None
    verifications = []
    for output, (name, reference) in zip(outputs, expected.items(), strict=True):
        if isinstance(output, torch.Tensor) and output.numel() == reference.numel():
            output = output.reshape(reference.shape)
        what = f"{side} ({built.provider}) of {case.target}" + ("" if name == "output" else f", {name}")
        gradient = name.startswith("gradient")
        verifications.append(
            verify(output, reference, precision, dtype=dtype, what=what, gradient=gradient, bounds=bounds)
        )
    return max(verifications, key=lambda verification: verification.whole, default=None)


class Runner:
    """One run: its results document and its folder."""

    def __init__(
        self,
        plans: Sequence[Plan],
        options: Options,
        device: torch.device,
        show: Callable[[str, int, int], None] = lambda step, done, total: None,
    ):
        """Check the options and begin the document. Nothing is written or run yet.

        Before each step of each case, `show` gets the step in words, the number of steps before it, and of all steps.
        """
        options.check(device.type)
        self.cases = [(plan, case) for plan in plans for case in plan.cases]
        self.options, self.device, self.show = options, device, show
        self.lost_gpu = ""  # why the GPU cannot be used any more
        self.document = res.RESULTS.document(
            run_id=options.run_id,
            status="running",
            started=utc_now(),
            finished=None,
            command=options.command,
            device=str(device),
            profile=options.profile,
            timing=options.timing,
            environment=environment(device),
            gpu_state=gpu_state(device) if device.type == "cuda" else None,
            cases=[],
        )

    def run(self) -> dict:
        """Run all cases and return the document.

        A kernel fault and Ctrl-C (KeyboardInterrupt) end the run. The results are valid in both cases.
        """
        self.options.folder.mkdir(parents=True)
        self.save()
        status = "complete"
        try:
            for number, (plan, case) in enumerate(self.cases):
                self._run_case(plan, case, number)
                self.save()
        except BaseException as error:
            status = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
            raise
        finally:
            self.document["status"] = "ended by a GPU fault" if self.lost_gpu else status
            self.document["finished"] = utc_now()
            self.save()
        return self.document

    def save(self) -> None:
        """Write the results so far, as JSON and as a page."""
        write_json(self.options.folder / res.RESULTS_FILE, self.document)
        write_whole(self.options.folder / res.REPORT_FILE, markdown(self.document))

    def _run_case(self, plan: Plan, case: Case, number: int) -> None:
        """Run one case and record it in the document, also if it fails. Only Ctrl-C raises an exception."""
        record = empty_record(plan, case, self.options)
        self.document["cases"].append(record)
        if self.lost_gpu:
            record["reason"] = self.lost_gpu
            return
        steps, begin = STEPS[:-1] if self.options.profile == "none" else STEPS, time.perf_counter()

        def on_step(step: str) -> None:
            done = number * len(steps) + steps.index(step)
            self.show(f"{case.target} {case.label}: {step}", done, len(self.cases) * len(steps))

        try:
            CaseRun(plan, case, record, self.options, on_step).measure()
            record["status"] = res.OK
        except KeyboardInterrupt:
            record |= {"status": res.INTERRUPTED, "reason": "Ctrl-C; the results so far are kept."}
            raise
        except (Exception, SystemExit) as error:  # SystemExit: a function may call sys.exit
            record["status"], record["reason"] = _failure(error)
            if not isinstance(error, BenchError):
                record["traceback"] = "".join(traceback.format_exception(error))
        finally:
            record["seconds"] = time.perf_counter() - begin
            self._free_gpu(record)

    def _free_gpu(self, record: dict) -> None:
        """Free the case's memory. After a kernel fault no CUDA context can be used, so the rest is not run."""
        if self.device.type != "cuda" or self.lost_gpu:
            return
        try:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        except Exception as fault:
            self.lost_gpu = f"the GPU context was lost by {record['target']} ({record['label']}): {first_line(fault)}"
            record |= {"status": res.FAILED, "reason": record["reason"] or self.lost_gpu}


def _failure(error: BaseException) -> tuple[str, str]:
    """Return status and reason of a case that this exception ended."""
    if isinstance(error, BenchError):
        return (res.REFUSED if isinstance(error, Refused) else res.FAILED), str(error)
    notes = " ".join(getattr(error, "__notes__", []))
    if CAPTURE_FAILED in notes:
        return res.REFUSED, f"it cannot be timed as CUDA graphs ({first_line(error)}): leave --graph out."
    reason = f"{type(error).__name__}: {first_line(error)}" + (f" ({notes})" if notes else "")
    if isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error):
        return res.OUT_OF_MEMORY, f"{reason} Choose smaller sizes."
    return res.FAILED, reason
