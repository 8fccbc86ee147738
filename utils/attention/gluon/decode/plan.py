"""Tiles of the decode kernels, and the arrangement of one call: plain Python, no Triton.

`TILES` is the table of all tiles. docs/kernels/decode.md has the measured sizes; between them `arrange` takes the choice of the
nearest sizes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

MOST_QUERIES = 64  # new tokens of one call
MOST_GROUP = 128  # query heads that share a head of keys
MOST_SEQUENCES = 4096
PAGES = (16, 32, 64, 128, 256)  # tokens of a page
SMALL_PAGE = 64  # tokens: a box of TMA has so many rows, or fewer if a page is smaller
SHARED_BYTES = 232_448
# With more shared memory than this a program has its SM to itself: two programs would not fit.
ALONE_BYTES = 116_736
MOST_PARTS = 16  # programs of a cluster
MERGE_NUMBERS = 512  # numbers of a head that a program of the merge adds up at the same time
MERGE_PARTS = 8  # parts of a head that a thread of the merge loads at once: with more, an SM holds fewer programs
MERGE_GROUPS = 4  # groups of a warp's lanes, which share the numbers of a head with more than MERGE_PARTS parts
MERGE_OPTIONS = {"num_warps": 4, "maxnreg": 96}  # launch options of the merge
MERGE_PROGRAMS = 2048  # programs of the merge, about
ONE_PIECE = 30  # in place of the logarithm of a page's tokens: the cache is not in pages

MANY_ROWS = 16  # with up to so many query rows, keys are the rows of the products
# Keys and values of up to so many bytes leave the L2 first: up to 2 us faster. From half a gigabyte on it is slower.
HINT_BYTES = 300 << 20
# If heads times bytes of keys and values are less, half of the SMs read: more parts would take longer to add up than to read. The
# measured calls gained 5 to 28%.
HALF_BYTES = 40_000_000
# A merge takes as long as reading so many bytes for each of up to 128 columns, plus six times the bytes of a part. Heads of 512
# keys take 12 to 19 us in one piece, and 16 to 24 us in parts.
MERGE_BYTES = 1 << 11
# If sequences have lengths up to so many keys, each of many heads has its own program: 0.95 of the time over 42 calls. With two
# consumers and many times as many heads as SMs this would take up to 1.2 of the time.
ONE_HEAD_KEYS = 1024
# If a head has fewer bytes of keys and values, tiles of 64 query rows that all run at the same time are 1.05 to 1.5 times as fast as
# half as many tiles of 128 rows. If they are a quarter of the SMs or less, that is so for longer heads, too.
SHORT_BYTES = 1 << 21
# {programs of a cluster: clusters that run at the same time on 132 SMs} if each program has an SM to itself. A cluster lies in one
# GPC, and seven of the eight GPCs have 16 or 18 SMs.
FITTING_CLUSTERS = {16: 7, 8: 15, 4: 30, 2: 66}
# Clusters need so many programs for each block of 128 keys in the longest share, at head dimension 128: with fewer, the SMs outside
# of clusters would save more than the second launch costs. Then clusters take 0.67 to 1.1 of the time of the other kernels. More than
# 8 query rows have longer products and need the second number: with 4 they took up to 1.14.
CLUSTER_PROGRAMS, CLUSTER_PROGRAMS_OF_ROWS = 4, 7


@dataclass(frozen=True)
class Plan:
    """The constants of a compiled kernel. The query rows of a head of keys are the columns of the products, or their rows.

    consumers: 0 if keys are the rows of the products, else the number of warpgroups, of 64 query rows each.
    """

    block_d: int
    block_n: int  # keys of a block
    columns: int  # query rows of a tile
    slots: int  # tiles of K and V in shared memory
    consumers: int = 0
    box: int = SMALL_PAGE  # rows of one TMA copy
    per_sm: int = 1  # programs that fit into an SM's shared memory
    cluster: bool = False  # the programs of a head merge in shared memory (`cluster.py`)
    fp8: bool = False  # the cache is in e4m3 (`quantized_keys.py`)

    @property
    def q_slots(self) -> int:
        """Tiles of Q when query rows are the rows of the products: two, if they fit."""
        return 1 if self.block_d * self.columns == 256 * 128 else 2

    @property
    def numbers_at(self) -> int:
        """Place of the output's slices in an inbox, in bytes: after a maximum and a sum for each row and program."""
        return 8 * MOST_PARTS * self.columns

    @property
    def inbox_space(self) -> int:
        """Bytes of shared memory for the inbox and its barrier, which a launch of clusters adds to Triton's memory."""
        return 16 + self.numbers_at + 4 * self.columns * self.block_d if self.cluster else 0

    @property
    def options(self) -> dict:
        """Triton's launch options.

        Roles share the registers of a program. With one consumer they take so few that a program of the merge fits on the SM and
        loads its first instructions early: 4% over nine calls. For 256 columns, and with two consumers, ptxas needs 168.
        """
        most = 168 if self.block_d == 256 or self.consumers == 2 else 112 if self.per_sm == 2 else 144
        return {"num_warps": 4 * max(self.consumers, 1)} | (
            {"maxnreg": most} if self.consumers and not self.cluster else {}
        )

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory, without the barriers and the inbox."""
        tile = self.block_n * self.block_d * (1 if self.fp8 else 2)
        p = 0 if self.consumers else 2 * self.columns * self.block_n
        query_tiles = 1 if self.cluster else self.q_slots
        return self.slots * tile + 2 * self.columns * query_tiles * self.block_d + p


# {head dimension: (keys of a block, slots of the ring)}. With long heads, half as many slots or keys are 1 to 3% slower. From 250 MB
# on, more slots are 1 to 2% slower.
KEYS = {64: (128, 4), 128: (128, 4), 256: (64, 6)}
ROWS = {64: (128, 4), 128: (128, 4), 256: (64, 4)}
# Head dimension, columns, keys, slots. With 128 keys and 64 columns, a thread would not have enough registers.
FP8 = (
    (64, 8, 128, 12),
    (64, 16, 128, 12),
    (64, 64, 64, 12),
    (128, 8, 64, 12),
    (128, 16, 64, 12),
    (128, 64, 64, 8),
    (256, 8, 64, 6),
    (256, 16, 64, 4),
)
TILES: dict[tuple, Plan] = {
    **{("keys", d): Plan(d, n, MANY_ROWS, slots, per_sm=1 + (d == 64)) for d, (n, slots) in KEYS.items()},
    **{("rows", d, 1): Plan(d, n, 64, slots, consumers=1, per_sm=1 + (d == 64)) for d, (n, slots) in ROWS.items()},
    # With as many heads as SMs, two programs share an SM: 1.05 times as fast over 15 calls, at most 1.3; with fewer 0.84 to 1.03.
    ("keys of many heads", 128): Plan(128, 64, MANY_ROWS, 4, per_sm=2),
    # Small pages take this tile, too: while a program waits for pages, the other program of the SM computes.
    ("rows of many heads", 128): Plan(128, 64, 64, 4, consumers=1, per_sm=2),
    **{("rows", d, 2): Plan(d, n, 128, slots, consumers=2) for d, (n, slots) in ROWS.items() if d > 64},
    # Head dimension 64 takes this tile, too: its last 64 columns are zeros and cost no bytes.
    ("cluster", 128): Plan(128, 128, 8, 6, cluster=True),
    ("cluster of rows", 128): Plan(128, 128, 64, 4, consumers=1, cluster=True),
    **{("fp8", d, columns): Plan(d, n, columns, slots, per_sm=2, fp8=True) for d, columns, n, slots in FP8},
}


@dataclass(frozen=True)
class Shape:
    """The sizes of a call. keys: the room of the cache for each sequence. window, page: 0 for none."""

    batch: int
    kv_heads: int
    group: int
    sq: int
    keys: int
    head_dim: int
    window: int = 0
    page: int = 0
    lengths: bool = False
    fp8: bool = False

    @property
    def rows(self) -> int:
        """Query rows of a head of keys."""
        return self.group * self.sq

    @property
    def width(self) -> int:
        """Columns of a tile: 64, 128 or 256, the smallest that holds the head dimension."""
        return next(d for d in (64, 128, 256) if self.head_dim <= d)

    @property
    def visible_keys(self) -> int:
        """Number of keys of a sequence that some query sees."""
        return min(self.keys, self.sq + self.window - 1) if self.window else self.keys

    @property
    def bytes(self) -> int:
        """Bytes of keys and values that the kernel reads."""
        return 2 * self.visible_keys * self.batch * self.kv_heads * self.head_dim * (1 if self.fp8 else 2)


@dataclass(frozen=True)
class Arrangement:
    """The tile of one call, and the way to deal out its blocks and the merge of its parts."""

    plan: Plan
    programs: int  # programs for each tile
    tiles: int = 1  # tiles of query rows of a head of keys
    parts: int = 0  # programs of a cluster
    whole: bool = False  # programs take whole heads, of equal lengths or at most one each, so nothing is merged
    hint: bool = False  # keys and values are the first to leave the L2 (`kernels/assembling.py`)

    @property
    def needs_merge(self) -> bool:
        """Whether a second launch adds up parts."""
        return not (self.whole or self.parts)


def refuse(group: int, sq: int, batch: int, page: int | None = None, head_dim: int = 0, fp8: bool = False) -> str:
    """Return why the kernel does not take these sizes, a sentence that begins with "it"; "" if it takes them."""
    if sq > MOST_QUERIES:
        return f"it decodes up to {MOST_QUERIES} new tokens, and {sq} were given."
    if group > MOST_GROUP:
        return f"it takes groups of up to {MOST_GROUP} query heads, and {group} share a head of keys."
    if batch > MOST_SEQUENCES:
        return f"it takes up to {MOST_SEQUENCES} sequences, and {batch} were given."
    if page is not None and page not in PAGES:
        return f"its pages have {', '.join(map(str, PAGES))} tokens, and {page} were given."
    if fp8 and head_dim % 16:
        return f"with an fp8 cache its head dimension is a multiple of 16, and {head_dim} was given."
    return ""


def takes_whole_heads(shape: Shape, plan: Plan, heads: int, programs: int) -> bool:
    """Whether programs take whole heads, because that costs less than a merge.

    heads: heads of keys of all sequences. Seven tenths of the SMs read as fast as all SMs.
    """
    if shape.lengths and heads > programs:
        return shape.visible_keys <= ONE_HEAD_KEYS and (plan.consumers < 2 or heads <= 4 * programs)
    blocks = -(-shape.keys // plan.block_n) - (shape.keys - shape.visible_keys) // plan.block_n
    rounds = -(-heads // programs)
    # The bytes that a program reads beyond its share, in columns of its tile; a length is taken as half of the longest.
    width = plan.block_d / shape.head_dim / (shape.batch * shape.kv_heads)
    more = shape.bytes * width * (1 - heads / programs / (2 if shape.lengths else 1))
    rows = min(shape.rows, plan.columns)
    if heads <= programs and more <= MERGE_BYTES * min(plan.block_d, 128) + 24 * rows * plan.block_d:
        return True
    balanced = rounds * programs <= 1.04 * heads or blocks == 1 or 0.7 * programs <= heads <= programs
    return balanced and not shape.lengths


def cluster_parts(shape: Shape, multiprocessors: int) -> int:
    """Choose the number of programs in a cluster for a head of keys; 0 for the kernels without clusters."""
    heads = shape.batch * shape.kv_heads
    blocks = -(-shape.keys // 128)
    parts = next((n for n, fitting in FITTING_CLUSTERS.items() if heads <= fitting and n < max(2 * blocks, 4)), 0)
    slow = shape.width == 256 or (shape.width == 64 and shape.rows > 8 and 2 * heads * parts > multiprocessors)
    if not parts or slow:
        return 0
    # With few rows and equal lengths, clusters read as fast as all SMs. Clusters of 16 do not: they lie in half of the GPCs.
    equal = shape.batch == 1 or not shape.lengths
    fast = shape.head_dim == 128 or (shape.width == 128 and heads * parts > 100)
    if parts < 16 and shape.rows <= 8 and fast and equal:
        return parts
    longest = -(-blocks // parts)  # the longest share of a program
    least = CLUSTER_PROGRAMS if shape.rows <= 8 else CLUSTER_PROGRAMS_OF_ROWS
    return parts if 128 * least * (longest - 1) < shape.head_dim * heads * parts else 0


def choose_tile(shape: Shape, multiprocessors: int) -> Plan:
    """Choose the tile of the kernels without clusters."""
    width, rows = shape.width, shape.rows
    if shape.fp8:
        columns = [n for d, n, *_ in FP8 if d == width]
        return TILES["fp8", width, next((n for n in columns if rows <= n), columns[-1])]
    heads = shape.batch * shape.kv_heads
    tiles = heads * -(-rows // 64)
    small_pages = 0 < shape.page < SMALL_PAGE
    if rows > 64 and width > 64 and not small_pages:
        at_once = multiprocessors if shape.bytes <= SHORT_BYTES * heads else multiprocessors // 4
        unequal = shape.lengths and shape.visible_keys <= ONE_HEAD_KEYS and width == 128
        if tiles > at_once and not unequal:
            return TILES["rows", width, 2]
    # If a block has several pages, a warp that only loads is worth more.
    if rows > MANY_ROWS or small_pages:
        many = width == 128 and (small_pages or tiles >= multiprocessors)
        return TILES["rows of many heads", 128] if many else TILES["rows", width, 1]
    return TILES["keys of many heads" if width == 128 and heads >= multiprocessors else "keys", width]


def arrange(shape: Shape, multiprocessors: int) -> Arrangement:
    """Choose the arrangement of a call."""
    heads = shape.batch * shape.kv_heads
    # Clusters were measured only for such calls.
    alike = (
        multiprocessors >= 132 and shape.rows <= 64 and not (shape.window or shape.fp8 or 0 < shape.page < SMALL_PAGE)
    )
    parts = cluster_parts(shape, multiprocessors) if alike else 0
    if parts:
        plan = TILES["cluster of rows" if shape.rows > 8 else "cluster", 128]
    else:
        plan = choose_tile(shape, multiprocessors)
    if 0 < shape.page < plan.box:
        plan = replace(plan, box=16)  # a page of 32 tokens has two boxes
    hint = not (shape.window or shape.fp8) and shape.bytes <= HINT_BYTES
    if parts:
        return Arrangement(plan, heads * parts, parts=parts, hint=hint)
    tiles = -(-shape.rows // plan.columns)
    shared = (
        heads * tiles >= multiprocessors
        or plan.fp8
        or (0 < shape.page < SMALL_PAGE and 16 * heads * tiles >= multiprocessors)
    )
    places = max(1, multiprocessors * (plan.per_sm if shared else 1) // tiles)
    whole = takes_whole_heads(shape, plan, heads, places)
    few = heads * tiles * shape.bytes <= HALF_BYTES and not shape.fp8
    programs = max(1, places // 2 if few else places)
    if whole:
        programs = heads if shape.lengths else min(heads, places)
    return Arrangement(plan, programs, tiles, whole=whole, hint=hint)
