"""What Triton 3.6 has no word for, written into the PTX of the GEMM's kernels before it is assembled.

**Clusters.** Two blocks whose tiles lie below each other read the same columns of B, two abreast the same rows of A. As a thread
block cluster they start together, and TMA can bring what it reads once to the shared memory of both ("multicast"). So each
fetches half of the shared tile, and the L2 sends it once:

    block 0    A0, first half of B  -> A0 here, B to both           one step: 128 rows of A and 256 columns of B are
    block 1    A1, second half of B -> A1 here, B to both           32 KB from the L2 for a block in place of 48 KB

    barrier of a slot    who completes it
    full                 the bytes: those that this block has asked for, and those that the others send
    empty                the consumers of all blocks: a piece that is sent too early would overwrite what another block still
                         reads. So consumers count on the barriers of all blocks.

Of four blocks below each other each fetches a quarter. Lanes of one warp arrive at the barriers of all blocks, in one instruction.
Triton compiles one block, whose shared copies stand between two marks. `multicast` writes the word into the copies between them
and makes arrivals count in the cluster; the launch makes the clusters (`handle.Handle`).

**Descriptors** are fetched before a launch that begins early waits for the one before it.

**Barriers** of all warps that protect nothing are taken out.
"""

from __future__ import annotations

import functools
import re
from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from utils.kernels.assembling import reassembled
from utils.kernels.gemm_plan import Plan

SHARED, OWN = "for all blocks of the cluster", "for this block"
MARK_SHARED, MARK_OWN = (gl.constexpr(f"mov.u32 $0, 0; // {mark}") for mark in (SHARED, OWN))
SHOW = gl.constexpr("fence.mbarrier_init.release.cluster; mov.u32 $0, 0;")
JOIN = gl.constexpr("barrier.cluster.arrive.relaxed; barrier.cluster.wait.acquire; mov.u32 $0, 0;")

_COPY = re.compile(
    r"(cp\.async\.bulk\.tensor\.\dd\.shared::)(?:cta|cluster)(\.global\.mbarrier::complete_tx::bytes)( \[[^;]*\]);"
)
_ARRIVAL = re.compile(r"(@%\w+ )?mbarrier\.arrive\.shared(?:::cta)?\.b64 _, \[(%\w+)\];")


@gluon.jit
def rank(CLUSTER: gl.constexpr):
    """This block's number in its cluster."""
    return gl.program_id(0) % CLUSTER


@gluon.jit
def for_all_blocks():
    """Mark the copies that follow: they go to all blocks of the cluster."""
    gl.inline_asm_elementwise(MARK_SHARED, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def for_this_block():
    """Mark the copies that follow: they go to this block, as all do without a mark."""
    gl.inline_asm_elementwise(MARK_OWN, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def let_cluster_see_barriers(PLAN: gl.constexpr):
    """Make the barriers that were set up visible to the other blocks, before this one joins."""
    if PLAN.clustered:
        gl.inline_asm_elementwise(SHOW, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def join_cluster(PLAN: gl.constexpr):
    """Wait until all blocks have set up their barriers: a copy or an arrival could come before they are there.

    All warps of all blocks have to come, those without a role too.
    """
    if PLAN.clustered:
        gl.inline_asm_elementwise(JOIN, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


def multicast(ptx: str, plan: Plan) -> tuple[str, int, int]:
    """Make the marked copies go to all blocks, and arrivals count in all; return the PTX, and how many arrivals and copies."""
    lines, shared, copies = [], False, 0
    for line in ptx.splitlines():
        if "// " + SHARED in line or "// " + OWN in line:
            shared = "// " + SHARED in line
        elif shared:
            # Place and barrier are this block's: those of the others are as far from the beginning of their memory.
            line, found = _COPY.subn(r"\1cluster\2.multicast::cluster\3, all;", line)
            if found:
                line = f"{{ .reg .b16 all; mov.b16 all, {(1 << plan.cluster) - 1}; {line.strip()} }}"
            copies += found
        lines.append(line)
    arrive = functools.partial(_arrive_in_all, blocks=plan.cluster)
    return *_ARRIVAL.subn(arrive, "\n".join(lines) + "\n"), copies


def _arrive_in_all(found: re.Match, blocks: int) -> str:
    # One thread of the four warps would arrive. Its warp does so instead, each lane at a block of its own, in one instruction.
    # The plain form, as within a block: with `.release.cluster` ptxas puts a fence of the whole GPU before each arrival, which
    # takes over a microsecond. There is nothing to release: threads have stored nothing, and their reads are over.
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


def adapted(compiled: Any, plan: Plan) -> Any:
    """Return a copy of a kernel that Triton compiled, with what Triton has no word for; not yet loaded when it is made."""
    # Triton keeps a compiled kernel for each device, and so is this kept with it.
    twin = compiled.__dict__.get("adapted_twin")
    if twin is None:
        ptx = compiled.asm["ptx"]
        if plan.clustered:
            ptx, arrivals, copies = multicast(ptx, plan)
            if not arrivals or not copies:
                raise ValueError(f"{compiled.name} has {copies} shared copies and {arrivals} arrivals: no cluster.")
        ptx = prefetch_descriptors(fewer_barriers(ptx)[0])
        twin = compiled.__dict__["adapted_twin"] = reassembled(compiled, ptx)
    return twin
