"""FlashAttention for Hopper in Gluon: the forward as a ladder of five kernels that compute the same thing.

    from utils.attention.gluon.launch import forward
    out, lse = forward(q, k, v, causal=True, step=5)

Read `shared.py` first, then step1 to step5. The kernels of steps 1 to 3 are long, so that they read from top to bottom.
The head of each step says what it adds, and each step has its own `launch`. `pipeline.py`, `transfers.py`, `blocks.py`
and `softmax.py` are parts of step 5. `plan.py` holds tiles and schedules, `arguments.py` holds the arguments of a
launch, `launch.py` is the operator that torch sees, and `offline.py` compiles a step without a GPU. The backward pass
has its own ladder, in `backward/`. A few new tokens over a long cache have their own kernel, in `decode/`. Importing
this package does not import Triton.
"""
