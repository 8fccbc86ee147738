"""The compiler may give a second buffer memory of the first while it is still in use."""

import pytest
import torch

pytest.importorskip("triton", reason="gluon_cpu needs Triton for the language; there are wheels for Linux only")

from tests.utils.gluon_cpu import gluon_reuse_kernels as kernels
from tests.utils.gluon_cpu.gluon_helpers import descriptor, marked_lines
from utils import gluon_cpu

LINES = marked_lines(kernels)


def two_stores(case: str) -> None:
    x, y, z = torch.randn(16, 32), torch.zeros(16, 32), torch.zeros(16, 32)
    kernels.two_stores[(1,)](x, descriptor(y, [16, 32]), descriptor(z, [16, 32]), case)
    assert torch.equal(y, x) and torch.equal(z, 2 * x)


def two_products(case: str) -> None:
    a, b, c = torch.randn(64, 64).half() / 8, torch.randn(64, 64).half() / 8, torch.zeros(64, 64)
    kernels.two_products[(1,)](descriptor(a, [64, 64]), descriptor(b, [64, 64]), c, case)
    torch.testing.assert_close(c.double(), a.double() @ a.double() + b.double() @ b.double(), atol=1e-4, rtol=1e-3)


def turns(case: str) -> None:
    x, y = torch.randn(16, 96), torch.zeros(16, 96)
    kernels.turns[(1,)](x, descriptor(y, [16, 32]), 3, case)
    assert torch.equal(x, y)


def two_calls(case: str) -> None:
    x, y, z = torch.randn(16, 96), torch.zeros(16, 96), torch.zeros(16, 96)
    kernels.two_calls[(1,)](x, descriptor(y, [16, 32]), descriptor(z, [16, 32]), 3, case)
    assert torch.equal(y, x) and torch.equal(z, 2 * x)


def between_warps(case: str) -> None:
    x, y = torch.randn(16, 32), torch.zeros(16, 32)
    kernels.between_warps[(1,)](x, descriptor(y, [16, 32]), torch.zeros(16, 32), case)
    assert torch.equal(y, x)


def dead_copy(case: str) -> None:
    x, y = torch.randn(512), torch.zeros(512)
    kernels.dead_copy[(1,)](x, y, case)
    assert torch.equal(x, y)


def ring_then_tile(case: str) -> None:
    for n in (1, 3):
        x, y = torch.randn(16, 32 * n), torch.zeros(16, 32 * n)
        kernels.ring_then_tile[(1,)](x, descriptor(y, [16, 32]), n, case == "late")
        assert torch.equal(x, y)


BUGS = [
    (two_stores, "store in flight", "TMA store from first"),
    (two_products, "product in flight", "wgmma that reads"),
    (turns, "next turn", "next turn of the loop"),
    (two_calls, "call before", "may get its memory"),
    (two_calls, "turn before", "may get its memory"),
    *((between_warps, f"{what} in flight", "TMA store from tile") for what in ("sum", "conversion", "gather", "scan")),
    (dead_copy, "copy in flight", "cp.async into ahead"),
]
CORRECT = [
    *((two_stores, case) for case in ("both before", "wait between")),
    *((two_products, case) for case in ("wait between", "operand in deps")),
    *((turns, case) for case in ("wait before use", "wait after use")),
    (two_calls, "wait after each"),
    *((between_warps, case) for case in ("wait between", "sum in each warp")),
    *((dead_copy, case) for case in ("wait between", "read later")),
    *((ring_then_tile, case) for case in ("early", "late")),
]


@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize(("launch", "bug", "words"), BUGS, ids=lambda x: x if isinstance(x, str) else "")
def test_memory_that_is_still_in_use_is_reported(launch, bug, words, seed):
    with pytest.raises(gluon_cpu.RaceError, match=words) as error, gluon_cpu.simulate(seed=seed):
        launch(bug)
    assert error.value.report.line in LINES[bug], str(error.value)


@pytest.mark.parametrize(("launch", "case"), CORRECT, ids=lambda x: x if isinstance(x, str) else x.__name__)
def test_memory_that_is_free_is_not_reported(launch, case):
    with gluon_cpu.simulate() as run:
        launch(case)
    assert run.ok


@pytest.mark.slow
@pytest.mark.parametrize("case, covered", [("", ["%bar"]), ("ended", [])])
def test_a_tile_in_a_barriers_place_is_found_in_what_is_compiled(case, covered):
    from tests.utils.barrier_places import covered_barriers
    from utils.kernels.offline import compile_gluon

    kinds = zip(("a_desc", "c_desc"), ("fp16", "fp32"), (torch.half, torch.float), strict=True)
    tiles = {name: (kind, descriptor(torch.zeros(64, 64, dtype=dtype), [64, 64])) for name, kind, dtype in kinds}
    signature = {name: f"tensordesc<{kind}[64, 64],{tile.layout!r}>" for name, (kind, tile) in tiles.items()}
    compiled = compile_gluon(kernels.barrier_then_tile, signature, {"CASE": case})
    assert covered_barriers(compiled.asm["ttgir"]) == covered
