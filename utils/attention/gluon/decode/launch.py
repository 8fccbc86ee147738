"""Run the decode kernel on tensors of a Hopper GPU, and register it with torch as one operator.

A `Launch` is made once for each combination of shapes, strides and options, and kept: a decode step takes microseconds, so its
call must not take more. A kept launch starts the compiled kernels without Triton's search for them (`kernels/handle.py`).
"""

from __future__ import annotations

import math

import torch

from utils.attention.gluon.arguments import make_addressable, placeholder, strides_fit
from utils.attention.gluon.decode.plan import (
    ALONE_BYTES,
    MERGE_GROUPS,
    MERGE_NUMBERS,
    MERGE_OPTIONS,
    MERGE_PARTS,
    MERGE_PROGRAMS,
    ONE_PIECE,
    Arrangement,
    Shape,
    arrange,
)
from utils.attention.problem import positive_scale
from utils.kernels.handle import Handle
from utils.newest import Newest

LOG2_E = math.log2(math.e)
EVICT_FIRST, EVICT_NORMAL = (
    0x12F0000000000000,
    0x1000000000000000,
)  # CUTLASS's numbers for the L2's policies of TMA copies


def decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    seqlens: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    kv_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute attention of the newest tokens q (B, H, Sq, D) over a cache, fp16 or bf16, on a Hopper GPU: (B, H, Sq, D).

    The last query of a sequence is at its last key. `utils.attention.decode` has checked the arguments; they mean the same as in
    `utils.attention.attention_decode`.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    if torch.compiler.is_compiling():
        return attention_decode(q, k, v, causal, scale, window or 0, seqlens, block_table, kv_scales)
    return _decode(q, k, v, causal, scale, window or 0, seqlens, block_table, kv_scales)


@torch.library.custom_op("labs::attention_decode", mutates_args=(), device_types="cuda")
def attention_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    scale: float,
    window: int,
    seqlens: torch.Tensor | None,
    block_table: torch.Tensor | None,
    kv_scales: torch.Tensor | None,
) -> torch.Tensor:
    """Compute `decode` as one operator, for graphs of torch.compile; window 0: no window."""
    return _decode(q, k, v, causal, scale, window, seqlens, block_table, kv_scales)


@attention_decode.register_fake
def _attention_decode_fake(q, k, v, causal, scale, window, seqlens, block_table, kv_scales):
    return torch.empty_like(q, memory_format=torch.contiguous_format)


def _decode(q, k, v, causal, scale, window, seqlens, block_table, kv_scales) -> torch.Tensor:
    if q.is_cuda and torch._C._cuda_getDevice() != q.get_device():
        # CUDA loads and launches kernels on the current device.
        with torch.cuda.device(q.device):
            return _decode(q, k, v, causal, scale, window, seqlens, block_table, kv_scales)
    if scale <= 0:
        q, scale = positive_scale(q, scale)  # the kernel takes maxima before it scales
    launch = _find_launch(q, k, v, causal, scale, window, seqlens is not None, block_table)
    if launch is None:  # there is no new token
        return torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if launch.copies or (q.data_ptr() | k.data_ptr() | v.data_ptr()) % 16:
        q = q.contiguous() if launch.copies else q
        q, k, v = make_addressable(q), make_addressable(k), make_addressable(v)
        return _decode(q, k, v, causal, scale, window, seqlens, block_table, kv_scales)
    return launch(q, k, v, seqlens, block_table, kv_scales)


def _find_launch(q, k, v, causal: bool, scale: float, window: int, lengths: bool, block_table) -> Launch | None:
    """Return the launch for tensors of these shapes, strides and types; make it if there is none."""
    table = None if block_table is None else (block_table.shape, block_table.stride())
    strides = q.stride(), k.stride(), v.stride()
    key = q.shape, k.shape, strides, table, q.dtype, k.dtype, q.device, causal, scale, window, lengths
    launch = _LAUNCHES.get(key)
    if launch is None and q.numel():
        launch = _LAUNCHES[key] = Launch(q, k, v, causal, scale, window, lengths, block_table)
    return launch


_LAUNCHES: Newest[tuple, Launch] = Newest(512)


class Launch:
    """The decode of tensors with given shapes and strides: plan, arguments and, after the first call, the handles of both kernels."""

    def __init__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        causal: bool,
        scale: float,
        window: int,
        lengths: bool,
        block_table: torch.Tensor | None,
        found: Arrangement | None = None,
    ):
        """Plan a launch; found: its arrangement, by default from `arrange`."""
        batch, _, sq, head_dim = q.shape
        kv_heads, page = k.shape[1:3]
        keys = page if block_table is None else page * block_table.shape[1]
        pages, stride = (0, 0) if block_table is None else (block_table.shape[1], block_table.stride(0))
        # No query is farther from a key than this. The kernel adds distances to positions in 32 bits.
        far = keys + sq
        self.fp8 = k.dtype == torch.float8_e4m3fn
        shape = Shape(
            batch,
            kv_heads,
            q.shape[1] // kv_heads,
            sq,
            keys,
            head_dim,
            min(window, far),
            page if pages else 0,
            lengths,
            self.fp8,
        )
        # A plain tuple: torch.empty takes more than a microsecond longer to read a torch.Size.
        self.shape, self.dtype, self.device = tuple(q.shape), q.dtype, q.device
        multiprocessors = torch.cuda.get_device_properties(q.device).multi_processor_count if q.is_cuda else 1
        self.found = found = found or arrange(shape, multiprocessors)
        self.plan = plan = found.plan
        # Triton's launcher multiplies the grid's first dimension by the size of a cluster.
        self.grid = (kv_heads, batch, 1) if found.parts else (found.tiles, found.programs, 1)
        left = min(window, far) if window else far
        right = 0 if causal else left - 1 if window else far
        page_bits = page.bit_length() - 1 if pages else ONE_PIECE
        heads, rows = kv_heads * found.tiles, shape.rows
        self.sizes: tuple = stride, batch, kv_heads, rows, sq, keys, left, right, int(lengths), page_bits, pages
        self.sizes += head_dim, int(found.whole), max(found.parts.bit_length() - 1, 0)
        self.sizes += scale * LOG2_E, EVICT_FIRST if found.hint else EVICT_NORMAL
        ends = 2 * found.tiles * found.programs * plan.columns * (plan.block_d + 2)
        self.merge_sizes: tuple = found.tiles, rows, plan.columns, plan.block_d.bit_length() - 1, head_dim, ends
        self.merge_sizes += (scale * LOG2_E,)
        shared = MERGE_GROUPS if found.programs > MERGE_PARTS * batch * kv_heads else 1
        pieces = -(-min(rows, plan.columns) * plan.block_d * shared // MERGE_NUMBERS)
        self.merge_grid = batch * heads, min(pieces, -(-MERGE_PROGRAMS // (batch * heads))), 1
        self.parts = ends + 2 * batch * heads if found.needs_merge else 0
        self.unused_parts, self.unused_integers = placeholder(q.device), placeholder(q.device, torch.int32)
        # TMA needs one distance between all query rows of a head of keys: the new tokens of each query head in turn.
        rows_apart = shape.group == 1 or sq == 1 or q.stride(1) == sq * q.stride(2)
        self.copies = not (rows_apart and all(map(strides_fit, (q, k, v))))
        q_strides = [q.stride(0), q.stride(1) * shape.group, q.stride(1 if sq == 1 else 2), 1]
        q_shape = [batch, kv_heads, rows, head_dim]
        self.q_map = q_shape, _tma_strides(q_shape, q_strides)
        self.k_map = list(k.shape), _tma_strides(k.shape, k.stride(), 16 // k.element_size())
        self.v_map = list(v.shape), _tma_strides(v.shape, v.stride(), 16 // v.element_size())
        self.handles: list[Handle] = []  # handles of the kernel, and of the merge if there is one

    def __call__(self, q, k, v, seqlens=None, block_table=None, scales=None) -> torch.Tensor:
        """Compute attention of tensors like the first ones; scales: (2, Hkv) fp32, of K and of V, for an fp8 cache."""
        out = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        parts = torch.empty(self.parts, dtype=torch.float32, device=self.device) if self.parts else self.unused_parts
        lens = self.unused_integers if seqlens is None else seqlens
        table = self.unused_integers if block_table is None else block_table
        factors = self.unused_parts if scales is None else scales
        if not self.handles:
            self._compile(q, k, v, (out, parts, lens, table, factors))
            if not self.handles:  # the simulator has run the kernels
                return out
        self.handles[0](q, k, v, out, parts, lens, table, factors)
        if self.parts:
            self.handles[1](out, parts)
        return out

    def _compile(self, q, k, v, memory: tuple) -> None:
        """Compile the kernels; in the simulator, run them."""
        from triton.experimental.gluon import language as gl
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        from utils.attention.gluon.decode.kernel import attention_decode
        from utils.attention.gluon.decode.merge import attention_decode_merge
        from utils.attention.gluon.decode.offline import attend_of

        def descriptor(x, map_, rows):
            swizzle = min(self.plan.block_d * x.element_size(), 128)
            layout = gl.NVMMASharedLayout(swizzle, 8 * x.element_size(), rank=4)
            x = x.view(torch.uint8) if x.element_size() == 1 else x
            return TensorDescriptor(x, *map_, [1, 1, rows, self.plan.block_d], layout)

        plan = self.plan
        maps = (
            descriptor(q, self.q_map, plan.columns),
            *(descriptor(x, map_, plan.box) for x, map_ in ((k, self.k_map), (v, self.v_map))),
        )
        kernels: list[tuple] = [
            (attention_decode, self.grid, (*maps, *memory), (*self.sizes, plan, attend_of(plan)), plan.options)
        ]
        if self.parts:
            options = MERGE_OPTIONS | {"launch_pdl": True}
            kernels.append((attention_decode_merge, self.merge_grid, memory[:2], self.merge_sizes, options))
        if self.device.type != "cuda":
            for kernel, grid, tensors, rest, options in kernels:
                kernel[grid](*tensors, *rest, **options)
            return
        for kernel, grid, tensors, rest, options in kernels:
            compiled = kernel.warmup(*tensors, *rest, grid=grid, **options)
            compiled, cluster = (compiled, 1) if self.handles else (self._adapt(compiled), max(self.found.parts, 1))
            self.handles.append(Handle(compiled, grid, tensors, rest, self.device.index, cluster))

    def _adapt(self, compiled):
        """Return a copy of the first kernel, not yet loaded, with a policy for TMA copies and with a cluster's inbox.

        All launches share this copy: a cache that grows by a token at each call has a launch for each length.
        """
        from utils.kernels.assembling import policy_copies, reassemble

        twin = reassemble(compiled, policy_copies)
        if self.plan.cluster:
            shared = max(-(-compiled.metadata.shared // 16) * 16 + self.plan.inbox_space, ALONE_BYTES)
            twin.metadata = compiled.metadata._replace(shared=shared)
        return twin


def _tma_strides(shape, strides, fitting: int = 8) -> list[int]:
    """Return strides for a descriptor. A dimension of size one gets the stride `fitting`, 16 bytes: TMA needs multiples of them."""
    pairs = zip(shape[:-1], strides, strict=False)
    return [stride if size > 1 else fitting for size, stride in pairs] + [1]
