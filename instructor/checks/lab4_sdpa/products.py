"""How often numbers of an input meet those of others, and whether a product is made of numbers that are too narrow."""

from __future__ import annotations

import math
from collections import Counter

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from utils.checking.sizes import MOVES, tensors_in, words

_MATRICES = ("mm", "bmm", "addmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "vdot")
_VIEWS = words(
    "detach alias view _unsafe_view _reshape_alias expand permute transpose t unsqueeze squeeze select slice split "
    "split_with_sizes unbind as_strided diagonal unfold"
)
_OF_ATTENTION = ("exp", "exp2", "_softmax", "_log_softmax", "_safe_softmax", "logsumexp", *_MATRICES)


def _name(func) -> str:
    return func._schema.name.split("::")[1].rstrip("_") or func.__name__


class Meetings(TorchDispatchMode):
    """Counts the pairs of a number of an input and one of another tensor that operators make, for each input of a shape.

    A matrix product makes as many pairs as it multiplies, any other operator as many as its result has numbers. What is only moved,
    converted or scaled stays the input that it was, and tensors that no input went into count as numbers to scale by. An answer that computes its
    scores twice lets K meet Q twice, in whatever steps.

    Args:
        shape: shape of the inputs that are followed.
    """

    def __init__(self, shape: tuple[int, ...]):
        super().__init__()
        self.shape = tuple(shape)
        self.pairs: Counter[int] = Counter()  # number of an input -> pairs
        self._memory: dict[int, int] = {}  # id of a tensor that was made -> id of the one whose memory it shows
        self._holds: dict[
            int, frozenset[int] | None
        ] = {}  # id of such memory -> inputs; None: numbers that were computed
        self._alive: list[torch.Tensor] = []  # so that no id is used twice

    def _root(self, tensor: torch.Tensor) -> int:
        root = self._memory.get(id(tensor), id(tensor))
        if root not in self._holds:  # it was not made here, so it is an input
            self._alive.append(tensor)
            self._memory[id(tensor)] = root
            followed = tuple(tensor.shape) == self.shape
            self._holds[root] = frozenset({root}) if followed else None
        return root

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = _name(func)
        given, made = tensors_in((*args, *(kwargs or {}).values())), tensors_in((result,))
        several = [t for t in given if t.numel() > 1]
        held = [(t, self._holds[self._root(t)]) for t in several]
        of_inputs = [(t, inputs) for t, inputs in held if inputs is None or inputs]  # not made of constants alone
        kept: frozenset[int] | None = frozenset()
        if name in MOVES or len(of_inputs) < 2:
            known = [inputs for _, inputs in of_inputs]
            kept = None if None in known else frozenset().union(*(inputs or () for inputs in known))
            if name not in MOVES and kept and (not made or made[0].numel() < of_inputs[0][0].numel()):
                kept = None  # a sum
        else:
            pairs = self._count(name, given, made)
            for inputs in {inputs for _, inputs in of_inputs if inputs}:
                self.pairs.update(dict.fromkeys(inputs, pairs))
            grown = [inputs for t, inputs in of_inputs if inputs and made and made[0].numel() <= t.numel()]
            kept = frozenset().union(*grown) if grown and name not in _MATRICES else None
        for tensor in made:
            known_root = self._memory.get(id(tensor))
            if known_root is not None or any(tensor is t for t in given):  # it was written to
                root = self._root(tensor)
                before = self._holds[root]
                self._holds[root] = None if before is None or kept is None else before | kept
                continue
            self._alive.append(tensor)
            if name in _VIEWS and given:
                self._memory[id(tensor)] = self._root(given[0])
            else:
                self._memory[id(tensor)] = id(tensor)
                self._holds[id(tensor)] = kept
        return result

    @staticmethod
    def _count(name: str, given: list[torch.Tensor], made: list[torch.Tensor]) -> int:
        if name in _MATRICES:
            left, right = given[-2:]
            columns = right.shape[-1] if right.dim() > 1 and name not in ("mv", "addmv", "dot", "vdot") else 1
            return left.numel() * columns
        return max(t.numel() for t in (*given, *made))

    def expect_once(self, product: int, beside: int, what: str) -> None:
        """Assert that no followed input meets the others as often as two products let it.

        Args:
            product: pairs of one product.
            beside: what may be done to each number besides.
            what: name of the call.
        """
        most = max(self.pairs.values(), default=0)
        if most > 1.2 * product + beside:
            raise AssertionError(
                f"in {what}, keys or values meet other numbers in {most:,} pairs, and a product of theirs has {product:,}: two matrix "
                "products at most, so the scores are computed once, and the values are added up once."
            )


class NarrowProducts(TorchDispatchMode):
    """Notes the operators of attention that give fewer than 64 bits, and what rounds numbers of 64 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name, made = _name(func), tensors_in((result,))
        given = [t for t in tensors_in((*args, *(kwargs or {}).values())) if t.is_floating_point() and t.numel() > 1]
        products = name in _OF_ATTENTION or name.startswith("_scaled_dot_product") or (name == "mul" and len(given) > 1)
        rounds = name == "_to_copy" and bool(given) and given[0].itemsize == 8
        if (
            (products or rounds)
            and made
            and made[0].is_floating_point()
            and made[0].itemsize < 8
            and made[0].numel() > 1
        ):
            self.found[f"{name} in {str(made[0].dtype).removeprefix('torch.')}"] += math.prod(made[0].shape)
        return result
