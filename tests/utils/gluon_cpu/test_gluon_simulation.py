"""simulate(): same seed, same run; timelines; collected reports; refusals; and this project's own kernels."""

import itertools
import linecache
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

pytest.importorskip("triton", reason="gluon_cpu needs Triton for the language; there are wheels for Linux only")

from triton.experimental.gluon import language as gl

from tests.utils.gluon_cpu import gluon_small_kernels as small
from tests.utils.gluon_cpu import verdict_kernels as kernels
from tests.utils.gluon_cpu.gluon_helpers import descriptor
from tests.utils.gluon_cpu.verdict_cases import launch_consumers
from utils import gluon_cpu
from utils.attention import reference
from utils.attention.gluon import launch
from utils.gluon_cpu import layouts, simulation
from utils.machine import versions


def run_consumers(seed=None, steps=5, stages=2, **options):
    """Simulate a producer and two consumers of a ring of slots."""
    with gluon_cpu.simulate(seed=seed, **options) as run:
        launch_consumers(kernels, "cpu", stages, steps)
    return run


def test_import_loads_no_heavy_library():
    code = "import sys, utils.gluon_cpu; loaded = {'torch', 'triton', 'matplotlib'} & set(sys.modules); assert not loaded, loaded"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_same_seed_same_run():
    for seed in (None, 7):
        first, second = run_consumers(seed, timeline=True), run_consumers(seed, timeline=True)
        assert first.cycles == second.cycles
        assert first.events == second.events
    assert len({run_consumers(seed).cycles[0] for seed in range(5)}) > 1


def test_timeline():
    run = run_consumers(timeline=True)
    partitions = {e.partition for e in run.events}
    assert partitions == {"consume 0", "consume 1", "produce"}
    copies = [e for e in run.events if e.kind == "copy in"]
    assert len(copies) == 5 and {e.buffer for e in copies} == {"slots[0]", "slots[1]"}
    assert sorted(e.phase for e in copies if e.buffer == "slots[0]") == [0, 1, 2]
    for e in run.events:
        assert 0 <= e.start <= e.end <= run.cycles[0] + 2000 and e.line > 0
    for name in partitions:  # a partition does one thing at a time
        bars = sorted((e.start, e.end) for e in run.events if e.partition == name and e.unit == "partition")
        assert all(a[1] <= b[0] + 1e-6 for a, b in itertools.pairwise(bars))


def test_timeline_records_as_many_programs_as_asked():
    y = torch.zeros(9, dtype=torch.int32)
    for wanted, lines in ((False, 0), (True, 1), (3, 3)):
        with gluon_cpu.simulate(timeline=wanted) as run:
            small.programs[(8,)](y, 1)
        assert sum(e.kind == "store" for e in run.events) == 2 * lines


def test_picture():
    run = run_consumers(timeline=True)
    figure, axes = run.plot()
    labels = [t.get_text() for t in axes.get_yticklabels()]
    assert "produce" in labels and "TMA: produce" in labels
    assert axes.get_xlabel() == "model cycles"
    import matplotlib.pyplot as plt

    plt.close(figure)
    with pytest.raises(ValueError, match="timeline=True"):
        gluon_cpu.plot_events([])


def test_more_stages_overlap_more():
    """With one slot, copies and additions take turns; with three they overlap."""
    one, three = (run_consumers(steps=20, stages=stages).cycles[0] for stages in (1, 3))
    assert three < 0.8 * one


def test_collecting_goes_on():
    y = torch.zeros(128)
    with gluon_cpu.simulate(stop_at_first=False) as run:
        small.two_findings[(1,)](y)
    assert [r.kind for r in run.reports] == ["uninitialized"] * 2 and not run.ok
    assert run.reports[0].line + 1 == run.reports[1].line
    with pytest.raises(gluon_cpu.UninitializedError), gluon_cpu.simulate() as run:
        small.two_findings[(1,)](y)
    assert len(run.reports) == 1


def test_deadlock_names_everybody():
    with pytest.raises(gluon_cpu.DeadlockError) as error, gluon_cpu.simulate():
        small.deadlock[(1,)](torch.zeros(1))
    text = str(error.value)
    assert "waits 0 waits for bar, phase parity 0" in text and "waits 1 waits for bar" in text
    assert "1 of 1 arrivals missing" in text and "returns has done its part" in text
    assert "mbarrier.wait(bar, PARITY)" in text


def test_no_thread_outlives_a_failure():
    before = threading.active_count()
    for kernel, error in ((small.deadlock, gluon_cpu.DeadlockError), (small.failing_worker, gluon_cpu.KernelError)):
        for _ in range(5):
            with pytest.raises(error), gluon_cpu.simulate():
                kernel[(1,)](torch.zeros(1))
    assert threading.active_count() == before


def test_bank_conflicts_are_tritons_count():
    y = torch.zeros(2, dtype=torch.int32)
    with gluon_cpu.simulate():
        small.count_bank_conflicts[(1,)](y, gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
        small.count_bank_conflicts[(1,)](y[1:], gl.SwizzledSharedLayout(1, 1, 32, [1, 0]))
    assert y.tolist() == [31, 0]


def test_an_address_outside_is_harmless_until_it_is_used():
    with gluon_cpu.simulate() as run:
        small.outside_but_not_used[(1,)](torch.zeros(128), 0)
    assert run.ok
    with pytest.raises(gluon_cpu.GlobalMemoryError, match=r"bars\[-1\]"), gluon_cpu.simulate():
        small.used_outside[(1,)](torch.zeros(128), 0)


def test_grids_warps_and_atomics():
    y = torch.zeros(25, dtype=torch.int32)
    with gluon_cpu.simulate() as run:
        small.programs[(2, 3, 4)](y, 5, num_warps=8)
    assert y[:24].tolist() == [40] * 24 and y[24] == 24 and len(run.cycles) == 24
    with gluon_cpu.simulate() as run:
        small.programs[lambda meta: (meta["WIDTH"],)](y, WIDTH=7)
    assert y[:7].tolist() == [28] * 7 and len(run.cycles) == 7 and run.launches == 1


def test_launches_are_triton_s_again_afterwards():
    from triton.experimental.gluon._runtime import GluonJITFunction

    before = GluonJITFunction.run
    with pytest.raises(ZeroDivisionError), gluon_cpu.simulate():
        assert GluonJITFunction.run is not before
        raise ZeroDivisionError
    assert GluonJITFunction.run is before


def test_simulate_decorates_a_function():
    @gluon_cpu.simulate()
    def sixes():
        y = torch.zeros(3, dtype=torch.int32)
        small.programs[(2,)](y, 6, num_warps=1)
        return y.tolist()

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(lambda _: sixes(), range(60))) == [[6, 6, 2]] * 60


IM2COL = r"im2col mode\. Copy plain tiles with a TensorDescriptor"


def test_bad_launches():
    x = torch.zeros(8)
    for arguments, options, error, words in (
        (("x", 1), {}, TypeError, "numbers and None; y_ptr is str"),
        ((x, 1), {"color": 3}, TypeError, "no parameter or option color"),
        ((x, 1), {"num_warps": 3}, ValueError, "power of two"),
        ((x, 1), {"num_ctas": 3}, ValueError, r"num_ctas must be 1, 2, 4, 8 or 16, .*; got 3"),
        ((type("TensorDescriptorIm2Col", (), {})(), 1), {}, gluon_cpu.UnknownOperationError, IM2COL),
        ((x.to("meta"), 1), {}, ValueError, "CPU tensors"),
        ((x.to(torch.complex64), 1), {}, TypeError, "complex"),
        ((x,), {}, gluon_cpu.KernelError, "argument: 'WIDTH'"),
    ):
        with gluon_cpu.simulate(), pytest.raises(error, match=words):
            small.programs[(1,)](*arguments, **options)


def test_older_tritons_are_refused(monkeypatch):
    monkeypatch.setattr(versions, "installed_version", lambda package: (3, 5))
    with pytest.raises(RuntimeError, match=r"Triton 3\.6 and later"), gluon_cpu.simulate():
        pass
    monkeypatch.setattr(versions, "installed_version", lambda package: None)
    with pytest.raises(ImportError, match="pip install"):
        simulation.check_version()


@pytest.mark.parametrize("kernel", [small.old_cp_async, small.old_tma])
def test_names_that_triton_removed_are_refused_as_triton_refuses_them(kernel):
    """Up to Triton 3.8 the old names work, from 3.9 on they raise an error: here as there."""
    x, y = torch.arange(64.0), torch.zeros(64)
    source = descriptor(x[None], [1, 64]) if kernel is small.old_tma else x
    with gluon_cpu.simulate():
        if versions.installed_version("triton") < (3, 9):
            kernel[(1,)](source, y, num_warps=2)
            assert torch.equal(y, x)
        else:
            with pytest.raises(gluon_cpu.UnknownOperationError, match="call async_load instead"):
                kernel[(1,)](source, y, num_warps=2)


def test_a_division_by_zero_is_no_error_as_on_a_gpu():
    y = torch.zeros(128, dtype=torch.int32)
    with gluon_cpu.simulate():
        small.tile_behind_the_last[(1,)](y, 7, 8)
    assert y[64:].tolist() == [7 - 1] * 64  # the remainder is the dividend, all bits of the quotient are set
    assert y[:64].tolist() == list(range(64))


def test_a_slot_is_used_again_with_another_shape():
    x, y = torch.randn(8, 128), torch.zeros(8, 128)
    with gluon_cpu.simulate():
        small.slot_used_again[(1,)](x, y)
    assert torch.equal(x, y)


# ---- kernels of this project ----------------------------------------------------------------------------------------


def simulated(shape, causal=False, window=0, step=5, seed=None):
    """Run a step on random tensors, compare its output and log-sum-exp with float64, and return both."""
    torch.manual_seed(shape[4])
    batch, heads, kv_heads, sq, sk, head_dim = shape
    q, k, v = (torch.randn(batch, h, s, head_dim).bfloat16() for h, s in ((heads, sq), (kv_heads, sk), (kv_heads, sk)))
    with gluon_cpu.simulate(seed=seed) as run:
        found = launch.run_step(q, k, v, causal, head_dim**-0.5, window, True, step)
    out, lse = reference(q, k, v, causal=causal, window=window or None)
    assert run.ok and (found[0].double() - out).abs().max() < 0.02 and (found[1] - lse).abs().max() < 1e-3
    return found


@pytest.mark.usefixtures("unwritten_is_nan")
@pytest.mark.parametrize("step", [1, 2, 3, 4, 5])
@pytest.mark.parametrize(
    ("shape", "causal", "window", "seed"),
    [
        ((2, 4, 2, 256, 256, 64), True, 0, None),
        ((1, 2, 1, 100, 200, 64), False, 0, 1),
        ((1, 2, 1, 200, 200, 64), True, 40, 2),
        ((1, 2, 2, 72, 130, 128), True, 0, 3),
        ((1, 4, 2, 250, 300, 128), False, 0, 4),
    ],
)
def test_attention_ladder(step, shape, causal, window, seed, monkeypatch):
    monkeypatch.setattr(launch, "processors", lambda device: 4)
    simulated(shape, causal, window if step == 5 else 0, step, seed)  # the other steps have no window


@pytest.mark.usefixtures("unwritten_is_nan")
@pytest.mark.parametrize(
    ("shape", "causal", "window", "variant", "programs"),
    [
        # One to six tiles for each program, two to five blocks of keys, full and partial ones.
        ((3, 2, 1, 130, 129, 64), False, 0, "few", 4),
        ((3, 2, 1, 130, 385, 80), False, 0, "", 5),
        ((3, 2, 1, 130, 200, 96), False, 0, "three", 2),
        ((3, 2, 1, 130, 385, 128), False, 0, "", 5),
        # 128 rows are two tiles, where the first tile begins ten rows before them.
        ((1, 2, 1, 128, 1034, 64), True, 0, "few", 4),
        ((1, 2, 1, 260, 270, 64), True, 0, "four", 2),
        ((1, 1, 1, 200, 200, 64), True, 0, "narrow", 1),
        ((1, 2, 2, 130, 389, 128), True, 0, "", 2),
        ((1, 1, 1, 60, 520, 256), False, 0, "", 1),
        ((1, 1, 1, 100, 200, 256), False, 60, "one", 1),
        ((1, 2, 1, 70, 700, 64), False, 0, "one", 3),
        pytest.param((1, 2, 1, 200, 231, 64), True, 0, "", 1, marks=pytest.mark.slow),
    ],
)
def test_several_tiles_a_program_and_tiles_that_begin_before_the_first_query(
    shape, causal, window, variant, programs, monkeypatch
):
    """Step 5 is right, also where Sk - Sq is no multiple of 64, and gives the same bits twice."""
    monkeypatch.setattr(launch, "processors", lambda device: programs)
    monkeypatch.setattr(launch, "variant_for", lambda *given: variant)
    (out, lse), (again, lse_again) = (simulated(shape, causal, window, seed=seed) for seed in (1, 2))
    assert torch.equal(out, again) and torch.equal(lse, lse_again)


@pytest.mark.parametrize("case", ["gather", "scatter", "registers"])
def test_indices_outside_are_refused(case):
    y = torch.zeros(128)
    with gluon_cpu.simulate():
        small.gather_and_scatter[(1,)](y, 5, case)
    assert torch.equal(y, torch.arange(128.0))
    for index in (-1, 128):
        with pytest.raises(gluon_cpu.GlobalMemoryError, match=f"index {index} "), gluon_cpu.simulate():
            small.gather_and_scatter[(1,)](y, index, case)


def test_a_phase_whose_arrivals_are_known_needs_no_wait():
    """Arrivals before the partitions begin cannot be late; those of another partition can, so it has to wait."""
    with gluon_cpu.simulate():
        small.arrival_before_the_partitions[(1,)]()
    with pytest.raises(gluon_cpu.SimulationError, match="never waited"), gluon_cpu.simulate():
        small.arrivals_beside_the_wait[(1,)]()


def test_linear_layouts_count_elements_and_others_blocks():
    linear = gl.DistributedLinearLayout([[1, 0]], [[0, 1]] * 5, [[2, 0], [4, 0]], [[0, 64], [8, 0]], [16, 128])
    assert layouts.block_bases(linear) == [[0, 1], [1, 0]]
    assert layouts.block_bases(gl.SliceLayout(1, linear)) == [[0], [1]]


@pytest.mark.parametrize(
    ("kernel", "error", "words"),
    [
        (small.spin_on_a_flag, gluon_cpu.EndlessLoopError, "nobody can change"),
        (small.constant_in_each_turn, gluon_cpu.KernelError, "a second value"),
        (small.misspelled_argument, gluon_cpu.KernelError, "unexpected keyword argument 'masked'"),
        (small.tile_of_other_elements, gluon_cpu.LayoutError, "16-bit elements"),
    ],
)
def test_a_mistake_is_reported_with_its_line(kernel, error, words):
    with pytest.raises(error, match=words) as caught, gluon_cpu.simulate():
        kernel[(1,)](torch.zeros(128, dtype=torch.int32))
    assert "# here" in linecache.getline(small.__file__, caught.value.report.line)


def test_a_partition_waits_for_the_flag_of_another_one():
    flag = torch.zeros(2, dtype=torch.int32)
    with gluon_cpu.simulate():
        small.flag_between_partitions[(1,)](flag)
    assert flag.tolist() == [1, 2]
