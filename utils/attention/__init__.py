"""Attention: eleven ways to compute it behind one call, from three plain matmuls to a Hopper kernel in Gluon.

    from utils.attention import attention, last_run, provider_table
    out = attention(q, k, v, causal=True)                     # q (B, H, S, D); k, v (B, Hkv, S, D)
    out = attention(q, k, v, causal=True, provider="gluon")   # this one or an error that says why not
    last_run().provider                                       # who computed it
    provider_table()                                          # what runs on this machine, and why not
    use_choices("sdpa_grid_choices.json")                     # "auto" goes by what `labs bench choose` measured

`registry.py` has the call and the list, `request.py` the checks, `reference.py` the float64 specification, one file
for each provider the rest. `gluon_ladder` holds the course's own kernel in five steps.

Masks and score modifiers as functions: `masks.py`, `score_mods.py`, `sparsity.py` (what a mask leaves to compute) and
`flex_paths.py` (eager, compiled, CuTe, Gluon and the dense baselines behind one prepared call).
"""

from utils.attention.choices import active_choices, use_choices
from utils.attention.reference import reference
from utils.attention.registry import (
    AUTO_ORDER,
    PROVIDERS,
    Provider,
    Run,
    able_providers,
    attention,
    choose,
    last_run,
    launched_names,
    proof,
    provider,
    provider_table,
)
from utils.attention.request import AttentionUnsupported, Request, allowed_keys, make_request

__all__ = [
    "AUTO_ORDER",
    "PROVIDERS",
    "AttentionUnsupported",
    "Provider",
    "Request",
    "Run",
    "able_providers",
    "active_choices",
    "allowed_keys",
    "attention",
    "choose",
    "last_run",
    "launched_names",
    "make_request",
    "proof",
    "provider",
    "provider_table",
    "reference",
    "use_choices",
]
