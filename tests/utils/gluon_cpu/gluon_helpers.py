"""Descriptors and launches for the simulator's tests."""

import ast
import inspect
import re

import torch


def descriptor(x: torch.Tensor, block: list[int], swizzle: int | None = None):
    """A TMA descriptor of a matrix, with the default layout or one of the given swizzle."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    element = {2: gl.float16, 4: gl.float32}[x.element_size()]
    layout = gl.NVMMASharedLayout.get_default_for(block, element)
    if swizzle is not None:
        layout = gl.NVMMASharedLayout(swizzle, 8 * x.element_size(), rank=2)
    return TensorDescriptor.from_tensor(x, block, layout)


def marked_lines(module) -> dict[str, set[int]]:
    """Return {name: lines of the statements below those comments `# found: a, b` that list the name}."""
    source = inspect.getsource(module)
    last_line = {node.lineno: node.end_lineno for node in ast.walk(ast.parse(source)) if isinstance(node, ast.stmt)}
    lines: dict[str, set[int]] = {}
    for below, text in enumerate(source.splitlines(), 2):
        mark = re.match(r" *# found: (.*)$", text)
        for name in mark[1].split(",") if mark else ():
            lines.setdefault(name.strip(), set()).update(range(below, last_line[below] + 1))
    return lines
