"""Decode: attention of a few new tokens over a long cache, split over the keys (Gluon, Hopper).

    from utils.attention.gluon.decode.launch import decode
    out = decode(q, k_cache, v_cache, seqlens=lengths)

`plan.py` chooses tiles and the split, and `work.py` gives each program its keys. `kernel.py` is compiled for one function that
attends: `keys.py`, `rows.py` for many query rows (`steps.py`), `cluster.py` for few heads (`cluster_rows.py`, `inbox.py`), or
`quantized_keys.py` for fp8 caches. `merge.py` adds up the parts of a head, and `launch.py` is the operator for torch.
Importing this package imports no Triton.
"""
