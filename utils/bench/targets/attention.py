"""Targets of attention: their flags, workloads and sides. A backend computes each side.

labs/flashattention_gluon  unfused attention against a warp-specialized FlashAttention, the Gluon kernel if it runs
labs/cudnn_sdpa_bench      two backends of SDPA, or kernels with a backward pass; flags choose both
attention_suite            SDPA, flash-attn, Gluon and other backends over one matrix of shapes, in two dtypes

The targets of FlexAttention are in `flexattention.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from utils.attention import AttentionUnsupported, prepare
from utils.bench.errors import BenchError, Refused
from utils.bench.knobs import Knob, Setting
from utils.bench.targets import backends
from utils.bench.targets.base import SHAPE_KNOBS, Built, Case, Target, interpreted
from utils.bench.workload import DIRECTIONS, DTYPES, MASKS, SCORE_MODS, Workload, make_inputs, reference
from utils.machine.device import Support, cuda_support

# Number of fp32 buffers (B, H, S, S) that a backend stores at once, such as scores and weights. Fused backends store none.
SCORE_BUFFERS = {"math": 3.0, "naive": 3.0, "naive_compiled": 3.0, "unfused": 3.0, "eager": 4.0}

# ---- flags, and the workloads that they make --------------------------------------------------------------------


def shape_knobs(cpu: tuple, gpu: tuple) -> tuple[Knob, ...]:
    """Make the knobs --batch --heads --seq-len --head-dim --dtype --seed, with defaults (B, H, S, D, dtype)."""
    sizes = (
        ("batch", "sequences, B"),
        ("heads", "attention heads, H"),
        ("seq-len", "tokens of a sequence, S"),
        ("head-dim", "numbers of a head, D"),
    )
    return (
        *(Knob(name, text, cpu[i], gpu[i]) for i, (name, text) in enumerate(sizes)),
        Knob("dtype", "dtype of q, k and v", cpu[4], gpu[4], choices=tuple(DTYPES)),
        Knob("seed", "seed of the random inputs", 42, 42, least=0),
    )


CAUSAL = Knob("causal", "a query sees no later key", False, False)
MASK_KNOBS = (
    Knob("mask", "which keys a query sees", "causal_document", "causal_document", choices=MASKS),
    Knob("doc-span", "tokens of a document, for the document masks", 256, 1024, env="DOC_SPAN"),
    Knob("score-mod", "change of the scores before the softmax", "none", "none", choices=SCORE_MODS),
)


def _shape(settings: Mapping[str, Setting]) -> dict[str, Any]:
    return {key: settings[key].value for key in SHAPE_KNOBS}


def masked_workload(settings: Mapping[str, Setting]) -> Workload:
    """Make the workload of settings with --mask, --doc-span and --score-mod.

    A document span is an error if the mask has no documents or the text is shorter. The default is cut to the text.
    """
    shape, mask, span = _shape(settings), settings["mask"].value, settings["doc_span"]
    length, documents = shape["seq_len"], "document" in mask
    if span.origin != "default" and not (documents and span.value <= length):
        source = "--doc-span" if span.origin == "flag" else "DOC_SPAN"
        raise BenchError(
            f"{source} is {span.value}, --mask is {mask} and the text has {length} tokens (--seq-len). Documents are for "
            f"the masks document and causal_document, and at most as long as the text: change one of the three."
        )
    doc_span = min(span.value, length) if documents else None
    return Workload(**shape, mask=mask, doc_span=doc_span, score_mod=settings["score_mod"].value)


def plain_workload(settings: Mapping[str, Setting], **more: Any) -> Workload:
    """Make the workload of settings with a --causal switch."""
    return Workload(**_shape(settings), mask="causal" if settings["causal"].value else "full", **more)


# ---- the calls of backends --------------------------------------------------------------------------------------


def build_prepared(name: str, case: Case, inputs: Sequence[torch.Tensor], **options) -> Built:
    """Prepare a backend on q, k, v; raise Refused if it cannot do the case. options: block_size and mode of `prepare`.

    The side calls the backend without `prepare`'s guard. After the timing, the run checks that it was compiled once.
    """
    q, k, v = inputs
    try:
        backend = backends.backend_of(name).name
        prepared = prepare(q, k, v, backend=backend, **case.workload.attention_arguments, **options)
    except AttentionUnsupported as error:
        raise Refused(str(error)) from None
    attend = prepared.fn
    return Built(lambda: attend(q, k, v), name, prepared.settings["implementation"], prepared)


class AttentionTarget(Target):
    """Two backends of attention. A subclass makes the workload and names the backend of each side."""

    def workload_of(self, settings: Mapping[str, Setting], device: torch.device) -> Workload:
        """Make the workload of these settings; raise BenchError for values that do not go together."""
        return masked_workload(settings) if "mask" in settings else plain_workload(settings)

    def cases(self, settings, device):
        """Return the only case of these settings."""
        workload = self.workload_of(settings, device)
        try:
            workload.problem(device)
        except ValueError as error:
            raise BenchError(f"{self.name}: {error}") from None
        return [Case(self.name, workload, settings, device)]

    def backend(self, case: Case, side: str) -> str:
        """Return the name of a side's backend, or "auto" for SDPA with torch's own choice."""
        raise NotImplementedError

    def support(self, case, side):
        """Whether this machine runs this side of the case, and why not."""
        name, answer = self.backend(case, side), super().support(case, side)
        if name == "triton":
            answer = answer and interpreted("the Triton kernel", case.device)
        backend = backends.backend_of(name)
        if name in backends.SDPA_CHOICES:  # `build` asks torch whether it takes the shape
            return answer and backend.machine()
        able = backend.support(case.workload.problem(case.device))
        return answer and (able or Support(False, f"backend {name}: {able.reason}", able.remedy))

    def bytes_needed(self, case, side):
        """Estimate the bytes of a run with this side, including stored scores."""
        return case.workload.bytes_needed(SCORE_BUFFERS.get(self.backend(case, side), 0.0))

    def inputs(self, case):
        """Make q, k, v, and for a backward pass also the output's gradient."""
        return make_inputs(case.workload, case.device, case.value("seed"))

    def expected(self, case, *inputs):
        """Compute the float64 reference of each result, by name."""
        return reference(case.workload, *inputs)

    def build(self, case, side, *inputs):
        """Bind the side's call; raise Refused, with the backend's reason, if it does not take these tensors."""
        name = self.backend(case, side)
        if name not in backends.SDPA_CHOICES and case.workload.direction == "forward":
            return build_prepared(name, case, inputs)
        implementation = backends.backend_of(name).implementation()
        return Built(backends.bind(case.workload, name, inputs), name, implementation)

    def prove(self, case, side, built, launched):
        """Return the backend that ran; raise WrongRun if it is not the side's backend."""
        return backends.prove(built.provider, launched, case.workload.direction)

    def facts(self, case, side, built):
        """Return the settings of a prepared call and the seconds of its preparation."""
        prepared = built.prepared
        return {} if prepared is None else {"settings": prepared.settings, "seconds": prepared.seconds}


# ---- unfused against fused --------------------------------------------------------------------------------------


def provider_knob(order: tuple[str, ...]) -> Knob:
    """Return the flag --provider: the backend of the optimized side."""
    explanation = f"fused attention; auto takes the first of {', '.join(order)} that runs here"
    return Knob("provider", explanation, "auto", "auto", choices=("auto", *order))


class UnfusedFused(AttentionTarget):
    """Unfused attention against the backend of --provider, or the first fused backend of `order` that can do the case."""

    order: tuple[str, ...]

    def _find_backend(self, case: Case) -> tuple[str, Support]:
        """Return the first backend that can do the case, or "" and the reasons of all backends."""
        names = self.order if case.value("provider") == "auto" else (case.value("provider"),)
        asked, listed = [backends.backend_of(name) for name in names], ", ".join(names)
        if not (cuda := cuda_support()) and not any(backend.machine() for backend in asked):
            need = f"{listed} need{'s' * (len(names) == 1)} an NVIDIA GPU: {cuda.reason}"
            return "", Support(False, need, cuda.remedy)
        reasons = []
        for backend in asked:
            if answer := backend.support(case.workload.problem(case.device)):
                return backend.name, answer
            reasons.append(f"backend {backend.name}: {answer.reason.rstrip('.')}")
        return "", Support(False, "; ".join(reasons) + ".", f"Run it where one of {listed} is supported.")

    def backend(self, case, side):
        """Return the name of a side's backend, "" if there is none."""
        return "unfused" if side == "baseline" else self._find_backend(case)[0]

    def support(self, case, side):
        """Whether this machine runs this side of the case, and why not."""
        answer = Support(True) if side == "baseline" else self._find_backend(case)[1]
        return answer and Target.support(self, case, side)


class FlashAttentionGluon(UnfusedFused):
    """matmul, softmax, matmul against the course's Gluon kernel, else FlashAttention 3, else CuTe, else flash-attn."""

    chapter, workload = "labs/flashattention_gluon", "flashattention_gluon"
    summary = "unfused attention against a fused, warp-specialized FlashAttention"
    sides: Mapping[str, str] = {
        "baseline": "matmul, softmax, matmul",
        "optimized": "Gluon, else FlashAttention 3, else CuTe, else flash-attn",
    }
    order = ("gluon", "fa3", "cute", "flash_attn")
    knobs = (*shape_knobs(cpu=(1, 2, 512, 64, "fp32"), gpu=(4, 16, 4096, 128, "bf16")), CAUSAL, provider_knob(order))

    def range_name(self, side, ran):
        """NVTX range of the side in a profile."""
        return f"flashattention_{side}_{ran}"


# ---- one named backend against another --------------------------------------------------------------------------------

# SDPA's backends, and other backends with a backward pass.
CHOICES = (*backends.SDPA_CHOICES, "gluon", "cute", "flash_attn")


class FlashSdp(AttentionTarget):
    """Two backends, by default of SDPA: forward, backward or both, with grouped heads."""

    chapter, workload = "labs/cudnn_sdpa_bench", "flash_sdp"
    summary = "one attention backend against another on the same inputs, forward and backward"
    sides: Mapping[str, str] = {
        "baseline": "--baseline-backend (SDPA's math)",
        "optimized": "--backend (SDPA's own choice)",
    }
    knobs = (
        *shape_knobs(cpu=(1, 4, 1024, 64, "fp32"), gpu=(4, 16, 4096, 128, "bf16")),
        CAUSAL,
        Knob("kv-heads", "heads of k and v, Hkv, a divisor of H; 0: as many", 0, 0, least=0),
        Knob("seq-len-kv", "tokens of k and v, Sk; 0: as many as q", 0, 0, least=0),
        Knob("window", "only keys fewer than this many positions away, by a boolean mask; 0: none", 0, 0, least=0),
        Knob("pass", "what is timed", "forward", "forward", choices=DIRECTIONS),
        Knob("backend", "backend of the optimized side; auto is torch's own choice", "auto", "auto", choices=CHOICES),
        Knob("baseline-backend", "backend of the baseline side", "math", "math", choices=CHOICES),
    )

    def workload_of(self, settings, device):
        """Make the workload of these settings; raise BenchError for values that do not go together."""
        given = {key: settings[key].value for key in ("kv_heads", "seq_len_kv")}
        window, direction = settings["window"].value or None, settings["pass"].value
        workload = plain_workload(settings, window=window, direction=direction, **given)
        if (workload.causal or window) and workload.seq_len > workload.seq_len_kv:
            raise BenchError(
                f"--seq-len is {workload.seq_len} and --seq-len-kv {workload.seq_len_kv}: with --causal or "
                "--window the last query is at the last key, and the first queries would see none. "
                "Choose --seq-len-kv at least --seq-len."
            )
        return workload

    def backend(self, case, side):
        """Return the name of a side's backend."""
        return case.value("backend" if side == "optimized" else "baseline_backend")


MATRIX = ((1, 1, 128, 64), (8, 4, 128, 64), (32, 8, 128, 64), (32, 8, 256, 64))  # B, H, S, D
MATRIX_DTYPES = {"cpu": ("fp32", "bf16"), "cuda": ("fp16", "bf16")}  # on a CPU fp16 products run near 1 GFLOP/s


class Suite(AttentionTarget):
    """One backend over the matrix. A size in a flag replaces its column in all rows; a dtype replaces both dtypes."""

    chapter = "attention_suite"
    knobs = (*shape_knobs((None,) * 5, (None,) * 5), CAUSAL)
    protocol: Mapping[str, tuple[int, int]] = {"cpu": (5, 30), "cuda": (200, 500)}

    def __init__(self, workload: str, optimized: str, baseline: str = "auto"):
        self.workload, self.contenders = workload, {"baseline": baseline, "optimized": optimized}
        self.sides = {side: backends.backend_of(name).summary for side, name in self.contenders.items()}
        self.summary = f"over the matrix of shapes: {self.sides['optimized']}"

    def cases(self, settings, device):
        """Return a case for each shape and dtype."""
        given = [settings[key].value for key in ("batch", "heads", "seq_len", "head_dim")]
        shapes = dict.fromkeys(tuple(new or old for new, old in zip(given, row, strict=True)) for row in MATRIX)
        mask, dtype = "causal" if settings["causal"].value else "full", settings["dtype"].value
        return [
            Case(self.name, Workload(*shape, dtype, mask), settings, device)
            for dtype, shape in itertools.product((dtype,) if dtype else MATRIX_DTYPES[device.type], shapes)
        ]

    def backend(self, case, side):
        """Return the name of a side's backend."""
        return self.contenders[side]


CONTENDERS = ("flash_attn", "gluon", "fa3", "cute", "flex", "flex_flash", "triton")
TARGETS = (
    FlashAttentionGluon(),
    FlashSdp(),
    Suite("sdpa", "auto", baseline="math"),
    *(Suite(name, name) for name in CONTENDERS),
)
