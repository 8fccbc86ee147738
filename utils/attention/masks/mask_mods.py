"""Masks as functions: `mask_mod(b, h, q, k)` is True where query q of head h in sequence b sees key k.

    mask = both(causal, documents(1024))         # compose them
    dense_mask(mask, 16, 16)                     # the mask as data, pair by pair
    build_block_mask(mask, 8192, 8192, "cuda")   # FlexAttention's tables, built once

The indices are integer tensors; in a GPU kernel each lane holds one number. A mask function consists of arithmetic,
comparisons and `&`, `|`, `~`, and it may read tensors that it captures. It cannot use Python's `and`, `or` and `if`:
they would need the value of a tensor while the kernel is still being written.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from utils.reads import names_in, outside_values
from utils.validation import whole_number

MaskMod = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
ROWS_AT_ONCE = 2**24  # pairs of a dense mask evaluated at a time: 128 MiB for each int64 intermediate


def named(mod: Callable, name: str, **facts: Any) -> Callable:
    """Give a function a readable name for tables and errors, and facts about it as attributes."""
    mod.__name__ = mod.__qualname__ = name
    for key, value in facts.items():
        setattr(mod, key, value)
    return mod


def name_of(mod: Callable | None) -> str:
    """Return the name of a mask or modifier, such as "both(causal, documents(1024))"; "none" for None."""
    return "none" if mod is None else getattr(mod, "__name__", type(mod).__name__)


def causal(b, h, q, k):
    """Let a query see its own key and the keys before it."""
    return q >= k


def sliding_window(window: int) -> MaskMod:
    """Let a query see the last `window` keys up to its own key, which counts as one of them."""
    whole_number("window", window)

    def mask_mod(b, h, q, k):
        return (q >= k) & (q - k < window)

    return named(mask_mod, f"sliding_window({window})", kind="sliding_window", window=window)


def nearby(window: int) -> MaskMod:
    """Let a query see only keys fewer than `window` positions away, before or after it."""
    whole_number("window", window)

    def mask_mod(b, h, q, k):
        return (q - k < window) & (k - q < window)

    return named(mask_mod, f"nearby({window})", kind="nearby", window=window)


def documents(ids_or_span: torch.Tensor | int) -> MaskMod:
    """Let a query see its own document only: `ids` (S,) has the document of each token, or each document has `span` tokens."""
    if not isinstance(ids_or_span, torch.Tensor):
        span = whole_number("span", ids_or_span)
        return named(lambda b, h, q, k: q // span == k // span, f"documents({span})", kind="documents", span=span)
    ids = ids_or_span
    if ids.dim() != 1 or ids.is_floating_point() or ids.dtype == torch.bool:
        raise ValueError(
            f"document numbers are a tensor (S,) of integers; got {tuple(ids.shape)} of {ids.dtype}. "
            "document_ids(lengths) makes one."
        )
    return named(lambda b, h, q, k: ids[q] == ids[k], "documents(ids)", kind="documents_by_ids", ids=ids)


def document_ids(lengths: Sequence[int], device: torch.device | str = "cpu") -> torch.Tensor:
    """Return the document number of each token, (S,), for documents in a row: lengths 2, 3 give 0 0 1 1 1."""
    lengths = [whole_number("a document's length", length) for length in lengths]
    if not lengths:
        raise ValueError("document_ids() was given no lengths; give one whole number a document.")
    numbers = torch.arange(len(lengths), dtype=torch.int32, device="cpu")
    return torch.repeat_interleave(numbers, torch.tensor(lengths, device="cpu")).to(device)


def document_lengths(mask_mod: Any, tokens: int) -> tuple[int, ...]:
    """Return the lengths of a mask's documents; () if the mask is no document mask, or if its lengths are unknown."""
    if getattr(mask_mod, "kind", "") == "documents":
        count, rest = divmod(tokens, mask_mod.span)
        return (mask_mod.span,) * count + ((rest,) if rest else ())
    lengths = getattr(mask_mod, "lengths", ()) if getattr(mask_mod, "kind", "") == "documents_by_ids" else ()
    return lengths if sum(lengths) == tokens else ()


def prefix_lm(prefix: int) -> MaskMod:
    """Let every query see the first `prefix` keys (the prompt); after them the mask is causal."""
    whole_number("prefix", prefix, 0)

    def mask_mod(b, h, q, k):
        return (q >= k) | (k < prefix)

    return named(mask_mod, f"prefix_lm({prefix})", kind="prefix_lm", prefix=prefix)


def dilated(step: int) -> MaskMod:
    """Let a query see its own key and every `step`-th key before it."""
    whole_number("step", step)

    def mask_mod(b, h, q, k):
        return (q >= k) & ((q - k) % step == 0)

    return named(mask_mod, f"dilated({step})", kind="dilated", step=step)


def checked_mods(name: str, mods: Sequence, kind: str = "mask function", form: str = "(b, h, q, k)") -> tuple:
    """Return the functions of a composition as a tuple; raise an error if there are none, or if one is not a function."""
    if not mods:
        raise ValueError(f"{name}() was given no {kind}; give it one or more.")
    for mod in mods:
        if not callable(mod):
            raise TypeError(f"{name}() takes {kind}s {form}, and was given a {type(mod).__name__}.")
    return tuple(mods)


def _combine(name: str, join: Callable, mods: Sequence[MaskMod]) -> MaskMod:
    mods = checked_mods(name, mods)

    def mask_mod(b, h, q, k):
        allowed = mods[0](b, h, q, k)
        for mod in mods[1:]:
            allowed = join(allowed, mod(b, h, q, k))
        return allowed

    return named(mask_mod, f"{name}({', '.join(map(name_of, mods))})", kind=name, mods=mods)


def both(*mods: MaskMod) -> MaskMod:
    """Let through the pairs that all of the masks let through."""
    return _combine("both", operator.and_, mods)


def either(*mods: MaskMod) -> MaskMod:
    """Let through the pairs that at least one of the masks lets through."""
    return _combine("either", operator.or_, mods)


def negate(mod: MaskMod) -> MaskMod:
    """Let through the pairs that the mask does not let through."""
    (mod,) = checked_mods("negate", (mod,))

    def mask_mod(b, h, q, k):
        return ~mod(b, h, q, k)

    return named(mask_mod, f"negate({name_of(mod)})", kind="negate", mods=(mod,))


def at_offset(mod: MaskMod, offset: int) -> MaskMod:
    """Return the mask for queries `offset` tokens later than their index: for decoding, or for Sq < Sk."""
    offset = operator.index(offset)

    def mask_mod(b, h, q, k):
        return mod(b, h, q + offset, k)

    return named(mask_mod, f"at_offset({name_of(mod)}, {offset})", kind="at_offset", mods=(mod,), offset=offset)


# The masks of `labs bench ... --mask`: {name: function of the tokens of a document}. A name that begins with "causal" promises
# that no query sees a later key. A name with "document" in it promises that attention stays in documents.
MASKS: dict[str, Callable[[Any], MaskMod | None]] = {
    "full": lambda span: None,
    "causal": lambda span: causal,
    "document": documents,
    "causal_document": lambda span: both(causal, documents(span)),
}


@functools.cache
def by_name(name: str, span: int | None = None) -> MaskMod | None:
    """Return a mask of `MASKS`, with documents of `span` tokens each."""
    if name not in MASKS:
        raise ValueError(f"there is no mask {name!r}; choose one of {', '.join(MASKS)}.")
    return MASKS[name](span)


# ---- evaluation --------------------------------------------------------------------------------------------


def check_device(mod: MaskMod, device: torch.device | str) -> None:
    """Raise an error unless the document numbers in a mask function of this module are on `device`."""
    ids = getattr(mod, "ids", None)
    if ids is not None and ids.device.type != torch.device(device).type:
        raise ValueError(
            f"{name_of(mod)} holds document numbers on {ids.device}, and the mask is evaluated on {device}; "
            f'make them there: document_ids(lengths, device="{torch.device(device).type}").'
        )
    for part in getattr(mod, "mods", ()):
        check_device(part, device)


def captures(mod: Any, depth: int = 6, names: tuple[str, ...] = (), seen: dict | None = None) -> tuple:
    """Return the values that a function reads beside its arguments: numbers, text, code, and tensors with their change counts.

    The blocks of a mask, for example, are right only as long as these values stay the same. This does not see changes of
    `tensor.data`, changes through memory shared with NumPy, or values below `depth` levels. names: the names in the function's
    code; only these attributes of modules and objects count. seen: visited objects with their names.
    """
    if isinstance(mod, torch.Tensor):  # torch counts no changes of an inference tensor: take its values
        return mod, str(mod.tolist()) if mod.is_inference() else mod._version
    if mod is None or isinstance(mod, (int, float, str)):
        return (mod,)
    seen = {} if seen is None else seen
    if not depth or (id(mod), names) in seen:
        return ()
    seen[id(mod), names] = mod
    call = getattr(mod, "__func__", getattr(type(mod), "__call__", None))  # noqa: B004 (the function of a method or object)
    function: Any = mod if hasattr(mod, "__code__") else call
    inner: list = []
    if hasattr(mod, "tobytes"):  # NumPy does not count the changes of an array, so its bytes stand for them
        return (mod.tobytes(),)
    if isinstance(mod, (tuple, list, set, dict)):
        inner += [*mod, *(mod.values() if isinstance(mod, dict) else ())]
    elif isinstance(mod, functools.partial):
        inner += [mod.func, *mod.args, *mod.keywords.values()]
    elif str(getattr(mod, "__module__", None) or getattr(mod, "__name__", "")).split(".")[0] != "torch":
        inner += getattr(mod, "__dict__", {}).values() if callable(mod) else ()
        if hasattr(function, "__code__") and not hasattr(mod, "kind"):  # with `kind`, attributes have the values
            names = names_in(function.__code__)
            inner += [function.__code__, *outside_values(function), getattr(mod, "__self__", None)]
        inner += [getattr(mod, x, None) for x in names] if function is not mod else ()
    return tuple(one if isinstance(one, types.CodeType) else captures(one, depth - 1, names, seen) for one in inner)


def same_for_all_heads(mask_mod: MaskMod | None) -> bool:
    """Whether a mask surely ignores b and h: the masks of this module do, all other functions may read them."""
    if mask_mod is None or mask_mod is causal:
        return True
    return hasattr(mask_mod, "kind") and all(map(same_for_all_heads, getattr(mask_mod, "mods", ())))


@contextlib.contextmanager
def errors_of(kind: str, mod: Callable) -> Iterator[None]:
    """Turn an error inside of a user's mask function or score modifier into a message with the name of the function."""
    try:
        yield
    except (TypeError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        text = f"{kind} {name_of(mod)}"
        if "must only return Tensors" in str(error):
            raise TypeError(
                f"{text} returns no tensor; it must return one value a pair. Is a `return` missing?"
            ) from error
        if "data-dependent control flow" in str(error):
            raise TypeError(
                f"{text} asks a tensor for True or False: `and`, `or`, `not`, `if` and chained comparisons cannot. "
                "Write &, |, ~ and torch.where. Put each comparison in parentheses: (q >= k) & (q - k < 8)."
            ) from error
        raise ValueError(
            f"{text} raised {type(error).__name__} ({str(error).strip()[:200]}). Its indices are whole numbers in "
            "tensors, and every tensor that it captures must be on the device of q, k and v and long enough for them."
        ) from error


def evaluate(mask_mod: MaskMod, q: torch.Tensor, k: torch.Tensor, b: int = 0, h: int = 0) -> torch.Tensor:
    """Evaluate the mask for these query and key indices, each pair by its own four scalars: (len(q), len(k)) bool."""
    batch, head = (torch.full((), index, dtype=torch.int32, device=q.device) for index in (b, h))
    pairs = torch.vmap(torch.vmap(mask_mod, (None, None, None, 0)), (None, None, 0, None))
    with errors_of("mask function", mask_mod):
        allowed = pairs(batch, head, q, k)
    if not isinstance(allowed, torch.Tensor) or allowed.dtype != torch.bool or allowed.dim() != 2:
        given = getattr(allowed, "dtype", type(allowed).__name__)
        if isinstance(allowed, torch.Tensor) and allowed.dim() != 2:
            given = f"a tensor of shape {tuple(allowed.shape[2:])}"
        raise TypeError(
            f"mask function {name_of(mask_mod)} returns {given}; it must return True or False a pair "
            "(a bool tensor), such as q >= k."
        )
    return allowed


def different_masks(mask_mod: MaskMod | None, batch: int, heads: int, device: torch.device | str) -> tuple[int, int]:
    """Return the numbers of sequences and of heads with different masks: (batch or 1, heads or 1).

    A call under vmap with two values of b, or of h, shows whether the function reads it: only then the result is a batched
    tensor.
    """
    if mask_mod is None or same_for_all_heads(mask_mod):
        return 1, 1
    zero, reads = torch.zeros((), dtype=torch.int32, device=device), []

    def call(place: int, index: torch.Tensor):
        arguments = [zero] * 4
        arguments[place] = index
        allowed = mask_mod(*arguments)
        reads.append(isinstance(allowed, torch.Tensor) and torch._C._functorch.is_batchedtensor(allowed))
        return allowed

    for place in (0, 1):
        with errors_of("mask function", mask_mod):
            torch.vmap(functools.partial(call, place))(zero.expand(2))
    return (batch if reads[0] else 1), (heads if reads[1] else 1)


def row_chunks(
    mask_mod: MaskMod | None, sq: int, sk: int, device, rows: int = 1, b: int = 0, h: int = 0
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield (first query, mask (some rows, Sk)) over all queries, with a small number of rows at a time.

    Args:
        mask_mod: the mask function; None lets every pair through.
        sq: number of queries.
        sk: number of keys.
        device: where the mask is evaluated.
        rows: every chunk before the last has a multiple of so many rows.
        b: index of the sequence.
        h: index of the head.
    """
    sq, sk = whole_number("sq", sq), whole_number("sk", sk)
    if mask_mod is not None:
        check_device(mask_mod, device)
    step = max(rows, ROWS_AT_ONCE // sk // rows * rows)
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
    """Return the mask as data, (Sq, Sk) bool: True where query (row) sees key (column) in sequence b and head h."""
    return torch.cat([rows for _, rows in row_chunks(mask_mod, sq, sk, device, 1, b, h)])
