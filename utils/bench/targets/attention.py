"""Targets of attention: their flags, and sides that are named by a backend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from utils.attention import AttentionUnsupported, find_backend, prepare
from utils.bench.errors import BenchError, Refused
from utils.bench.knobs import Knob, Setting
from utils.bench.targets import backends
from utils.bench.targets.base import SHAPE_KNOBS, Built, Case, Target, interpreted
from utils.bench.workload import DTYPES, MASKS, SCORE_MODS, Inputs, Workload, make_inputs, reference
from utils.machine.device import Support, cuda_support

# Fp32 buffers of (B, H, S, S) that a backend stores at once: scores, weights and what lies between. A fused one stores none.
SCORE_BUFFERS = {"math": 3.0, "naive": 3.0, "naive_compiled": 3.0, "unfused": 3.0, "eager": 4.0}

# ---- flags, and the workloads that they make --------------------------------------------------------------------


def shape_knobs(cpu: tuple, gpu: tuple, *, many_dtypes: bool = False) -> tuple[Knob, ...]:
    """Make the knobs --batch --heads --seq-len --head-dim --dtype --seed, with defaults (B, H, S, D, dtype)."""
    sizes = (
        ("batch", "sequences, B"),
        ("heads", "attention heads, H"),
        ("seq-len", "tokens of a sequence, S"),
        ("head-dim", "numbers of a head, D"),
    )
    meaning = "dtype of q, k and v" + (", several with commas" if many_dtypes else "")
    return (
        *(Knob(name, text, cpu[i], gpu[i]) for i, (name, text) in enumerate(sizes)),
        Knob("dtype", meaning, cpu[4], gpu[4], choices=tuple(DTYPES), many=many_dtypes),
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

    A document span that the mask would ignore or that is longer than the text is an error. The default is cut to the text.
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
    """Prepare a backend on q, k, v; raise Refused if it cannot do the case. The options are block_size and mode of `prepare`.

    The side's function is the bare call without the guard; afterwards a run checks that it was compiled once.
    """
    q, k, v = inputs
    try:
        backend = backends.backend_of(name).name
        prepared = prepare(q, k, v, backend=backend, **case.workload.attention_arguments, **options)
    except AttentionUnsupported as error:
        raise Refused(str(error)) from None
    attend = prepared.fn
    return Built(lambda: attend(q, k, v), name, prepared.settings["implementation"], prepared)


def backend_support(name: str, case: Case) -> Support:
    """Whether a backend computes the case on its device; whether one of SDPA takes the shape, torch says when it is built."""
    backend = backends.backend_of(name)
    if name in backends.SDPA_CHOICES:
        return backend.machine()
    answer = backend.support(case.workload.problem(case.device))
    return answer if answer else Support(False, f"backend {name}: {answer.reason}", answer.remedy)


class AttentionTarget(Target):
    """Attention by one backend against another. A subclass makes the workload and names the backend of each side."""

    def workload_of(self, settings: Mapping[str, Setting], device: torch.device) -> Workload:
        """Make the workload of these settings; raise BenchError for values that do not go together."""
        return plain_workload(settings)

    def cases(self, settings, device):
        """Return the one case of these settings."""
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
        name = self.backend(case, side)
        here = interpreted("the Triton kernel", case.device) if name == "triton" else Support(True)
        return super().support(case, side) and here and backend_support(name, case)

    def score_buffers(self, case, side):
        """Fp32 buffers of (B, H, S, S) that the side needs at once."""
        return SCORE_BUFFERS.get(self.backend(case, side), 0.0)

    def inputs(self, case):
        """Make q, k, v, and the output's gradient unless the pass is forward."""
        inputs = make_inputs(case.workload, case.device, case.value("seed"))
        return inputs.qkv if inputs.dout is None else inputs

    def expected(self, case, *inputs):
        """Compute the float64 reference of each result, by name."""
        return reference(case.workload, *inputs)

    def build(self, case, side, *inputs):
        """Bind the side's call; raise Refused, with the backend's reason, if it does not take these tensors."""
        name, tensors = self.backend(case, side), Inputs(*inputs)
        if name not in backends.SDPA_CHOICES and tensors.dout is None:
            return build_prepared(name, case, inputs)
        implementation = backends.backend_of(name).implementation()
        return Built(backends.bind(case.workload, name, tensors), name, implementation)

    def prove(self, case, side, built, launched):
        """Return the backend that ran; raise WrongRun if it is another one than asked for."""
        return backends.prove(built.provider, launched, case.workload.direction)

    def facts(self, case, side, built):
        """Return the settings in force and the seconds spent once, where the call was prepared."""
        prepared = built.prepared
        return {} if prepared is None else {"settings": prepared.settings, "seconds": prepared.seconds}


# ---- unfused against fused --------------------------------------------------------------------------------------


def provider_knob(order: tuple[str, ...]) -> Knob:
    """Return the flag --provider: the backend of the optimized side."""
    explanation = f"fused attention; auto takes the first of {', '.join(order)} that runs here"
    return Knob("provider", explanation, "auto", "auto", choices=("auto", *order))


def first_able(names: Sequence[str], case: Case) -> tuple[str, Support]:
    """Return the first backend of `names` that can do the case, or "" and the reason of each."""
    if not (cuda := cuda_support()) and not any(find_backend(name).machine() for name in names):
        need = f"{', '.join(names)} need{'s' * (len(names) == 1)} an NVIDIA GPU: {cuda.reason}"
        return "", Support(False, need, cuda.remedy)
    reasons = []
    for name in names:
        answer = find_backend(name).support(case.workload.problem(case.device))
        if answer:
            return name, answer
        reasons.append(f"backend {name}: {answer.reason.rstrip('.')}")
    return "", Support(False, "; ".join(reasons) + ".", f"Run it where one of {', '.join(names)} is supported.")


class UnfusedFused(AttentionTarget):
    """Unfused attention against the first fused backend of `order` that can do the case, or the one of --provider."""

    order: tuple[str, ...]

    def _first_able(self, case: Case) -> tuple[str, Support]:
        asked = case.value("provider")
        return first_able(self.order if asked == "auto" else (asked,), case)

    def backend(self, case, side):
        """Return the name of a side's backend, "" if there is none."""
        return "unfused" if side == "baseline" else self._first_able(case)[0]

    def support(self, case, side):
        """Whether this machine runs this side of the case, and why not."""
        answer = Support(True) if side == "baseline" else self._first_able(case)[1]
        return answer and Target.support(self, case, side)
