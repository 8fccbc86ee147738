"""Without a GPU: the decode kernel compiles for sm_90a, does not spill, and is made of wgmma and TMA."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from utils.machine.device import offline_compile_support

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not offline_compile_support(), reason=offline_compile_support().reason),
]

ROOT = Path(__file__).resolve().parents[3]
CASES = {  # arguments of make_plan or cluster_plan, of Case
    "one token": (dict(head_dim=128, group=4, sq=1), dict()),
    "seven tokens, pages of 32": (
        dict(head_dim=128, group=4, sq=7, page=32),
        dict(causal=True, lengths=True, batch_block=8, page=32, clean=True),
    ),
    "head dimension 256": (dict(head_dim=256, group=4, sq=4), dict(causal=True, window=True)),
    "64 rows": (dict(head_dim=128, group=4, sq=16), dict(causal=True)),
    "64 rows, ahead": (dict(head_dim=128, group=4, sq=16, consumers=1, ahead=True), dict(causal=True, aligned=True)),
    "64 rows, two programs an SM": (
        dict(head_dim=128, group=4, sq=16, consumers=1, block_n=64, per_sm=2, by_tma=True),
        dict(causal=True, aligned=True),
    ),
    "128 rows, the output by TMA": (dict(head_dim=128, group=8, sq=16, by_tma=True), dict(causal=True, aligned=True)),
    "128 rows, keys backwards, K first, rings filled early": (
        dict(head_dim=128, group=8, sq=16, by_tma=True, backward=True, k_first=True, prefill=True),
        dict(causal=True, aligned=True),
    ),
    "64 rows, ahead, in the new order": (
        dict(head_dim=128, group=4, sq=16, consumers=1, ahead=True, backward=True, k_first=True, prefill=True),
        dict(causal=True, aligned=True),
    ),
    "64 rows, parts, K first, rings filled early": (
        dict(head_dim=128, group=4, sq=16, k_first=True, prefill=True),
        dict(causal=True),
    ),
    "one token, a program a head": (dict(head_dim=128, group=8, sq=1, lean=True), dict(aligned=True)),
    "128 rows, pages of 16": (
        dict(head_dim=128, group=8, sq=16, page=16),
        dict(causal=True, window=True, lengths=True, batch_block=8, page=16, clean=True),
    ),
    "a cluster of 8": (dict(head_dim=128, group=4, sq=1, keys=8192, heads=8, parts=8), dict()),
    "a cluster of 8, 64 rows": (dict(head_dim=128, group=4, sq=16, keys=2048, heads=8, parts=8), dict(causal=True)),
    "clusters of 2, in the ring": (dict(head_dim=256, group=4, sq=8, keys=4096, heads=64, parts=2), dict(causal=True)),
    "a cluster of 8, pages of 64": (
        dict(head_dim=128, group=4, sq=1, keys=8192, heads=8, parts=8, page=64),
        dict(lengths=True, batch_block=1, page=64, clean=True),
    ),
    "divided clusters, pages of 256": (
        dict(head_dim=128, group=4, sq=1, keys=8192, heads=64, parts=8, page=256, block_n=64, per_sm=2, halvings=3),
        dict(lengths=True, batch_block=8, page=256, clean=True),
    ),
    "fp8": (dict(head_dim=128, group=4, sq=4, fp8=True), dict(causal=True)),
    "fp8, 64 rows": (dict(head_dim=128, group=4, sq=16, fp8=True), dict(causal=True)),
    "fp8, 64 rows, products in fp16": (dict(head_dim=128, group=4, sq=16, fp8=True, fp16=True), dict(causal=True)),
    "fp8, 64 rows, blocks of 128 keys": (
        dict(head_dim=128, group=4, sq=16, fp8=True, fp16=True, block_n=128),
        dict(causal=True, aligned=True),
    ),
    "fp8, 64 rows, blocks of 128 keys, parts": (
        dict(head_dim=128, group=4, sq=16, fp8=True, fp16=True, block_n=128),
        dict(causal=True),
    ),
    "fp8, 128 rows, products in fp16": (
        dict(head_dim=128, group=8, sq=16, fp8=True, fp16=True, consumers=2),
        dict(causal=True, aligned=True),
    ),
    "fp8, 64 rows, head dimension 256, pages": (
        dict(head_dim=256, group=4, sq=16, page=16, fp8=True),
        dict(causal=True, lengths=True, batch_block=4, page=16, clean=True),
    ),
    "fp8, 128 rows": (dict(head_dim=128, group=8, sq=16, fp8=True, consumers=2), dict(causal=True, aligned=True)),
    "fp8, 128 rows, head dimension 64": (dict(head_dim=64, group=8, sq=16, fp8=True, consumers=2), dict(causal=True)),
}
PROGRAM = r"""
import json, sys
from utils.attention.gluon.decode.offline import compile_decode
from utils.attention.gluon.decode.cluster_plan import cluster_plan
from utils.attention.gluon.decode.plan import Case, make_plan
from utils.kernels.assembling import assemble
from utils.kernels.l2_hint import hint_copies
answer = {}
MERGED = "one token", "head dimension 256"  # the merge depends on the case and the tile's width alone
for name, (plan, case) in json.loads(sys.argv[1]).items():
    plan, case = (cluster_plan if "keys" in plan else make_plan)(**plan), Case(**case)
    first, second = compile_decode(plan, case), compile_decode(plan, case, merge=True) if name in MERGED else None
    hinted, copies = hint_copies(first.ptx)
    loads = plan.slots if plan.cluster else plan.block_n // plan.box * (2 if plan.consumers else 2 + plan.slots + 2 * plan.raw_slots)
    answer[name] = dict(
        spill=first.spill_bytes + (second.spill_bytes if second else 0), shared=[first.shared_bytes, plan.shared_bytes],
        wgmma=first.count("wgmma.mma_async", "ptx"), loads=[first.count("cp.async.bulk.tensor", "ptx"), loads],
        warnings=[w for w in first.warnings if "maxnreg" in w or "wgmma" in w],
        hints=[copies, hinted.count(".L2::cache_hint"), first.count(r"cp\.async\.bulk\.tensor\.4d\.shared", "ptx")],
        sends=first.count("STAS"), inbox=plan.inbox_space, in_ring=plan.inbox_in_ring, barriers=plan.slots + 1,
        unused=first.unused_barriers + (second.unused_barriers if second else ()),
        invalidated=first.count("mbarrier.inval", "ptx"), joins=first.count("UCGABAR_ARV"), hinted=len(assemble(hinted)) if plan.cluster else 0,
        begins=first.count("griddepcontrol.launch_dependents", "ptx"), waits=second.count("griddepcontrol.wait", "ptx") if second else 1,
    )
print("REPORT " + json.dumps(answer))
"""


@pytest.fixture(scope="module")
def report():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(CASES)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=550,
        cwd=ROOT,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("REPORT ")]
    assert lines, f"compiling failed:\n{done.stderr[-3000:]}"
    return json.loads(lines[0].removeprefix("REPORT "))


@pytest.mark.parametrize("name", CASES)
def test_the_assembly_is_what_the_plan_says(report, name):
    found = report[name]
    # Where an accumulator has 128 registers of a thread, or 64 beside scores of as many, numbers that are used once a head have left theirs.
    assert found["unused"] == []
    assert found["spill"] <= (
        24 if name.startswith("fp8, 64 rows, head dimension 256") or name.endswith("128 keys, parts") else 0
    )
    assert found["wgmma"] >= 16 and not found["warnings"]
    measured, planned = found["shared"]
    assert planned <= measured <= min(planned + 4096, 232_448)  # barriers and what reductions exchange
    # Two tiles in the loop, and without a producer the first blocks before it; the queries come by TMA too.
    issued, expected = found["loads"]
    assert issued > expected
    # Whole heads that are never merged have no second launch that could begin early, and clusters merge by themselves.
    clusters = "keys" in CASES[name][0]
    assert (found["begins"], found["waits"]) == (0 if clusters or CASES[name][0].get("ahead") else 1, 1)
    assert (found["sends"] > 0) == clusters
    assert measured + clusters * found["inbox"] <= 232_448


@pytest.mark.parametrize("name", [name for name, (plan, _) in CASES.items() if "keys" in plan])
def test_no_barrier_is_left_where_an_inbox_takes_the_place_of_the_ring(report, name):
    found = report[name]
    assert found["in_ring"] == ("in the ring" in name)  # CASES has both
    assert found["invalidated"] == (found["barriers"] if found["in_ring"] else 0)
    assert found["joins"] == 2  # before the inboxes are written, and before the first program ends


@pytest.mark.parametrize("name", CASES)
def test_every_copy_of_keys_and_values_can_have_a_hint(report, name):
    copies, hints, there = report[name]["hints"]
    assert copies == hints == there > 0
    if "keys" in CASES[name][0]:
        assert report[name]["hinted"] > 10_000  # the assembler takes it
