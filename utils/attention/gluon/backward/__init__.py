"""FlashAttention's backward pass for Hopper in Gluon: a ladder of three kernels, and a kernel for wide heads.

    from utils.attention.gluon.backward.launch import backward
    dq, dk, dv = backward(dout, q, k, v, out, lse, causal=True)

Read `fragments.py` first: it explains how dQ is summed. Then read step 1, step 3, and step 6 with `shares.py`.
`wide_heads.py` is the kernel of head dimension 256, and `dq.py` computes dQ there and in deterministic mode. `pipeline.py`
has the common parts of the roles, `order.py` the order of the blocks, `launch.py` runs the kernels, `operator.py` is for
torch's autograd, and `offline.py` compiles a kernel without a GPU. Importing this package imports no Triton.
"""
