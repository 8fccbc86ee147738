"""The rules of questions: forbidden operators and limits of sizes. A watch sees the operators that an answer runs.

    @check("1.1", "Naive GEMM", forbids=MATMUL, largest=1)
    def gemm_naive(gemm_naive, seed=None):
        expect_close(gemm_naive(a, b), a @ b, ...)  # every call keeps to the rule, or the check fails

The code runs under two modes of torch, and only operators that run count. The dispatch mode sees every operator below
autograd: `a @ b` and `F.linear` as `aten.mm`, `einsum` as `aten.bmm`, and the operators of compiled functions. Under
`inference_mode` it sees composite operators such as `matmul`. The function mode sees calls of torch's functions, also
the ways out of torch: `.numpy()`, `.tolist()`, DLPack. Single numbers may leave torch. The watch does not see the inside
of custom and higher-order operators (`custom` has their names), nor other threads.
"""

from __future__ import annotations

import contextlib
import functools
import math
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import NamedTuple
from unittest import mock

import torch
import torch.autograd.forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from utils.checking.authors import lender, line_of_stack


def words(text: str) -> frozenset[str]:
    """Return the set of the words of a text."""
    return frozenset(text.split())


# ---- families of operators -----------------------------------------------------------------------------------------


class Family(NamedTuple):
    """Operators that a question can forbid: regular expressions of their names, without namespace and overload."""

    words: str  # the family's name in a sentence, such as `fused attention`
    names: str  # regular expressions, with spaces between them


# Operators that compute attention in one call.
FUSED_ATTENTION = Family(
    "fused attention",
    r"_?scaled_dot_product_\w+ _(?:flash|efficient|cudnn)_attention\w* \w*multi_head_attention\w* flex_attention\w*"
    r" _triton_scaled_dot_attention",
)
# Operators that multiply matrices, or that can replace a product: decompositions, inverses, distances and Fourier
# transforms hold products. Outer products (`outer`, `addr`) are not here: they are one step of the sum over k.
_PRODUCTS = r"""
    mm bmm addmm baddbmm addbmm addmv mv dot vdot inner einsum tensordot multi_dot linalg_multi_dot \w*matmul\w*
    matrix_power linalg_matrix_power cov corrcoef hspmm smm sspaddmm \w*_mm\w* _?\w*addmm\w*
    (?!_*upsample)\w*linear\w* fbgemm_\w+ _spsolve
    \w*convolution\w* \w*conv[123]d\w* \w*conv_(?:transpose|tbc|depthwise|dilated)\w*
    _transformer_encoder\w* \w*cdist\w* _euclidean_dist \w*_rnn\w* \w*lstm\w* \w*gru\w* rnn_\w+ \w*_cell\w*
    _?linalg_(?!(?:vector_|matrix_)?norm|cross|diagonal|vecdot)\w+ \w*triangular_solve\w* ormqr orgqr geqrf qr svd
    _?embedding_bag\w* sampled_addmm
    \w*cholesky\w* _?lu_\w+ lu matrix_exp inverse pinverse _?pdist\w* _?fft_\w+
"""
MATMUL = Family("matrix product, convolution or attention of torch", f"{_PRODUCTS} {FUSED_ATTENTION.names}")
SOFTMAX = Family("softmax or logsumexp of torch", r"\w*softmax\w* \w*logsumexp\w* logcumsumexp softmin")
GELU = Family("GELU of torch", r"\w*gelu\w*")
DERIVATIVES = Family("derivative by torch", "autograd")

# Operators that compute nothing: they create tensors, change their shapes, or move values.
VIEWS = words("""
    detach alias view _unsafe_view reshape _reshape_alias view_as_real view_as_complex expand permute transpose t unsqueeze
    squeeze select slice split split_with_sizes unsafe_split tensor_split unbind chunk narrow as_strided diagonal unfold movedim
    flatten unflatten lift_fresh
    """)
MOVES = VIEWS | words("""
    lift_fresh_copy clone _to_copy to contiguous cat stack index index_select gather take take_along_dim _unsafe_index
    masked_select repeat repeat_interleave tile roll flip pad constant_pad_nd tril triu copy
    empty empty_like empty_strided new_empty new_empty_strided zeros zeros_like new_zeros ones ones_like new_ones full
    full_like new_full fill zero arange eye scalar_tensor lift index_put index_copy index_fill put scatter slice_scatter
    select_scatter masked_scatter nonzero tril_indices triu_indices _local_scalar_dense item equal is_nonzero resize set
    result_type promote_types
    """)

# The ways out of torch for many numbers at once: {name in the function mode: words for a message}.
_EXITS = {
    **dict.fromkeys(("__array__", "__array_wrap__"), "numpy.asarray(tensor)"),
    **{name: f".{name}()" for name in ("numpy", "tolist", "data_ptr", "untyped_storage")},
    "__dlpack__": "DLPack",
}

# ---- what ran ---------------------------------------------------------------------------------------------------------


class OperationWatch(TorchDispatchMode):
    """A record of a `with` block: operators and their sizes, custom operators, derivatives, ways out of torch.

    `with OperationWatch() as watch: gemm(a, b)` counts operators by name, and stores for each name the student's line that
    ran it first. At its end, also after an exception, it restores the functions of torch that it replaces. An operator
    takes tens of microseconds more under it: use small shapes, and never measure time. The record is plain data, which
    can travel between processes as JSON.
    """

    supports_higher_order_operators = True  # otherwise flex_attention and similar operators raise an error
    SEEN = ("operations", "calls", "exits", "custom", "borrowed", "lines", "largest", "steps")

    def __init__(self) -> None:
        super().__init__()
        self.operations: dict[str, int] = {}  # aten operators, for example "mm"
        self.calls: dict[str, int] = {}  # torch's functions and methods, for example "einsum"
        self.exits: dict[str, int] = {}  # ways out of torch, for example ".numpy()"
        self.custom: dict[str, int] = {}  # custom operators, whose inside is hidden: "mylib::mm"
        self.borrowed: dict[str, int] = {}  # "file, function" of a library's formula that ran operators
        self.lines: dict[str, str] = {}  # name -> the first line that used it
        self.largest: dict[str, int] = {}  # operator -> elements of the largest tensor that it took or returned
        self.steps: list[tuple] = []  # each operator with the shapes and the numbers among its arguments
        self._beside = contextlib.ExitStack()

    def __enter__(self):
        for owner, name in _DERIVATIVES:
            noting = functools.partial(self._note_and_derive, getattr(owner, name))
            self._beside.enter_context(mock.patch.object(owner, name, noting))
        self._beside.enter_context(uncompiled_flex())
        self._beside.enter_context(_Calls(self))
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self._beside.close()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name, counters = _name_and_counters(func)
        for counter in counters:
            self._note(getattr(self, counter), name)
        if name not in MOVES and (source := lender()):
            self._note(self.borrowed, source)
        result = func(*args, **(kwargs or {}))
        self._measure(name, args, kwargs or {}, result)
        return result

    def _note(self, counter: dict[str, int], name: str) -> None:
        if name not in counter and (line := line_of_stack()) is not None:
            self.lines.setdefault(name, str(line))
        counter[name] = counter.get(name, 0) + 1

    def _note_and_derive(self, derive: Callable, *args, **kwargs):
        self._note(self.calls, "autograd")
        return derive(*args, **kwargs)

    def _measure(self, name: str, args: tuple, kwargs: dict, result) -> None:
        values = (*args, *kwargs.values())
        given = tensors_in(values)
        self.largest[name] = max(self.largest.get(name, 0), *(t.numel() for t in (*given, *tensors_in(result))), 0)
        self.steps.append((name, tuple(tuple(t.shape) for t in given), *(n for n in values if type(n) in (int, float))))

    def line_of(self, name: str) -> str:
        """Return the student's line that used this name first, as the end of a message; "" if none is known."""
        return f"\n  {self.lines[name]}" if name in self.lines else ""

    @property
    def products(self) -> list[tuple[int, int, int, int]]:
        """Return (batch, m, k, n) of each matrix product."""
        names = ("mm", "bmm", "addmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "vdot")
        factors = [s[1][1:3] if "add" in s[0] else s[1][:2] for s in self.steps if s[0] in names]  # `add` comes first
        return [(*(1, 1, *left)[-3:], right[-1] if len(right) > 1 else 1) for left, right in factors]

    @property
    def macs(self) -> int:
        """Return the multiply-accumulates of all matrix products."""
        return sum(math.prod(product) for product in self.products)

    def largest_above(self, limit: int, names: Collection[str] | None = None) -> tuple[str, int] | None:
        """Return the operator with the most elements, and their number, if it is more than `limit`.

        Args:
            limit: the number of elements that is allowed.
            names: the operators that count. None: all operators count, except MOVES, as a list of all operators that
                compute would never be complete.
        """
        counted = [n for n in self.largest if (n not in MOVES if names is None else n in names)]
        name = max(counted, key=self.largest.__getitem__, default=None)
        return (name, self.largest[name]) if name and self.largest[name] > limit else None


def uncompiled_flex() -> contextlib.AbstractContextManager:
    """Let eager FlexAttention call masks without compiling them: compilation fails under a mode, and in later calls."""
    return mock.patch("torch.nn.attention.flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True, create=True)


def tensors_in(values) -> list[torch.Tensor]:
    """Return the tensors among arguments or results, also the tensors in containers."""
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


@functools.cache
def _name_and_counters(func) -> tuple[str, tuple[str, ...]]:
    """Return an operator's name, without namespace, overload and the _ of in-place operators, and its counters."""
    if not hasattr(func, "_schema"):  # a higher-order operator, whose inside the watch does not see
        return func.__name__, ("operations", "custom")
    if func.namespace in ("aten", "prim", "prims", "profiler"):  # a label for the profiler computes nothing
        return func._schema.name.split("::")[1].rstrip("_") or func.__name__, ("operations",)
    return func._schema.name, ("custom",)


class _Calls(TorchFunctionMode):
    def __init__(self, seen: OperationWatch):
        super().__init__()
        self.seen = seen

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        if name == "__get__":  # a property, whose descriptor has the name
            name = getattr(getattr(func, "__self__", None), "__name__", name)
        if name in _EXITS:
            # Indices, counts and truth values may leave torch.
            if not args or not isinstance(args[0], torch.Tensor) or args[0].is_floating_point() or args[0].is_complex():
                self.seen._note(self.seen.exits, _EXITS[name])
        elif name != "__get__":
            self.seen._note(self.seen.calls, name)
        return func(*args, **(kwargs or {}))


# Every derivative by torch calls one of these: backward, autograd.grad, torch.func's vjp, and forward mode.
_DERIVATIVES = (
    (torch.autograd, "_engine_run_backward"),
    (torch.autograd.graph, "_engine_run_backward"),
    (torch.autograd.forward_ad, "make_dual"),
)


# ---- rules -----------------------------------------------------------------------------------------------------------


def _plain(name: str) -> str:
    """Return a name without underscores at its ends: `matmul` for `__matmul__` and `matmul_`."""
    return name.strip("_") if name.startswith("__") else name.rstrip("_")


@dataclass(frozen=True)
class Rule:
    """The rule of a question, declared beside its check.

    Attributes:
        forbids: families of operators that may not run. Formulas of libraries and custom operators may never run. If there
            is a family or a limit, tensors of real numbers may not leave torch, where the watch sees nothing.
        largest: elements that an operator may take or return, if it computes. It is a text, such as "one tile", if the
            number depends on the sizes of a call: then the check gives the number by `Answer.with_limit`.
        hint: advice, for an answer that breaks the rule.
    """

    forbids: tuple[Family, ...] = ()
    largest: int | str | None = None
    hint: str = ""

    def describe(self) -> str:
        """Return the rule in sentences, for the question's text, the feedback and the docs."""
        parts = [f"no {family.words}" for family in self.forbids]
        if self.largest is not None:
            unit = "numbers" if isinstance(self.largest, int) and self.largest > 1 else "number"
            limit = f"{self.largest} {unit}" if isinstance(self.largest, int) else self.largest
            parts.append(f"no operator on more than {limit} at once")
        parts.append("no formula of a library")
        stay = " Tensors of real numbers stay in torch; single numbers may leave it." if len(parts) > 1 else ""
        return f"What runs counts: {', '.join(parts)}.{stay}"

    def expect(self, watch: OperationWatch, limit: int | None = None) -> None:
        """Assert that a watched call keeps to the rule; `limit` is the number of elements for `largest`."""
        pattern = re.compile(
            "|".join(f"(?:{name})" for family in self.forbids for name in family.names.split()) or "(?!)"
        )
        # A student wrote the call, `einsum`; torch ran the operator, `aten.bmm`.
        called = [name for name in watch.calls if pattern.fullmatch(_plain(name))]
        ran = [name for name in watch.operations if pattern.fullmatch(_plain(name))]
        if called or ran:
            shown = f"torch's {_plain(called[0])}" if called else f"aten.{ran[0]}"
            also = f" (it ran aten.{ran[0]})" if called and ran and ran[0] != _plain(called[0]) else ""
            name, words = (called or ran)[0], f"your code may not use {shown}{also} here."
        elif watch.borrowed:
            name = next(iter(watch.borrowed))
            words = (
                f"your code had a formula of a library computed ({name}). Write it yourself, with torch's operators."
            )
        elif watch.custom:
            name = next(iter(watch.custom))
            words = f"your code ran the custom operator {name}, whose inside cannot be watched. Write it with torch's own operators."
        elif watch.exits and (self.forbids or self.largest is not None):
            name = next(iter(watch.exits))
            words = f"your code took a tensor's values out of torch, by {name}. Keep them in tensors."
        elif limit is not None and (found := watch.largest_above(limit)):
            name, allows = found[0], f"{self.largest} has" if isinstance(self.largest, str) else "this question allows"
            words = f"the operator {name} worked on {found[1]:,} elements at once, and {allows} {limit:,}."
        else:
            return
        end = "" if self.hint.endswith(("?", "!", ".")) else "."
        hint = f" {self.hint[0].upper()}{self.hint[1:]}{end}" if self.hint else ""
        raise AssertionError(f"{words}{hint}{watch.line_of(name)}")
