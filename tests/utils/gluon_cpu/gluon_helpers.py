"""Descriptors and launches for the simulator's tests."""

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
    """Lines of a module's source by the names after `# found: a, b`."""
    lines: dict[str, set[int]] = {}
    for number, text in enumerate(inspect.getsource(module).splitlines(), 1):
        mark = re.search(r"# found: (.*)$", text)
        for name in mark[1].split(",") if mark else ():
            lines.setdefault(name.strip(), set()).add(number)
    return lines
