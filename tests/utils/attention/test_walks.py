"""Who computes what in step 5, checked for thousands of shapes: the kernel's own loops, run on the host as Python.

`producer` and `consumer` are taken as they are written, with integers of 32 bits that divide as the GPU does and may not
overflow, and with stand-ins for all that moves or computes numbers. What is left is the walk: which blocks are loaded,
read, masked and released, and which rows are stored.
"""

import itertools
import random
import types
from dataclasses import replace

import pytest
import torch

from utils.attention.gluon.arguments import Arguments
from utils.attention.gluon.plan import packed_variant, plan_for, tile_blocks, variant_for
from utils.machine.device import triton_support

needs_triton = pytest.mark.skipif(not __import__("importlib").util.find_spec("triton"), reason=triton_support().reason)


class Int32(int):
    """An integer of the GPU: 32 bits, and a division that rounds towards zero."""

    def _checked(self, number):
        assert -(1 << 31) <= number < 1 << 31, "an overflow of 32 bits"
        return Int32(number)

    def __add__(self, other):
        return self._checked(int(self) + int(other))

    def __sub__(self, other):
        return self._checked(int(self) - int(other))

    def __rsub__(self, other):
        return self._checked(int(other) - int(self))

    def __mul__(self, other):
        return self._checked(int(self) * int(other))

    def __floordiv__(self, other):
        quotient = abs(int(self)) // abs(int(other))
        return self._checked(quotient if (self < 0) == (other < 0) else -quotient)

    def __mod__(self, other):
        return self._checked(int(self) - int(other) * int(self // other))

    def __rshift__(self, other):
        return Int32(int(self) >> other)

    def __and__(self, other):
        return Int32(int(self) & other)

    __radd__, __rmul__ = __add__, __mul__


class Table:
    """A pointer into a table in memory."""

    def __init__(self, numbers, at=0):
        self.numbers, self.at = numbers, at

    def __add__(self, count):
        return Table(self.numbers, self.at + int(count))


class Device:
    """Gluon's language for one program, as far as walks need it."""

    int32 = int64 = float32 = None

    def __init__(self, program, programs, table):
        self.program, self.programs, self.table, self.counted = program, programs, table, []

    def program_id(self, axis):
        return Int32(self.program)

    def num_programs(self, axis):
        return Int32(self.programs)

    def load(self, at):
        return Int32(at.numbers[at.at] if isinstance(at, Table) else self.table[at])

    def atomic_add(self, at, value, **options):
        self.counted.append(int(at))
        return Int32(1 << 20)  # all others have arrived

    def atomic_xchg(self, at, value, **options):
        self.counted.append(int(at))

    minimum, maximum = staticmethod(min), staticmethod(max)
    where = staticmethod(lambda condition, a, b: a if condition else b)
    cdiv = staticmethod(lambda a, b: (Int32(a) + b - 1) // b)
    static_range = staticmethod(range)
    zeros = staticmethod(lambda *given: 0)
    to_tensor = staticmethod(Int32)


def on_host(function, **names):
    """Return a function of a kernel as Python, in which some global names mean something else."""
    code = function.fn
    return types.FunctionType(code.__code__, {**code.__globals__, **names}, code.__name__, code.__defaults__)


class Ring:
    """A ring of tiles of one role: what it loads, or what it waits for and releases."""

    tiles = types.SimpleNamespace(shape=[1, 1, 1, 64, 64])

    def __init__(self):
        self.loads, self.released, self.waited, self.expected = [], [], [], []

    def load(self, number, descriptor, batch, head, row, lane=0):
        self.loads.append((int(lane), int(number), int(batch), int(head), int(row)))

    def expect(self, number, descriptor, lane=0, pred=True):
        if pred:
            self.expected.append((int(lane), int(number)))

    def copy(self, number, descriptor, batch, head, row, lane=0, pred=True):
        if pred:
            assert (int(lane), int(number)) in self.expected
            self.load(number, descriptor, batch, head, row, lane)

    def wait_full(self, number, lane=0, pred=True):
        if pred:
            self.waited.append(int(number))

    def release(self, number, lane=0):
        self.released.append(int(number))

    def tile(self, number, lane=0):
        return None

    slot = tile


class Role:
    """One role of one program: the real functions of `Work`, `Tiles` and `Parts` over what a launch gives the kernel."""

    def __init__(self, given, device):
        from utils.attention.gluon import intervals, parts, pipeline, shared

        names = {"gl": device, "uniform": lambda x: x}
        for module, functions in (
            (shared, ("key_blocks", "clean_blocks")),
            (intervals, ("tile_entry", "visible_interval", "clean_interval")),
        ):
            for function in functions:
                names[function] = on_host(getattr(module, function), **names)
        names["thread_barrier"] = lambda: None
        self.PLAN, self.CASE, self.c = given["PLAN"], given["CASE"], 1.0
        self.q, self.k, self.v = (Ring() for _ in range(3))
        for name in ("sq", "sk", "offset", "heads", "group"):
            setattr(self, name, Int32(given[name]))
        packed = self.CASE.window == "rows"
        self.window = Table(given["window"].tolist()) if packed else Int32(given["window"])
        self.todo, self.parts = types.SimpleNamespace(schedule=Int32(0)), types.SimpleNamespace(counters=Int32(0))
        self.todo.DEALT, self.todo.SHARED, self.todo.LONGEST_FIRST = self.CASE.dealt, self.CASE.parts, self.CASE.causal
        self.todo.stride, self.todo.tiles_m = Int32(given["schedule_stride"]), Int32(given["tiles_m"])
        self.todo.heads_total = Int32(given["heads_total"])
        self.todo.parts = self.parts.count = Int32(given["parts"])
        for owner, kind, methods in (
            (self, pipeline.Work, ("first_row", "stop", "visible_blocks", "clean_blocks", "blocks", "first")),
            (self.todo, pipeline.Tiles, ("first", "start_next", "finish_next", "locate")),
            (self.parts, parts.Parts, ("used", "blocks", "arrive", "depart")),
        ):
            for method in methods:
                setattr(owner, method, types.MethodType(on_host(getattr(kind, method), **names), owner))


class Consumer(Role):
    """A consumer's walk: the blocks that it reads, and the rows that it stores."""

    def __init__(self, given, device, w):
        from utils.attention.gluon import step5_overlapped

        super().__init__(given, device)
        self.read, self.stored, self.left = [], [], []
        self.parts.leave = lambda t, o, lses, row, *more: self.left.append((int(t), int(row)))
        self.parts.add_up = lambda *more: (0, 0)
        names = {
            "gl": device,
            "Block": lambda number, row, key: types.SimpleNamespace(number=number, row=row, key=key),
            "accumulator": lambda columns: None,
            "skip_blocks": on_host(step5_overlapped.skip_blocks, gl=device),
            "first_block": self.first_block,
            "step": self.step,
            "start_scores": lambda q, k: 0,
            "finish_block": self.finish_block,
            "start_output": lambda work, number, *more: work.v.wait_full(number - 1) or 0,
            "wait_products": lambda x, *more: x,
            "normalizers": lambda *more: (0, 0),
            "spread": lambda *more: 0,
            "unseen_halves": lambda *more: 0,
            "store_lse": lambda *more: None,
            "store_tile": self.store_tile,
            "store_rows": lambda work, out, lse, flat, row, *more: self.stored.append((int(flat), int(row), 8)),
            "tma": types.SimpleNamespace(store_wait=lambda left: None),
        }
        kernel = step5_overlapped.consumer_ahead if self.PLAN.ahead else step5_overlapped.consumer
        tiles = types.SimpleNamespace(index=lambda lane: None)
        on_host(kernel, **names)(self, (None, tiles, None), w)

    def store_tile(self, work, out, flat, row, tile, o, stop):
        packed = self.CASE.window == "rows"
        self.stored.append((int(flat), int(row), min(64, int(stop - row)) if packed else 64))

    def first_block(self, work, block, q, causal, window, tail):
        self.k.wait_full(block.number)
        self.k.release(block.number)
        self.read.append((int(block.number), int(block.row), int(block.key), causal or window or tail))
        return 0, 0

    def step(self, work, block, q, o, p, state, more, masked, causal, window):
        self.v.wait_full(block.number - 1)
        return self.finish_block(work, block, 0, 0, state, more, masked, causal, window)

    def finish_block(self, work, block, s, pv, state, more, masked, causal, window, tail=False):
        self.k.release(block.number)
        self.k.wait_full(block.number + 1, pred=more)
        self.v.release(block.number - 1)
        applied = bool(masked and (causal or window or tail))
        self.read.append((int(block.number), int(block.row), int(block.key), applied))
        return 0, 0, 0


def launched(monkeypatch, plan, batch, heads, kv_heads, sq, sk, head_dim, causal, window, lse, programs, lengths=()):
    """What `launch` gives the kernel: its arguments by name, and the grid. No memory: the tensors are on "meta"."""
    from utils.attention.gluon import step5_overlapped

    found = []
    names = [name for name in step5_overlapped.attention_step5.arg_names if name not in ("PLAN", "CASE")]

    class Recorder:
        def __getitem__(self, grid):
            return lambda *given, **more: found.append((grid, dict(zip(names, given, strict=True)) | more))

    q = torch.empty(batch, heads, sq, head_dim, dtype=torch.bfloat16, device="meta")
    k = torch.empty(batch, kv_heads, sk, head_dim, dtype=torch.bfloat16, device="meta")
    real = torch.tensor
    step5_overlapped.tile_schedule.cache_clear()
    with monkeypatch.context() as context:
        context.setattr(step5_overlapped, "attention_step5", Recorder())
        context.setattr(step5_overlapped, "workspace", lambda like, numbers, counters: (numbers, counters))
        context.setattr(step5_overlapped, "unused", lambda *given: None)
        context.setattr(Arguments, "descriptors", lambda self: [None] * 4)
        context.setattr(torch, "tensor", lambda x, dtype, device: real(x, dtype=dtype))  # so that the test can read it
        step5_overlapped.launch(Arguments(q, k, k, q, q, causal, window, lse, 1.0, plan, programs, lengths))
    step5_overlapped.tile_schedule.cache_clear()
    ((grid, given),) = found
    return given, grid[0]


def visible(row, sq, sk, causal, window):
    """Keys [lo, hi) that a query may see."""
    position = row + sk - sq
    lo, hi = 0, sk
    if causal:
        hi = min(hi, position + 1)
    if window:
        lo = max(lo, position - window + 1)
        hi = min(hi, position + window)
    return lo, max(hi, lo)


def check_program(given, programs, program, table):
    """Run the roles of one program: the rows that it stores, and (head, first row, [(key, masked)]) of each consumer's tiles."""
    from utils.attention.gluon import loads

    plan, heads = given["PLAN"], given["heads"]
    ahead = plan.ahead
    device = Device(program, programs, table)
    role = Role(given, device)
    names = {"gl": device, "prefetch_queries": lambda *at: None, "fence_async_shared": lambda: None}
    if plan.prefill:
        on_host(loads.fill_rings, **names)(role, None, None, None)
    starts = []  # how many blocks had been loaded before each tile
    first_row = role.first_row
    role.first_row = lambda tile: (starts.append(len(role.k.loads)), first_row(tile))[1]
    on_host(loads.producer, **names)(role, None, None, None)
    tiles = len(
        {load[1] for load in role.q.loads}
    )  # where programs share tiles, the place of the first one is asked for once more
    starts = [0, *starts[len(starts) - tiles + 1 :]] if tiles else []
    blocks = role.k.loads
    every = list(range(len(blocks)))
    assert blocks == role.v.loads and [number for _, number, *_ in blocks] == every
    bounds = list(itertools.pairwise([*starts, len(blocks)]))
    stored, computed = [], []
    for w in range(plan.consumers):
        device = Device(program, programs, table)
        consumer = Consumer(given, device, w)
        tiles = [load[2:] for load in role.q.loads if load[0] == w]  # batch, head, row
        assert [load[1] for load in role.q.loads if load[0] == w] == list(range(len(tiles))) and len(tiles) == len(
            bounds
        )
        # Each block is released once and in order, not before it has come; "ahead" releases one more behind all others.
        more = [len(blocks)] if ahead and blocks else []
        assert consumer.k.released == every + more and consumer.v.released == every
        assert sorted(set(consumer.k.waited)) == sorted(set(consumer.v.waited)) == every
        # Where the output leaves through one of two tiles of Q, a slot is released a tile later, by the next tile's number but one.
        late = plan.o_in_q and plan.q_slots == 2
        assert consumer.q.released == list(range(2, len(tiles) + 1) if late else range(len(tiles)))
        assert max(device.counted, default=-1) < max(given["counters"], 1)
        stored += consumer.stored
        reads = [read for read in consumer.read if read[0] < len(blocks)]
        assert [number for number, *_ in reads] == sorted({number for number, *_ in reads})
        for i, (batch, head, row) in enumerate(tiles):
            own = [read for read in reads if bounds[i][0] <= read[0] < bounds[i][1]]
            assert own, "a tile without a block leaves its registers as they are"
            for number, first_row, key, _ in own:
                assert blocks[number][2:4] == (batch, head // given["group"])
                assert ahead or (first_row, key) == (row, blocks[number][4])
            size = 64 if given["CASE"].parts else consumer.stored[i][2]
            if size > 0:
                computed.append((batch * heads + head, row, size, [(blocks[read[0]][4], read[3]) for read in own]))
        if not given["CASE"].parts:
            assert [place[:2] for place in consumer.stored] == [
                (batch * heads + head, row) for batch, head, row in tiles
            ]
    return [place for place in stored if place[2] > 0], computed


def check_rows(given, flat, row, size, blocks):
    """Check the blocks of up to 64 rows of a head: none twice, all that the rows see, and no row reads what it may not see."""
    sq, sk, block_n = given["sq"], given["sk"], given["PLAN"].block_n
    if given["CASE"].window == "rows":
        first, behind = given["window"].tolist()[:sq], given["window"].tolist()[sq : 2 * sq]

        def interval(r):
            return first[r], behind[r]
    else:

        def interval(r):
            return visible(r, sq, sk, given["CASE"].causal, given["window"])

    keys = [key for key, _ in blocks]
    assert len(set(keys)) == len(keys), (flat, row)
    exist = range(max(row, 0), min(row + size, sq))
    if not exist:
        return
    ranges = [interval(r) for r in exist]
    seen = [(lo, hi) for lo, hi in ranges if lo < hi]
    if seen:
        lo, hi = min(seen)[0], max(hi for _, hi in seen)
        assert set(range(lo // block_n * block_n, hi, block_n)) <= set(keys), (flat, row)
    for key, masked in blocks:
        assert masked or all(lo <= key and key + block_n <= hi for lo, hi in ranges), (flat, row, key)


def draw(rng, longest, most_heads):
    """Sizes, masks and a machine."""
    ends = [n + d for n in (64, 128, 192, 256, 384, 512) for d in (-1, 0, 1)] + [1, 2]
    sq, sk = (rng.choice(ends) if rng.random() < 0.3 else int(longest ** rng.random()) for _ in range(2))
    kv_heads = rng.randint(1, most_heads)
    return {
        "batch": rng.choice((1, 1, 2, 3)),
        "heads": kv_heads * rng.choice((1, 1, 2, 3)),
        "kv_heads": kv_heads,
        "sq": sq,
        "sk": sk,
        "head_dim": rng.choice((16, 64, 64, 72, 128, 136, 256)),
        "causal": rng.random() < 0.6,
        "window": rng.choice((0, 0, 1, 2, 64, 65, rng.randint(1, max(sq, sk)), 60000)),
        "lse": rng.random() < 0.5,
        "programs": rng.choice((1, 2, 3, 5, 8, 24, 78, 114, 132, 144)),
    }


def draw_shared(rng):
    """Few causal tiles and many keys: programs share tiles, and a tile more than was counted is one too many."""
    sizes = {"sq": rng.randint(1, 600), "sk": rng.randint(600, 9000), "window": 0, "causal": True}
    return draw(rng, 3000, 16) | sizes | {"programs": rng.choice((78, 114, 132, 144))}


def check_launch(monkeypatch, rng, shape, most_blocks):
    """Check the walks of a launch: all programs where they have `most_blocks` of work at most, else one; returns their parts."""
    lengths = shape.get("lengths", ())
    plan = plan_for(
        5,
        shape["head_dim"],
        packed_variant(shape["head_dim"], shape["sq"], shape["batch"] * shape["heads"], shape["programs"])
        if lengths
        else variant_for(
            *(shape[name] for name in ("head_dim", "causal", "window", "sq", "sk")),
            shape["batch"] * shape["heads"],
            shape["programs"],
        ),
    )
    given, grid = launched(monkeypatch, plan, **shape)
    assert 1 <= grid <= shape["programs"]
    case = given["CASE"]
    tiles = given["tiles_m"] * given["heads_total"]
    assert grid == tiles * given["parts"] if case.parts else given["parts"] == 1
    # What `Parts` writes: for each part, 64 rows of each consumer and their log-sum-exp.
    assert given["parts_ptr"] == (grid * plan.rows * (plan.block_d + 1) if case.parts else 0)
    given["CASE"] = replace(case, together=case.parts)  # as on a GPU
    table = given["schedule"].flatten().tolist() if case.dealt else []
    work = sum(tile_blocks(plan, shape["sq"], shape["sk"], shape["causal"], shape["window"]))
    work *= given["heads_total"]
    whole = work <= most_blocks
    stored, computed = [], {}
    for program in range(grid) if whole else rng.sample(range(grid), 1) if work / grid <= most_blocks else ():
        rows, blocks = check_program(given, grid, program, table)
        stored += rows
        for *place, own in blocks:
            computed.setdefault(tuple(place), []).extend(own)
    assigned = []  # to all programs, in any case
    for program in range(grid):
        role = Role(given, Device(program, grid, table))
        count, t, rest = role.todo.first()
        for i in range(count):
            following = role.todo.start_next(t, rest, i)
            assigned.append((*map(int, role.todo.locate(t)), int(t % given["parts"])))
            t = role.todo.finish_next(following)
    each = range(given["tiles_m"]), range(given["heads_total"]), range(given["parts"])
    assert sorted(assigned) == list(itertools.product(*each))
    if whole:
        by_head = {}
        for flat, row, size in stored:
            by_head.setdefault(flat, []).append((row, size))
        assert sorted(by_head) == list(range(given["heads_total"]))
        for rows in by_head.values():
            rows.sort()
            assert rows[0][0] <= 0 < rows[0][0] + 128 * plan.consumers and sum(rows[-1]) >= shape["sq"]
            assert all(row + size == next_row for (row, size), (next_row, _) in itertools.pairwise(rows))
    if whole or not case.parts:
        for place, blocks in computed.items():
            check_rows(given, *place, blocks)
    return given["parts"]


@needs_triton
def test_what_is_loaded_is_read_and_every_row_is_stored_once(monkeypatch):
    rng, shared = random.Random(0), 0
    for _ in range(60):
        shared += check_launch(monkeypatch, rng, draw(rng, 3000, 2), 150) > 1
    assert shared > 1


@needs_triton
def test_packed_sequences_are_walked_by_their_table(monkeypatch):
    rng = random.Random(2)
    for _ in range(25):
        lengths = tuple(int(400 ** rng.random()) for _ in range(rng.randint(1, 9)))
        shape = draw(rng, 100, 2) | {"sq": sum(lengths), "sk": sum(lengths), "lengths": lengths}
        check_launch(monkeypatch, rng, shape | {"window": rng.choice((0, 0, 1, 70))}, 1000)


@needs_triton
def test_parts_of_causal_tiles_have_a_program_each(monkeypatch):
    rng = random.Random(1)
    assert sum(check_launch(monkeypatch, rng, draw_shared(rng), 0) > 1 for _ in range(80)) > 25


@needs_triton
@pytest.mark.parametrize(
    "seed", [pytest.param(n, marks=pytest.mark.slow if n < 2 else pytest.mark.overnight) for n in range(1, 9)]
)
def test_walks_of_many_shapes(monkeypatch, seed):
    rng = random.Random(seed)
    for _ in range(300):
        shape = draw(rng, *rng.choice(((700, 4), (3000, 2), (50_000, 1), (50_000, 40))))
        check_launch(monkeypatch, rng, shape, 2000)
