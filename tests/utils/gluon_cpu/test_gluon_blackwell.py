"""Tensor memory and tcgen05 in the simulator: right kernels give right numbers, and a broken line is named."""

import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from utils import gluon_cpu
from utils.machine.versions import installed_version

if (installed_version("triton") or (0,)) < (3, 7):
    pytest.skip("Blackwell's kernels here are written for Triton 3.7 and later", allow_module_level=True)

from tests.utils.gluon_cpu import blackwell_kernels as kernels
from tests.utils.gluon_cpu.gluon_helpers import descriptor

TIMINGS = (None, 1, 2, 3)


def multiply(module, m=256, n=128, k=256, stages=2, seed=None, block=(128, 128, 64)) -> torch.Tensor:
    """The error of one product, relative to its largest element."""
    torch.manual_seed(0)
    a, b, c = torch.randn(m, k).half(), torch.randn(n, k).half(), torch.zeros(m, n).half()
    rows, columns, depth = block
    grid = (-(-m // rows), -(-n // columns))
    given = descriptor(a, [rows, depth]), descriptor(b, [columns, depth]), descriptor(c, [rows, columns])
    with gluon_cpu.simulate(seed=seed):
        module.product[grid](*given, -(-k // depth), stages, num_warps=4)
    expected = a.double() @ b.double().T
    return ((c.double() - expected).abs().max() / expected.abs().max()).item()


@pytest.mark.parametrize("seed", TIMINGS)
@pytest.mark.parametrize(
    ("shape", "block"),
    [((256, 128, 256), (128, 128, 64)), ((200, 96, 136), (128, 64, 64)), ((64, 256, 64), (64, 256, 32))],
)
def test_a_product_is_right(shape, block, seed):
    assert multiply(kernels, *shape, seed=seed, block=block) < 1e-3


@pytest.mark.parametrize("shape", [(128, 64), (64, 64), (128, 256)])
def test_a_copy_through_tensor_memory(shape):
    x, y = torch.randn(shape), torch.zeros(shape)
    with gluon_cpu.simulate():
        kernels.through_tensor_memory[(1,)](x, y, *shape, num_warps=4)
    assert torch.equal(x, y)


def test_views_that_share_columns():
    x, y = torch.randn(128, 64), torch.zeros(128, 64)
    with gluon_cpu.simulate():
        kernels.shared_columns[(1,)](x, y, False, num_warps=4)
    assert torch.equal(y, (x / 2).half().float())
    with pytest.raises(gluon_cpu.LayoutError, match="written as fp16"), gluon_cpu.simulate():
        kernels.shared_columns[(1,)](x, y, True, num_warps=4)


@dataclass(frozen=True)
class Bug:
    """A line of `product` that is changed, the kinds of report that may follow, and a part of the line that they name."""

    name: str
    old: str
    new: str
    kinds: tuple[str, ...]
    line: str


MMA = "tcgen05_mma(a_ring"
BUGS = (
    Bug("accumulator read early", "    mbarrier.wait(done, 0)\n", "", ("race",), "acc.load"),
    Bug("done before the products", "    for i in range(tiles):\n        slot = i % STAGES\n        mbarrier.wait(full",
        "    tcgen05_commit(done)\n    for i in range(tiles):\n        slot = i % STAGES\n        mbarrier.wait(full", ("race", "barrier"), ""),
    Bug("no commit at the end", "        tcgen05_commit(empty.index(slot))\n    tcgen05_commit(done)", "        tcgen05_commit(empty.index(slot))",
        ("deadlock",), "mbarrier.wait(done"),
    Bug("two commits for one slot", "        tcgen05_commit(empty.index(slot))\n", "        tcgen05_commit(empty.index(slot))\n        tcgen05_commit(empty.index(slot))\n",
        ("race", "barrier"), ""),
    Bug("slot refilled before the commit", "        tcgen05_commit(empty.index(slot))", "        mbarrier.arrive(empty.index(slot), count=1)",
        ("race",), "async_copy_global_to_shared"),
    Bug("slot never freed", "        tcgen05_commit(empty.index(slot))\n", "", ("deadlock",), "mbarrier.wait"),
    Bug("tile read before it has come", "        mbarrier.wait(full.index(slot), (i // STAGES) & 1)\n", "", ("race",), MMA),
    Bug("phase of full off by one", "mbarrier.wait(full.index(slot), (i // STAGES) & 1)", "mbarrier.wait(full.index(slot), ((i // STAGES) & 1) ^ 1)",
        ("race", "barrier", "deadlock"), ""),
    Bug("phase of empty off by one", "((i // STAGES) & 1) ^ 1)", "(i // STAGES) & 1)", ("deadlock",), "mbarrier.wait"),
    Bug("bytes of one tile only", "a_desc.block_type.nbytes + b_desc.block_type.nbytes)", "a_desc.block_type.nbytes)", ("barrier",), ""),
    Bug("accumulator never set", "use_acc=i > 0", "use_acc=True", ("uninitialized",), MMA),
    Bug("one warp stores", "            (store_tile, (c_desc, c_tile, acc, done)),\n            (multiply_tiles, (rings, acc, full, empty, done, tiles, STAGES)),",
        "            (multiply_tiles, (rings, acc, full, empty, done, tiles, STAGES)),\n            (store_tile, (c_desc, c_tile, acc, done)),",
        ("layout",), "get_tmem_reg_layout"),
    Bug("no fence before the store", "    fence_async_shared()\n    at = ", "    at = ", ("missing fence",), "async_copy_shared_to_global"),
    Bug("barrier for two commits", "mbarrier.init(done, count=1)", "mbarrier.init(done, count=2)", ("deadlock",), "mbarrier.wait(done"),
    Bug("B is not transposed", ".permute((1, 0))", "", ("layout",), MMA),
    Bug("too many columns", "allocate_tensor_memory(gl.float32, c_desc.block_type.shape, columns)",
        "allocate_tensor_memory(gl.float32, [5, *c_desc.block_type.shape], columns).index(0)", ("layout",), "allocate_tensor_memory"),
    Bug("commit before the product", "        tcgen05_mma(a_ring", "        tcgen05_commit(empty.index(slot))\n        tcgen05_mma(a_ring", ("race", "barrier"), ""),
    Bug("registers of another layout", "acc.load(registers)", "acc.load(gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0]))", ("layout",), "acc.load"),
)  # fmt: skip


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    """A function that writes the kernels with one change into a module of its own."""
    folder, text = tmp_path_factory.mktemp("broken"), Path(kernels.__file__).read_text()

    def write(bug: Bug):
        assert text.count(bug.old) == 1, f"{bug.name}: the kernel has other lines now"
        path = folder / f"{bug.name.replace(' ', '_')}.py"
        path.write_text(text.replace(bug.old, bug.new))
        spec = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        spec.loader.exec_module(module)
        return module

    return write


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_broken_line_is_reported(broken, bug):
    module = broken(bug)
    for seed in TIMINGS:
        with pytest.raises(gluon_cpu.SimulationError) as caught:
            multiply(module, m=128, k=384, seed=seed, block=(128, 128, 64))
        report = caught.value.report
        assert report.kind in bug.kinds, (seed, str(report))
        line = Path(module.__file__).read_text().split("\n")[report.site.line - 1 : report.site.line + 2]
        assert bug.line in "\n".join(line), (seed, str(report))
