"""Time the trial variants of the decode kernels beside the default and the other libraries: a file for one session of measurements."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from tools.record import decode_variants
from tools.record.common import Record, arguments_parser
from tools.record.decode import draw, in_pages, others
from tools.record.turns import Turns
from utils.attention import decode_reference

# Rows with most variants first: a process a row.
ROWS = (
    (16, 64, 8, 8192, 128, 16),
    ("lengths", 8, 8192, 0),
    (64, 32, 8, 4096, 128, 16),
    (64, 32, 8, 4096, 128, 8),
    (128, 64, 8, 1024, 128, 8),
    (128, 64, 8, 1024, 128, 16),
    ("lengths", 1, 32768, 0),
    ("pages", 8, 8192, 64),
    (16, 64, 8, 8192, 128, 8),
    ("fp8", 16, 64, 8, 8192, 128, 16),
    ("fp8", 8, 32, 8, 8192, 128, 16),
    ("fp8", 128, 64, 8, 1024, 128, 16),
    ("fp8", 64, 32, 8, 4096, 128, 16),
    ("lengths", 64, 4096, 0),
    (64, 32, 8, 4096, 128, 1),
    (16, 64, 8, 8192, 128, 1),
    (128, 64, 8, 1024, 128, 1),
    (64, 16, 16, 2048, 64, 1),
    (64, 16, 16, 2048, 64, 16),
    (1, 4, 1, 32768, 256, 16),
    (1, 32, 8, 131072, 128, 16),
    ("promotion", 64, 32, 8, 4096, 128, 1),
    ("promotion", 16, 64, 8, 8192, 128, 1),
)
LEAN: dict = {"lean": True}
SOON: dict = {"lean": True, "soon": True}
TURNS: dict = SOON | {"turns": True}


def named(point: tuple) -> dict[str, dict]:
    """Name the trials of a point."""
    batch, heads, kv_heads, _, head_dim, new = point
    rows, all_heads = heads // kv_heads * new, batch * kv_heads
    found: dict[str, dict] = {"default": {}, "lean": LEAN}
    if rows < 32:
        if all_heads > 132:
            block = 64 if head_dim == 128 else 128
            one = {"consumers": 0, "block_n": block, "per_sm": 2, "programs": all_heads}
            found["a program a head"] = LEAN | one
        return distinct(point, found)
    consumers = 1 if rows <= 64 else 2
    large = {"consumers": consumers, "block_n": 128}
    if all_heads < 128:
        return distinct(point, found | {"soon": SOON})
    if all_heads == 128:
        found |= {"soon": SOON, "turns": TURNS, "by_tma": LEAN | large | {"by_tma": True}}
        found |= {"soon, by_tma": SOON | large | {"by_tma": True}, "turns, by_tma": TURNS | large | {"by_tma": True}}
        if consumers == 2:
            found["turns, by_tma, 64 keys"] = TURNS | large | {"by_tma": True, "block_n": 64}
    elif consumers == 1:
        two = {"consumers": 1, "block_n": 64, "per_sm": 2, "ahead": False}
        found |= {"soon": SOON, "soon, two an SM": SOON | two, "soon, two an SM, by_tma": SOON | two | {"by_tma": True}}
        found["soon, two an SM, a program a head"] = SOON | two | {"by_tma": True, "programs": all_heads}
        found["soon, a program a head"] = SOON | large | {"programs": all_heads, "by_tma": True, "ahead": False}
    else:
        found |= {"soon": SOON, "turns": TURNS, "turns, ahead, 128 keys": TURNS | large | {"ahead": True}}
        found["turns, a program a head"] = TURNS | large | {"programs": all_heads, "by_tma": True, "ahead": False}
    return distinct(point, found)


def distinct(point: tuple, found: dict[str, dict]) -> dict[str, dict]:
    """Keep one name for each way to compute a point."""
    names: dict = {}
    for name, choices in found.items():
        names.setdefault(decode_variants.arrangement(point, choices), name)
    return {name: found[name] for name in names.values()}


class Promotion:
    """Descriptors whose copies bring 256 bytes into the L2 at once, while `on`: Triton's own say 128."""

    def __init__(self) -> None:
        from triton.runtime import driver

        self.on, self.count = False, 0
        utils = driver.active.utils
        name = next(n for n in ("fill_tma_descriptor_tiled", "fill_tma_descriptor") if hasattr(utils, n))
        self.fill = getattr(utils, name)
        self.mask = self.difference()
        setattr(utils, name, self)

    def encode(self, promotion: int, address: int) -> bytes:
        """Encode some descriptor."""
        cuda = ctypes.CDLL("libcuda.so.1")
        space = ctypes.create_string_buffer(256)
        at = (ctypes.addressof(space) + 127) // 128 * 128
        sizes, strides = (ctypes.c_uint64 * 2)(128, 1024), (ctypes.c_uint64 * 1)(256)
        box, ones = (ctypes.c_uint32 * 2)(64, 64), (ctypes.c_uint32 * 2)(1, 1)
        given = (9, 2, ctypes.c_void_p(address), sizes, strides, box, ones, 0, 3, promotion, 0)  # bf16, swizzle 128
        if cuda.cuTensorMapEncodeTiled(ctypes.c_void_p(at), *given):
            raise RuntimeError("cuTensorMapEncodeTiled refused")
        return ctypes.string_at(at, 128)

    def difference(self) -> tuple[int, list[tuple[int, int]]]:
        """Where the address stands in a descriptor, and which bits differ between 128 and 256 bytes."""
        x = torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
        a, b = (self.encode(p, x.data_ptr()) for p in (2, 3))
        bits = [(i, u ^ w) for i, (u, w) in enumerate(zip(a, b, strict=True)) if u != w]
        place = a.find(x.data_ptr().to_bytes(8, "little"))
        print("promotion bits", bits, "address at", place, flush=True)
        return place, bits

    def __call__(self, address, *rest):
        """Fill a descriptor as Triton does, and change it while `on`."""
        map_ = self.fill(address, *rest)
        if self.on:
            raw = ctypes.string_at(id(map_), type(map_).__basicsize__)
            at = raw.find(address.to_bytes(8, "little")) - self.mask[0]
            if at < 0:
                raise RuntimeError("no descriptor found")
            for i, bits in self.mask[1]:
                byte = ctypes.c_uint8.from_address(id(map_) + at + i)
                byte.value ^= bits
            self.count += 1
        return map_

    def promoted(self, call: Callable) -> Callable:
        """Return the call with changed descriptors."""

        def run():
            self.on = True
            try:
                return call()
            finally:
                self.on = False

        return run


def prepare(point: tuple, fa3: bool) -> tuple[dict, dict[str, Callable], int]:
    """Prepare a row."""
    if isinstance(point[0], str):
        kinds = {"fp8": prepare_fp8, "promotion": prepare_promotion}
        return kinds.get(point[0], prepare_lengths)(point)
    q, k, v = draw(*point)
    expected = decode_reference(q[:1], k[:1], v[:1])
    errors: dict[str, float] = {}
    chosen = named(point)
    calls, left_out = decode_variants.right_calls(chosen, expected, q, k, v, errors=errors)
    own = {}
    for name, choices in chosen.items():
        try:
            own[name] = decode_variants.describe(decode_variants.arrangement(point, choices))
        except ValueError as error:
            own[name] = str(error)
    calls |= others(q, k, v, fa3, True, left_out)
    return {"point": list(point), "left_out": left_out, "own": own, "errors": errors}, calls, 4 * k.numel()


def prepare_lengths(point: tuple) -> tuple[dict, dict[str, Callable], int]:
    """Prepare a cache with lengths, in one piece or in pages: who merges, and how many programs share it."""
    _, batch, keys, page = point
    q, k, v = draw(batch, 32, 8, keys, 128, 1)
    used = torch.full((batch,), keys, dtype=torch.int32, device="cuda")
    expected = decode_reference(q[:1], k[:1], v[:1])
    calls, left_out = decode_variants.right_calls({"one piece": {}, "no cluster": {"cluster": 0}}, expected, q, k, v)
    table = None
    if page:
        table = torch.randperm(batch * keys // page, device="cuda").int().view(batch, -1)
        k, v = (in_pages(x, page, table) for x in (k, v))
    found: dict[str, dict] = {"default": {}, "lean": LEAN, "lean, hint": LEAN | {"hint": True}}
    keys = LEAN | {"consumers": 0}
    if batch == 64:
        found = {"default": {}, "lean": LEAN, "keys, level": keys | {"level": True}}
        found["keys, 128"] = keys | {"programs": 128}
    else:
        for programs, merge in ((128, "second"), (128, "together"), (132, "together")):
            found[f"keys, {programs}, {merge}"] = keys | {"programs": programs, "merge": merge}
        found["rows, 128, together"] = SOON | {"consumers": 1, "programs": 128, "merge": "together"}
    more, missing = decode_variants.right_calls(found, expected, q, k, v, used, table)
    return {"point": list(point), "own": {}, "left_out": left_out | missing, "errors": {}}, calls | more, 4 * k.numel()


def prepare_promotion(point: tuple) -> tuple[dict, dict[str, Callable], int]:
    """Prepare the default with its own descriptors, and with those that bring 256 bytes into the L2 at once."""
    q, k, v = draw(*point[1:])
    expected = decode_reference(q[:1], k[:1], v[:1])
    calls, left_out = decode_variants.right_calls({"default": {}}, expected, q, k, v)
    try:
        promotion = Promotion()
        call = promotion.promoted(calls["default"])
        error = decode_variants.error_of(call()[:1], expected)
        print("promoted", promotion.count, "error", error, flush=True)
        if promotion.count == 0 or error > 5e-3:
            raise RuntimeError(f"{promotion.count} descriptors, error {error}")
        calls["256 B"] = call
        calls["default again"] = calls["default"]
        calls["256 B again"] = call
    except Exception as problem:
        left_out["256 B"] = f"{type(problem).__name__}: {problem}"
        print(left_out["256 B"], flush=True)
    return {"point": list(point), "own": {}, "left_out": left_out, "errors": {}}, calls, 4 * k.numel()


def prepare_fp8(point: tuple) -> tuple[dict, dict[str, Callable], int]:
    """Prepare a cache in e4m3 beside the same one in bf16: one converting warpgroup or two, one consumer or two."""
    _, heads, kv_heads, _, _, new = point[1:]
    q, k, v = draw(*point[1:])
    calls, left_out = decode_variants.right_calls({"bf16": {}}, decode_reference(q[:1], k[:1], v[:1]), q, k, v)
    small, scales = [x.to(torch.float8_e4m3fn) for x in (k, v)], torch.rand(2, kv_heads, device="cuda") + 0.5
    expected = decode_reference(q[:1], small[0][:1], small[1][:1], kv_scales=scales)
    one: dict = {"fp8": True, "consumers": 1}
    two = one | SOON | {"converters": 2}
    found = {"default": {"fp8": True}, "one, soon": one | SOON, "two converters": one | {"converters": 2}}
    found |= {"two converters, soon": two, "two converters, fp16": two | {"fp16": True}}
    if heads // kv_heads * new > 64:
        found |= {"two consumers, soon": two | {"consumers": 2}}
        found |= {"two consumers, turns": two | {"consumers": 2, "turns": True}}
        found |= {"two consumers, turns, fp16": two | {"consumers": 2, "turns": True, "fp16": True}}
    more, missing = decode_variants.right_calls(found, expected, q, *small, scales=scales)
    return {"point": list(point), "own": {}, "left_out": left_out | missing, "errors": {}}, calls | more, 2 * k.numel()


def main() -> None:
    """Measure the rows of this part."""
    parser = arguments_parser(__doc__)
    parser.add_argument("--fa3", type=Path)
    parser.add_argument("--part", default="0/1")
    parser.add_argument("--turns", type=Path)
    parser.add_argument("--prepare", type=float, default=60)
    parser.add_argument("--processes", type=int, help="that share the folder of `--turns`; by default, the parts")
    options = parser.parse_args()
    part, parts = map(int, options.part.split("/"))
    if options.fa3:
        torch.ops.load_library(str(options.fa3.expanduser()))
    turns = Turns(options.turns, options.processes or parts, options.prepare)
    decode_variants.ITERATIONS = 17
    record = Record(options.out, "decode: trials", "cuda", l2="cold", iterations=decode_variants.ITERATIONS)
    rows = list(ROWS)[part::parts]
    ready = partial(prepare, fa3=options.fa3 is not None)
    decode_variants.measure_in_turns(rows, ready, finish, turns, f"points-{part}", record)


def finish(row: dict, samples: dict, bytes_: int) -> dict:
    """Finish a row; those with lengths have no other library."""
    return decode_variants.finish_point(row, samples, bytes_) if row["own"] else row


if __name__ == "__main__":
    main()
