"""The GEMM on clusters: what is written into the PTX, and what is compiled."""

import importlib.util
import re
from types import SimpleNamespace

import pytest

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

from utils.kernels.gemm_plan import Plan
from utils.kernels.gemm_ptx import OWN, SHARED, adapted, fewer_barriers, multicast, prefetch_descriptors

COPY = "cp.async.bulk.tensor.{}d.shared::{}.global.mbarrier::complete_tx::bytes"
PTX = f"""
    @%p1 {COPY.format(2, "cta")} [%r1], [%rd1, {{%r2, %r3}}], [%r7];
    mov.u32 %r9, 0; // {SHARED}
    @%p2 {COPY.format(2, "cta")} [%r1], [%rd1, {{%r2, %r3}}], [%r7];
    @%p3 {COPY.format(3, "cluster")} [%r1], [%rd1, {{%r2, %r3, %r4}}], [%r7];
    mov.u32 %r9, 0; // {OWN}
    @%p4 {COPY.format(2, "cluster")} [%r1], [%rd1, {{%r2, %r3}}], [%r7];
    @%p5 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r7], 49152;
    @%p6 mbarrier.arrive.shared::cta.b64 _, [%r8];
"""


@pytest.mark.parametrize("plan", [Plan(128, 256, down=2), Plan(64, 64, abreast=4)], ids=lambda plan: plan.name)
def test_copies_between_the_marks_go_to_all_blocks_and_lanes_arrive_in_all(plan):
    ptx, arrivals, copies = multicast(PTX, plan)
    assert (arrivals, copies) == (1, 2)
    before, _, first, second, _, behind, expect, arrive = ptx.strip().splitlines()
    for line, condition in ((first, "@%p2"), (second, "@%p3")):
        assert re.search(rf"{condition} cp\.async\.bulk\.tensor\.\dd\.shared::cluster\.global", line)
        assert ".multicast::cluster [%r1]" in line and line.endswith("[%r7], all; }")
        assert f"mov.b16 all, {2**plan.cluster - 1};" in line
    assert "multicast" not in before + behind
    assert "mapa" not in expect
    assert "vote.sync.any.pred arrives, %p6, -1;" in arrive
    assert f"setp.lt.and.u32 arrives, lane, {plan.cluster}, arrives;" in arrive
    assert arrive.count("mbarrier.arrive") == 1 and "mapa.shared::cluster.u32 there, %r8, lane;" in arrive
    with pytest.raises(ValueError, match="condition"):
        multicast(PTX.replace("@%p6 ", ""), plan)


LOAD = f"@%p3 {COPY.format(2, 'cluster')} [%r1], [%rd1, {{%r2, %r3}}], [%r7];"
BARRIERS = f"""
    @%p1 mbarrier.init.shared::cta.b64 [%r4], 1;
    bar.sync 0;
    @%p1 mbarrier.init.shared::cta.b64 [%r5], 1;
    bar.sync 	0, 128;
    @%p2 mbarrier.arrive.expect_tx.shared.b64 _, [%r4], 16384;
    bar.sync 0;
    {LOAD}
    bar.sync 0;
    mbarrier.try_wait.parity.shared.b64 complete, [%r41], %r42;
    wgmma.wait_group.sync.aligned 1;
    bar.sync 0;
    @%p2 mbarrier.arrive.expect_tx.shared.b64 _, [%r4], 16384;
    stmatrix.sync.aligned.m8n8.x4.shared.b16 [%r87], {{%r61, %r62, %r63, %r64}};
    bar.sync 2, 128;
    {LOAD.replace("shared::cluster.global", "global.shared::cta")}
"""


def test_only_barriers_that_protect_nothing_are_taken_out():
    """Kept: behind the last mbarrier, before a slot is filled again, and before what threads stored is read."""
    ptx, count = fewer_barriers(BARRIERS)
    lines = ptx.splitlines()
    assert count == 3 and [i for i, line in enumerate(lines) if "bar.sync" in line] == [4, 11, 14]
    assert lines[6] == "bar.warp.sync -1;" and lines[2] == lines[8] == ""


def test_descriptors_are_fetched_before_the_wait_and_other_arguments_are_not():
    ptx = ".param .align 64 .b8 k_param_0[128],\n.param .u32 k_param_1,\n.param .align 64 .b8 k_param_5[128]\ngriddepcontrol.wait;"
    body = prefetch_descriptors(ptx).splitlines()[-1]
    assert re.findall(r"mov\.b64 map, (\w+);", body) == ["k_param_0", "k_param_5"]
    assert body.count("prefetch.tensormap [map];") == 2 and body.endswith("} griddepcontrol.wait;")


def test_a_kernel_whose_blocks_share_nothing_is_named():
    with pytest.raises(ValueError, match="plain has 0 shared copies"):
        adapted(SimpleNamespace(name="plain", asm={"ptx": "ret;"}), Plan(128, 256, down=2))
