"""Tiles of the decode kernels and what they are compiled for: plain Python, no Triton.

`arrangement.py` chooses among them for a call. All tile shapes are powers of two; a block has 227 KiB of shared memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

MOST_QUERIES = 64  # new tokens of one call
MOST_COLUMNS = 32  # query rows of a tile where keys are the rows of the products
MOST_FP8_COLUMNS = {64: 64, 128: 64, 256: 32}  # the same with an fp8 cache; more do not fit into registers
MOST_GROUP = 128  # query heads that share a head of keys
MOST_SEQUENCES = 4096
PAGES = (16, 32, 64, 128, 256)  # tokens of a page
SHARED_BYTES = 232_448
# With so much shared memory a program has its SM to itself, since two would need more than there is.
ALONE_BYTES = 116_736
OVERHEAD = 8  # blocks that a program costs whatever it reads, in the weights of `divide.py`
PLACES = 240  # programs in clusters of eight or four that run at once, two an SM
# What the longest share of a program may be, of the mean over PLACES programs: there `divide.py` no longer halves a cluster.
LOAD = 19, 10
SLACK = 6  # blocks that the longest share of a program may have more than the mean where clusters are halved
MERGE_WARPS = 4  # of a program of the second launch
ROWS_FROM = 32  # query rows of a head of keys from which `rows.py` is faster
KEYS_BLOCK = {64: 256, 128: 128, 256: 64}  # keys of a block by head dimension, where keys are the rows
ROWS_BLOCK = {64: 128, 128: 128, 256: 64}  # where query rows are the rows
LEVEL_PAGES = 32  # tokens of the largest page with which whole heads are worth being found by the kernel
MOST_RAW = 4  # blocks of an fp8 cache's bytes on their way where query rows are the rows: more are slower (entry 61)
FP8_ROWS_FROM = 17  # query rows of a head of keys from which `quantized.py` reads an fp8 cache, not `quantized_keys.py`
MERGES = {
    "cluster": "the programs of a head, a thread block cluster, in shared memory (`cluster.py`)",
    "second": "a second launch, which begins while the first runs and waits for its end",
    "together": "the programs of a head, which wait for each other (a cooperative launch), each some of its rows",
    # Slower than "together", but the simulator can run it, which runs programs one after another.
    "last": "the program of a head that stores its part last, alone; nobody waits",
}


@dataclass(frozen=True)
class Plan:
    """Tile and pipeline. The query rows of a head of keys are the columns of the products, or their rows.

    heads: query heads of a tile, queries: new tokens of a tile; heads x queries are the columns. consumers: 0 for the
    kernel in which keys are the rows (`kernel.py`), else warpgroups of the other one (`rows.py`), 64 query rows each.
    """

    block_d: int
    block_n: int  # keys of a block
    heads: int
    queries: int
    slots: int  # tiles of K and V in shared memory; an even number where keys are the rows
    q_slots: int  # tiles of Q in shared memory: with two, the next head's comes while this one is computed
    box: int  # rows of one TMA copy: block_n, or a page if that is smaller
    merge_parts: int = 32  # parts of a head that a thread of the merge holds at once
    merge_width: int = 2  # neighbouring numbers of each part, which it loads at once
    merge_steps: int = 1  # times as many, where the programs of a head merge it themselves
    merge_warps: int = 1  # warps that share the parts of a head in the merge; each takes `merge_parts`
    merge: str = "second"  # who adds up the parts of a head: a key of MERGES
    early: bool = True  # the second launch begins while the first runs, and waits for its end
    consumers: int = 0  # warpgroups of 64 query rows each; 0: keys are the rows of the products
    registers: int = 0  # of a consumer's thread, with two consumers
    fp16: bool = False  # products of an fp8 cache in fp16 also where queries are in bf16 (`quantized.py`)
    order: bool = False  # which of the clusters have work where lengths are equal: those that lie evenly
    load: int = 19  # tenths of the mean that the longest share may be (`divide.py`)
    where: bool = False  # clusters keep their SM and their times
    raw_slots: int = 0  # slots of K and of V for an fp8 cache's bytes, each; 0: the cache has the queries' type
    per_sm: int = 1  # programs that an SM runs at the same time
    level: bool = False  # with lengths: programs take whole heads where the kernel finds them balanced
    producers: int = 1  # warps that load, where query rows are the rows: one, or one for K and one for V
    ahead: bool = False  # whole heads, each begun before the one before it is stored (`rows_ahead.py`)
    cluster: int = 0  # programs of a head, which merge in shared memory (`cluster.py`); 0: the other kernels
    in_turn: bool = False  # the programs of a cluster take a head's blocks in turn, and not a run of them each
    base: int = 0  # how often every cluster is halved at least, whatever the lengths are
    halvings: int = 0  # how often a cluster may be halved, to be shared by heads of short sequences (`divide.py`)
    sent: int = 0  # query rows of the tile that the programs of a cluster send each other: those that exist
    inbox_in_ring: bool = False  # what they send lies where the tiles were: that costs a wait for the cluster
    halves: bool = False  # rows r and r + 8 of a warp have a softmax each (gluon/softmax.py)
    wide: bool = False  # where query rows are the rows: threads exchange the output, and store 16 bytes at once, not 4
    by_tma: bool = False  # the output of a whole head leaves by TMA, from the place of its queries
    backward: bool = (
        False  # query rows as rows, whole heads: keys from the last block to the first, so that masks come first
    )
    k_first: bool = False  # query rows as rows: each block of K is asked for before the block of V in front of it
    prefill: int = 0  # query rows as rows: blocks of K and of V that are asked for before the roles begin
    both: bool = False  # of the forward's plan, whose blocks `rows_ahead.py` shares
    lean: bool = False  # keys as rows: all expectations come before all copies, and whole heads have no code for parts

    @property
    def columns(self) -> int:
        """Query rows of a tile: columns of the products, or their rows."""
        return self.heads * self.queries

    @property
    def output_box(self) -> list[int]:
        """Box of a TMA store of 64 query rows of the output, (B, Hkv, group, Sq, D): with `ahead` and `by_tma`."""
        return [1, 1, 64 // self.queries, self.queries, self.block_d]

    @property
    def numbers_at(self) -> int:
        """Where in a program's inbox the slices of the output begin: behind a maximum and a sum of each row and program."""
        return 8 * self.cluster * self.sent

    @property
    def inbox_bytes(self) -> int:
        """Bytes of shared memory for what the programs of a cluster send each other."""
        return self.numbers_at + 4 * self.sent * self.block_d

    @property
    def inbox_space(self) -> int:
        """Bytes of shared memory that a launch adds to Triton's: the inbox's barrier, and the inbox if it has its own place."""
        return 16 if self.inbox_in_ring else 16 + -(-self.inbox_bytes // 16) * 16

    @property
    def producer_registers(self) -> int:
        """Registers of a thread of the producer: what two consumers leave, and enough beside one."""
        return 504 - 2 * self.registers if self.consumers == 2 and not self.raw_slots else 40

    @property
    def converter_registers(self) -> int:
        """Registers of a thread that converts an fp8 cache: what a block's other roles leave."""
        return 128 if self.consumers == 1 else 56

    @property
    def options(self) -> dict:
        """Triton's options of the launch.

        With one consumer the block has eight warps with their padding, and Triton would ask for 256 registers a thread,
        which no instruction can name; ptxas then ignores the number that the roles' own requests build on.
        """
        if self.per_sm == 2 and self.consumers:
            return {"num_warps": 4, "maxnreg": 128}
        if self.per_sm > 2:
            return {"num_warps": 4, "maxnreg": 65536 // (128 * self.per_sm) // 8 * 8}
        alone = self.consumers == 1 and not self.raw_slots and not self.cluster
        return {"num_warps": 4} | ({"maxnreg": 240} if alone else {})

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory, without the barriers."""
        tile = self.block_n * self.block_d
        p = 0 if self.consumers else self.columns * self.block_n
        raw = 2 * self.raw_slots * tile
        query_tiles = (
            self.q_slots + self.ahead + self.fp16
        )  # the output has a tile like one of Q's, and queries in fp16
        return 2 * (self.slots * tile + self.columns * query_tiles * self.block_d + p) + raw


@dataclass(frozen=True)
class Case:
    """What an attention needs of the kernel.

    causal, window: the mask. lengths: each sequence has its own, read by the kernel; batch_block: a power of two that
    holds all sequences, only then. page: tokens of the cache's pages; 0: it is in one piece. aligned: whole heads only, so nothing is merged.
    clean: what lies behind a sequence's last key may be anything, even nan, and its values are replaced by zeros.
    """

    causal: bool = False
    window: bool = False
    lengths: bool = False
    batch_block: int = 1
    page: int = 0
    aligned: bool = False
    clean: bool = False


def power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()


def make_plan(
    head_dim: int,
    group: int,
    sq: int,
    page: int | None = None,
    block_n: int | None = None,
    slots: int | None = None,
    merge: str = "second",
    early: bool = True,
    consumers: int | None = None,
    halves: bool | None = None,
    q_slots: int | None = None,
    fp8: bool = False,
    per_sm: int | None = None,
    producers: int = 1,
    level: bool | None = None,
    ahead: bool = False,
    wide: bool = False,
    by_tma: bool = False,
    backward: bool = False,
    k_first: bool = False,
    prefill: bool = False,
    lean: bool = False,
    fp16: bool = False,
) -> Plan:
    """Choose the tile for a head dimension, query heads in a group, new tokens, and page size (None: one piece).

    The other arguments overrule the choice, for measurements. consumers: 1 or 2 make query rows the rows of the
    products, 64 or 128 a tile (`rows.py`); 0 makes keys the rows. fp8: the cache is in e4m3, which one consumer's kernel
    reads (`quantized.py`), or with 0 consumers `quantized_keys.py`. per_sm: programs of an SM, where keys are the rows.
    ahead: `rows_ahead.py`. prefill: as many blocks as the rings have room for.
    """
    if fp8:
        if consumers is None:
            consumers = 0 if power_of_two(group) * sq < FP8_ROWS_FROM else 1
        if consumers == 0 and power_of_two(group) <= MOST_FP8_COLUMNS[block_width(head_dim)]:
            return _fp8_keys_plan(head_dim, group, sq, page, block_n, merge, early, per_sm or 2)
        return _fp8_plan(head_dim, group, sq, page, block_n, merge, early, consumers, halves, fp16)
    consumers = best_consumers(head_dim, group, sq, page) if consumers is None else consumers
    if consumers:
        plan = _rows_plan(
            head_dim, group, sq, page, block_n, slots, merge, early, consumers, halves, q_slots, ahead, per_sm or 1
        )
        producers = producers if consumers == 1 else 1
        level = (page is not None and page <= LEVEL_PAGES) if level is None else level
        plan = replace(plan, producers=producers, level=level, wide=wide, by_tma=by_tma)
        return replace(plan, backward=backward, k_first=k_first, prefill=plan.slots // 2 if prefill else 0)
    if ahead:
        raise ValueError("ahead is a variant of the kernel with query rows as rows; give consumers=1 or 2 with it.")
    block_d = block_width(head_dim)
    heads = power_of_two(group)
    if heads > MOST_COLUMNS:
        raise ValueError(
            f"where keys are the rows a tile has up to {MOST_COLUMNS} query rows, which hold all heads of a group; "
            f"groups of {group} were given. Leave `consumers` out, or give 1 or 2."
        )
    queries = min(power_of_two(sq), MOST_COLUMNS // heads)
    if heads * queries < 8:  # a product has eight columns at least
        heads = 8 // queries
    columns = heads * queries
    block_n = block_n or KEYS_BLOCK[block_d]
    per_sm = per_sm or 1
    tile, rest = 2 * block_n * block_d, 512 if per_sm == 1 else 1024
    for tiles in (2, 1) if q_slots is None else (q_slots,):
        room = SHARED_BYTES // per_sm - rest - 2 * columns * (tiles * block_d + block_n) - 32 * columns
        fit = min(room // tile // 2 * 2, 16)
        if fit >= (6 if 2 * columns * block_d > 8192 else 4):
            break
    return Plan(
        block_d,
        block_n,
        heads,
        queries,
        slots or fit,
        tiles,
        min(block_n, page) if page else block_n,
        merge=merge,
        early=early,
        per_sm=per_sm,
        level=bool(level),
        lean=lean,
    )


def _rows_plan(
    head_dim, group, sq, page, block_n, slots, merge, early, consumers, halves, q_slots, ahead=False, per_sm=1
) -> Plan:
    """Return `make_plan`'s plan where query rows are the rows of the products."""
    rows = 64 * consumers
    heads = power_of_two(group)
    if consumers not in (1, 2) or heads > rows:
        raise ValueError(
            f"consumers are 1 or 2, with 64 query rows each, which hold all heads of a group; {consumers} were given "
            f"for groups of {group}."
        )
    block_d = block_width(head_dim)
    queries = min(power_of_two(sq), rows // heads)
    heads = rows // queries
    block_n = block_n or ROWS_BLOCK[block_d]
    tile, room = 2 * block_n * block_d, SHARED_BYTES // per_sm - 1024
    q_bytes = 2 * rows * block_d
    if q_slots is None:
        q_slots = 2 if ahead or (room - 2 * q_bytes) // tile >= 6 else 1
    fit = min((room - (q_slots + ahead) * q_bytes) // tile, 16)
    if ahead and (fit < 4 or q_slots != 2):
        raise ValueError(
            f"ahead takes two tiles of Q and one of the output, and two slots of K and of V beside them; with {rows} query "
            f"rows, head dimension {head_dim}, blocks of {block_n} keys and q_slots={q_slots} that is not so. Give smaller "
            "blocks (block_n) or fewer consumers."
        )
    return Plan(
        block_d,
        block_n,
        heads,
        queries,
        slots or fit,
        q_slots,
        min(block_n, page) if page else block_n,
        merge=merge,
        early=early,
        consumers=consumers,
        # A producer that looks up eight pages a block needs 40 registers; ptxas spills them in 24.
        registers=0 if consumers == 1 else 232 if page and page < block_n else 240,
        halves=halves if halves is not None else block_d >= 128,
        ahead=ahead,
        per_sm=per_sm,
    )


def _fp8_keys_plan(head_dim, group, sq, page, block_n, merge, early, per_sm) -> Plan:
    """Return `make_plan`'s plan for a cache in e4m3 where keys are the rows: `per_sm` programs share an SM's memory."""
    block_d = block_width(head_dim)
    heads = power_of_two(group)
    queries = min(power_of_two(sq), MOST_FP8_COLUMNS[block_d] // heads)
    heads = max(heads, 8 // queries)  # a product has eight columns at least
    # A block of 128 keys and 64 columns do not fit into the registers of a thread.
    block_n = block_n or (64 if block_d == 256 or heads * queries > 32 else 128)
    plan = Plan(
        block_d,
        block_n,
        heads,
        queries,
        0,  # every tile of K and V holds bytes
        2,  # as they come, and in fp16
        min(block_n, page) if page else block_n,
        merge=merge,
        early=early,
        per_sm=per_sm,
    )
    room = (
        SHARED_BYTES // per_sm - 1024 - 24 * plan.columns - plan.shared_bytes
    )  # two programs; reductions exchange sums
    return replace(plan, raw_slots=min(room // (2 * block_n * block_d), 8))


def _fp8_plan(head_dim, group, sq, page, block_n, merge, early, consumers, halves, fp16) -> Plan:
    """Return `make_plan`'s plan for a cache in e4m3: slots for converted tiles of K and of V, the rest for bytes."""
    if power_of_two(group) > 64:
        raise ValueError(
            "an fp8 cache takes groups of up to 64 query heads (32 with keys as rows at head dimension 256) and at most "
            f"one consumer; {group} share a head, and consumers={consumers}."
        )
    if consumers == 2 and block_width(head_dim) == 256:
        raise ValueError(
            "with an fp8 cache two consumers take head dimensions up to 128: at 256 their output and the converters need "
            f"more registers than a block has; head dimension {head_dim} was given. Leave `consumers` out, or give 1."
        )
    block_n = block_n or {64: 128, 128: 64, 256: 32}[block_width(head_dim)]
    converted = 6 if consumers == 2 else 4  # two products with a tile take so long that a third one is worth its place
    plan = _rows_plan(head_dim, group, sq, page, block_n, converted, merge, early, consumers, halves, 1)
    plan = replace(plan, fp16=fp16)
    room = SHARED_BYTES - 1024 - plan.shared_bytes
    registers = 160 if consumers == 2 else 0
    raw_slots = min(room // (2 * block_n * plan.block_d), MOST_RAW)
    return replace(plan, raw_slots=raw_slots, registers=registers)


def refuse(group: int, sq: int, batch: int, page: int | None = None, head_dim: int = 0, fp8: bool = False) -> str:
    """Say why the kernel does not take these sizes; "" if it does. The reason is a sentence that begins with "it"."""
    if sq > MOST_QUERIES:
        return f"it decodes up to {MOST_QUERIES} new tokens, and {sq} were given."
    if group > MOST_GROUP:
        return f"it takes groups of up to {MOST_GROUP} query heads, and {group} share a head of keys."
    if batch > MOST_SEQUENCES:
        return f"it takes up to {MOST_SEQUENCES} sequences, and {batch} were given."
    if page is not None and page not in PAGES:
        return f"its pages have {', '.join(map(str, PAGES))} tokens, and {page} were given."
    if fp8 and group > 64:
        return f"with an fp8 cache it takes groups of up to 64 query heads, and {group} share a head of keys."
    if fp8 and head_dim % 16:
        return f"with an fp8 cache its head dimension is a multiple of 16, and {head_dim} was given."
    return ""


def block_width(head_dim: int) -> int:
    """The head dimension of a tile: the smallest that there is and that holds this one."""
    return next(d for d in (64, 128, 256) if head_dim <= d)


def best_consumers(head_dim: int, group: int, sq: int, page: int | None = None) -> int:
    """Choose the kernel: 0 makes keys the rows of the products, 1 and 2 make query rows the rows, 64 or 128 a tile.

    A product with keys as rows costs by its columns, one with query rows as rows costs the same for 1 and for 64 of
    them. Where a block is several pages, a warp that does nothing but load is worth more; the second kernel has one.
    """
    rows = power_of_two(group) * sq
    block = min(KEYS_BLOCK[block_width(head_dim)], 128)
    if rows < ROWS_FROM and not (page and page < block):
        return 0
    return 1 if rows <= 64 and group <= 64 else 2
