"""Attention: sixteen ways to compute it behind one call, from three plain operators to a Hopper kernel in Gluon.

    from utils.attention import attention, backend_table, last_run, prepare
    out = attention(q, k, v, causal=True)                       # q (B, H, S, D); k, v (B, Hkv, S, D)
    out = attention(q, k, v, mask_mod=both(causal, documents(1024)))
    out = attention(q, k, v, causal=True, backend="gluon")      # this backend, or an error that says why not
    last_run().backend                                          # which backend ran
    out = attention_decode(q, keys, values, seqlens=lengths)    # a few new tokens over a cache, in one piece or in pages
    attend = prepare(q, k, v, mask_mod=causal, backend="flex")  # built, compiled and run once; attend() is guarded
    backend_table()                                             # which backends run on this machine, and why others do not

`problem.py` defines a problem and a backend. `call.py` is the door to attention, and `decode.py` the door for caches.
`choosing.py` has the automatic order, `reference.py` the float64 specification, `masks/` mask functions and score modifiers,
`backends/` one file a library, and `gluon/` the course's own kernels.
"""

# ruff: noqa: F401 (these imports are the names of the package)
from utils.attention.backends import BACKENDS, able_backends, find_backend
from utils.attention.call import Run, attention, backend_table, last_run, prepare, proof
from utils.attention.decode import attention_decode, decode_reference
from utils.attention.prepared import Prepared, Recompiled
from utils.attention.problem import AttentionUnsupported, Backend, Options, Problem, Refused, make_problem
from utils.attention.reference import allowed_keys, reference, reference_gradients
