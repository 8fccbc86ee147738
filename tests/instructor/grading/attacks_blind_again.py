"""Answers of a third blind round: right values that break a word of their question, by people who had read the notebooks alone.

Of 24 that two of them had fixed before any was graded, six were accepted: these five, and one that clamps rows where 1.5 of lab 1 said to mask them. Its
words say now what is measured: nothing outside of the matrices is read.
"""

from __future__ import annotations

from tests.instructor.grading.attacks_shortcuts import Shortcut

BLIND_AGAIN = [
    Shortcut(
        "1.2 a sum in two halves of 16 bits",
        "lab1",
        "q1_2",
        "q1_2_tests",
        '''
def gemm_tiled(
    a: torch.Tensor, b: torch.Tensor, tile_m: int = 64, tile_n: int = 64, tile_k: int = 64
) -> torch.Tensor:
    """Multiply (M, K) by (K, N) tile by tile; tiles at the edges may be smaller."""
    (rows, inner), columns = a.shape, b.shape[1]
    wide = torch.promote_types(a.dtype, torch.float32)
    wide_a, wide_b = a.to(wide), b.to(wide)
    c = torch.empty(rows, columns, dtype=a.dtype, device=a.device)
    for i in range(0, rows, tile_m):
        for j in range(0, columns, tile_n):
            height, width = min(tile_m, rows - i), min(tile_n, columns - j)
            high = torch.zeros(height, width, dtype=a.dtype, device=a.device)
            low = torch.zeros(height, width, dtype=a.dtype, device=a.device)
            for k in range(0, inner, tile_k):
                x, y = wide_a[i : i + tile_m, k : k + tile_k], wide_b[k : k + tile_k, j : j + tile_n]
                total = (x[:, :, None] * y[None, :, :]).sum(1) + high.to(wide) + low.to(wide)
                high = total.to(a.dtype)
                low = (total - high.to(wide)).to(a.dtype)
            c[i : i + tile_m, j : j + tile_n] = high
    return c
''',
        ("gemm_tiled", "gemm_tiled"),
        "numbers to 16 bits",
    ),
    Shortcut(
        "4.1 waits in recorded steps only",
        "lab1",
        "q4_1",
        "q4_1_tests",
        '''
def profile_steps(fn, trace_path: str) -> torch.profiler.profile:
    """Profile 6 steps of fn() after 1 waiting and 3 warm-up steps; export a Chrome trace."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities, schedule=default_schedule) as prof:
        for step in range(10):
            fn()
            if step >= 4:
                synchronize()
            prof.step()
    prof.export_chrome_trace(trace_path)
    return prof
''',
        ("profile_steps", "profile_steps"),
        "are followed by synchronize()",
    ),
    Shortcut(
        "5.1 sorts all pairs into blocks at every call",
        "lab2_flexattention",
        "q5_1",
        "q5_1_tests",
        '''
def prepare_flex(attention, mask_mod, score_mod, length: int, device: torch.device, block_size: int = 128):
    """attend(q, k, v) under mask_mod and score_mod, its block mask built beforehand."""
    block_mask = table = None
    if mask_mod is not None:
        index, zero = torch.arange(length, device=device), torch.tensor(0, device=device)
        ask = torch.vmap(torch.vmap(mask_mod, in_dims=(None, None, None, 0)), in_dims=(None, None, 0, None))
        table = ask(zero, zero, index, index)
        block_mask = create_block_mask(
            lambda b, h, i, j: table[i, j], None, None, length, length, device=device, BLOCK_SIZE=block_size
        )
        block_mask.mask_mod = mask_mod

    def build() -> None:
        """Sort all pairs into blocks, and write the four tables of the block mask."""
        rest = -length % block_size
        padded = F.pad(table, (0, rest, 0, rest))
        side = padded.shape[0] // block_size
        counted = padded.view(side, block_size, side, block_size).sum((1, 3))
        full = counted == block_size**2
        for numbers, indices, kind in (
            (block_mask.kv_num_blocks, block_mask.kv_indices, (counted > 0) & ~full),
            (block_mask.full_kv_num_blocks, block_mask.full_kv_indices, full),
        ):
            numbers.copy_(kind.sum(-1)[None, None])
            indices.copy_(kind.int().argsort(dim=-1, descending=True, stable=True)[None, None])

    def attend(q, k, v):
        if block_mask is not None:
            build()
        return attention(
            q, k, v, score_mod=score_mod, block_mask=block_mask, enable_gqa=k.shape[1] < q.shape[1]
        )

    return attend
''',
        ("prepare_flex", "prepare_flex"),
        "beside attention",
    ),
    Shortcut(
        "2.4 the scores again, by logarithms",
        "lab4_sdpa",
        "bonus_2_4",
        "bonus_2_4_tests",
        '''
def attention_backward(q, k, v, out, lse, dout) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients (dq, dk, dv) of attention, from its output and log-sum-exp; no mask."""
    scale = q.shape[-1] ** -0.5
    p = torch.exp(q @ k.mT * scale - lse[..., None])
    dv = p.mT @ dout
    inner = dout @ v.mT - (dout * out).sum(-1, keepdim=True)
    dq = (p * inner) @ k * scale
    log_q, log_k = q.abs().log(), k.abs().log()
    again = torch.zeros_like(p)
    for d in range(q.shape[-1]):
        size = torch.exp(log_q[..., d, None] + log_k[..., None, :, d])
        same = (q[..., d, None] > 0) == (k[..., None, :, d] > 0)
        again = again + torch.where(same, size, -size)
    dk = (torch.exp(again * scale - lse[..., None]) * inner).mT @ q * scale
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)
''',
        ("attention_backward", "attention_backward"),
        "pairs of numbers",
    ),
    Shortcut(
        "4.3 a copy of its memory, put under the input",
        "lab4_sdpa",
        "q4_3",
        "q4_3_tests",
        '''
def unpack_qkv(packed: torch.Tensor, heads: int, kv_heads: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q (B, H, S, D) and k, v (B, Hkv, S, D) as views of a projection's output (B, S, (H + 2 Hkv) D)."""
    every = packed.unflatten(-1, (heads + 2 * kv_heads, -1)).transpose(1, 2)
    return every[:, :heads], every[:, heads : heads + kv_heads], every[:, heads + kv_heads :]


def ready_for_flash(x: torch.Tensor) -> torch.Tensor:
    """x, copied only if flash would refuse its strides."""
    if x.stride(-1) != 1 and x.shape[-1] > 1:
        return x.contiguous()
    x.set_(x.untyped_storage().clone(), x.storage_offset(), x.shape, x.stride())
    return x
''',
        ("unpack", "unpack_qkv", "ready_for_flash"),
        "on other memory",
    ),
]
