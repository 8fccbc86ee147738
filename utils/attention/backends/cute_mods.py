"""Mask functions and score modifiers of PyTorch, translated to the CuTe DSL for FlashAttention 4.

FlashAttention 4 takes both as functions in the CuTe DSL. The PyTorch function is traced once, on scalar indices, into
a graph of elementwise operators, and the graph is replayed on CuTe's register vectors while the kernel is built.
Tensors that the function captures become the kernel's `aux_tensors`. An operator without a counterpart is refused by
its name.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable

import torch

from utils.attention.masks.blocks import count_blocks
from utils.attention.masks.mask_mods import different_masks, name_of
from utils.attention.problem import Problem, Refused


class NoCounterpart(Refused):
    """A mask function or score modifier uses an operator that is not translated to the CuTe DSL."""


def _remainder(a, b):
    # The DSL's own remainder has the sign of the dividend, PyTorch's that of the divisor.
    return a - (a // b) * b


_ARITHMETIC = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "floor_divide": operator.floordiv,
    "remainder": _remainder,
    "ge": operator.ge,
    "gt": operator.gt,
    "le": operator.le,
    "lt": operator.lt,
    "eq": operator.eq,
    "ne": operator.ne,
    "bitwise_and": operator.and_,
    "bitwise_or": operator.or_,
    "bitwise_xor": operator.xor,
    "logical_and": operator.and_,
    "logical_or": operator.or_,
    "__and__": operator.and_,
    "__or__": operator.or_,
}
_MATH = ("exp", "exp2", "tanh", "log", "log2", "sqrt", "rsqrt", "sin", "cos")
_TYPES = {
    torch.float32: "Float32",
    torch.float64: "Float32",
    torch.int32: "Int32",
    torch.int64: "Int32",
    torch.bool: "Boolean",
    torch.float16: "Float16",
    torch.bfloat16: "BFloat16",
}


def trace(mod: Callable, arguments: int) -> torch.fx.GraphModule:
    """Trace a function into a graph of aten operators on one element.

    Args:
        mod: the mask function (4 arguments, indices) or score modifier (5 arguments, a score and indices).
        arguments: 4 or 5.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    device = _device_of(mod)
    indices = [torch.zeros(1, dtype=torch.int32, device=device) for _ in range(4)]
    score = [torch.zeros(1, dtype=torch.float32, device=device)] if arguments == 5 else []
    graph = make_fx(mod)(*score, *indices)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    for node in graph.graph.nodes:
        defaults = {"alpha": 1, "rounding_mode": "floor"}  # other values would change the operator's meaning
        changed = any(node.kwargs.get(key, usual) not in (usual, None) for key, usual in defaults.items())
        if node.op == "call_function" and (changed or _name(node) not in KNOWN):
            arguments_text = f" with {dict(node.kwargs)}" if changed else ""
            raise NoCounterpart(
                f"{name_of(mod)} uses {_name(node)}{arguments_text}, which is not translated to the CuTe DSL; it "
                f"knows {', '.join(KNOWN)}. Backend 'flex' takes any."
            )
    return graph


def _device_of(mod: Callable) -> torch.device:
    """Return the device of the tensors that a function captures, also in the functions that it is composed of."""
    seen: set[int] = set()
    remaining: list = [mod]
    while remaining:
        value = remaining.pop()
        if isinstance(value, torch.Tensor):
            return value.device
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, (tuple, list)):
            remaining.extend(value)
        remaining.extend(cell.cell_contents for cell in getattr(value, "__closure__", None) or ())
    return torch.device("cpu")


def _name(node: torch.fx.Node) -> str:
    name = node.target.__name__.split(".")[0]
    name = name if name.startswith("__") else name.rstrip("_")  # add_ is add, __and__ stays
    return {"_to_copy": "to", "convert_element_type": "to"}.get(name, name)


def captured(graph: torch.fx.GraphModule) -> list[str]:
    """Return the names of the tensors that the graph reads by index, in the order of `aux_tensors`."""
    indexed = [
        node.args[0].target for node in graph.graph.nodes if node.op == "call_function" and _name(node) == "index"
    ]
    return list(dict.fromkeys(indexed))


def _constant(graph: torch.fx.GraphModule, name: str):
    tensor = getattr(graph, name)
    if tensor.numel() != 1:
        raise NoCounterpart(
            f"a captured tensor of shape {tuple(tensor.shape)} is used without an index by b, h, q or "
            "k; index it, or capture one number."
        )
    return tensor.item()


class CuteDsl:
    """The operations of the CuTe DSL on register vectors; imported while FlashAttention's kernel is traced."""

    def __init__(self):
        import cutlass
        import cutlass.cute as cute

        self.cutlass, self.cute = cutlass, cute

    def is_vector(self, x) -> bool:
        """Whether x is a vector of registers, and not a Python number."""
        return isinstance(x, self.cute.TensorSSA)

    def is_float(self, x) -> bool:
        """Whether x is a floating-point number or a vector of fp32."""
        return isinstance(x, float) or (self.is_vector(x) and x.dtype is self.cutlass.Float32)

    def to(self, x, dtype: torch.dtype):
        """Convert a vector to a dtype of PyTorch."""
        return x.to(getattr(self.cutlass, _TYPES[dtype]))

    def math(self, name: str, x):
        """Apply a function of the DSL's math library, such as "tanh"."""
        return getattr(self.cute.math, name)(x, fastmath=True)

    def invert(self, x):
        """Return the logical not of a vector."""
        return x == self.cutlass.Boolean(False)

    def where(self, condition, x, y):
        """Choose x or y in each lane."""
        return self.cute.where(condition, x, y)

    def full_like(self, x, value):
        """Return a vector like x that holds one value."""
        return self.cute.full_like(x, value)

    def load(self, tensor, indices):
        """Read tensor[i, j, ...] for each lane of the index vectors."""
        cute, cutlass = self.cute, self.cutlass
        size = cute.size(next(index for index in indices if self.is_vector(index)).shape)
        values = cute.make_rmem_tensor(size, tensor.element_type)
        for lane in range(size):
            place = tuple(index[lane] if self.is_vector(index) else index for index in indices)
            values[lane] = tensor[place if len(place) > 1 else place[0]]
        loaded = values.load()
        return loaded.to(cutlass.Float32) if tensor.element_type in (cutlass.Float16, cutlass.BFloat16) else loaded


def replay(graph: torch.fx.GraphModule, inputs: list, aux: dict, dsl):
    """Run the graph on a DSL's vectors.

    Args:
        graph: a traced mask function or score modifier.
        inputs: its arguments, as the DSL's vectors.
        aux: {name of a captured tensor: the DSL's tensor}.
        dsl: the operations, such as CuteDsl().
    """
    values: dict = {}
    remaining = iter(inputs)
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            values[node] = next(remaining)
        elif node.op == "get_attr":
            values[node] = aux[node.target] if node.target in aux else _constant(graph, node.target)
        elif node.op == "call_function":
            args = torch.fx.map_arg(list(node.args), values.__getitem__)
            values[node] = _call(_name(node), args, node.kwargs, dsl)
        else:
            return values[node.args[0]]


def _clamp(dsl, x, low=None, high=None):
    x = x if low is None else dsl.where(x < low, dsl.full_like(x, low), x)
    return x if high is None else dsl.where(x > high, dsl.full_like(x, high), x)


_OTHERS: dict[str, Callable] = {
    "abs": lambda dsl, x: dsl.where(x < 0, -x, x),
    "neg": lambda dsl, x: -x,
    "logical_not": lambda dsl, x: dsl.invert(x),
    "bitwise_not": lambda dsl, x: dsl.invert(x),
    "where": lambda dsl, condition, x, y: dsl.where(condition, x, y),
    "minimum": lambda dsl, x, y: dsl.where(x < y, x, y),
    "maximum": lambda dsl, x, y: dsl.where(x < y, y, x),
    "clamp": lambda dsl, x, min=None, max=None: _clamp(dsl, x, min, max),
    "to": lambda dsl, x, dtype=None, **others: x if dtype is None else dsl.to(x, dtype),
    "index": lambda dsl, tensor, indices: dsl.load(tensor, list(indices)),
}
KNOWN = sorted({*_ARITHMETIC, *_MATH, *_OTHERS})


def _call(name: str, args: list, kwargs: dict, dsl):
    """Apply one operator of the graph."""
    if name in _OTHERS:
        return _OTHERS[name](dsl, *args, **kwargs)
    if name in _MATH:
        return dsl.math(name, args[0] if dsl.is_float(args[0]) else dsl.to(args[0], torch.float32))
    pair = args[:2]
    if kwargs.get("rounding_mode"):
        name = "floor_divide"
    if name in ("floor_divide", "remainder") and any(map(dsl.is_float, pair)):
        raise NoCounterpart(f"{name} of floating-point numbers is not translated to the CuTe DSL.")
    if name == "div" or any(map(dsl.is_float, pair)):
        pair = [dsl.to(x, torch.float32) if dsl.is_vector(x) else float(x) for x in pair]
    return _ARITHMETIC[name](*pair)


def _hash(graph: torch.fx.GraphModule) -> str:
    """Name the function in FlashAttention's cache of kernels, by its code and the numbers built into it."""
    names = [node.target for node in graph.graph.nodes if node.op == "get_attr"]
    tensors = [(name, getattr(graph, name)) for name in names]
    numbers = [(name, x.shape, x.dtype, x.item() if x.numel() == 1 else None) for name, x in tensors]
    return hashlib.sha256(f"{graph.code}{numbers}".encode()).hexdigest()


def translate(mask_mod: Callable | None, score_mod: Callable | None):
    """Return (mask function, score modifier, aux_tensors) for FlashAttention 4; None where there is none."""
    graphs = [None if mod is None else trace(mod, count) for mod, count in ((mask_mod, 4), (score_mod, 5))]
    aux = [(which, name) for which, graph in enumerate(graphs) if graph is not None for name in captured(graph)]
    tensors = [getattr(graphs[which], name).detach().contiguous() for which, name in aux]

    def captured_by(which: int, aux_tensors) -> dict:
        return {name: aux_tensors[i] for i, (owner, name) in enumerate(aux) if owner == which}

    def cute_mask(b_idx, h_idx, q_idx, kv_idx, seqlen_info, aux_tensors):
        return replay(graphs[0], [b_idx, h_idx, q_idx, kv_idx], captured_by(0, aux_tensors), CuteDsl())

    def cute_score(score, b_idx, h_idx, q_idx, kv_idx, seqlen_info, aux_tensors):
        return replay(graphs[1], [score, b_idx, h_idx, q_idx, kv_idx], captured_by(1, aux_tensors), CuteDsl())

    functions = []
    for graph, function in zip(graphs, (cute_mask, cute_score), strict=True):
        if graph is not None:
            function.__cute_hash__ = _hash(graph) + str(aux)  # type: ignore[attr-defined]
        functions.append(None if graph is None else function)
    return functions[0], functions[1], tensors or None


def block_tables(mask_mod: Callable, problem: Problem, block_size: tuple[int, int]):
    """Return (partial counts, partial indices, full counts, full indices), int32, each of (B or 1, H or 1, ...)."""
    heads = different_masks(mask_mod, problem.batch, problem.heads, problem.device)
    lengths = problem.sq, problem.sk, problem.device, block_size
    blocks = [count_blocks(mask_mod, *lengths, b, h) for b in range(heads[0]) for h in range(heads[1])]
    tables = []
    for kind in ([x.partial for x in blocks], [x.full for x in blocks]):
        listed = torch.stack(kind).unflatten(0, heads)
        order = torch.argsort(listed.int(), dim=-1, descending=True, stable=True)
        tables += [listed.sum(-1, dtype=torch.int32), order.to(torch.int32).contiguous()]
    return tuple(tables)
