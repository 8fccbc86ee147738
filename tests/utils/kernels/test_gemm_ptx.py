"""The GEMM on clusters: what is written into the PTX, what is compiled, and which tiles have neighbours."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

from utils.kernels.gemm_candidates import candidates
from utils.kernels.gemm_config import SHAPES, Config
from utils.kernels.gemm_model import estimate
from utils.kernels.gemm_plan import parts_of
from utils.kernels.gemm_ptx import (
    OWN,
    SHARED,
    adapted,
    fewer_barriers,
    multicast,
    prefetch_descriptors,
    read_other_blocks,
    sharing_blocks,
)
from utils.kernels.gemm_stream import STAYS, STREAMS, stream_copies

COPY = "cp.async.bulk.tensor.{}d.shared::{}.global.mbarrier::complete_tx::bytes"
PTX = f"""
    @%p1 {COPY.format(2, "cta")} [%r1], [%rd1, {{%r2, %r3}}], [%r7];
    mov.u32 %r9, 0; // {SHARED} B
    @%p2 {COPY.format(2, "cta")} [%r1], [%rd1, {{%r2, %r3}}], [%r7];
    @%p3 {COPY.format(3, "cluster")} [%r1], [%rd1, {{%r2, %r3, %r4}}], [%r7];
    mov.u32 %r9, 0; // {OWN}
    @%p4 {COPY.format(2, "cluster")} [%r1], [%rd1, {{%r2, %r3}}], [%r7];
    @%p5 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r7], 49152;
    @%p6 mbarrier.arrive.shared::cta.b64 _, [%r8];
    mbarrier.arrive.shared.b64 _, [%r8];
"""

STREAM = f"""
    @%p1 {COPY.format(2, "cta")} [%r1], [%rd1, {{%r2, %r3}}], [%r7];
    mov.u32 %r9, 0; // {STREAMS}
    @!%p2 {COPY.format(3, "cluster")} [%r1], [%rd1, {{%r2, %r3, %r4}}], [%r7];
    mov.u32 %r9, 0; // {SHARED} B
    {{ .reg .b16 all; mov.b16 all, 3; {COPY.format(2, "cluster")}.multicast::cluster [%r1], [%rd1, {{%r2, %r3}}], [%r7], all; }}
    mov.u32 %r9, 0; // {OWN}
    mov.u32 %r9, 0; // {STAYS}
    @%p4 {COPY.format(2, "cluster")} [%r1], [%rd1, {{%r2, %r3}}], [%r7];
"""


def test_copies_between_the_marks_of_a_stream_have_its_policy():
    ptx, copies = stream_copies(STREAM)
    assert copies == 2
    before, after = STREAM.splitlines(), ptx.splitlines()
    changed = [line for line in range(len(before)) if before[line] != after[line]]
    assert changed == [3, 5]
    for line in changed:
        assert after[line].count("createpolicy.fractional.L2::evict_first.L2::evict_unchanged.b64 policy, 0.5;") == 1
    assert (
        after[3]
        .strip()
        .endswith(
            f"@!%p2 {COPY.format(3, 'cluster')}.L2::cache_hint [%r1], [%rd1, {{%r2, %r3, %r4}}], [%r7], policy; }}"
        )
    )
    assert ".multicast::cluster.L2::cache_hint [%r1], [%rd1, {%r2, %r3}], [%r7], all, policy; } }" in after[5]


@pytest.mark.slow
def test_a_stream_changes_the_copies_of_its_operand_alone():
    code = (
        "from dataclasses import replace\n"
        "from utils.kernels.gemm_launch import compile_for_hopper\n"
        "from utils.kernels.gemm_plan import CONFIGS, as_cluster\n"
        "for config in (replace(CONFIGS[1], multicast='4x1'), replace(CONFIGS[8], multicast='2x4', transposed=True),\n"
        "               replace(CONFIGS[9], pairs=True), as_cluster(CONFIGS[4], 4)):\n"
        "    for stream in ('A', 'B'):\n"
        "        ptx = compile_for_hopper(replace(config, stream=stream)).asm['ptx']\n"
        "        plain = compile_for_hopper(config).asm['ptx']\n"
        "        copies = plain.count('global.mbarrier::complete_tx')\n"
        "        print(ptx.count('L2::cache_hint'), plain.count('L2::cache_hint'), copies)\n"
    )
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [[int(x) for x in line.split()] for line in done.stdout.splitlines()]
    assert len(rows) == 8
    for (of_a, none_a, copies), (of_b, none_b, again) in zip(rows[::2], rows[1::2], strict=True):
        assert none_a == none_b == 0 and copies == again
        assert 0 < of_a < copies and of_a + of_b == copies  # each copy brings one operand


# In a process of its own: Triton may be interpreting in this one, and a fault of the assembler would end it.
COMPILE = """
import json, re, sys
from dataclasses import replace
from utils.kernels.gemm_launch import compile_for_hopper
from utils.kernels.gemm_plan import CONFIGS
from utils.kernels.offline import disassemble

reports = []
for index, operand, split, pairs, a_column_major, b_column_major in json.loads(sys.argv[1]):
    config = replace(CONFIGS[index], multicast=operand, split=split, pairs=pairs)
    kernel = compile_for_hopper(config, a_column_major=a_column_major, b_column_major=b_column_major)
    sass = disassemble(kernel)
    reports.append({name: len(re.findall(pattern, sass)) for name, pattern in {
        "shared": r"UTMALDG\\.[23]D\\.MULTICAST", "copies": r"UTMALDG", "spills": r"\\b(?:LDL|STL)\\b",
        "joins": r"UCGABAR_ARV", "waits": r"UCGABAR_WAIT"}.items()})
    reports[-1] |= {"arrivals": len(re.findall(r"mbarrier\\.arrive\\.shared::cluster", kernel.asm["ptx"])),
                    "consumers": config.consumers, "bytes": kernel.metadata.shared}
print(json.dumps(reports))
"""
# configuration, shared operand, parts, rows by parity, A and B column-major, copies for both blocks
VARIANTS = [
    (0, "B", 1, False, False, False, 2),  # 128 of 256 columns, 64 at once
    (0, "B", 1, False, True, True, 1),  # 128 of the 256 rows that columns are in memory
    (6, "A", 4, True, False, True, 3),  # 32 of the 64 rows of each consumer
    (12, "B", 1, False, False, True, 2),  # 32 of 64 and 16 of 32
    (12, "4x1", 1, False, False, True, 2),  # 16 of 64 and 8 of 32
    (1, "4x2", 2, False, False, False, 3),  # 32 of the 64 rows of each consumer, and of 128 columns 32 rows of 64
]


@pytest.mark.slow
def test_the_assembly_sends_the_shared_tile_to_both_blocks():
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    given = json.dumps([variant[:-1] for variant in VARIANTS])
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, given], capture_output=True, text=True, env=environment, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for variant, report in zip(VARIANTS, json.loads(done.stdout.splitlines()[-1]), strict=True):
        assert report["shared"] == variant[-1] <= report["copies"], variant
        assert (report["shared"] < report["copies"]) == (variant[1] != "4x2"), variant  # there all is shared
        assert report["spills"] == 0 and report["bytes"] <= 232448, variant
        # Each consumer releases a slot in its loop and behind it; all roles join, and so do the warps without one.
        assert report["arrivals"] == 2 * report["consumers"], variant
        assert report["joins"] == report["waits"] == report["consumers"] + 3, variant


def test_copies_between_the_marks_go_to_both_blocks_and_arrivals_count_in_both():
    ptx, arrivals, copies = multicast(PTX, Config(128, 256, multicast="B"))
    assert (arrivals, copies) == (2, 2)
    before, _, first, second, _, behind, expect, arrive, plain = ptx.strip().splitlines()
    for line, condition in ((first, "@%p2"), (second, "@%p3")):
        assert re.search(rf"{condition} cp\.async\.bulk\.tensor\.\dd\.shared::cluster\.global", line)
        assert ".multicast::cluster [%r1]" in line and line.endswith("[%r7], all; }") and "mov.b16 all, 3;" in line
    assert "multicast" not in before + behind
    assert "mapa" not in expect
    for line, condition in ((arrive, "@%p6 "), (plain, "; ")):
        assert "mapa.shared::cluster.u32 there, %r8, other;" in line
        assert f"{condition}mbarrier.arrive.shared::cluster.b64 _, [there];" in line


def test_in_larger_clusters_lanes_arrive_in_all_blocks():
    ptx, arrivals, copies = multicast(
        PTX.replace("    mbarrier.arrive.shared.b64 _, [%r8];\n", ""), Config(64, 64, multicast="4x2")
    )
    assert (arrivals, copies) == (1, 2)
    arrive = ptx.strip().splitlines()[-1]
    assert "vote.sync.any.pred arrives, %p6, -1;" in arrive and "setp.lt.and.u32 arrives, lane, 8, arrives;" in arrive
    assert arrive.count("mbarrier.arrive") == 1 and "mapa.shared::cluster.u32 there, %r8, lane;" in arrive
    with pytest.raises(ValueError, match="a condition that says which"):
        multicast(PTX, Config(64, 64, multicast="4x2"))


def blocks_by_assembly(text, number):
    """The bits that `sharing_blocks` computes in the block with a number."""
    if "first" not in text:
        return int(re.search(r"mov\.b16 all, (\d+);", text)[1])
    first = number & int(re.search(r"and\.b32 first, first, (\d+);", text)[1])
    return int(re.search(r"mov\.b32 bits, (\d+);", text)[1]) << first


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape])
def test_a_copy_goes_to_the_blocks_that_read_the_same_tile(shape):
    config = Config(64, 64, multicast=shape)
    place = lambda number: (number % config.down, number // config.down)  # noqa: E731
    for operand, same in (("A", 0), ("B", 1)):
        if config.sharers(operand) == 1:
            continue
        for number in range(config.cluster):
            found = blocks_by_assembly(sharing_blocks(config, operand), number)
            assert found == sum(1 << x for x in range(config.cluster) if place(x)[same] == place(number)[same])
            assert found.bit_count() == config.sharers(operand) and found >> number & 1


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
    ptx, count = fewer_barriers(BARRIERS)
    kept = [i for i, line in enumerate(ptx.splitlines()) if "bar.sync" in line]
    assert count == 3
    assert kept == [
        4,
        11,
        14,
    ]  # behind the last mbarrier, before a slot is filled again, and before what threads stored is read
    assert ptx.splitlines()[6] == "bar.warp.sync -1;" and ptx.splitlines()[2] == ptx.splitlines()[8] == ""


def test_descriptors_are_fetched_before_the_wait_and_other_arguments_are_not():
    ptx = ".param .align 64 .b8 k_param_0[128],\n.param .u32 k_param_1,\n.param .align 64 .b8 k_param_5[128]\ngriddepcontrol.wait;"
    body = prefetch_descriptors(ptx).splitlines()[-1]
    assert re.findall(r"mov\.b64 map, (\w+);", body) == ["k_param_0", "k_param_5"]
    assert body.count("prefetch.tensormap [map];") == 2 and body.endswith("} griddepcontrol.wait;")


def test_a_kernel_whose_blocks_share_nothing_is_named():
    with pytest.raises(ValueError, match="plain has 0 copies for both blocks"):
        adapted(SimpleNamespace(name="plain", asm={"ptx": "ret;"}), Config(128, 256, multicast="B"))


def test_a_box_is_half_of_a_shared_tile():
    config = Config(128, 256, multicast="B")
    assert config.box("A", 64, 64) == [64, 64]
    assert config.box("B", 64, 256) == [64, 128]  # rows of 512 bytes lie in blocks of 128: the halves are columns
    assert config.box("B", 64, 256, True) == [128, 64]
    assert config.box("B", 64, 64) == [32, 64]
    assert replace(config, multicast="A").box("A", 128, 64, True) == [64, 64]


def test_a_box_is_a_quarter_of_what_four_share():
    config = Config(128, 256, multicast="4x1")
    assert config.box("B", 64, 256) == [64, 64]  # a block of 128 bytes
    assert config.box("B", 64, 128) == [32, 64] and config.box("B", 64, 128, True) == [32, 64]
    assert config.box("A", 64, 64) == config.box("C", 64, 64) == [64, 64]
    both = Config(64, 128, multicast="2x4")
    assert both.box("A", 64, 64) == [16, 64] and both.box("B", 64, 128) == [64, 64]


def test_what_larger_clusters_share_has_eight_rows_or_more():
    for late in ((0, 0), (3, 2), (1, 3)):
        for m, n in ((232, 3816), (7504, 88)):
            found = [config for config in candidates(m, n, 4096, 132, late) if config.cluster > 2 and config.multicast]
            assert {config.multicast for config in found} == set(SHAPES) - {"", "A", "B"}
            for config in found:
                for transposed in (False, True):
                    boxes = [config.box("A", config.rows, 64, transposed)]
                    boxes += [config.box("B", 64, columns, transposed) for columns in config.columns if columns]
                    assert all(rows >= 8 and rows % 8 == 0 for rows, _ in boxes), config
                rows, columns = (n, m) if config.transposed else (m, n)
                assert -(-rows // config.block_m) >= config.down and -(-columns // config.block_n) >= config.abreast


def test_tiles_with_neighbours():
    for m, n in ((64, 5000), (5000, 64), (3000, 3000), (130, 200)):
        found = [config for config in candidates(m, n, 4096, 132, (1, 0)) if config.multicast in ("A", "B")]
        assert found
        for config in found:
            rows, columns = config.cluster_tile
            assert (rows, columns) == (config.block_m * (1 + (config.multicast == "B")), columns)
            sizes = (n, m) if config.transposed else (m // 2 if config.pairs else m, n)
            assert (sizes[0] > config.block_m) if config.multicast == "B" else (sizes[1] > config.block_n)
            rest = parts_of(*((n, m) if config.transposed else (m, n)), config, 132)[1]
            assert rest < 66 and (rest > 0) == (config.split > 1)
    found = candidates(64, 5000, 4096, 132)
    assert not any(config.multicast == ("A" if config.transposed else "B") for config in found)


def test_sharing_is_estimated_to_help_where_bytes_are_the_limit():
    late, aligned = (2, 2), (0, 0)
    config = Config(128, 256)
    gain = [
        estimate(5120, 5120, 5120, config, 132, rows)
        / estimate(5120, 5120, 5120, replace(config, multicast="B"), 132, rows)
        for rows in (late, aligned)
    ]
    assert gain[0] > 1.2 and 0.99 < gain[1] < gain[0]


def test_loads_behind_a_mark_read_the_block_that_it_names():
    ptx = "\n".join(
        [
            "ld.shared.v2.b32 {%r1, %r2}, [%r9+512];",
            "mov.u32 %r20, 0; // from block 0",
            "@%p1 ld.shared.b32 %r3, [%r10];",
            "ld.shared.v2.b32 \t{%r4, %r5}, [%r11+512];",
            "mov.u32 %r21, 0; // from here",
            "ld.shared.b32 %r6, [%r12];",
            "mov.u32 %r22, 0; // from block 3",
            "ld.shared::cta.f32 %r7, [%r13-16];",
            "st.shared.b32 [%r13], %r7;",
            "mov.u32 %r23, 0; // from here",
        ]
    )
    text, loads = read_other_blocks(ptx)
    lines, before = text.splitlines(), ptx.splitlines()
    assert loads == [2, 1]
    assert [i for i in range(len(before)) if lines[i] != before[i]] == [2, 3, 7]
    at = "{ .reg .b32 there; mapa.shared::cluster.u32 there, "
    assert lines[2] == at + "%r10, 0; @%p1 ld.shared::cluster.b32 %r3, [there]; }"
    assert lines[3] == at + "%r11, 0; ld.shared::cluster.v2.b32 \t{%r4, %r5}, [there+512]; }"
    assert lines[7] == at + "%r13, 3; ld.shared::cluster.f32 %r7, [there-16]; }"


COMPILE_PARTS = """
import json, re, sys
from utils.kernels.gemm_launch import compile_for_hopper
from utils.kernels.gemm_plan import CONFIGS, as_cluster

reports = []
for index, split in json.loads(sys.argv[1]):
    ptx = compile_for_hopper(as_cluster(CONFIGS[index], split)).asm["ptx"]
    reports.append(re.findall(r"mapa\\.shared::cluster\\.u32 there, %r\\d+, (\\d);", ptx))
print(json.dumps(reports))
"""


@pytest.mark.slow
def test_sums_of_every_block_are_read_by_loads_of_their_own():
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    given = [(12, 2), (1, 8)]  # 64 x 96 with one consumer, 128 x 128 with two
    done = subprocess.run(
        [sys.executable, "-c", COMPILE_PARTS, json.dumps(given)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for (_, split), blocks in zip(given, json.loads(done.stdout.splitlines()[-1]), strict=True):
        loads = [blocks.count(str(block)) for block in range(split)]
        assert len(set(loads)) == 1 and loads[0] > 0 and sum(loads) == len(blocks)
