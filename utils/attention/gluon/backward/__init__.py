"""FlashAttention's backward pass for Hopper in Gluon, as a ladder of six kernels that compute the same thing.

    from utils.attention.gluon.backward.launch import backward
    dq, dk, dv = backward(dout, q, k, v, out, lse, causal=True, step=4)

Read `fragments.py` first, which says how dQ is summed, then step1 to step6 (with `step6_roles.py`, `queue.py` and
`split.py`). `wide_heads.py` is steps 3 to 6 for head dimension 256, `dq.py` the kernel that computes dQ in deterministic
mode, `pipeline.py` holds what the roles share, `plan.py` the tiles, `arguments.py` what a launch needs, `operator.py` is
what torch differentiates with, and `offline.py` compiles a step without a GPU. Importing this package imports no Triton.
"""
