"""Masks as functions: `mask_mod(b, h, q, k)` is True where query q of head h in sequence b sees key k.

    mask = both(causal, documents(1024))         # compose them
    dense_mask(mask, 16, 16)                     # what it says, pair by pair
    build_block_mask(mask, 8192, 8192, "cuda")   # what FlexAttention needs, built once, for all batches and heads

The indices are integer tensors, on a GPU one number a lane: a mask function is made of arithmetic, comparisons and
`&`, `|`, `~`, and it may read tensors that it captures. Python's `and`, `or` and `if` cannot look into a tensor.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

MaskMod = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
ROWS_AT_ONCE = 2**24  # pairs of a dense mask evaluated at a time: 128 MiB an int64 intermediate


def named(mod: Callable, name: str, **facts: Any) -> Callable:
    """The function with a name that reads well in tables and errors, and facts about it as attributes."""
    mod.__name__ = mod.__qualname__ = name
    for key, value in facts.items():
        setattr(mod, key, value)
    return mod


def name_of(mod: Callable | None) -> str:
    """Such as "both(causal, documents(1024))"; "none" for None."""
    return "none" if mod is None else getattr(mod, "__name__", type(mod).__name__)


def _whole(name: str, value: Any, least: int = 1) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} is {value!r}; it must be a whole number, {least} or more.")
    return value


def _mods(name: str, mods: Sequence) -> tuple:
    if not mods:
        raise ValueError(f"{name}() was given no mask function; give it one or more, such as {name}(causal, ...).")
    for mod in mods:
        if not callable(mod):
            raise TypeError(f"{name}() takes mask functions (b, h, q, k), and was given a {type(mod).__name__}.")
    return tuple(mods)


def causal(b, h, q, k):
    """A query sees its own key and those before it."""
    return q >= k


def sliding_window(window: int) -> MaskMod:
    """Causal, and only the last `window` keys, the own one included."""
    _whole("window", window)

    def mask_mod(b, h, q, k):
        return (q >= k) & (q - k < window)

    return named(mask_mod, f"sliding_window({window})", kind="sliding_window", window=window)


def documents(ids_or_span: torch.Tensor | int) -> MaskMod:
    """A query sees its own document: `ids` (S,), a document number a token, or documents of `span` tokens each."""
    if isinstance(ids_or_span, torch.Tensor):
        return _documents_by_ids(ids_or_span)
    span = _whole("span", ids_or_span)

    def mask_mod(b, h, q, k):
        return q // span == k // span

    return named(mask_mod, f"documents({span})", kind="documents", span=span)


document = documents


def _documents_by_ids(ids: torch.Tensor) -> MaskMod:
    if ids.dim() != 1 or ids.is_floating_point() or ids.dtype == torch.bool:
        raise ValueError(
            f"document numbers are a tensor (S,) of integers; got {tuple(ids.shape)} of {ids.dtype}. "
            "document_ids(lengths) makes one."
        )

    def mask_mod(b, h, q, k):
        return ids[q] == ids[k]

    return named(mask_mod, "documents(ids)", kind="documents_by_ids", ids=ids)


def document_ids(lengths: Sequence[int], device: torch.device | str = "cpu") -> torch.Tensor:
    """Document numbers (S,) of documents packed one after the other: lengths 2, 3 give 0 0 1 1 1."""
    lengths = [_whole("a document's length", length) for length in lengths]
    if not lengths:
        raise ValueError("document_ids() was given no lengths; give one whole number a document.")
    numbers = torch.arange(len(lengths), dtype=torch.int32)
    return torch.repeat_interleave(numbers, torch.tensor(lengths)).to(device)


def prefix_lm(prefix: int) -> MaskMod:
    """Every query sees the first `prefix` keys (the prompt); after them it is causal."""
    _whole("prefix", prefix, 0)

    def mask_mod(b, h, q, k):
        return (q >= k) | (k < prefix)

    return named(mask_mod, f"prefix_lm({prefix})", kind="prefix_lm", prefix=prefix)


def dilated(step: int, window: int | None = None) -> MaskMod:
    """Causal, every `step`-th key back from the own one; with `window`, none further than window - 1 tokens away."""
    _whole("step", step)
    if window is None:

        def mask_mod(b, h, q, k):
            return (q >= k) & ((q - k) % step == 0)

        return named(mask_mod, f"dilated({step})", kind="dilated", step=step)
    _whole("window", window)

    def windowed(b, h, q, k):
        return (q >= k) & ((q - k) % step == 0) & (q - k < window)

    return named(windowed, f"dilated({step}, window={window})", kind="dilated", step=step, window=window)


def both(*mods: MaskMod) -> MaskMod:
    """The pairs that all of the masks let through."""
    mods = _mods("both", mods)

    def mask_mod(b, h, q, k):
        allowed = mods[0](b, h, q, k)
        for mod in mods[1:]:
            allowed = allowed & mod(b, h, q, k)
        return allowed

    return named(mask_mod, f"both({', '.join(map(name_of, mods))})", kind="both", mods=mods)


def either(*mods: MaskMod) -> MaskMod:
    """The pairs that at least one of the masks lets through."""
    mods = _mods("either", mods)

    def mask_mod(b, h, q, k):
        allowed = mods[0](b, h, q, k)
        for mod in mods[1:]:
            allowed = allowed | mod(b, h, q, k)
        return allowed

    return named(mask_mod, f"either({', '.join(map(name_of, mods))})", kind="either", mods=mods)


def negate(mod: MaskMod) -> MaskMod:
    """The pairs that the mask does not let through."""
    (mod,) = _mods("negate", (mod,))

    def mask_mod(b, h, q, k):
        return ~mod(b, h, q, k)

    return named(mask_mod, f"negate({name_of(mod)})", kind="negate", mods=(mod,))


def at_offset(mod: MaskMod, offset: int) -> MaskMod:
    """The mask for queries that stand `offset` tokens later than their index says: decoding, or Sq < Sk."""
    _whole("offset", offset, 0)

    def mask_mod(b, h, q, k):
        return mod(b, h, q + offset, k)

    return named(mask_mod, f"at_offset({name_of(mod)}, {offset})", kind="at_offset", mods=(mod,), offset=offset)


def on_device(mod: MaskMod, device: torch.device | str) -> None:
    """Raise unless every tensor that a mask function of this module captures is on `device`."""
    ids = getattr(mod, "ids", None)
    if ids is not None and ids.device.type != torch.device(device).type:
        raise ValueError(
            f"{name_of(mod)} holds document numbers on {ids.device}, and the mask is wanted on {device}; "
            f'make them there: document_ids(lengths, device="{torch.device(device).type}").'
        )
    for part in getattr(mod, "mods", ()):
        on_device(part, device)


def evaluate(mask_mod: MaskMod, q: torch.Tensor, k: torch.Tensor, b: int = 0, h: int = 0) -> torch.Tensor:
    """The mask (len(q), len(k)), bool, of these query and key indices, each pair by its own four scalars."""
    batch, head = (torch.full((), index, dtype=torch.int32, device=q.device) for index in (b, h))
    pairs = torch.vmap(torch.vmap(mask_mod, (None, None, None, 0)), (None, None, 0, None))
    try:
        allowed = pairs(batch, head, q, k)
    except RuntimeError as error:
        if "data-dependent control flow" in str(error):
            raise TypeError(
                f"mask function {name_of(mask_mod)} asks a tensor for True or False: `and`, `or`, `not`, "
                "`if` and chained comparisons cannot. Write &, |, ~ and torch.where. Put each comparison "
                "in parentheses: (q >= k) & (q - k < 8)."
            ) from error
        raise
    if not isinstance(allowed, torch.Tensor) or allowed.dtype != torch.bool:
        given = allowed.dtype if isinstance(allowed, torch.Tensor) else type(allowed).__name__
        raise TypeError(
            f"mask function {name_of(mask_mod)} returns {given}; it must return True or False a pair "
            "(a bool tensor), such as q >= k."
        )
    return allowed


def row_chunks(mask_mod: MaskMod, sq: int, sk: int, device, rows: int = 1, b: int = 0, h: int = 0):
    """(first query, mask (some rows, Sk)) over all queries: as many rows at a time as stay small, steps of `rows`."""
    if mask_mod is not None:
        on_device(mask_mod, device)
    step = max(rows, ROWS_AT_ONCE // max(sk, 1) // rows * rows)
    keys = torch.arange(sk, device=device, dtype=torch.int32)
    for first in range(0, sq, step):
        queries = torch.arange(first, min(first + step, sq), device=device, dtype=torch.int32)
        if mask_mod is None:
            yield first, torch.ones(len(queries), sk, dtype=torch.bool, device=device)
        else:
            yield first, evaluate(mask_mod, queries, keys, b, h)


def dense_mask(
    mask_mod: MaskMod | None, sq: int, sk: int, device: torch.device | str = "cpu", b: int = 0, h: int = 0
) -> torch.Tensor:
    """The mask as data: (Sq, Sk) bool, True where query (row) sees key (column), of sequence b and head h."""
    return torch.cat([rows for _, rows in row_chunks(mask_mod, _whole("sq", sq), _whole("sk", sk), device, 1, b, h)])


def block_sizes(block_size: int | tuple[int, int]) -> tuple[int, int]:
    """(queries, keys) of a block, out of one number or two."""
    pair = (block_size, block_size) if isinstance(block_size, int) else tuple(block_size)
    if len(pair) != 2:
        raise ValueError(f"block_size is {block_size!r}; it must be one whole number or two: (queries, keys).")
    return tuple(_whole("block_size", size) for size in pair)


def has_flex() -> bool:
    """Whether this torch has FlexAttention."""
    try:
        import torch.nn.attention.flex_attention  # noqa: F401
    except ImportError:
        return False
    return True


@dataclass(frozen=True)
class Blocks:
    """Which blocks of keys each block of queries needs, without FlexAttention: what its BlockMask holds, the same way.

    counts (query blocks, key blocks): pairs let through; full, partial: bool of the same shape.
    """

    counts: torch.Tensor
    full: torch.Tensor
    partial: torch.Tensor
    block_size: tuple[int, int]


def count_blocks(
    mask_mod: MaskMod | None,
    sq: int,
    sk: int,
    device: torch.device | str = "cpu",
    block_size: int | tuple[int, int] = 128,
) -> Blocks:
    """Count the pairs of every block. A block at an edge that is not filled is partial, as it is in FlexAttention."""
    size_q, size_k = block_sizes(block_size)
    counts = []
    for _, rows in row_chunks(mask_mod, sq, sk, device, size_q):
        padded = torch.nn.functional.pad(rows, (0, -sk % size_k, 0, -len(rows) % size_q))
        blocks = padded.view(padded.shape[0] // size_q, size_q, padded.shape[1] // size_k, size_k)
        counts.append(blocks.sum(dim=(1, 3), dtype=torch.int32))
    counts = torch.cat(counts)
    full = counts == size_q * size_k
    return Blocks(counts, full, (counts > 0) & ~full, (size_q, size_k))


_kept: dict[tuple, Any] = {}
KEPT_AT_MOST = 64


def build_block_mask(
    mask_mod: MaskMod | None,
    sq: int,
    sk: int,
    device: torch.device | str = "cpu",
    block_size: int | tuple[int, int] = 128,
):
    """FlexAttention's BlockMask, one for all batches and heads, built at the first call and kept. None for no mask."""
    if mask_mod is None:
        return None
    return _kept_or_built(mask_mod, sq, sk, device, block_size)[0]


def block_mask_seconds(
    mask_mod: MaskMod | None,
    sq: int,
    sk: int,
    device: torch.device | str = "cpu",
    block_size: int | tuple[int, int] = 128,
) -> float:
    """Seconds that create_block_mask took when this block mask was built; 0 without a mask."""
    if mask_mod is None:
        return 0.0
    return _kept_or_built(mask_mod, sq, sk, device, block_size)[1]


def _kept_or_built(mask_mod, sq, sk, device, block_size) -> tuple[Any, float]:
    on_device(mask_mod, device)
    key = (mask_mod, _whole("sq", sq), _whole("sk", sk), str(device), block_sizes(block_size))
    if key not in _kept:
        built = _build(*key)
        while len(_kept) >= KEPT_AT_MOST:  # the oldest goes
            del _kept[next(iter(_kept))]
        _kept[key] = built
    return _kept[key]


def _build(mask_mod, sq, sk, device, block_size) -> tuple[Any, float]:
    from torch.nn.attention.flex_attention import create_block_mask

    _synchronize(device)
    began = time.perf_counter()
    block_mask = create_block_mask(mask_mod, None, None, sq, sk, device=str(device), BLOCK_SIZE=block_size)
    _synchronize(device)
    return block_mask, time.perf_counter() - began


def seconds_to_build_block_mask(
    mask_mod: MaskMod, sq: int, sk: int, device: torch.device | str = "cpu", block_size: int | tuple[int, int] = 128
) -> float:
    """Seconds that create_block_mask takes by now, with everything warm: the middle one of three."""
    return sorted(_build(mask_mod, sq, sk, device, block_sizes(block_size))[1] for _ in range(3))[1]


def forget_block_masks() -> None:
    """Drop every block mask kept: their captured tensors may be large, or may have been changed in place."""
    _kept.clear()


def _synchronize(device) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()


@functools.cache
def by_name(name: str, span: int | None = None) -> MaskMod | None:
    """The masks of the benchmarks: full, causal, document and causal_document, the latter two of `span` tokens."""
    if name == "full":
        return None
    if name == "causal":
        return causal
    if name not in ("document", "causal_document"):
        raise ValueError(f"there is no mask {name!r}; choose full, causal, document or causal_document.")
    mask = documents(_whole("span", span))
    return both(causal, mask) if name == "causal_document" else mask
