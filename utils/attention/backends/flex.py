"""FlexAttention: mask and score modifier are Python functions, inductor writes the kernel.

| backend | runs as |
|---|---|
| flex_eager | Python: it stores all scores and evaluates the mask for every pair |
| flex | one fused kernel from inductor (Triton on a GPU, C++ on a CPU) |
| flex_flash | the same with BACKEND=FLASH: the functions go into FlashAttention 4's CuTe kernel |

Two of the Triton kernel's options are claims about the mask. This file uses them only after it has counted the mask's
blocks and found the claims true.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable

import torch

from utils.attention.backends.plain import reason_against_compiling
from utils.attention.masks.blocks import BlockSize, block_sizes, build_timed, count_blocks
from utils.attention.masks.mask_mods import MaskMod, captures, different_masks, row_chunks
from utils.attention.prepared import compile_attend, own_copy
from utils.attention.problem import Attend, Backend, Bound, Options, Problem, Refused
from utils.machine.device import Support, compile_support, compute_capability, flash_attn_support
from utils.machine.versions import keep_captured_floats_constant

SMALLEST_TILE, DEFAULT_TILE = 16, 128  # tiles of the Triton kernel, in queries and in keys
# Triton's tile on Hopper in 16 bit, at head dimensions 64 and 128, measured on an H200. With 64 x 64 and 4 warps, several tiles
# fit on a multiprocessor, so that a tile can start or end while another tile is in its loop. Inductor's own choice is 4 to 15%
# slower.
HOPPER_TILE = {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 4, "num_stages": 3}


# ---- kernel options ----------------------------------------------------------------------------------------


def needed_kernel_options(block_size: tuple[int, int], lengths: tuple[int, int] = (0, 0)) -> dict:
    """Return the options that FlexAttention's Triton kernel needs for right results with blocks of this size.

    Tiles must divide the blocks, so the options name the tile if inductor's own, 128, does not. Inductor also leaves out the
    check of the sequence's end if the lengths are multiples of 128. If they are no multiples of the block size, the last
    block reaches beyond the last key, and the kernel would attend to the memory after it.
    """
    options: dict = {}
    if any(size % DEFAULT_TILE for size in block_size):
        options = {f"BLOCK_{x}": min(size & -size, DEFAULT_TILE) for x, size in zip("MN", block_size, strict=True)}
    overhang = any(length % size for length, size in zip(lengths, block_size, strict=True))
    return options | {"IS_DIVISIBLE": False} if overhang else options


def triton_options(problem: Problem, block_size: BlockSize = 128) -> dict:
    """Return options of FlexAttention's Triton kernel: the measured tile, and the proved claims about the mask."""
    if problem.device.type != "cuda":
        return {}
    blocks, on_hopper = block_sizes(block_size), compute_capability() == (9, 0)
    divided = not (blocks[0] % HOPPER_TILE["BLOCK_M"] or blocks[1] % HOPPER_TILE["BLOCK_N"])
    measured = on_hopper and problem.dtype.itemsize == 2 and problem.head_dim in (64, 128)
    tile = HOPPER_TILE if measured and divided else {}
    # If inductor chooses the tile, the claims must hold for its smallest tile.
    least_keys = tile.get("BLOCK_N", SMALLEST_TILE)
    mask, device = problem.mask_function(), str(problem.device)
    if different_masks(mask, problem.batch, problem.heads, device) != (1, 1):
        return tile  # the claims would have to be counted for each sequence and head
    return tile | proved_options(mask, problem.sq, problem.sk, device, blocks, least_keys, captures(mask))


@functools.lru_cache(maxsize=64)
def proved_options(
    mask_mod: MaskMod | None,
    sq: int,
    sk: int,
    device: str,
    block_size: tuple[int, int],
    tile_keys: int,
    read: tuple = (),
) -> dict:
    """Return the claims about a mask that a count proves for tiles of `tile_keys` keys; read: `captures(mask_mod)`, for the cache.

    ROWS_GUARANTEED_SAFE: each query sees a key of the first tile that the kernel visits. FlexAttention's documentation asks
    for a key in any tile, but that is not enough: after the first tile the running maximum would still be minus infinity, and
    its difference with itself is NaN. BLOCKS_ARE_CONTIGUOUS: no row of blocks has a gap.
    """
    if mask_mod is None:
        return {"ROWS_GUARANTEED_SAFE": True}
    blocks = count_blocks(mask_mod, sq, sk, device, block_size)
    options = {}
    # The kernel visits partial blocks first and then full blocks, each from the left.
    first = torch.where(blocks.partial.any(1), blocks.partial.int().argmax(1), blocks.full.int().argmax(1))
    keys = first.repeat_interleave(block_size[0])[:sq, None] * block_size[1] + torch.arange(tile_keys, device=device)

    def safe(start: int, rows: torch.Tensor) -> bool:
        visited = keys[start : start + len(rows)]
        return bool((rows.gather(1, visited.clamp(max=sk - 1)) & (visited < sk)).any(1).all())

    if all(safe(start, rows) for start, rows in row_chunks(mask_mod, sq, sk, device)):
        options["ROWS_GUARANTEED_SAFE"] = True
    if _without_gaps(blocks.partial) and _without_gaps(blocks.full):
        options["BLOCKS_ARE_CONTIGUOUS"] = True
    return options


def _without_gaps(blocks: torch.Tensor) -> bool:
    """Whether in every row all True cells are neighbours."""
    starts = blocks & ~torch.nn.functional.pad(blocks, (1, 0))[:, :-1]
    return bool((starts.sum(1) <= 1).all())


# ---- which problems the backends accept --------------------------------------------------------------------


def _refuses_eager(problem: Problem, options: Options) -> str:
    try:
        importlib.import_module("torch.nn.attention.flex_attention")
    except ImportError:
        return f"it needs FlexAttention, which torch {torch.__version__} does not have."
    if problem.needs_autograd and problem.device.type == "cpu":
        return "it has no backward pass on a CPU, and an input requires a gradient."
    transform = torch._C._functorch.peek_interpreter_stack()
    if transform is not None and transform.key().name in ("Vmap", "Jvp"):
        return f"torch does not run it under {transform.key().name.lower()}."
    if not problem.sq:
        return "it takes one query at least: compiled for a CPU, it ends the process without."
    if problem.type_name not in ("float16", "bfloat16", "float32"):
        return f"it takes float16, bfloat16 and float32, not {problem.type_name}."
    return ""


def _refuses_compiled(problem: Problem, options: Options) -> str:
    if reason := _refuses_eager(problem, options) or reason_against_compiling(problem, options):
        return reason
    if problem.with_lse and problem.device.type == "cpu":
        return "torch compiles it on a CPU without the log-sum-exp."
    if problem.has_empty_rows:
        return f"rows without keys are not tested with it (Sq {problem.sq} > Sk {problem.sk})."
    on_gpu = problem.device.type == "cuda"
    shortest = 16 if on_gpu else 8
    if not shortest <= problem.head_dim <= 256:
        return f"its head dimension is {shortest} to 256 here, and {problem.head_dim} was given."
    largest_tile = min(size & -size for size in options.blocks)  # the largest power of two that divides the blocks
    if on_gpu and problem.mask_function() is not None and largest_tile < SMALLEST_TILE:
        sizes = " x ".join(map(str, options.blocks))
        return f"it takes blocks of {SMALLEST_TILE} tokens or a multiple, and the block size is {sizes}."
    return ""


def refuses_flash(problem: Problem, options: Options) -> str:
    """Return why FlashAttention 4's kernel cannot do this problem through FlexAttention; "" if it can."""
    if problem.needs_autograd:
        return "it is used forward only under functions, and an input requires a gradient."
    if problem.mask_function() is not None and problem.head_dim > 128:
        return (
            "with a block mask its head dimension ends at 128 (beyond that its key tile, 80, does not divide the "
            f"blocks), and {problem.head_dim} was given."
        )
    if problem.mask_function() is not None and (options.blocks[1] != 128 or options.blocks[0] % 64):
        sizes = " x ".join(map(str, options.blocks))
        return f"it takes blocks of 128 keys and a multiple of 64 queries, and the block size is {sizes}."
    return compile_support().reason if not compile_support() else _refuses_compiled(problem, options)


# ---- binding -----------------------------------------------------------------------------------------------


def _flex_call(problem: Problem, blocks, options: dict | None) -> Attend:
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    keep_captured_floats_constant()
    more = {"return_aux": AuxRequest(lse=True)} if problem.with_lse else {}
    given, scale, grouped, on_cpu = problem.score_mod, problem.scale, problem.grouped, problem.device.type == "cpu"

    def in_fp32(score, b, h, q, k):
        return given(score, b, h, q, k).float()  # code for a CPU reads scores of any type as fp32

    mod = in_fp32 if on_cpu and given is not None else given

    def attend(q, k, v):
        # Compiled code takes a stride of zero in the last dimension for one, and reads behind the tensor.
        q, k, v = (x if x.stride(-1) else x.contiguous() for x in (q, k, v))
        q, k, v = (x.detach() for x in (q, k, v)) if on_cpu else (q, k, v)  # a CPU refuses gradients even under no_grad
        result = flex_attention(
            q, k, v, score_mod=mod, block_mask=blocks, scale=scale, enable_gqa=grouped, kernel_options=options, **more
        )
        return (result[0], result[1].lse) if more else result

    return own_copy(attend)


def _blocks(problem: Problem, options: Options) -> Bound:
    """Return the first form of a binding: an eager call with its block mask, settings, and seconds for the block mask."""
    mask = problem.mask_function()
    heads = problem.batch, problem.heads
    block_mask, seconds = build_timed(mask, problem.sq, problem.sk, problem.device, options.blocks, *heads)
    settings = {"block_size": options.blocks if mask is not None else None}
    return Bound(_flex_call(problem, block_mask, None), settings, {"block_mask": seconds}, block_mask=block_mask)


def _bind_compiled(problem: Problem, options: Options) -> Bound:
    kernel_options = {}
    if problem.device.type == "cuda" and problem.mask_function() is not None:
        kernel_options = needed_kernel_options(options.blocks, (problem.sq, problem.sk))
    if options.tuned:
        kernel_options |= triton_options(problem, options.blocks)
    given = options.kernel_options or {}
    return _compiled(problem, options, fewer_stages(kernel_options | given, given))


def bind_flash(problem: Problem, options: Options) -> Bound:
    """Bind FlexAttention with BACKEND=FLASH. It may refuse at the first call."""
    bound = _compiled(problem, options, [{"BACKEND": "FLASH"} | (options.kernel_options or {})])
    compile_and_call = bound.first

    def first(q, k, v):
        try:
            return compile_and_call(q, k, v)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # FlashAttention 4 refuses a problem during the compilation of its kernel
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            reason = lines[0] if lines else type(error).__name__
            raise Refused(f"FlexAttention's FLASH backend refused it ({reason[:300]}).") from error

    bound.first = first
    return bound


def fewer_stages(kernel_options: dict, given: dict) -> list[dict]:
    """Return the kernel options to try in turn: these options, then fewer stages, unless the caller has given the stages.

    Tensors that a mask or a modifier reads go through the pipeline, too. Inductor does not count them when it chooses the
    stages, so the kernel may need too much shared memory.
    """
    fewer = [n for n in (2, 1) if n < kernel_options.get("num_stages", 3) and "num_stages" not in given]
    return [kernel_options, *(kernel_options | {"num_stages": n} for n in fewer)]


def first_that_fits(attempts: list[dict], use: Callable[[dict], torch.Tensor]) -> torch.Tensor:
    """Return use(options) for the first options with a kernel that fits into shared memory."""
    errors = []
    for options in attempts:
        try:
            return use(options)
        except RuntimeError as error:
            if "out of resource" not in str(error):
                raise
            errors.append(error)
    raise errors[0]


def _compiled(problem: Problem, options: Options, attempts: list[dict]) -> Bound:
    """Bind FlexAttention under torch.compile; its first call takes the first of these kernel options that fit."""
    bound = _blocks(problem, options)
    bound.settings["mode"] = mode = options.mode or "default"

    def compile_with(kernel_options: dict) -> Attend:
        bound.source = _flex_call(problem, bound.block_mask, kernel_options or None)
        bound.call = compile_attend(bound.source, mode)
        bound.settings["kernel_options"] = kernel_options
        return bound.call

    def first(q, k, v):
        return first_that_fits(attempts, lambda kernel_options: compile_with(kernel_options)(q, k, v))

    compile_with(attempts[0])
    bound.first = first
    return bound


BACKENDS = {
    "flex_eager": Backend(
        name="flex_eager",
        summary="FlexAttention as Python: all scores stored",
        machine=lambda: Support(True, "Part of torch, on every device."),
        refuses=_refuses_eager,
        bind=_blocks,
        kernels=r"(?i)softmax|gem[mv]|nvjet",
        cpu_operators=r"FlexAttention",
        implementation=lambda: f"FlexAttention of torch {torch.__version__}, eager",
        options=("block_size",),
        returns_lse=True,
        takes_v_dim=True,
    ),
    "flex": Backend(
        name="flex",
        summary="FlexAttention compiled by inductor",
        returns_lse=True,
        takes_v_dim=True,
        machine=compile_support,
        refuses=_refuses_compiled,
        bind=_bind_compiled,
        kernels=r"triton_tem_fused|flex",
        cpu_operators=r"(?i)torch-compiled region|flex|cpp_fused",
        implementation=lambda: f"FlexAttention of torch {torch.__version__}, compiled",
        options=("block_size", "mode", "kernel_options"),
        compiles=True,
    ),
    "flex_flash": Backend(
        name="flex_flash",
        summary="FlexAttention with BACKEND=FLASH: FlashAttention 4's kernel with the mask inside",
        machine=lambda: flash_attn_support(4) and compile_support(),
        refuses=refuses_flash,
        bind=bind_flash,
        largest_head=256,
        kernels=r"(?i)flash_?attention|flash_fwd|flash_attncute",
        implementation=lambda: f"FlexAttention of torch {torch.__version__}, FLASH backend",
        options=("block_size", "mode", "kernel_options"),
        compiles=True,
    ),
}
