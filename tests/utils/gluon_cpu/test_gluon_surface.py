"""The public functions of Gluon for NVIDIA: each one runs in the simulator, or its refusal says what to use in its place."""

import types
from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("triton", reason="gluon_cpu needs Triton for the language; there are wheels for Linux only")

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.runtime.jit import JITFunction

from utils import gluon_cpu
from utils.gluon_cpu import interpreter  # noqa: F401 (it fills the table)
from utils.gluon_cpu.known import TABLE, advice

# Jit functions run from their source; what they call is looked up in the same table.
PACKAGE = gl.__name__


def public_functions(module: types.ModuleType, seen: set[int]) -> Iterator[tuple[str, object]]:
    """Yield (name, function) of all that a kernel can call: builtins and jit functions of Gluon and its submodules."""
    seen.add(id(module))
    for name, value in sorted(vars(module).items()):
        if name.startswith("_"):
            continue
        if isinstance(value, types.ModuleType):
            if value.__name__.startswith(PACKAGE) and ".amd" not in value.__name__ and id(value) not in seen:
                yield from public_functions(value, seen)
        elif getattr(value, "__triton_builtin__", False) or isinstance(value, JITFunction):
            yield f"{getattr(value, '__module__', '')}.{name}", value


def test_every_public_function_runs_or_says_what_to_use():
    functions = dict(public_functions(gl, set()))
    assert len(functions) > 100
    silent = [name for name, f in functions.items() if f not in TABLE and not isinstance(f, JITFunction)]
    assert [name for name in silent if not advice(name)] == [], f"Triton {triton.__version__}"


@gluon.jit
def compare_and_swap(values_ptr, old_ptr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    i = gl.arange(0, 128, layout)
    gl.store(old_ptr + i, (values_ptr + i // 2).atomic_cas(i // 4, val=i + 1000))


def test_compare_and_swap_goes_element_by_element():
    values, old = torch.arange(64, dtype=torch.int32) // 2, torch.zeros(128, dtype=torch.int32)
    expected, seen = values.clone(), []
    for i in range(128):  # two elements for each value: the second one meets what the first one stored
        seen.append(expected[i // 2].item())
        if expected[i // 2] == i // 4:
            expected[i // 2] = i + 1000
    with gluon_cpu.simulate():
        compare_and_swap[(1,)](values, old)
    assert torch.equal(values, expected) and old.tolist() == seen


@gluon.jit
def newer_functions(x_ptr, y_ptr, PROPAGATE: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    i = gl.arange(0, 128, layout)
    x = gl.load(x_ptr + i)
    gl.store(y_ptr + i, gl.clamp(x, -0.5, 0.5, propagate_nan=PROPAGATE))
    gl.store(y_ptr + 128 + i, gl.cumsum(x, 0))
    gl.store(y_ptr + 256 + i, gl.cumprod(x, 0, reverse=True))
    gl.atomic_store(y_ptr + 384 + i, gl.atomic_load(x_ptr + i))


@pytest.mark.skipif(not hasattr(gl, "clamp"), reason="Triton has gl.clamp and gl.cumsum from 3.9 on")
@pytest.mark.parametrize("propagate", ["NONE", "ALL"])
def test_functions_of_newer_versions(propagate):
    x, y = torch.randn(128), torch.zeros(512)
    x[5] = float("nan") if propagate == "ALL" else x[5]
    with gluon_cpu.simulate():
        newer_functions[(1,)](x, y, getattr(tl.PropagateNan, propagate))
    expected = [x.clamp(-0.5, 0.5), x.cumsum(0), x.flip(0).cumprod(0).flip(0), x]
    torch.testing.assert_close(y, torch.cat(expected), equal_nan=True, atol=1e-5, rtol=1e-5)
