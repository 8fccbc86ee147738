"""Checks of mask functions and score modifiers. They evaluate each pair, and show the result beside the right one.

    expect_mask(causal, "100/110/111", "causal", probes={(1, 1): "A query sees its own key."})

A mask function runs under vmap, as in FlexAttention, so Python cannot read the value of an index. Where torch raises an
error about this, the message is a sentence with the usual causes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping

import torch

from utils.attention.masks import dense_mask
from utils.attention.masks.score_mods import modify_scores
from utils.attention.prepared import compiled_versions, own_copy
from utils.checking.answers import run_beside
from utils.checking.watching import OperationWatch

Mod = Callable[..., torch.Tensor]
_SHOWN = 12  # a message shows tables of at most this number of keys
_REASONS = (  # words of the errors under vmap, and the sentence that replaces the error
    (
        ("data-dependent control flow", "asks a tensor for True or False"),
        "asks a tensor for True or False: `and`, `or`, `not`, `if`, `max`, `min` and chained comparisons cannot "
        "work here. Write &, |, ~, .clamp or torch.where, and put each comparison in parentheses.",
    ),
    (
        (".item()", "__index__", "_local_scalar_dense"),
        "takes a value out of a tensor (.item(), int(), float(), a Python index). A kernel has no Python: stay in tensors.",
    ),
    (
        ("it must return True or False",),
        "should return a bool tensor, one truth value a pair, such as k <= q. It does not.",
    ),
)


def call_mod(function: Callable, what: str, *args, **kwargs):
    """Call a function that runs the student's mod; explain the usual errors of a mod in a sentence."""
    try:
        return function(*args, **kwargs)
    except (RuntimeError, TypeError) as error:
        for signs, reason in _REASONS:
            if any(sign in str(error) for sign in signs):
                raise AssertionError(f"{what} {reason}") from None
        raise


def count_arguments(mod: Mod) -> int:
    """Count the positional arguments, by which FlexAttention distinguishes masks from score modifiers."""
    if hasattr(mod, "__code__"):
        return mod.__code__.co_argcount - len(getattr(mod, "__defaults__", None) or ())
    return sum(parameter.default is inspect.Parameter.empty for parameter in inspect.signature(mod).parameters.values())


def _expect_callable(mod: object, what: str, kind: str) -> None:
    if not callable(mod):
        raise AssertionError(f"{what} should be a {kind}, and is of type {type(mod).__name__}: is a return missing?")


def pairs(mod: Mod, sq: int, sk: int, what: str, b: int = 0, h: int = 0) -> torch.Tensor:
    """Evaluate a student's mask_mod for all pairs, and return a bool tensor (Sq, Sk)."""
    _expect_callable(mod, what, "mask_mod, a function of (b, h, q, k)")
    count = count_arguments(mod)
    if count != 4:
        raise AssertionError(
            f"{what} is a function with {count} positional arguments to FlexAttention, which counts them. A mask_mod "
            "takes exactly four, (b, h, q, k); *args does not count."
        )
    return call_mod(dense_mask, what, mod, sq, sk, b=b, h=h)


def table(mask: torch.Tensor | str) -> torch.Tensor:
    """Return a mask as a tensor. It may be a text with a row of 0 and 1 for each query: "10/11" is causal."""
    return torch.tensor([[digit == "1" for digit in row] for row in mask.split("/")]) if isinstance(mask, str) else mask


def expect_mask(
    mod: Mod,
    expected: torch.Tensor | str,
    what: str,
    mistakes: Mapping[str, torch.Tensor] | Mapping[str, str] | None = None,
    b: int = 0,
    h: int = 0,
    probes: Mapping[tuple[int, int], str] | None = None,
) -> None:
    """Assert that a mask_mod lets exactly these pairs (Sq, Sk) through; otherwise show both tables, if they are small.

    `mistakes` is {hint: the mask that this mistake leads to}, a tensor or the text of a `table`. If two mistakes lead to
    the same mask, the message names both. `probes` is {(query, key): hint for a wrong answer at this pair}. The message
    has the first hint that applies, unless a mistake explains the whole mask.
    """
    expected = table(expected)
    sq, sk = expected.shape
    got = pairs(mod, sq, sk, what, b, h)
    wrong = got != expected
    if not wrong.any():
        return
    hints = [hint for hint, mask in (mistakes or {}).items() if torch.equal(got, table(mask).expand(sq, sk))]
    hints = hints or [hint for (q, k), hint in (probes or {}).items() if wrong[q, k]][:1]
    where = next(((q, k) for q, k in probes or {} if wrong[q, k]), None) or tuple(wrong.nonzero()[0].tolist())
    sees = "lets query {} see key {}, and should not" if got[where] else "hides key {1} from query {0}, and should not"
    lines = [f"  {'got':{max(sk, 3)}}   expected"]
    for mine, right in zip(got.int().tolist(), expected.int().tolist(), strict=True):
        row, other = "".join(map(str, mine)), "".join(map(str, right))
        lines.append(f"  {row:3}   {other}" + ("   <-" if row != other else ""))
    hint = f" {' Or: '.join(hints)}" if hints else ""
    place = "" if b == h == 0 else f" in sequence {b}, head {h},"
    words = f"{what}{place} over {sq} queries and {sk} keys {sees.format(*where)}.{hint}"
    raise AssertionError("\n".join([words, *lines] if sk <= _SHOWN else [words]))


def expect_program(mod: Mod, limit: int, what: str, sq: int = 8, sk: int = 8) -> None:
    """Assert that a mod computes the value of a pair without a tensor of more than `limit` elements."""
    # FlexAttention evaluates many pairs at once, so no index is a number that Python can read.
    with OperationWatch() as watch:
        call_mod(torch.vmap(mod), what, *(torch.tensor([i]) for i in (0, 0, sq - 1, sk - 1)))
    if large := watch.largest_above(limit, watch.largest):
        raise AssertionError(
            f"{what} touches a tensor of {large[1]} elements (in {large[0]}) to decide about one pair. It is a "
            f"program: it may read tensors with one number a token, {limit} elements at most here, and no tensor of pairs."
        )


def apply_score_mod(mod: Mod, scores: torch.Tensor, what: str, b: int = 0, h: int = 0) -> torch.Tensor:
    """Run a student's score_mod on scores (Sq, Sk) of sequence b and head h, one pair at a time."""
    _expect_callable(mod, what, "score_mod, a function of (score, b, h, q, k)")
    return call_mod(modify_scores, what, mod, scores, b, h)


def kernels_for(mods: list[Mod], size: int) -> int:
    """Count the kernels that torch.compile makes for these masks; its backend compiles nothing, which is fast."""
    return run_beside(mods[0])(_count_kernels, mods, size)


def _count_kernels(mods: list[Mod], size: int) -> int:
    def ask(mod, q, k):
        return mod(0 * q, 0 * q, q, k)

    ask = own_copy(ask)
    compiled = torch.compile(ask, backend=lambda graph, _: graph.forward, dynamic=False)
    q, k = torch.arange(size)[:, None], torch.arange(size)[None, :]
    for mod in mods:
        compiled(mod, q, k)
    return compiled_versions(ask)
