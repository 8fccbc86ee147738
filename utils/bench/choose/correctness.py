"""Checking one provider on one shape against float64, before it is timed."""

from __future__ import annotations

from collections.abc import Callable

import torch

from utils.bench.errors import VerificationError
from utils.bench.targets import sdpa
from utils.bench.targets.sdpa import SdpaWorkload
from utils.bench.verify import verify
from utils.bench.workload import DTYPES, arithmetic

CHECKED_SCORES = 1 << 27  # verify two KV heads against float64, or one if a KV head has more scores than this

Heads = tuple[slice, slice, slice]  # batch, query heads, KV heads


def references_of(workload: SdpaWorkload, inputs: sdpa.Inputs) -> list[tuple[Heads, dict[str, torch.Tensor]]]:
    """Compute the float64 results of the first and the last KV head; of large shapes the last one only.

    Heads are independent of each other, so two of them show a wrong shape, mask or scale.
    """
    group = workload.heads // workload.hkv
    pairs = [(0, 0), (workload.batch - 1, workload.hkv - 1)]
    if group * workload.seq_len * workload.sk > CHECKED_SCORES:
        pairs = pairs[-1:]
    references = []
    for b, h in dict.fromkeys(pairs):
        batch, query, key = heads = slice(b, b + 1), slice(h * group, (h + 1) * group), slice(h, h + 1)
        dout = None if inputs.dout is None else inputs.dout[batch, query]
        exact = sdpa.reference(workload, inputs.q[batch, query], inputs.k[batch, key], inputs.v[batch, key], dout)
        references.append((heads, exact))
    return references


def largest_error(workload: SdpaWorkload, call: Callable, references: list, name: str, device: torch.device) -> dict:
    """Verify a call's results; return the largest relative error and the tensor that has it.

    Args:
        workload: the shape.
        call: returns the output, or the output and the gradients.
        references: from `references_of`.
        name: the provider, for messages.
        device: where the call runs: it decides the precision of fp32 products.
    """
    results = call()
    results = results if isinstance(results, tuple) else (results,)
    precision, heads = arithmetic(workload.dtype, device), 0
    errors: list[tuple[float, str]] = []
    for (batch, query, key), exact in references:
        heads += query.stop - query.start
        for tensor, (result, expected) in zip(results, exact.items(), strict=True):
            verification = verify(
                tensor[batch, query if result in ("output", "gradient of q") else key],
                expected,
                precision,
                dtype=DTYPES[workload.dtype],
                what=f"{result} of {name}",
                gradient=result.startswith("gradient"),
            )
            errors.append((verification.whole, result))
    bad = sum(int((~torch.isfinite(tensor)).sum()) for tensor in results)
    if bad:
        raise VerificationError(f"{name} gives {bad} values that are NaN or infinite.")
    error, result = max(errors)
    return {"error": error, "error_of": result, "heads_checked": heads}
