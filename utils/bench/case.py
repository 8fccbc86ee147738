"""One case of a run: build both sides, verify, prove what ran, time, profile, and record everything."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from utils.bench import results as res
from utils.bench.errors import Refused, VerificationError, first_line
from utils.bench.options import Options
from utils.bench.profiles import Request, file_stem, profile_side
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
from utils.machine.environment import HARMLESS_REASONS

STEPS = ("build", "verify", "time", "profile")
COMPARISON_FIELDS = ("speedup", "interval", "verdict", "same_within", "method")
OPERATORS_KEPT = 40  # of a call, in the results


@dataclass
class CaseRecord:
    """What the results say about one case. `vars(record)` is its entry in the results document."""

    target: str
    label: str
    sides_asked: list[str]
    workload: dict
    knobs: dict
    device: str
    timing: dict
    swept: dict
    status: str = res.NOT_RUN
    reason: str = ""
    traceback: str = ""  # of an error that is none of the harness's own
    cost: dict = field(default_factory=dict)
    verification: dict[str, dict] = field(default_factory=dict)  # by side, like the three below
    ran: dict[str, dict] = field(default_factory=dict)
    sides: dict[str, dict] = field(default_factory=dict)
    comparison: dict | None = None
    profiles: dict[str, dict] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    memory_estimate_bytes: int = field(init=False)  # absent from cases that were refused
    seconds: float = field(init=False)  # absent from cases that never began

    @classmethod
    def of_case(cls, plan: Plan, case: Case, options: Options) -> CaseRecord:
        """Make the record of a case that has not run yet."""
        work = case.workload
        return cls(
            target=plan.target.name,
            label=case.label,
            sides_asked=list(plan.sides),
            workload=work.to_dict(),
            knobs=case.knobs_record(),
            device=str(case.device),
            timing=options.timing,
            swept=dict(case.swept),
            cost={"flops": work.cost.flops, "bytes": work.cost.bytes, "mask_density": work.density},
        )


class CaseRun:
    """Measures one case into its record; raises if a side is refused, wrong, or not what was asked for."""

    def __init__(
        self, plan: Plan, case: Case, record: CaseRecord, options: Options, on_step: Callable[[Case, str], None]
    ):
        self.target, self.sides, self.case = plan.target, plan.sides, case
        self.record, self.options, self.on_step = record, options, on_step
        self.precision = arithmetic(case.workload.dtype, case.device)

    @torch.no_grad()
    def measure(self) -> None:
        """Run all steps of the case."""
        case, target = self.case, self.target
        self._refuse_unsupported()
        score_buffers = max(target.score_buffers(case, side) for side in self.sides)
        self.record.memory_estimate_bytes = check_fits(case.workload, score_buffers, case.device)
        self.on_step(case, "build")
        if "torch._dynamo" in sys.modules:
            torch._dynamo.reset()  # from the ninth shape on, a compiled function silently runs eager
        inputs = target.inputs(case)
        built = {side: target.build(case, side, *inputs) for side in self.sides}
        self.on_step(case, "verify")
        self._verify(built, target.expected(case, *inputs))
        self._prove(built)
        self.on_step(case, "time")
        measurements = self._time(built)
        self._note_timing(measurements)
        for side in built.values():
            side.after()
        if self.options.profile != "none":
            self.on_step(case, "profile")
            self._profile(built)

    def _refuse_unsupported(self) -> None:
        for side in reversed(self.sides):  # the optimized side first: its reason says more
            support = self.target.support(self.case, side)
            if support:
                continue
            other = [name for name in self.sides if name != side and self.target.support(self.case, name)]
            also = f" Its other side runs here: {self.target.side_name(other[0])}." if other else ""
            reason = f"{support.reason} {support.remedy}".strip()
            raise Refused(f"{self.target.side_name(side)} does not run here: {reason}{also}")

    def _verify(self, built: Mapping[str, Built], expected: Mapping[str, torch.Tensor]) -> None:
        for side, call in built.items():
            bounds = self.target.bounds(self.case, side, self.precision, self.record.verification)
            if (verification := check_side(self.case, call, expected, self.precision, side, bounds)) is not None:
                self.record.verification[side] = verification.to_dict()

    def _prove(self, built: Mapping[str, Built]) -> None:
        """Record what each side really ran, with the kernels and operators that prove it."""
        for side, call in built.items():
            launched = profile_launches(call.fn)
            provider = self.target.prove(self.case, side, call, launched)
            facts = dict(self.target.facts(self.case, side, call))
            self.record.notes += facts.pop("notes", [])
            self.record.ran[side] = {
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
        """Fill the record's timing with the target's protocol; return all options of the timer."""
        warmup, iterations = self.target.protocol[self.case.device.type]
        timing = self.record.timing
        timing["warmup"] = warmup if timing["warmup"] is None else timing["warmup"]
        timing["iterations"] = iterations if timing["iterations"] is None else timing["iterations"]
        cost, roofs = self.case.workload.cost, machine_roofs()
        known = self.precision in roofs.tflops
        self.record.notes += [roofs.busy] if roofs.busy else []
        if not known:
            self.record.notes.append(
                f"the roofs of {roofs.name} have no {self.precision} peak: no share of a roof is given."
            )
        return dict(
            timing,
            device=self.case.device,
            flops=cost.flops or None,
            bytes=cost.bytes or None,
            roofs=roofs if known else None,
            dtype=self.precision,
        )

    def _time(self, built: Mapping[str, Built]) -> dict[str, Measurement]:
        """Time the sides: interleaved if both were asked for."""
        options = self._timing_options()
        labels = {side: self.record.ran[side]["range"] for side in built}
        try:
            if len(built) < 2:
                return {side: measure(call.fn, label=labels[side], **options) for side, call in built.items()}
            calls = [built[side].fn for side in SIDES]
            pair = compare(*calls, labels=tuple(labels[side] for side in SIDES), **options)
        except Exception as error:
            if any(CAPTURE_FAILED in note for note in getattr(error, "__notes__", ())):
                names = " and ".join(labels.values())
                raise Refused(
                    f"{names} cannot be timed as CUDA graphs ({first_line(error)}): leave --graph out."
                ) from error
            raise
        if pair.verdict == NOT_ENOUGH_DATA:
            few = pair.method["pairs"] < MIN_PAIRS
            why = (
                f"fewer than {MIN_PAIRS} pairs were taken"
                if few
                else f"the interval crosses 1 +- {pair.same_within:.0%}"
            )
            self.record.notes.append(f"no verdict: {why}; more --iterations narrow it.")
        result = pair.to_dict()
        self.record.comparison = {name: result[name] for name in COMPARISON_FIELDS}
        return {"baseline": pair.a, "optimized": pair.b}

    def _note_timing(self, measurements: Mapping[str, Measurement]) -> None:
        """Record the measurements, and note what makes them doubtful."""
        notes = self.record.notes
        for side, measurement in measurements.items():
            # The environment is recorded once for the whole run.
            notes += [f"{side}: {text}." for text in measurement.doubtful()]
            self.record.sides[side] = {**measurement.to_dict(), "environment": {}}
            method = measurement.method
            notes += [f"{side}: {text}." for text in method["notes"]]
            if method["cut_by_time_budget"]:
                notes.append(f"{side}: {method['stopped']}.")
            if measurement.over_roof:
                notes.append(f"{side} is faster than the roof allows: data came from the cache or the roof is too low.")
            if measurement.below_floor:
                notes.append(f"{side} is as short as an empty call.")
        state = next(iter(measurements.values())).method.get("gpu_after") or {}
        if reasons := sorted(set(state.get("throttle_reasons") or ()) - HARMLESS_REASONS):
            notes.append(f"clocks were held back after the timing: {', '.join(reasons)}.")

    def _profile(self, built: Mapping[str, Built]) -> None:
        options, record = self.options, self.record
        folder = options.profiles_dir / self.target.chapter / options.run_id
        for side, call in built.items():
            request = Request.of_side(self.case, side, record.ran[side]["range"])
            base = folder / file_stem(self.target.workload, side, record.label)
            record.profiles[side] = profile_side(
                call.fn, request, record.sides[side], base, level=options.profile, l2=options.l2
            )


def check_side(
    case: Case,
    built: Built,
    expected: Mapping[str, torch.Tensor],
    precision: str,
    side: str,
    bounds: tuple[float, float] | None,
) -> Verification | None:
    """Compare a side's outputs with the reference; return the verification with the largest error, None without one.

    Args:
        case: the case, for its dtype.
        built: the side; its own `fn`, which is timed afterwards, makes the outputs.
        expected: {name: reference} in the order of the outputs.
        precision: the precision of the products (see `verify`).
        side: the side's name, for messages.
        bounds: errors allowed, of the whole and of the worst row; None for what the dtype's rounding explains.
    """
    for _ in range(2):
        built.fn()  # compiled functions may replay a CUDA graph from the third call on; that replay is verified
    result = built.fn()
    if not expected:
        return None
    outputs = list(result) if isinstance(result, (tuple, list)) else [result]
    if bounds is not None:  # a user's function may return other things too
        outputs = [one for one in outputs if isinstance(one, torch.Tensor)]
        if len(outputs) != len(expected):
            raise VerificationError(f"{side} returns {len(outputs)} tensors and the reference {len(expected)}.")
    verifications = []
    for output, (name, reference) in zip(outputs, expected.items(), strict=True):
        if isinstance(output, torch.Tensor) and output.numel() == reference.numel():
            output = output.reshape(reference.shape)
        part = "" if name == "output" else f", {name}"
        what = f"{side} ({built.provider}) of {case.target}{part}"
        gradient = name.startswith("gradient")
        dtype = DTYPES[case.workload.dtype] if bounds is None else None
        options = {"dtype": dtype, "what": what, "gradient": gradient, "bounds": bounds}
        verifications.append(verify(output, reference, precision, **options))
    return max(verifications, key=lambda verification: verification.whole, default=None)
