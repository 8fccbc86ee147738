"""Run the decode kernel on tensors of a Hopper GPU, and register it with torch as one operator.

What a call needs is worked out once for each combination of shapes, strides and options, and kept (`Launch`): a decode
step takes microseconds, so its call must not take more. A kept launch starts the compiled kernel by itself and leaves
out Triton's search for it.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from utils.attention.gluon.arguments import addressable, strides_fit, unused
from utils.attention.gluon.decode.arrangement import arrange
from utils.attention.gluon.decode.plan import ALONE_BYTES, MERGE_WARPS, Case, power_of_two
from utils.attention.problem import positive_scale
from utils.newest import Newest

LOG2_E = math.log2(math.e)


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
    launches: dict[bool, Launch] | None = None,
) -> torch.Tensor:
    """Attention of the newest tokens q (B, H, Sq, D) over a cache, fp16 or bf16, on a Hopper GPU: (B, H, Sq, D).

    The last query of a sequence is at its last key. The arguments are checked by `utils.attention.decode`.

    Args:
        q: queries, at most `plan.MOST_QUERIES` a sequence.
        k: keys (B, Hkv, S, D), or pages (P, Hkv, page, D) with a block table.
        v: values, of the same shape.
        causal: whether a query sees keys up to its own position only.
        scale: factor of the scores, 1/sqrt(D) by default.
        window: a query sees keys that are fewer positions away than this; None: all.
        seqlens: keys of each sequence, the new ones included, (B,) int32; None: S.
        block_table: pages of each sequence in order, (B, pages) int32; the cache is then in pages.
        kv_scales: for keys and values in float8_e4m3fn: their factors, (2, Hkv) fp32, of K and of V.
        launches: a dictionary, empty at first, which the caller keeps for calls with these shapes, strides, types and
            options: the launch is then found without looking at them again.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    if torch.compiler.is_compiling():
        return attention_decode(q, k, v, causal, scale, window or 0, seqlens, block_table, kv_scales)
    return _decode(q, k, v, causal, scale, window or 0, seqlens, block_table, kv_scales, launches)


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
    """`decode` as one operator, for graphs of torch.compile; window 0: none."""
    return _decode(q, k, v, causal, scale, window, seqlens, block_table, kv_scales)


@attention_decode.register_fake
def _attention_decode_fake(q, k, v, causal, scale, window, seqlens, block_table, kv_scales):
    return torch.empty_like(q, memory_format=torch.contiguous_format)


def _decode(q, k, v, causal, scale, window, seqlens, block_table, kv_scales, launches=None) -> torch.Tensor:
    if q.is_cuda and torch._C._cuda_getDevice() != q.get_device():
        # Kernels are loaded on the current device, and launched there.
        with torch.cuda.device(q.device):
            return _decode(q, k, v, causal, scale, window, seqlens, block_table, kv_scales, launches)
    if scale <= 0:
        q, scale = positive_scale(q, scale)  # the kernel takes the maximum before it scales
        launches = None  # they are for the queries that were given, and these may have other strides
    # A captured graph may be replayed on any stream, beside another: it shares no counters, and merges by a launch or in clusters.
    captured = torch.cuda.is_current_stream_capturing()
    launch = None if launches is None else launches.get(captured)
    if launch is None:
        if not q.numel():  # no new token
            return torch.empty(q.shape, dtype=q.dtype, device=q.device)
        launch = _find_launch(q, k, v, causal, window, seqlens is not None, block_table, captured)
        if launches is not None:
            launches[captured] = launch
    if launch.copies or (q.data_ptr() | k.data_ptr() | v.data_ptr()) % 16:
        q, k, v = addressable(q), addressable(k), addressable(v)
        return _decode(q, k, v, causal, scale, window, seqlens, block_table, kv_scales)
    return launch(q, k, v, scale, seqlens, block_table, kv_scales)


def _find_launch(q, k, v, causal, window, lengths: bool, block_table, captured: bool) -> Launch:
    """Return the launch for tensors of these shapes, strides and types, made now if there is none."""
    table = None if block_table is None else (block_table.shape, block_table.stride())
    strides = q.stride(), k.stride(), v.stride()
    key = q.shape, k.shape, strides, table, q.dtype, k.dtype, q.device, causal, window, lengths, captured
    launch = _LAUNCHES.get(key)
    if launch is None:
        fp8 = k.dtype == torch.float8_e4m3fn
        launch = Launch(q, k, v, causal, window, lengths, block_table, fp8=fp8, stateless=captured)
        _LAUNCHES[key] = launch
    return launch


_LAUNCHES: Newest[tuple, Launch] = Newest(512)
_COUNTERS: dict[tuple, torch.Tensor] = {}


class Map:
    """What Triton's launcher reads of a TMA descriptor: a tensor, its shape and its strides.

    Triton's own class checks its arguments each time it is made, which takes longer than the rest of a call.
    """

    __slots__ = ("base", "shape", "strides")
    padding = "zero"
    round_f32_to_tf32 = False

    def __init__(self, base, shape, strides):
        self.base, self.shape, self.strides = base, shape, strides


class Launch:
    """Decode for tensors of given shapes and strides: plan, arguments, and after the first call the compiled kernel.

    choices: `arrangement.arrange`'s last arguments, which overrule what it finds best, for measurements and the simulator.
    """

    def __init__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        causal: bool,
        window: int,
        lengths: bool,
        block_table: torch.Tensor | None,
        fp8: bool = False,
        **choices,
    ):
        batch, _, sq, head_dim = q.shape
        kv_heads, rows = k.shape[1:3]
        group = q.shape[1] // kv_heads
        paged = block_table is not None
        page = rows if paged else 0
        keys = rows if block_table is None else rows * block_table.shape[1]
        # No query is farther from a key than this; the kernel adds a window to positions, in 32 bits.
        window = min(window, keys + sq)
        # A plain tuple: torch.empty takes more than a microsecond longer to read a torch.Size.
        self.shape, self.dtype, self.device = tuple(q.shape), q.dtype, q.device
        if fp8 and q.dtype == torch.float16:
            choices.setdefault("fp16", False)  # the products are in fp16 anyway
        found = arrange(
            batch,
            kv_heads,
            group,
            sq,
            keys,
            head_dim,
            torch.cuda.get_device_properties(q.device).multi_processor_count if q.is_cuda else 1,
            window=window,
            page=page or None,
            lengths=lengths,
            fp8=fp8,
            **choices,
        )
        self.plan = plan = found.plan
        self.programs, self.hint = found.programs, found.hint
        # Triton's launcher multiplies the grid's first dimension by the size of a cluster; the simulator has no clusters.
        clusters = kv_heads >> plan.base
        self.grid = (clusters * (1 if plan.merge == "cluster" else plan.cluster), batch, found.tiles)
        self.grid = self.grid if plan.cluster else (found.programs, 1, 1)
        self.adapted = q.is_cuda and (self.hint or plan.merge == "cluster")  # between Triton's compiler and the launch
        in_memory = plan.merge != "cluster"  # parts of heads that are merged
        self.counters = 2 * found.heads if in_memory and plan.merge != "second" else 0
        holds = power_of_two(batch) if lengths else 1
        self.case = Case(causal and sq > 1, window > 0, lengths, holds, page, found.aligned, lengths or paged)
        pages, stride = (0, 0) if block_table is None else (block_table.shape[1], block_table.stride(0))
        self.sizes = (stride, batch, kv_heads, group, sq, rows, window, found.tiles, pages, head_dim)
        self.parts = 2 * self.programs * plan.columns * (plan.block_d + 2) if in_memory and not found.aligned else 0
        self.merge_grid = found.heads, found.merge_pieces, 1
        self.constants = plan, self.case
        self.merge_arguments = self.programs, found.merge_plan, self.case
        self.unused_parts, self.unused_integers = unused(q.device), unused(q.device, torch.int32)
        self.copies = not all(map(strides_fit, (q, k, v)))
        self.fp8 = fp8
        q_shape = [batch, kv_heads, group, sq, head_dim]
        q_strides = [q.stride(0), q.stride(1) * group, q.stride(1), q.stride(2)]
        self.q_map = q_shape, _tma_strides(q_shape, q_strides)
        self.k_map = list(k.shape), _tma_strides(k.shape, k.stride(), 16 // k.element_size())
        self.v_map = list(v.shape), _tma_strides(v.shape, v.stride(), 16 // v.element_size())
        out_strides = [sq * head_dim * n for n in (group * kv_heads, group, 1)] + [head_dim]
        self.o_map = q_shape, _tma_strides(q_shape, out_strides)
        self.kept = None
        if plan.where:
            self.kept = torch.zeros(
                3 * self.grid[0] * self.grid[1] * plan.cluster, dtype=torch.float32, device=q.device
            )
        self.compiled: list[tuple] = []
        self._runtime: Any = None  # Triton's settings, from the first launch on

    def __call__(self, q, k, v, scale: float, seqlens, block_table, scales=None) -> torch.Tensor:
        """Attention of tensors like those it was made for; scales: (2, Hkv) fp32, of K and of V, for an fp8 cache."""
        device = self.device
        out = torch.empty(self.shape, dtype=self.dtype, device=device)
        parts = torch.empty(self.parts, dtype=torch.float32, device=device) if self.parts else self.unused_parts
        stream = torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else 0
        counters = self.counters_for(stream) if self.counters else self.unused_integers
        lens = self.unused_integers if seqlens is None else seqlens
        table = self.unused_integers if block_table is None else block_table
        c = scale * LOG2_E
        if not self.compiled or (not self.adapted and self._is_watched()):
            self._launch_by_triton(q, k, v, out, parts, counters, (lens, table, *self.sizes, c), scales)
            if not self.adapted:
                return out
        maps: list[Map | None] = [Map(q, *self.q_map), Map(k, *self.k_map), Map(v, *self.v_map)]
        if self.plan.ahead or self.plan.by_tma:
            maps.append(Map(out, *self.o_map))
        elif self.plan.consumers and not self.plan.cluster and not self.fp8:
            maps.append(None)
        # Addresses as numbers: of a tensor Triton's launcher asks the driver whose memory that is.
        parts = parts if self.kept is None else self.kept
        addresses = out.data_ptr(), parts.data_ptr(), counters.data_ptr(), lens.data_ptr(), table.data_ptr()
        start, function, metadata = self.compiled[0]
        rest = *addresses, *self.sizes, c
        own = (scales.data_ptr(), *self.constants) if self.fp8 else self.constants
        start(*self.grid, stream, function, metadata, None, None, None, *maps, *rest, *own)
        if self.parts and not self.counters:
            start, function, metadata = self.compiled[1]
            start(*self.merge_grid, stream, function, metadata, None, None, None, *rest, *self.merge_arguments)
        return out

    def _is_watched(self) -> bool:
        """Whether somebody, such as Triton's own profiler, wants to be told of launches: then Triton launches."""
        hook = self._runtime.launch_enter_hook
        return bool(getattr(hook, "calls", hook))  # a chain of hooks, or one or None

    def counters_for(self, stream: int) -> torch.Tensor:
        """Counters, all zero, of a stream: its kernels run one after another and each leaves them at zero.

        A captured graph may be replayed on any stream, beside another, so it gets counters of its own.
        """
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return torch.zeros(self.counters, dtype=torch.int32, device=self.device)
        kept = _COUNTERS.get((self.device, stream))
        if kept is None or kept.numel() < self.counters:
            kept = torch.zeros(max(self.counters, 1024), dtype=torch.int32, device=self.device)
            _COUNTERS[self.device, stream] = kept
        return kept

    def _launch_by_triton(self, q, k, v, out, parts, counters, sizes: tuple, scales) -> None:
        """Compile the kernels if need be, and launch them if they are to run as they are: the first call."""
        from triton import knobs
        from triton.experimental.gluon import language as gl
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        from utils.attention.gluon.decode.cluster import attention_decode_cluster
        from utils.attention.gluon.decode.kernel import attention_decode, attention_decode_merge
        from utils.attention.gluon.decode.quantized import attention_decode_fp8
        from utils.attention.gluon.decode.quantized_keys import attention_decode_fp8_keys
        from utils.attention.gluon.decode.rows import attention_decode_rows
        from utils.attention.gluon.decode.rows_ahead import attention_decode_rows_ahead

        def descriptor(x, map_, box):
            bits = 8 * x.element_size()
            swizzle = min(box[-1] * bits // 8, 128)
            x = x.view(torch.uint8) if self.fp8 and bits == 8 else x
            return TensorDescriptor(x, *map_, box, gl.NVMMASharedLayout(swizzle, bits, rank=len(box)))

        self._runtime = knobs.runtime
        plan = self.plan
        cache_box = [1, 1, plan.box, plan.block_d]
        descriptors = [
            descriptor(q, self.q_map, [1, 1, plan.heads, plan.queries, plan.block_d]),
            descriptor(k, self.k_map, cache_box),
            descriptor(v, self.v_map, cache_box),
        ]
        if plan.ahead or plan.by_tma:  # each consumer stores its 64 rows
            descriptors.append(descriptor(out, self.o_map, plan.output_box))
        elif plan.consumers and not plan.cluster and not self.fp8:
            descriptors.append(None)

        def run(kernel, grid: tuple, *arguments, **options):
            return (
                kernel.warmup(*arguments, grid=grid, **options) if self.adapted else kernel[grid](*arguments, **options)
            )

        constants = {"PLAN": plan, "CASE": self.case}
        options = plan.options | ({"launch_cooperative_grid": True} if plan.merge == "together" else {})
        kernel = attention_decode_rows if plan.consumers else attention_decode
        if plan.ahead:
            kernel = attention_decode_rows_ahead
        if plan.cluster:
            kernel = attention_decode_cluster
        rest = (out, parts, counters, *sizes)
        if self.fp8:
            kernel = attention_decode_fp8 if plan.consumers else attention_decode_fp8_keys
            kernels = [run(kernel, self.grid, *descriptors, *rest, scales, **constants, **options)]
        else:
            kernels = [run(kernel, self.grid, *descriptors, *rest, **constants, **options)]
        if self.parts and not self.counters:
            options = {"num_warps": MERGE_WARPS, "launch_pdl": plan.early}
            programs, merge_plan, case = self.merge_arguments
            arguments = out, parts, counters, *sizes, programs
            constants = {"PLAN": merge_plan, "CASE": case}
            kernels.append(run(attention_decode_merge, self.merge_grid, *arguments, **constants, **options))
        if hasattr(kernels[0], "run"):  # not in the simulator
            first = self._adapt(kernels[0]) if self.adapted else kernels[0]
            second = [(kernel.run, kernel.function, kernel.packed_metadata) for kernel in kernels[1:]]
            self.compiled = [(first.run, first.function, self._metadata(first)), *second]

    def _adapt(self, compiled):
        """Return a copy of the first kernel, not yet loaded, with the hint to the L2 and with the inbox of a cluster.

        It is kept with the kernel, and launches for other lengths of the cache share it: Triton never unloads what it has
        loaded, and a cache that grows by a token at each call has a launch for each.
        """
        from utils.kernels.assembling import not_loaded
        from utils.kernels.l2_hint import with_l2_hint

        twins = vars(compiled).setdefault("decode_twins", {})  # the plan is the kernel's own, the hint is not
        twin = twins.get(self.hint)
        if twin is None:
            twin = with_l2_hint(compiled) if self.hint else not_loaded(compiled)
            if self.plan.merge == "cluster":
                alone = ALONE_BYTES if self.plan.per_sm == 1 else 0
                shared = max(-(-compiled.metadata.shared // 16) * 16 + self.plan.inbox_space, alone)
                twin.metadata = compiled.metadata._replace(shared=shared)
            twins[self.hint] = twin
        return twin

    def _metadata(self, compiled) -> tuple:
        """What Triton's launcher asks of a kernel: warps, blocks of a cluster, bytes of shared memory.

        Triton compiles one program, which knows of the others by what it sends them; only its launcher makes clusters.
        """
        clusters = self.plan.merge == "cluster"
        metadata = compiled.metadata
        return (metadata.num_warps, self.plan.cluster, metadata.shared) if clusters else compiled.packed_metadata


def _tma_strides(shape, strides, fitting: int = 8) -> list[int]:
    """Strides for a descriptor: dimensions of size one may have any, and TMA wants multiples of 16 bytes (fitting)."""
    pairs = zip(shape[:-1], strides, strict=False)
    return [stride if size > 1 else fitting for size, stride in pairs] + [1]
