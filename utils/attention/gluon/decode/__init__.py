"""Decode: attention of a few new tokens over a long cache, split over the keys (Gluon, Hopper).

    from utils.attention.gluon.decode.launch import decode
    out = decode(q, k_cache, v_cache, seqlens=lengths)

`plan.py` chooses tiles and the split, `work.py` says which program reads which keys, `kernel.py` is the kernel for few query
rows, `rows.py` the one for many (`steps.py`, `heads.py`: its parts; `rows_ahead.py`: a variant), `quantized_keys.py` and `quantized.py` those for fp8 caches,
`merge.py` adds up the parts of a head, and `launch.py` is the operator that torch sees. Importing this package imports no Triton.
"""
