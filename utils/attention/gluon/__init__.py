"""FlashAttention for Hopper in Gluon: the forward as a ladder of five kernels that compute the same thing.

    from utils.attention.gluon.launch import forward
    out, lse = forward(q, k, v, causal=True, step=5)

Read `shared.py` first, then step1 to step5: each says at its head what it adds, and has a `launch` of its own.
`pipeline.py`, `transfers.py`, `blocks.py` and `softmax.py` are parts of step 5, `plan.py` holds tiles and schedules, `arguments.py` what a launch
needs, `launch.py` is the operator that torch sees, and `offline.py` compiles a step without a GPU. The backward pass is a
ladder of its own in `backward/`. A few new tokens over a long cache have a kernel of their own, in `decode/`. Importing
this package imports no Triton.
"""
