"""FlashAttention forward for Hopper in Gluon, as a ladder of five kernels that compute the same thing.

    from utils.attention.gluon.launch import forward
    out, lse = forward(q, k, v, causal=True, step=5)

Read `shared.py` first, then step1 to step5: each says at its head what it adds. `plan.py` holds tiles and schedules,
`launch.py` runs a step on a GPU, `offline.py` compiles one without. Importing this package imports no Triton.
"""
