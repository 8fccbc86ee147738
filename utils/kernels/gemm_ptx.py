"""What Triton 3.6 has no word for, written into the PTX of the GEMM's kernels before it is assembled.

**Clusters** (`Config.multicast`). Two blocks whose tiles lie below each other read the same columns of B, two
abreast the same rows of A. As a thread block cluster they start together, and TMA can bring what it reads once to the
shared memory of both ("multicast"). So each fetches half of the shared tile, and the L2 sends it once:

    block 0    A0, first half of B  -> A0 here, B to both           one step: 128 rows of A and 256 columns of B are
    block 1    A1, second half of B -> A1 here, B to both           32 KB from the L2 for a block in place of 48 KB

    barrier of a slot    who completes it
    full                 the bytes: those that this block has asked for, and those that the other one sends
    empty                the consumers of both blocks: a half that is sent too early would overwrite what the other block
                         still reads. So consumers count on the barriers of both blocks.

With four or eight blocks, some of them below each other and some abreast, a piece goes to those that read the same tile
(`sharing_blocks`), and lanes of one warp arrive at the barriers of all blocks, in one instruction.

Triton compiles one block, whose shared copies stand between two marks. `multicast` writes the word into the copies between
them and adds to each arrival one on the other block's barrier; the launch makes the clusters (`handle.Handle`).

**Parts that add up in shared memory** (`Config.in_cluster`). The parts of a tile are a cluster. Each leaves its sums in its
own shared memory, and each adds up some columns of all. Triton reads its own block's memory only: a mark says which block the
loads behind it read, and `read_other_blocks` turns the addresses into those of that block (`mapa`).

**Descriptors** (`Config.prefetch`) are fetched before a launch that begins early waits for the one before it.

**Barriers** (`Config.lean`) of all warps that protect nothing are taken out.

**Products** of tiles between powers of two are one instruction in place of two, and no wider than C (`other_products`).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from utils.kernels.assembling import reassembled
from utils.kernels.gemm_config import Config
from utils.kernels.gemm_stream import stream_copies
from utils.kernels.handle import Handle

SHARED = "for all blocks that share"
OWN = "for this block"
MARK_OWN = gl.constexpr(f"mov.u32 $0, 0; // {OWN}")
SHOW = gl.constexpr("fence.mbarrier_init.release.cluster; mov.u32 $0, 0;")
JOIN = gl.constexpr("barrier.cluster.arrive.relaxed; barrier.cluster.wait.acquire; mov.u32 $0, 0;")
FROM_BLOCK, FROM_HERE = "from block", "from here"
MARK_HERE = gl.constexpr(f"mov.u32 $0, 0; // {FROM_HERE}")
MEET = gl.constexpr("barrier.cluster.arrive.release; barrier.cluster.wait.acquire; mov.u32 $0, 0;")

_LOAD = re.compile(r"(@!?%\w+ )?ld\.shared(?:::cta)?(\.[.\w]+\s+[^\[;]*)\[(%r\d+)([+-]?\d*)\];")
_COPY = re.compile(
    r"(cp\.async\.bulk\.tensor\.\dd\.shared::)(?:cta|cluster)(\.global\.mbarrier::complete_tx::bytes)( \[[^;]*\]);"
)
_ARRIVAL = re.compile(r"(@%\w+ )?mbarrier\.arrive\.shared(?:::cta)?\.b64 _, \[(%\w+)\];")


@gluon.jit
def rank(CLUSTER: gl.constexpr = 2):
    """This block's number in its cluster."""
    return gl.program_id(0) % CLUSTER


@gluon.constexpr_function
def mark_of_operand(operand):
    """Return the assembly that marks the copies that follow: they go to all blocks that share an operand."""
    return f"mov.u32 $0, 0; // {SHARED} {operand}"


@gluon.jit
def for_sharing_blocks(OPERAND: gl.constexpr):
    """Mark the copies that follow: they go to all blocks of the cluster that read the same tile of an operand, "A" or "B"."""
    mark: gl.constexpr = mark_of_operand(OPERAND)
    gl.inline_asm_elementwise(mark, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def for_this_block():
    """Mark the copies that follow: they go to this block, as all do without a mark."""
    gl.inline_asm_elementwise(MARK_OWN, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def let_cluster_see_barriers(CONFIG: gl.constexpr):
    """Make the barriers that were set up visible to the other block, before it joins."""
    if CONFIG.on_clusters:
        gl.inline_asm_elementwise(SHOW, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def join_cluster(CONFIG: gl.constexpr):
    """Wait until both blocks have set up their barriers: a copy or an arrival could come before they are there.

    All warps of both blocks have to come, those without a role too.
    """
    if CONFIG.on_clusters:
        gl.inline_asm_elementwise(JOIN, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.constexpr_function
def mark_of_block(number):
    """Return the assembly that marks the loads that follow: they read another block's shared memory."""
    return f"mov.u32 $0, 0; // {FROM_BLOCK} {number}"


@gluon.jit
def read_block(NUMBER: gl.constexpr):
    """Mark the loads that follow: they read the shared memory of a block of the cluster. Returns 0.

    The addresses have to be made with that 0, which the compiler does not see through: it would take loads of the same
    place in all blocks for one.
    """
    mark: gl.constexpr = mark_of_block(NUMBER)
    return gl.inline_asm_elementwise(mark, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def read_this_block():
    """Mark the loads that follow: they read this block's shared memory, as all do without a mark."""
    gl.inline_asm_elementwise(MARK_HERE, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def meet_in_cluster(SHOW_SUMS: gl.constexpr = False):
    """Wait for all threads of the cluster. With SHOW_SUMS, what the calling thread has stored before can be read behind it.

    To show costs a fence, so who has stored nothing does without.
    """
    if SHOW_SUMS:
        gl.inline_asm_elementwise(MEET, "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    else:
        gl.inline_asm_elementwise(JOIN, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


def read_other_blocks(ptx: str) -> tuple[str, list[int]]:
    """Make the marked loads read the shared memory of the block that the mark names; return how many loads each mark has."""
    lines, block, counts = [], None, []
    for line in ptx.splitlines():
        if "// " + FROM_HERE in line:
            block = None
        elif "// " + FROM_BLOCK in line:
            block = int(line.rsplit(maxsplit=1)[1])
            counts.append(0)
        elif block is not None:
            # A place in this block's memory, and the place as far from the beginning of the other's.
            line, found = _LOAD.subn(
                rf"{{ .reg .b32 there; mapa.shared::cluster.u32 there, \3, {block}; \1ld.shared::cluster\2[there\4]; }}",
                line,
            )
            counts[-1] += found
        lines.append(line)
    return "\n".join(lines) + "\n", counts


def multicast(ptx: str, config: Config) -> tuple[str, int, int]:
    """Make the marked copies go to all blocks that share, and arrivals count in the cluster; return the PTX and how many of each."""
    lines, operand, copies = [], "", 0
    for line in ptx.splitlines():
        if "// " + SHARED in line or "// " + OWN in line:
            operand = line.rsplit(maxsplit=1)[1] if "// " + SHARED in line else ""
        if operand:
            # Place and barrier are this block's: those of the others are as far from the beginning of their memory.
            line, found = _COPY.subn(r"\1cluster\2.multicast::cluster\3, all;", line)
            if found:
                line = f"{{ {sharing_blocks(config, operand)} {line.strip()} }}"
            copies += found
        lines.append(line)
    arrive = _arrive_in_both if config.cluster == 2 else functools.partial(_arrive_in_all, blocks=config.cluster)
    return *_ARRIVAL.subn(arrive, "\n".join(lines) + "\n"), copies


def sharing_blocks(config: Config, operand: str) -> str:
    """Return the assembly that puts into `all` a bit for each block that reads the same tile of an operand as this one.

    Blocks of a cluster are numbered down, then to the right: below each other they share B, abreast A.
    """
    down, abreast = config.down, config.abreast
    bits, others = ((1 << down) - 1, abreast) if operand == "B" else (sum(1 << down * i for i in range(abreast)), down)
    if others == 1:  # all blocks of the cluster
        return f".reg .b16 all; mov.b16 all, {bits};"
    # Powers of two: the first block of this one's column, or this one's place in it.
    of_block = f"and.b32 first, first, {config.cluster - down if operand == 'B' else down - 1};"
    return (
        f".reg .b16 all; .reg .b32 first, bits; mov.u32 first, %cluster_ctarank; {of_block} "
        f"mov.b32 bits, {bits}; shl.b32 bits, bits, first; cvt.u16.u32 all, bits;"
    )


def _arrive_in_both(found: re.Match) -> str:
    # The plain form, as within a block: with `.release.cluster` ptxas puts a fence of the whole GPU before each arrival,
    # which takes over a microsecond. There is nothing to release: threads have stored nothing, and their reads are over.
    condition, barrier = found[1] or "", found[2]
    return (
        f"{found[0]} {{ .reg .b32 other, there; mov.u32 other, %cluster_ctarank; xor.b32 other, other, 1; "
        f"mapa.shared::cluster.u32 there, {barrier}, other; "
        f"{condition}mbarrier.arrive.shared::cluster.b64 _, [there]; }}"
    )


def _arrive_in_all(found: re.Match, blocks: int) -> str:
    # One thread of the four warps would arrive. Its warp does so instead, each lane at a block of its own, in one instruction.
    condition, barrier = found[1], found[2]
    if condition is None or condition.startswith("@!"):
        raise ValueError(f"An arrival of one thread has a condition that says which: {found[0]}")
    return (
        f"{{ .reg .b32 lane, there; .reg .pred arrives; vote.sync.any.pred arrives, {condition.strip()[1:]}, -1; "
        f"mov.u32 lane, %laneid; setp.lt.and.u32 arrives, lane, {blocks}, arrives; "
        f"mapa.shared::cluster.u32 there, {barrier}, lane; "
        f"@arrives mbarrier.arrive.shared::cluster.b64 _, [there]; }}"
    )


_DESCRIPTOR = re.compile(r"\.param \.align 64 \.b8 (\w+)\[128\]")
_WAIT = "griddepcontrol.wait;"


def prefetch_descriptors(ptx: str) -> str:
    """Fetch the TMA descriptors before each wait for the launch before: they are arguments, and there by then."""
    fetch = "".join(
        f"mov.b64 map, {name}; cvta.param.u64 map, map; prefetch.tensormap [map]; " for name in _DESCRIPTOR.findall(ptx)
    )
    return ptx.replace(_WAIT, f"{{ .reg .b64 map; {fetch}}} {_WAIT}")


# What stands between barriers and says what they protect; the first pattern that is found in a line names it.
_OPERATIONS = {
    "init": re.compile(r"mbarrier\.init"),
    "load": re.compile(r"mbarrier\.arrive\.expect_tx|cp\.async\.bulk\.tensor\.\dd\.shared"),
    "wait": re.compile(r"mbarrier\.try_wait"),
    "other": re.compile(
        r"mbarrier\.|cp\.async|wgmma\.|matrix\.|\b(?:ld|st|atom|red)\.(?:shared|global)|setmaxnreg|barrier\."
    ),
}
_ALL_WARPS = re.compile(r"^\s*bar\.sync\s+\d+(?:, 128)?;\s*$")


def fewer_barriers(ptx: str) -> tuple[str, int]:
    """Take out barriers of all warps that protect nothing; return the PTX and how many there were.

    Triton puts a barrier between any two operations on the same shared memory, and so between those on a slot's mbarrier,
    which order themselves:

    - One thread sets up all mbarriers. A barrier behind the last of them is enough.
    - One warp announces bytes and starts copies: its own lanes have to wait for each other, the other warps do not.
    - A wait for a phase may begin before the bytes of that phase are announced: it is not over before they have come.
    """
    lines = ptx.splitlines()
    kinds = [next((kind for kind, pattern in _OPERATIONS.items() if pattern.search(line)), None) for line in lines]
    following, behind = [""] * len(lines), ""
    for i in range(len(lines) - 1, -1, -1):
        following[i] = behind
        behind = kinds[i] or behind
    before, count = "", 0
    for i, line in enumerate(lines):
        if _ALL_WARPS.match(line):
            if (before, following[i]) == ("init", "init") or following[i] == "wait":
                lines[i], count = "", count + 1
            elif (before, following[i]) == ("load", "load"):
                lines[i], count = "bar.warp.sync -1;", count + 1
        before = kinds[i] or before
    return "\n".join(lines) + "\n", count


_PRODUCT = re.compile(r"(\s*wgmma\.mma_async\.sync\.aligned\.m64n)(\d+)(k\d+[.\w]*) \{([^}]*)\}(.*)")


def other_products(ptx: str, config: Config) -> str:
    """Change the products of a step: both parts of the columns in one instruction, or fewer columns than the tile has."""
    if config.join:
        ptx = join_products(ptx, *config.columns)
    if 0 < config.width < config.block_n:
        ptx = narrow_products(ptx, config.block_n, config.width)
    return ptx


def join_products(ptx: str, first: int, second: int) -> str:
    """Make one instruction of each product with `first` columns and the one with the next `second` columns.

    Both read the same rows of A, and the columns of B follow each other in shared memory; so do the sums in registers,
    once they are named in one list. A product of 16 columns alone takes about as long as one of 48: it waits for A.
    """
    lines = ptx.splitlines()
    found = [(i, match) for i, line in enumerate(lines) if (match := _PRODUCT.match(line))]
    left, right = ([entry for entry in found if int(entry[1][2]) == columns] for columns in (first, second))
    if not left or len(left) + len(right) != len(found) or len(left) != len(right):
        raise ValueError(f"There are {len(left)} products of {first} columns and {len(right)} of {second}: no pairs.")
    for (i, one), (j, other) in zip(left, right, strict=True):
        sums = {x.strip() for x in other[4].split(",")}
        between = [line for line in lines[i + 1 : j] if not _PRODUCT.match(line)]
        if not i < j or any(sums & set(re.findall(r"%\w+", line)) for line in between):
            raise ValueError(f"Between the products of lines {i} and {j} something else uses the second one's sums.")
        lines[i] = f"{one[1]}{first + second}{one[3]} {{{one[4]},{other[4]}}}{one[5]}"
        lines[j] = ""
        for k in range(j, i, -1):  # the second product has no group of its own any more, and needs no fence
            if "wgmma.fence" in lines[k] or "wgmma.commit_group" in lines[k]:
                lines[k] = ""
    text, groups = "\n".join(lines) + "\n", len(re.findall(r"wgmma\.commit_group", ptx))
    text, waits = re.subn(r"(wgmma\.wait_group\.sync\.aligned) 2;", r"\1 1;", text)
    if 2 * waits != groups or len(re.findall(r"wgmma\.commit_group", text)) != waits:
        raise ValueError(
            f"{groups} groups of products and {waits} waits for all but two: not the loop that was expected."
        )
    return text


def narrow_products(ptx: str, columns: int, width: int) -> str:
    """Make products of `columns` columns ones of their first `width`: the sums of the others stay zero, and C has no such columns."""

    def narrow(found: re.Match) -> str:
        sums = found[4].split(",")[: width // 2]
        return f"{found[1]}{width}{found[3]} {{{','.join(sums)}}}{found[5]}"

    widths = {int(found[2]) for found in _PRODUCT.finditer(ptx)}
    if widths != {columns}:
        raise ValueError(f"There are products of {sorted(widths)} columns, not of {columns} only.")
    return _PRODUCT.sub(narrow, ptx)


def adapted(compiled: Any, config: Config) -> Any:
    """Return a copy of a kernel that Triton compiled, with what Triton has no word for; not yet loaded when it is made."""
    # Triton keeps a compiled kernel for each device, and so are these kept with it: one for each width of C.
    twins = compiled.__dict__.setdefault("adapted_twins", {})
    twin = twins.get(config.width)
    if twin is None:
        ptx = compiled.asm["ptx"]
        if config.in_cluster:
            ptx, loads = read_other_blocks(ptx)
            if not loads or not all(loads) or len(loads) % config.split:
                raise ValueError(f"{compiled.name} reads other blocks' sums by {loads} loads, in {config.split} parts.")
        elif config.on_clusters:
            ptx, arrivals, copies = multicast(ptx, config)
            if not arrivals or not copies:
                raise ValueError(
                    f"{compiled.name} has {copies} copies for both blocks and {arrivals} arrivals: no cluster."
                )
        if config.stream:
            ptx, copies = stream_copies(ptx)
            if not copies:
                raise ValueError(f"{compiled.name} has no copies of {config.stream}: there is nothing to stream.")
        ptx = other_products(ptx, config)
        if config.lean:
            ptx = fewer_barriers(ptx)[0]
        if config.prefetch:
            ptx = prefetch_descriptors(ptx)
        twin = twins[config.width] = reassembled(compiled, ptx)
    return twin


def start(
    kernel: Any, blocks: int, tensors: Sequence[Any], others: Sequence[Any], config: Config, device: torch.device
) -> Handle | None:
    """Compile a kernel, rewrite it if its configuration says so, and launch it; return the launch, to be repeated.

    None in a process that only simulates kernels, where what is rewritten runs as it was compiled.
    """
    options = {"num_warps": 4, "launch_pdl": config.early}
    rewritten = config.rewritten and device.type == "cuda"
    if rewritten:
        compiled = adapted(kernel.warmup(*tensors, *others, grid=(blocks,), **options), config)
    else:
        compiled = kernel[(blocks,)](*tensors, *others, **options)
    if compiled is None or device.type != "cuda":
        return None
    cluster = config.cluster if config.on_clusters else 1
    # Triton's launcher takes the number of clusters.
    handle = Handle(compiled, (blocks // cluster,), tensors, others, device.index, cluster)
    if rewritten:
        handle(*(x.base if isinstance(x, TensorDescriptor) else x for x in tensors))
    return handle
