"""Aggregates in the simulator: bugs in them, methods, operators and Triton's rules; test_gluon_results.py draws a pipeline of them."""

import pytest
import torch

pytest.importorskip("triton", reason="gluon_cpu needs Triton for the language; there are wheels for Linux only")

from tests.utils.gluon_cpu import gluon_aggregate_kernels as kernels
from tests.utils.gluon_cpu.gluon_helpers import descriptor
from utils import gluon_cpu
from utils.machine import versions


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_bugs_in_aggregates_are_found(seed):
    """Reports name the right ring, although both rings allocate their memory in the same line."""
    tiles = [descriptor(torch.zeros(16, 160), [16, 32]) for _ in "xyz"]
    with gluon_cpu.simulate(seed=seed):
        with pytest.raises(gluon_cpu.RaceError, match=r"y_ring\.slots\[0\]") as error:
            kernels.add_with_aggregates[(1,)](*tiles, 5, 2, 0.5, "no wait for y")
        assert "x_ring" not in str(error.value)
        with pytest.raises(gluon_cpu.DeadlockError, match=r"y_ring\.bars\.empty\[0\]"):
            kernels.add_with_aggregates[(1,)](*tiles, 5, 2, 0.5, "no release of y")


def test_operators_methods_and_isinstance():
    x, y = torch.randn(128), torch.zeros(128)
    with gluon_cpu.simulate() as run:
        kernels.add_pairs[(1,)](x, y, 3)
    assert run.ok
    torch.testing.assert_close(y, 8 * (x + 1) * 3)


RULES = {
    "forgets a field": "did not set the field size",
    "a number for a constant": r"field size .* gl\.constexpr\(3\)",
    "an unknown field": "no field sizes",
    "a field is assigned": "cannot be changed",
    "an unknown attribute": "no field or method other",
    "a number for a tensor": "field a .* tensor.* got 1",
    "a tensor for a worker": "workers take scalars",
    "subtracts": "__sub__",
}


@pytest.mark.parametrize("wrong", RULES)
def test_tritons_rules_for_aggregates_hold(wrong):
    with gluon_cpu.simulate():
        kernels.misuse[(1,)](torch.zeros(1), "")
        with pytest.raises(gluon_cpu.KernelError, match=RULES[wrong]):
            kernels.misuse[(1,)](torch.zeros(1), wrong)


@pytest.mark.skipif(versions.installed_version("triton") < (3, 8), reason="Triton generates constructors from 3.8 on")
def test_constructors_that_triton_generates():
    y = torch.zeros(3, dtype=torch.int32)
    with gluon_cpu.simulate():
        kernels.generated_constructors[(1,)](y)
    assert y.tolist() == [10, 26, 18]
    with gluon_cpu.simulate(), pytest.raises(gluon_cpu.KernelError, match="did not set the field column"):
        kernels.field_left_out[(1,)](y)
