"""How large the tensors are that an answer works on, whether it reads memory that nothing was written to, and its device."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Collection, Iterator

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


def words(text: str) -> frozenset[str]:
    """The words of a text, to write a set of names in few lines."""
    return frozenset(text.split())


# Operators that compute nothing: they make tensors, look at them in other shapes, or carry values from place to place.
_MOVES = """
    empty empty_like empty_strided new_empty new_empty_strided zeros zeros_like new_zeros ones ones_like new_ones full
    full_like new_full fill zero arange eye scalar_tensor lift lift_fresh lift_fresh_copy detach alias clone copy _to_copy
    to contiguous view _unsafe_view reshape _reshape_alias view_as_real view_as_complex expand permute transpose t
    unsqueeze squeeze select slice split split_with_sizes unsafe_split tensor_split unbind chunk narrow as_strided diagonal
    unfold movedim flatten unflatten cat stack index index_select gather take take_along_dim index_put _unsafe_index
    index_copy index_fill put scatter slice_scatter select_scatter masked_select masked_scatter nonzero repeat
    repeat_interleave tile roll flip pad constant_pad_nd tril triu tril_indices triu_indices _local_scalar_dense item
    equal is_nonzero resize set
"""
MOVES = frozenset(_MOVES.split())
# Of these, the ones whose result is another look at the memory of their argument.
_VIEWS = words("""
    detach alias view _unsafe_view reshape _reshape_alias view_as_real view_as_complex expand permute transpose t unsqueeze
    squeeze select slice split split_with_sizes unsafe_split tensor_split unbind chunk narrow as_strided diagonal unfold movedim
    flatten unflatten lift_fresh
    """)
# And the ones whose result holds numbers of their arguments in memory of its own.
_COPIES = words("""
    lift_fresh_copy clone _to_copy to contiguous cat stack index index_select gather take take_along_dim _unsafe_index
    masked_select repeat repeat_interleave tile roll flip pad constant_pad_nd tril triu
    """)
_WRITES = words(
    "copy index_put index_copy put masked_scatter scatter slice_scatter select_scatter"
)  # into their first argument
# Sums and masks: no softmax and no product can be made of these alone.
LINEAR = frozenset(["add", "sub", "rsub", "neg", "mul", "div", "sum", "nansum", "mean", "where", "masked_fill"])
# What one does with all sums of rows, at the end.
_AFTERWARDS = frozenset(
    [
        "reciprocal",
        "log",
        "log2",
        "nan_to_num",
        "clamp",
        "isnan",
        "isinf",
        "isfinite",
        "eq",
        "ne",
        "gt",
        "ge",
        "lt",
        "le",
    ]
)
_SUMS = words("add sub rsub sum nansum mean cumsum addcmul addcdiv lerp")  # and differences
_PLACES = words("argmax argmin argsort sort topk max min nonzero searchsorted bucketize")  # integers among the results
_PRODUCTS = frozenset(("mm", "bmm", "addmm", "baddbmm", "addbmm", "mv", "addmv"))
_CONVOLUTIONS = words("convolution _convolution mkldnn_convolution thnn_conv2d slow_conv3d convolution_overrideable")
_MULTIPLY = words("mul div addcmul addcdiv _foreach_mul _foreach_div _foreach_addcmul lerp")
# Operators on two tensors of numbers that multiply none of one by those of the other. Any other one counts as a product.
_NO_PRODUCTS = words("""
    add sub rsub where masked_fill maximum minimum fmax fmin max min clamp clamp_min clamp_max logaddexp logaddexp2 eq ne gt ge lt le
    isclose allclose searchsorted bucketize index_add scatter_add copysign nextafter sort topk cummax cummin _foreach_add _foreach_sub
    _foreach_copy _foreach_maximum _foreach_minimum logical_and logical_or logical_xor heaviside fmod remainder floor_divide
    _softmax _log_softmax _softmax_backward_data _safe_softmax
    """)
_PRODUCTS_OF_ONE = words("square prod cumprod pow float_power")  # of the numbers in one tensor


def tensors_in(values) -> list[torch.Tensor]:
    """Return the tensors among arguments or results, those in lists and tuples included."""
    found = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += tensors_in(value)
    return found


def _numbers(tensor: torch.Tensor) -> int:
    """How many real numbers a tensor holds: a complex one is two."""
    return tensor.numel() * (2 if tensor.is_complex() else 1)


def _is_written(argument) -> bool:
    """Whether an operator writes to this argument of its schema."""
    return argument.alias_info is not None and argument.alias_info.is_write


def computing_name(func, args: tuple, kwargs: dict) -> str:
    """Return an operator's name; that of another one where an option makes it multiply or add and not only carry values."""
    name = func._schema.name.split("::")[1].rstrip("_") or func.__name__
    if name == "scatter" and func._schema.overload_name.endswith("reduce"):  # reduce="multiply" is one
        return "scatter_reduce"
    if name in ("index_put", "_index_put_impl", "put") and (kwargs.get("accumulate") or args[3:4] == (True,)):
        return "index_add"
    return name


class SizeWatch(TorchDispatchMode):
    """Records the operators that run, with the elements of the largest tensor that each one reads or writes.

    Every operator counts as one that computes unless it is known to move values only: a list of those that compute would
    never be complete.
    """

    def __init__(self) -> None:
        super().__init__()
        self.largest: dict[str, int] = {}
        self.computed: dict[str, int] = {}  # the same of operators that compute, on real numbers
        self.computing: set[str] = set()  # the operators that compute, on numbers and truth values of any kind
        self.products: list[tuple[int, int, int, int]] = []  # (batch, m, k, n) of each matrix product
        self.multiplied = 0  # elements of all elementwise products of two tensors
        self.multiplications: list[int] = []  # the same of each of them
        self.largest_multiplied: tuple[str, int] = ("", 0)  # the largest of these
        self.others: list[
            tuple[str, int]
        ] = []  # (operator, elements) of all that compute otherwise than by sums and products
        self.longest: dict[str, int] = {}  # the longest dimension that an operator computes on, on real numbers
        self.moved = 0  # elements that were copied, filled or put together, and not computed
        self.created: tuple[str, int] = (
            "",
            0,
        )  # the largest tensor with memory of its own, and the operator that made it
        self.created_in_all = 0  # elements of all tensors with memory of their own
        self.copied: list[tuple[str, int]] = []  # (operator, elements) of each copy of numbers of the inputs
        self.read = 0  # elements of all tensors that were given to operators, but for single numbers
        self._memory: dict[int, int] = {}  # id of a tensor that was made -> the id of the one whose memory it shows
        # id of such a tensor -> [elements, step that made it, last step that used it, does it hold numbers of the inputs?]
        self._spans: dict[int, list[int]] = {}
        self._copied: set[int] = set()  # ids of such tensors that hold numbers of the inputs as they were
        self._bits: set[int] = set()  # ids of views that show floating-point numbers as integers
        self.narrow: tuple[str, int] = ("", 0)  # the largest sum of 16-bit numbers in 16 bits, and its operator
        self.narrow_results: tuple[str, int] = ("", 0)  # the same of all that computes
        self.narrowed = 0  # numbers that were rounded from 32 bits or more to 16 or fewer
        self._alive: list[torch.Tensor] = []  # so that no id is used twice
        self.steps: list[int] = []  # a hash of each operator, with the shapes and numbers that it was given

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = computing_name(func, args, kwargs or {})
        several = name.startswith("_foreach")  # one operator on a list of tensors
        given, made = tensors_in((*args, *(kwargs or {}).values())), tensors_in((result,))
        if result is None:  # such as _foreach_copy_, which returns nothing and writes to what it was given
            made = tensors_in([a for a, about in zip(args, func._schema.arguments, strict=False) if _is_written(about)])
        sizes = [_numbers(t) for t in (*given, *made)]
        self.read += sum(t.numel() for t in given if t.numel() > 1)
        numbers = (a for a in (*args, *(kwargs or {}).values()) if type(a) in (int, float))
        self.steps.append(hash((name, *(tuple(t.shape) for t in given), *numbers)))
        self._follow(name, given, made)
        narrow = max((t.numel() for t in made if t.is_floating_point() and t.itemsize < 4), default=0)
        if name in _SUMS:
            self.narrow = max(self.narrow, (name, narrow), key=lambda entry: entry[1])
        if name not in MOVES:
            self.narrow_results = max(self.narrow_results, (name, narrow), key=lambda entry: entry[1])
        wide = [t for t in given if t.is_floating_point() and t.itemsize >= 4 and t.numel() > 1]
        if wide and made and made[0].is_floating_point() and made[0].itemsize < 4:
            self.narrowed += made[0].numel()
        if name in MOVES and name not in _VIEWS and not self._onto_itself(name, given):
            self.moved += sum(t.numel() for t in made)
        self.largest[name] = max(self.largest.get(name, 0), max(sizes, default=0))
        if name not in MOVES:
            self.computing.add(name)
            # Masks and places are no numbers of the inputs, unless they are added up or multiplied.
            real = [_numbers(t) for t in (*given, *made) if name in LINEAR or t.is_floating_point() or t.is_complex()]
            elements = (sum if several else max)(real) if real else 0
            self.computed[name] = max(self.computed.get(name, 0), elements)
            if name not in LINEAR and name not in _AFTERWARDS:
                lengths = [n for t in (*given, *made) if t.is_floating_point() for n in t.shape]
                self.longest[name] = max([self.longest.get(name, 0), *lengths])
        if self._multiplies(name, given):
            elements = (sum if several else max)(t.numel() for t in made) if made else max(sizes)
            self.multiplied += elements
            self.multiplications.append(elements)
            self.largest_multiplied = max(self.largest_multiplied, (name, elements), key=lambda entry: entry[1])
        elif name in _PRODUCTS_OF_ONE:
            if given and given[0].numel() > 1 and given[0].is_floating_point():
                self.multiplied += given[0].numel()
                self.multiplications.append(given[0].numel())
        elif name not in MOVES and name not in LINEAR and name not in _PRODUCTS:
            real = [t.numel() for t in (*given, *made) if t.is_floating_point() or t.is_complex()]
            self.others.append((name, max(real, default=0)))
        if name == "mul" and len(given) == 2 and all(t.is_floating_point() and t.numel() > 1 for t in given):
            # A row of numbers times each of many rows is a product along them all.
            few, many = sorted(given, key=torch.Tensor.numel)
            along = max(
                (n for n, m in zip(many.shape[::-1], (*few.shape[::-1], *[1] * many.dim()), strict=False) if m == 1),
                default=0,
            )
            self.longest["mul"] = max(self.longest.get("mul", 0), along)
        if name in _PRODUCTS:
            pair = [t for t in args if isinstance(t, torch.Tensor)][-2:]
            left, right = pair[0], pair[1]
            batch = left.shape[0] if left.dim() == 3 else 1
            columns = right.shape[-1] if right.dim() >= 2 else 1
            self.products.append((batch, left.shape[-2], left.shape[-1], columns))
        elif name in ("dot", "vdot"):
            self.products.append((1, 1, given[0].numel(), 1))
        elif name in _CONVOLUTIONS and len(given) > 1 and made:
            self.products.append((1, made[0].numel(), given[1][0].numel(), 1))
        return result

    @staticmethod
    def _multiplies(name: str, given: list[torch.Tensor]) -> bool:
        """Whether an operator multiplies numbers of one tensor by those of another: all do that are not known for something else."""
        several = [t.numel() > 1 for t in given]
        if name in _MULTIPLY:
            return len(given) > 1 and (sum(several) > 1 or not any(several))
        if (
            name in MOVES
            or name in _NO_PRODUCTS
            or name in _PRODUCTS
            or name in _CONVOLUTIONS
            or name in ("dot", "vdot")
        ):
            return False
        return sum(t.is_floating_point() and t.numel() > 1 for t in given) > 1

    def _follow(self, name: str, given: list[torch.Tensor], made: list[torch.Tensor]) -> None:
        """Note which memory an operator used, and which it made."""
        step, spans = len(self.steps), [self._spans.get(self._memory.get(id(t), 0)) for t in given]
        of_inputs = any(
            span[3] if span else self._is_real(t) and t.numel() > 1  # memory that was not made here is an input's
            for t, span in zip(given, spans, strict=True)
        )
        for span in spans:
            if span:
                span[2] = step
        is_copy = self._note_copy(name, given, made)
        if name not in MOVES and self._copies_by_arithmetic(given, made):
            self.moved += made[0].numel()
        for tensor in made:
            known = self._spans.get(self._memory.get(id(tensor), 0))
            if known:  # it was written to
                known[3] |= of_inputs
                if not is_copy and name not in _VIEWS:
                    self._copied.discard(self._memory[id(tensor)])
            elif any(tensor is t for t in given) or id(tensor) in self._memory:
                continue
            else:
                self._alive += [tensor, *given[:1]]
                if name in _VIEWS and given:
                    if self._is_real(given[0]) and not tensor.is_floating_point() and not tensor.is_complex():
                        self._bits.add(id(tensor))
                    self._memory[id(tensor)] = self._memory.get(id(given[0]), id(given[0]))
                else:
                    self._memory[id(tensor)] = id(tensor)
                    # A truth value is a bit; places of a search or a sorting are no numbers of the inputs.
                    numbers = _numbers(tensor) // (16 if tensor.dtype is torch.bool else 1)
                    kept = of_inputs and (name not in _PLACES or self._is_real(tensor))
                    self._spans[id(tensor)] = [numbers, step, step, kept]
                    self.created = max(self.created, (name, tensor.numel()), key=lambda entry: entry[1])
                    self.created_in_all += tensor.numel()

    def _onto_itself(self, name: str, given: list[torch.Tensor]) -> bool:
        """Whether a copy writes numbers to where they are: the end of `c[i, j] += x`, after the sum was made in place."""
        if name != "copy" or len(given) < 2:
            return False
        one, other = ((self._memory.get(id(t), id(t)), t.storage_offset(), t.shape, t.stride()) for t in given[:2])
        return one == other

    def _copies_by_arithmetic(self, given: list[torch.Tensor], made: list[torch.Tensor]) -> bool:
        """Whether an operator that computes got numbers of one input alone, and made as many: tile + 0, or maximum(tile, tile)."""
        several = [t for t in given if t.numel() > 1]
        roots = {self._memory.get(id(t), id(t)) for t in several}
        of_input = len(roots) == 1 and all(root not in self._spans or root in self._copied for root in roots)
        return of_input and bool(made) and self._is_real(several[0]) and made[0].numel() >= several[0].numel()

    def _is_real(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor holds real or complex numbers, or their bits as integers."""
        return tensor.is_floating_point() or tensor.is_complex() or id(tensor) in self._bits

    def _note_copy(self, name: str, given: list[torch.Tensor], made: list[torch.Tensor]) -> bool:
        """Note a copy, a conversion or a joining of the inputs' numbers, and return whether this was one."""
        if name not in _COPIES and name not in _WRITES:
            return False
        taken = given[1:] if name in _WRITES else given
        real = [t for t in taken if self._is_real(t) and t.numel() > 1]
        roots = [self._memory.get(id(t), id(t)) for t in real]
        # What was not made here is an input.
        if not real or any(root in self._spans and root not in self._copied for root in roots):
            return False
        self.copied.append((name, max(t.numel() for t in (real if name in _WRITES else made))))
        self._copied |= {id(t) for t in made if name in _COPIES}
        return True

    @property
    def held(self) -> int:
        """Return the most numbers, computed from the inputs and needed again later, that there were at any one time."""
        spans = [(n, made, used) for n, made, used, of_inputs in self._spans.values() if of_inputs]
        # At one step, what ends comes before what begins.
        changes = sorted(c for n, made, used in spans for c in ((made, n), (used + 1, -n)))
        return max(itertools.accumulate((n for _, n in changes), initial=0))

    def carried(self, step: int, least: int = 1) -> int:
        """Return how many numbers computed from the inputs were there before a step and are needed after it.

        Args:
            step: place in `steps`.
            least: numbers of a tensor that counts.
        """
        spans = self._spans.values()
        return sum(n for n, made, used, of_inputs in spans if of_inputs and n >= least and made < step < used)

    def longer_in_softmax(self, limit: int) -> tuple[str, int] | None:
        """Return an operator that works along more than `limit` numbers, and how many; sums, scaling and masks may."""
        name = max(self.longest, key=self.longest.__getitem__, default="")
        return (name, self.longest[name]) if name and self.longest[name] > limit else None

    @property
    def macs(self) -> int:
        """Return the multiply-accumulates of all matrix products."""
        return sum(math.prod(product) for product in self.products)

    def multiplied_in_all(self, product: int) -> int:
        """Return the pairs of numbers that are multiplied, by matrix products, by elements or in another way.

        Other operators than sums that work on as many numbers as a product multiplies could be one: a norm of sums, say.

        Args:
            product: multiply-accumulates of one product.
        """
        small = sum(n for n in self.multiplications if n < product // 2)
        # A few for each score are a softmax; as many as a product multiplies are one, by logarithms say.
        others = sum(n for _, n in self.others if n < product // 2)
        return self.multiplied_at_once(product) + small + (others if others >= product // 2 else 0)

    def multiplied_at_once(self, product: int) -> int:
        """Return the same of matrix products, and of operators that work on half as many numbers as a product, or more."""
        large = [n for n in (*self.multiplications, *(n for _, n in self.others)) if n >= product // 2]
        return self.macs + sum(large)

    def expect_seen(self, least: int, what: str) -> None:
        """Assert that at least so many multiply-accumulates ran as operators: what runs elsewhere, no limit holds for.

        Args:
            least: multiply-accumulates that any way of computing it takes.
            what: name of the answer.
        """
        if (seen := self.macs + self.multiplied) < 0.95 * least:
            raise AssertionError(
                f"{what} multiplied {seen:,} pairs of numbers by torch's operators, and its products take {least:,}. Write all of "
                "them with torch's operators (@, or * and a sum): numbers that are read one by one, or computed elsewhere, do not count."
            )

    def over(
        self, limit: int, names: Collection[str] | None = None, but: Collection[str] = ()
    ) -> tuple[str, int] | None:
        """Return the operator with the most elements, and their number, if it is more than `limit`.

        Args:
            limit: elements.
            names: the operators that count; all that compute by default.
            but: operators that do not count.
        """
        sizes = self.computed if names is None else self.largest
        counted = [n for n in sizes if n not in but and (names is None or n in names)]
        name = max(counted, key=sizes.__getitem__, default=None)
        return (name, sizes[name]) if name and sizes[name] > limit else None

    def over_in_softmax(self, limit: int, most_multiplied: int) -> tuple[str, int] | None:
        """Return an operator that a softmax needs, or a product of two tensors, on more elements than allowed.

        Sums, scaling and masks may be as large as they like, and the sizes of matrix products are in `products`.

        Args:
            limit: elements of all other operators.
            most_multiplied: elements of an elementwise product of two tensors.
        """
        name, elements = self.largest_multiplied
        return self.over(limit, but=LINEAR | _PRODUCTS) or ((name, elements) if elements > most_multiplied else None)


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fill new memory of `torch.empty` with NaN: a function that reads it before writing gets NaN."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.utils.deterministic.fill_uninitialized_memory = fill


class _ScalarsOfNothing(TorchFunctionMode):
    """Answers 1.0 when a value of a meta tensor is read; such a tensor has no values."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, "__name__", "") in ("item", "__float__"):
            return 1.0
        return func(*args, **(kwargs or {}))


def expect_follows_device(function: Callable[..., torch.Tensor], *shapes: tuple[int, ...], what: str) -> None:
    """Assert that the result is on the device of the inputs, with inputs on a device that is not the default one.

    That device is "meta": tensors with shapes and without values, which every machine has. A function that needs values of
    its inputs, for example to branch on them, cannot run there and is not judged.

    Args:
        function: the answer.
        *shapes: shapes of its inputs.
        what: name of the answer, the subject of the message.
    """
    inputs = [torch.empty(*shape, device="meta") for shape in shapes]
    hint = "Create tensors with device=a.device (the device of the input): on a GPU they must not land on the CPU."
    try:
        with _ScalarsOfNothing():
            result = function(*inputs)
    except RuntimeError as error:
        if "same device" in str(error) or "devices" in str(error):
            raise AssertionError(f"{what} mixes devices when its inputs are not on the CPU. {hint}") from None
        return
    except Exception:
        return
    if isinstance(result, torch.Tensor) and result.device.type != "meta":
        raise AssertionError(f"{what} should be on its inputs' device, and is on the {result.device.type}. {hint}")
