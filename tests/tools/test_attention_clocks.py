"""Clocks of step 5: what is read from a warp's entries, that a simulated kernel fills them, and what they cost when compiled."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tools.record import attention_clocks as clocks
from tools.record import attention_profile as profile
from tools.record import sass

ROOT = Path(__file__).resolve().parents[2]
START = 2**32 - 5000  # the 32-bit clock begins anew within the second block


def entries_of(first_block=0, blocks=6, ring=8, steps=(100, 20, 300, 400)):
    """Entries of a warp whose blocks follow each other, 50 cycles from one's end to the next one's begin."""
    words, at = np.zeros((ring, 16), np.uint32), START
    for block in range(first_block, first_block + blocks):
        for point, step in enumerate((0, *steps)):
            at += step
            words[block % ring, point] = at % 2**32
        at += 50
    return words


def test_steps_are_read_across_the_clock_and_the_ring():
    words = entries_of(first_block=5)
    steps = clocks.steps_between(words, [0, 1, 2, 3, 4])
    assert steps.shape == (6, 4) and (steps == [100, 20, 300, 400]).all()
    assert (clocks.to_next_block(words, 4, 0) == 50).all() and len(clocks.to_next_block(words, 4, 0)) == 5
    assert (clocks.to_next_block(words, 0, 0) == 870).all()


def test_a_block_that_was_overwritten_in_part_is_left_out():
    words = entries_of()
    words[2, 3] = START - 10**9  # of a block long ago
    assert len(clocks.steps_between(words, [0, 1, 2, 3, 4])) == 5


def test_a_new_tile_is_no_next_block():
    words = entries_of(blocks=6)
    words[3] = 0  # a tile's first block keeps nothing
    assert len(clocks.to_next_block(words, 4, 0)) == 3


def test_shares_of_time_beside_each_other():
    one = entries_of(steps=(100, 100, 100, 100))
    other = entries_of(steps=(100, 100, 100, 100))
    other[:6, :5] += np.uint32(50)  # half of its span from point 1 to 2 lies behind the first one's
    both = np.stack([one, other])[None, :, None].repeat(4, axis=2)
    shares = clocks.beside_each_other(both, 1, 2)
    # From the second one's first span to the first one's last: five periods of 450 cycles and 50. Spans of 100 lie 50 over each other.
    assert shares == [round(x / 2300, 3) for x in (1500, 10 * 50, 6 * 50)]


def test_clock_rate_from_cycles_and_nanoseconds():
    tiles = np.zeros((2, 16, 16), np.uint32)
    for i in range(16):
        tiles[:, (i + 5) % 16, 4] = (START + 1755 * 10 * i) % 2**32
        tiles[:, (i + 5) % 16, 9] = (2**32 - 20_000 + 10_000 * i) % 2**32
    assert clocks.clock_rate(tiles, 4, 9) == pytest.approx(1755)


def test_every_case_has_the_plan_that_attention_takes():
    variants = {str(case): clocks.plan_of_case(case)[0] for case in clocks.CASES}
    assert (
        variants["64: 1 x 32/32 x 16384 full"] == "ahead of three"
        and variants["128: 1 x 16/16 x 16384 full"] == "ahead"
    )
    assert variants["64: 2 x 8/2 x 1408 full, window 256"] == "narrow"
    assert all(clocks.plan_of_case(case)[1].block_d == case.head_dim for case in clocks.CASES)


@pytest.mark.parametrize(("head_dim", "variant", "causal"), [(64, "ahead of three", False), (64, "", True)], ids=str)
def test_a_simulated_kernel_keeps_clocks_and_computes_the_same(head_dim, variant, causal):
    pytest.importorskip("triton", reason="Gluon kernels need Triton")
    from utils import gluon_cpu
    from utils.attention.gluon.launch import step_module
    from utils.attention.gluon.plan import plan_for, tile_blocks

    torch.manual_seed(0)
    plan, length = plan_for(5, head_dim, variant), 640
    q, k, v = (torch.randn(1, 1, length, head_dim, dtype=torch.bfloat16) for _ in range(3))
    plain, clocked = (clocks.arguments_of(q, k, v, causal, plan, programs=2) for _ in range(2))
    with gluon_cpu.simulate() as run:
        step_module(5).launch(plain)
        _, entries = clocks.launch_with_clocks(clocked)
    assert run.ok and torch.equal(plain.out, clocked.out)
    found = clocks.read_entries(clocks.words_of(entries), plan.consumers)
    tiles = tile_blocks(plan, length, length, causal, 0)
    if not causal:  # each consumer's loop has every block of a tile but the first
        assert found["blocks"] == sum(n - 1 for n in tiles) * plan.consumers
    assert found["blocks"] > 0 and found["loads"]["block"]["mean"] > 0
    phases = found["phases"]
    steps = sum(phases[name]["mean"] for name in phases if name not in ("block", "to the next block"))
    assert phases["to softmax"]["mean"] > 300 and 0.5 < steps / phases["block"]["mean"] < 1.5
    assert sum(found["beside"]["from scores to softmax"]) == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize("mode", ["scores", "output", "output, P shared", "products"])
def test_simulated_products_share_the_tensor_cores(mode):
    pytest.importorskip("triton", reason="Gluon kernels need Triton")
    from tools.record.attention_floors import cycles_of
    from utils import gluon_cpu

    with gluon_cpu.simulate() as run:
        cycles = cycles_of((2, 64, 128, 160, False), mode, device="cpu", programs=1, rounds=8)
    needed = 2 * 8 * (512 if mode == "products" else 256)  # of the tensor cores, for both consumers
    assert run.ok and all(0.9 * needed < x < 1.6 * needed for x in cycles)


@pytest.mark.slow
def test_clocks_cost_two_instructions_a_point_and_the_kernel_without_has_none():
    code = (
        "import json; from tools.record.attention_clocks import CASES, compile_case; from utils.attention.gluon.offline import compile_step\n"
        "plain = compile_step(5, 64, variant='ahead of three')\n"
        "print('ROW', json.dumps([compile_case(CASES[0]), plain.count('%clock|%globaltimer', 'ptx')]))"
    )
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, cwd=ROOT)
    rows = [line for line in done.stdout.splitlines() if line.startswith("ROW ")]
    assert rows, done.stderr[-2000:]
    row, clocks_without = json.loads(rows[0].removeprefix("ROW "))
    assert clocks_without == 0
    assert row["without"]["spill_bytes"] == row["with clocks"]["spill_bytes"] == 0
    assert len(row["without"]["loops"]) == 3
    # 18 for the points; the others keep and move the entry's address.
    assert all(0 < b - a <= 48 for a, b in zip(row["without"]["loops"], row["with clocks"]["loops"], strict=True))
    units = row["with clocks"]["between"]
    assert [part.get("tensor", 0) > 0 for part in units] == [True, False, True, True, False, False, True, False, False]
    assert units[4]["MUFU"] >= 64 and units[8]["conversion"] == 32, "the softmax, and P packed behind the last point"


def test_units_of_instructions():
    expected = {
        "@!P0 FMUL R88, R88, R3": "FMA",
        "FMNMX R13, R24, R25, !PT": "ALU",
        "MUFU.EX2 R4, R4": "MUFU",
        "HGMMA.64x128x16.F32.BF16 R24, gdesc[UR24], RZ, !UPT": "tensor",
        "UIADD3 UR36, UR8, UR31, URZ": "uniform",
        "F2FP.BF16.F32.PACK_AB R123, R69, R86": "conversion",
        "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR9], R76": "sync",
        "SHFL.BFLY PT, R13, R14, 0x2, 0x1f": "LSU",
        "@P0 BRA `(.L_x_12)": "control",
    }
    assert {text: sass.unit_of(text) for text in expected} == expected


SOURCE_PAGE = """"Kernel Name","attention_step5"
"#","Address","Source","Warp Stall Sampling (All Samples)","Warp Stall Sampling (Not-issued Samples)","Instructions Executed","stall_math","stall_wait","stall_wait (Not Issued)"
"0","7f00","MUFU.EX2   R4, R4","30","20","1,000","25","5","5"
"1","7f10","FADD R1, R2, R3","10","5","1,000","0","10","3"
"""
RAW_PAGE = """==PROF== something
"ID","Kernel Name","gpu__time_duration.sum","sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active","dram__bytes.sum"
"","","ns","%","byte"
"0","attention_step5","4,000,000","61.5","1"
"""


def test_a_profile_is_read_by_line_and_reason():
    lines = profile.lines_of(SOURCE_PAGE)
    assert [line["samples"] for line in lines] == [30, 10] and lines[0]["executed"] == 1000
    assert profile.sums_by(lines) == {"math": 0.625, "wait": 0.375}
    assert profile.executed_by_unit(lines) == {"MUFU": 0.5, "FMA": 0.5}
    units = profile.busy_units(RAW_PAGE)
    assert units == {"gpu__time_duration.sum": 4e6, "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active": 61.5}
    found = {"units": units, "reasons": profile.sums_by(lines), "executed": {}, "lines": lines}
    assert "MUFU.EX2 R4, R4" in profile.show(found, 1) and "FADD" not in profile.show(found, 1)
    with pytest.raises(ValueError, match="no table"):
        profile.lines_of("nothing\n")


def test_a_report_is_needed_for_the_table(capsys):
    with pytest.raises(SystemExit):
        profile.main(["table"])
    assert "report" in capsys.readouterr().err
