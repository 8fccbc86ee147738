"""How one call is computed: the rule that chooses the kernel, its tile, and who takes which share of the blocks.

Plain Python, no Triton. What was timed on an H200, and at which sizes, says docs/decode-log.md; between these sizes the rule
takes what the nearest ones take, and other GPUs get the plain way.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from utils.attention.gluon.decode.cluster_plan import FITTING_CLUSTERS, cluster_plan
from utils.attention.gluon.decode.plan import (
    KEYS_BLOCK,
    MERGE_WARPS,
    MOST_COLUMNS,
    ROWS_BLOCK,
    Plan,
    best_consumers,
    block_width,
    make_plan,
    power_of_two,
)

MERGE_PROGRAMS = 2048  # of the second launch, about
TOGETHER_BYTES = 40 << 20  # of keys and values
TWO_PRODUCERS_BYTES = 160 << 20  # of keys and values in pages, up to which a warp for each loads faster
# Keys of a block of an fp8 cache of more than TOGETHER_BYTES, head dimension TIMED_WIDTH, with up to 64 query rows as rows (entry 61).
FP8_BLOCK = 128
FP8_LARGE_COLUMNS = 32  # query rows up to which `quantized_keys.py` is faster for a cache of more than TOGETHER_BYTES
LONG_HEADS = 1024  # keys from which whole heads are shared by two programs an SM, where keys are the rows
TIMED_WIDTH = 128  # head dimension at which the choices of entry 28 were timed; others keep the plain way
FEW_BLOCKS = {64: 0, 128: 3, 256: 5}  # where a program has fewer of the latter, half as large ones are faster
# Of keys and values: where it is faster that they leave the L2 first, by up to 2 us. With 4 to 12 MB it gains 0.3 us at most, with
# 268 MB nothing, and from half a gigabyte on it is slower.
HINT_BYTES = 16 << 20, 192 << 20
# Of keys and values, from which two blocks of K and two of V on their way are faster than three (entries 46 to 50).
SHORT_RING_BYTES = 250_000_000
SHORT_RING = 4
# Heads of keys, of all sequences, and the programs of a cluster that were timed for them (entries 34 and 35).
CLUSTERS = {4: 16, 8: 8, 16: 4, 32: 2, 64: 2}
CLUSTERS_64 = {48: 2, 64: 2}  # the same for head dimension 64 and a tile of eight query rows (entry 40)
# Sequences whose lengths may differ, and keys of the longest, where each sequence has clusters of its own (entries 51 to 53); more of them
# in pages, which the other kernels read more slowly.
FEW_SEQUENCES, FEW_KEYS = 8, (2048, 16384)
MANY_SEQUENCES, MANY_KEYS = 64, (4096, 8192)
# Sequences for which such clusters are divided by the lengths, and the most in one piece (entries 57 and 58).
DIVIDED_SEQUENCES, DIVIDED_PIECES = range(5, FEW_SEQUENCES + 1), 16
MOST_HALVINGS = 3
# Keys of a sequence from which two blocks of K and two of V on their way are faster than three where clusters of two fill all SMs, and
# tokens of a page from which a program of a single sequence's clusters is faster with a run of blocks than with every eighth (entry 57).
TWO_KEYS = 4096
RUNS_PAGE = 256
CLUSTER_64_KEYS = 8192  # of a sequence, up to which those clusters are taken; two of 2048 keys were timed
WHOLE_KEYS = 512  # from which heads that are not as many as SMs have a program each (entry 40)
TIMED_SMS = 132
# A sequence that is longer than the others has more parts than where all are equal; a thread of the merge loads so many at once.
LENGTHS_PARTS = 16
PROGRAM_A_HEAD_KEYS = (
    4096  # keys as rows, from which as many programs as heads are faster than two an SM that take several
)


def aligned_split(heads: int, blocks: int, programs: int) -> bool:
    """Whether programs take whole heads, so that nothing is merged: where that costs less than the merge.

    heads: of all sequences. blocks: of each head.
    """
    rounds = -(-heads // programs)
    return rounds * programs <= 1.04 * heads or blocks == 1


def best_cluster(
    heads: int, group: int, sq: int, keys: int, head_dim: int, multiprocessors: int, lengths: bool = False
) -> int:
    """Choose the programs of a cluster, 0 for the other kernels: as timed on an H200, with heads of 128, and a few of 64.

    heads: of keys, of all sequences. Half of the SMs read as fast as all of them, if each has all of its memory for a ring;
    with many query rows, or with two programs a head, they do so only for short caches. lengths: the kernel reads them, which a
    cluster does while its first copies are under way; the other kernels begin behind that.
    """
    width, rows = block_width(head_dim), power_of_two(group) * sq
    if multiprocessors != TIMED_SMS or width > TIMED_WIDTH or rows > 64:
        return 0
    few = width == 64 and rows <= 8 and keys <= CLUSTER_64_KEYS
    parts = CLUSTERS.get(heads, 0) if width == TIMED_WIDTH else CLUSTERS_64.get(heads, 0) if few else 0
    blocks = -(-keys // KEYS_BLOCK[width])
    if blocks < parts or not parts:
        return 0
    if 2 * heads * parts <= multiprocessors:
        longest = -(-blocks // parts)  # share of a program
        if (longest > 8 and (rows > 8 or parts == 2)) or (longest > 4 and rows > 16 and not lengths):
            return 0
    return parts


def cluster_of_a_sequence(
    batch: int, kv_heads: int, group: int, sq: int, keys: int, head_dim: int, multiprocessors: int, paged: bool
) -> int:
    """Choose the programs of a cluster where each sequence has a length of its own; 0 for the other kernels.

    Each sequence has 64 programs, which read as fast as all SMs would, so that a long one among short ones is as fast as by itself;
    two of them share an SM, so that nearly all SMs work where lengths are equal.
    """
    timed = multiprocessors == TIMED_SMS and block_width(head_dim) == TIMED_WIDTH and power_of_two(group) * sq <= 8
    parts = 64 // kv_heads
    if not timed or batch < 2 or parts * kv_heads != 64 or parts not in FITTING_CLUSTERS:
        return 0
    few = batch <= FEW_SEQUENCES and FEW_KEYS[0] <= keys <= FEW_KEYS[1]
    many = batch <= (MANY_SEQUENCES if paged else DIVIDED_PIECES) and MANY_KEYS[0] <= keys <= MANY_KEYS[1]
    return parts if few or many else 0


def two_blocks(keys: int, head_dim: int) -> bool:
    """Whether two blocks of K and of V on their way are enough where clusters of two fill all SMs."""
    return keys >= TWO_KEYS and block_width(head_dim) == TIMED_WIDTH


def halvings(batch: int, kv_heads: int, cluster: int, paged: bool) -> int:
    """How often clusters of a sequence may be halved, so that heads of it share one (`divide.py`)."""
    divided = batch in DIVIDED_SEQUENCES or (not paged and FEW_SEQUENCES < batch <= DIVIDED_PIECES)
    most = MOST_HALVINGS if divided else 0
    while cluster % (1 << most) or kv_heads % (1 << most):
        most -= 1
    return most


def best_block(head_dim: int, heads: int, seen: int, multiprocessors: int) -> int:
    """Keys of a block of `rows.py`: half as many where a program has few blocks, so that its ring fills sooner.

    heads: of all sequences. seen: keys of each.
    """
    width = block_width(head_dim)
    block = ROWS_BLOCK[width]
    few = heads * seen <= FEW_BLOCKS[width] * block * multiprocessors
    return block // 2 if few else block


def two_programs(heads: int, group: int, sq: int, seen: int, head_dim: int, places: int) -> bool:
    """Whether two programs of an SM are faster than one, or than query rows as rows: where each takes whole long heads.

    heads: of all sequences. seen: keys of each. places: programs that the GPU holds then.
    """
    few = power_of_two(group) * sq <= MOST_COLUMNS and block_width(head_dim) <= 128
    return few and seen >= LONG_HEADS and aligned_split(heads, seen, places)


def whole_heads(heads: int, group: int, sq: int, keys: int, head_dim: int, bytes_: int, multiprocessors: int) -> int:
    """Choose how many programs of an SM take a head each where heads are not as many as SMs; 0: other rules decide.

    Nothing is merged, and the GPU puts the programs where there is room: two of them on one SM get twice the bytes of one
    that is alone, so all end together. heads: of all sequences; bytes_: of keys and values.
    """
    width = block_width(head_dim)
    if multiprocessors != TIMED_SMS or width > TIMED_WIDTH or power_of_two(group) * sq > 8 or keys < WHOLE_KEYS:
        return 0
    if aligned_split(heads, 2, multiprocessors):
        return 0
    if 0.7 * multiprocessors <= heads < multiprocessors:
        return 2
    more = multiprocessors < heads <= 1.5 * multiprocessors and bytes_ <= HINT_BYTES[1]
    return 0 if not more else 3 if width == TIMED_WIDTH else 2


def several_heads(head_dim: int, group: int, sq: int, consumers: int, heads: int, multiprocessors: int) -> bool:
    """Whether a multiprocessor takes two or more whole heads with query rows as rows: the next can begin before one ends.

    heads: of keys, of all sequences.
    """
    queries = min(power_of_two(sq), 64 * consumers // power_of_two(group))
    heads *= -(-sq // queries)
    whole = heads > multiprocessors and aligned_split(heads, 2, multiprocessors)
    return whole and block_width(head_dim) == TIMED_WIDTH


def shared_programs(heads: int, multiprocessors: int) -> int:
    """As many programs as share heads of equal lengths evenly, or take as many of them each; 0 if that wastes more than 5%."""
    found = range(multiprocessors, int(0.95 * multiprocessors), -1)
    return next((n for n in found if n % heads == 0 or heads % n == 0), 0)


def even_programs(heads: int, blocks: int, multiprocessors: int) -> int:
    """As many programs as share each head evenly, so that none has parts of two; 0 if that wastes more than 5%."""
    each = multiprocessors // heads
    return heads * each if heads * each >= 0.95 * multiprocessors and blocks % each == 0 else 0


def merge_shape(parts: int, numbers: int) -> dict[str, Any]:
    """Choose how a thread of the merge works: the plan's `merge_parts`, `merge_width`, `merge_steps`, `merge_warps`.

    parts: of a head, the most there are. numbers: of a head, that one program merges. A thread has about 64 numbers in
    its registers, so with few parts it takes more neighbours of each.
    """
    held = min(max(power_of_two(parts), 2), 32)
    width = 2 if held == 32 else 4
    warps = 1 if parts <= 32 else MERGE_WARPS
    steps = min(power_of_two(-(-numbers * warps // (width * 128))), 64 // (held * width))
    return {"merge_parts": held, "merge_width": width, "merge_steps": max(steps, 1), "merge_warps": warps}


def most_parts(heads: int, blocks: int, programs: int) -> int:
    """Return the most parts that a head of `blocks` blocks has where `programs` share those of all heads equally."""
    share, longer = divmod(heads * blocks, programs)
    if share == 0:
        return blocks
    if longer == 0 and blocks % share == 0:
        return blocks // share
    return min(blocks, (blocks - 2) // share + 2, programs)


@dataclass(frozen=True)
class Arrangement:
    """How one call is computed: the tile, and how its blocks and the merge of its parts are dealt out."""

    plan: Plan
    merge_plan: Plan  # of the second launch; the first one's is the same for all numbers of parts
    programs: int
    tiles: int  # of queries
    heads: int  # of keys, of all sequences and tiles of queries
    aligned: bool  # programs take whole heads
    merge_pieces: int  # programs of the second launch that share a head's merge
    hint: bool = False  # what TMA brings is the first to leave the L2 (`kernels/l2_hint.py`)


def arrange(
    batch: int,
    kv_heads: int,
    group: int,
    sq: int,
    keys: int,
    head_dim: int,
    multiprocessors: int,
    *,
    window: int = 0,
    page: int | None = None,
    lengths: bool = False,
    fp8: bool = False,
    programs: int = 0,
    aligned: bool | None = None,
    merge: str | None = None,
    consumers: int | None = None,
    block_n: int | None = None,
    hint: bool | None = None,
    cluster: int | None = None,
    stateless: bool = False,
    **choices,
) -> Arrangement:
    """Choose how a call is computed; the arguments from `programs` on overrule the choice, for measurements.

    keys: of the longest sequence that the cache has room for; window: 0 for none. cluster: programs of one; 0: the other
    kernels. stateless: nothing is kept in counters from one launch to the next. choices: `make_plan`'s other ones.
    """
    seen = min(keys, sq + window - 1) if window else keys
    bytes_ = 2 * seen * batch * kv_heads * head_dim * (1 if fp8 else 2)
    plain_fp8 = not (lengths or page or window)
    plain = plain_fp8 and not fp8
    own = programs or aligned is not None or merge or consumers is not None or block_n or choices
    chosen = cluster is None and not (window or fp8 or own)
    if chosen:
        cluster = best_cluster(batch * kv_heads, group, sq, keys, head_dim, multiprocessors, lengths)
        if lengths and batch > 1:
            cluster = cluster_of_a_sequence(batch, kv_heads, group, sq, keys, head_dim, multiprocessors, bool(page))
            if cluster:
                choices = {"per_sm": 2, "slots": SHORT_RING, "halvings": halvings(batch, kv_heads, cluster, bool(page))}
                block_n = 64
        elif lengths and block_width(head_dim) != TIMED_WIDTH:
            cluster = 0
        elif cluster == 2 and 4 * batch * kv_heads > multiprocessors and two_blocks(keys, head_dim):
            block_n, choices = KEYS_BLOCK[TIMED_WIDTH], {"slots": SHORT_RING}
    chosen = chosen and plain
    if hint is None:
        hint = not (window or fp8 or (page and not cluster)) and HINT_BYTES[0] <= bytes_ <= HINT_BYTES[1]
    if cluster:
        if window or fp8:
            raise ValueError("a cluster takes no window and no fp8 cache: leave `cluster` out.")
        own_tile = consumers, block_n, choices.get("slots"), merge, page
        in_turn = choices.get("in_turn", bool(lengths) and not (batch == 1 and page and page >= RUNS_PAGE))
        more = {
            name: choices[name] for name in ("per_sm", "halvings", "load", "order", "base", "where") if name in choices
        }
        plan = cluster_plan(head_dim, group, sq, keys, batch * kv_heads, cluster, *own_tile, in_turn, **more)
        tiles = -(-sq // plan.queries)
        heads = batch * kv_heads * tiles
        return Arrangement(plan, plan, heads * plan.cluster, tiles, heads, False, 1, hint)
    whole = 0
    if chosen:
        whole = whole_heads(batch * kv_heads, group, sq, keys, head_dim, bytes_, multiprocessors)
    width = block_width(head_dim)
    large = chosen and not whole and bytes_ >= SHORT_RING_BYTES and width <= TIMED_WIDTH
    if large and best_consumers(head_dim, group, sq) == 0 and aligned_split(batch * kv_heads, 2, multiprocessors):
        consumers, block_n, aligned, programs = 0, KEYS_BLOCK[width], True, batch * kv_heads
        choices = {"per_sm": 1, "slots": SHORT_RING}
    if whole:
        block_n = 64 if whole == 3 else KEYS_BLOCK[block_width(head_dim)] // 2
        consumers, aligned, programs, choices = 0, True, batch * kv_heads, {"per_sm": whole}
    free = not (lengths or page or fp8 or programs or aligned is False)
    by_rows = consumers if fp8 or consumers is not None else best_consumers(head_dim, group, sq, page)
    several = free and by_rows and several_heads(head_dim, group, sq, by_rows, batch * kv_heads, multiprocessors)
    if not (fp8 or lengths or several) and consumers is None and block_n is None and "per_sm" not in choices:
        half = KEYS_BLOCK[block_width(head_dim)] // 2
        if two_programs(batch * kv_heads, group, sq, seen, head_dim, 2 * multiprocessors):
            consumers, block_n, choices = 0, half, choices | {"per_sm": 2}
    if fp8 and consumers is None and bytes_ > TOGETHER_BYTES and head_dim == TIMED_WIDTH:
        consumers = 0 if power_of_two(group) * sq <= FP8_LARGE_COLUMNS else None
    if (
        fp8
        and consumers is None
        and power_of_two(group) * sq > 64
        and not (lengths or page or window)
        and head_dim <= 128
    ):
        consumers = 2  # with lengths, pages or a window its registers would spill
    if page and bytes_ <= TWO_PRODUCERS_BYTES:
        choices = {"producers": 2} | choices
    if not fp8:
        consumers = best_consumers(head_dim, group, sq, page) if consumers is None else consumers
        if consumers and block_n is None:
            if several:
                # Two programs with 64 query rows fit on an SM; one with 128 begins the next head before one ends, or ends with it.
                choices = ({"per_sm": 2} if consumers == 1 else {"ahead": bytes_ < SHORT_RING_BYTES}) | choices
            # Small blocks leave more than two slots for K and for V beside the rest.
            small = choices.get("ahead", False) or choices.get("per_sm", 1) == 2
            block_n = ROWS_BLOCK[width] // 2 if small else best_block(head_dim, batch * kv_heads, seen, multiprocessors)
    if fp8 and plain_fp8 and bytes_ > TOGETHER_BYTES and head_dim == TIMED_WIDTH:
        choices = {"fp16": True} | choices
        if consumers in (None, 1) and FP8_LARGE_COLUMNS < power_of_two(group) * sq <= 64:
            block_n = block_n or FP8_BLOCK
    plan = make_plan(head_dim, group, sq, page, block_n=block_n, consumers=consumers, fp8=fp8, **choices)
    if plain and plan.consumers and not plan.ahead and plan.block_d == TIMED_WIDTH and bytes_ >= SHORT_RING_BYTES:
        plan = replace(plan, slots=choices.get("slots", min(plan.slots, SHORT_RING)))
    multiprocessors *= plan.per_sm  # from here on, places for programs
    tiles = -(-sq // plan.queries)
    heads = batch * kv_heads * tiles
    blocks = -(-keys // plan.block_n) - (keys - seen) // plan.block_n
    if aligned is None:
        # A program a head is balanced where as many SMs would be: the GPU starts each where another ends.
        a_head_each = bool(several) and plan.per_sm == 2
        aligned = not lengths and (a_head_each or aligned_split(heads, blocks, programs or multiprocessors))
    if plan.ahead and (lengths or not aligned):
        raise ValueError(
            "ahead takes whole heads, which the host knows to be balanced: give no lengths, and sizes for which "
            "`aligned_split` is true, or aligned=True."
        )
    even = 0 if lengths or aligned else even_programs(heads, blocks, multiprocessors)
    several = bool(several) and plan.consumers == 2 and not plan.ahead
    if aligned and (several or (plan.per_sm == 2 and (plan.consumers or seen >= PROGRAM_A_HEAD_KEYS))):
        programs = programs or heads  # they drift apart, and so some read while others begin and end
    if lengths and not page and not plan.consumers and not fp8 and bytes_ > HINT_BYTES[1]:
        programs = programs or shared_programs(heads, multiprocessors)
    programs = programs or even or (heads if aligned and heads <= multiprocessors else multiprocessors)
    one_head = aligned and heads <= programs
    if plain and plan.consumers and plan.block_d == TIMED_WIDTH:
        k_first = one_head and plan.per_sm == 1
        plan = replace(
            plan,
            backward=choices.get("backward", plan.ahead),
            k_first=choices.get("k_first", k_first),
            prefill=plan.slots // 2 if choices.get("prefill", not plan.ahead) else 0,
        )
    if plan.prefill:
        # Its blocks exist and lie in one head: of whole heads, or where programs share each evenly.
        each = heads * blocks // programs if even == programs else 0
        plan = replace(plan, prefill=plan.prefill if (aligned and blocks > plan.prefill) or each >= plan.prefill else 0)
    if aligned and plan.consumers and plan.block_d == TIMED_WIDTH and not (plan.ahead or fp8):
        by_tma = one_head and (plan.consumers == 2 or plan.per_sm == 2)
        plan = replace(plan, by_tma=choices.get("by_tma", by_tma))
        plan = replace(plan, wide=choices.get("wide", plan.consumers == 1 and not plan.by_tma))
    if plan.consumers == 0 and not fp8 and "lean" not in choices:
        plan = replace(plan, lean=one_head or lengths)
    parts = most_parts(heads, blocks, programs)
    if merge is None:
        # Waiting for each other is faster where the time is that of launches, not of bytes; and for long caches, too,
        # where all programs of a head end at the same time and many rows are merged.
        small = bytes_ <= TOGETHER_BYTES
        level = plan.consumers > 0 and programs == even
        wait = not lengths and not aligned and not stateless and parts <= 32 and (small or level)
        merge = "together" if wait else "second"
    numbers = group * min(sq, plan.queries) * plan.block_d
    own = 1 if merge == "last" else parts  # programs that merge a head
    plan = replace(plan, merge=merge)
    # Sequences that are longer than others have more parts than where all are equal.
    merge_plan = replace(plan, **merge_shape(max(parts, LENGTHS_PARTS) if lengths else parts, -(-numbers // own)))
    # A program of the second launch adds up a piece at a time; few heads have enough programs for all their pieces.
    pieces = -(-numbers // (32 * merge_plan.merge_width * MERGE_WARPS // merge_plan.merge_warps))
    pieces = min(pieces, -(-MERGE_PROGRAMS // heads))
    if merge != "second":
        plan = merge_plan
    elif aligned:
        merge_plan = plan
    return Arrangement(plan, merge_plan, programs, tiles, heads, aligned, pieces, hint)
