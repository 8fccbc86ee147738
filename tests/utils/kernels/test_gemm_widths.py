"""The GEMM with tiles between powers of two, and with C's transpose: what is launched, what is written into the PTX, results."""

import importlib.util
import json
import os
import random
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

from tests.utils.kernels.test_gemm_gluon import ROUNDING, assert_product, hopper
from tests.utils.kernels.test_gemm_gluon import matrix as cuda_matrix
from tests.utils.kernels.test_gemm_simulated import assert_close, matrix, simulated  # noqa: F401
from utils.kernels import gemm_launch
from utils.kernels.gemm_candidates import Traits, candidates
from utils.kernels.gemm_config import Config
from utils.kernels.gemm_model import COST, estimate, read_together
from utils.kernels.gemm_plan import CONFIGS, WIDTHS
from utils.kernels.gemm_ptx import join_products, narrow_products

SHARED_MEMORY = 232448  # bytes a block may have on compute capability 9.0


def width(block_m, block_n):
    return next(config for config in (*WIDTHS, *CONFIGS) if (config.block_m, config.block_n) == (block_m, block_n))


# ---- how a configuration is launched -----------------------------------------------------------------------


def test_parts_of_the_columns_are_joined_where_b_lies_so():
    config = width(128, 160)
    along_k, across = config.placed(1000, True), config.placed(1000, False)
    assert along_k.join and not along_k.pad and along_k.brought == 32 and along_k.stages == config.stages
    # Blocks of 64 columns: 192 come, 160 are multiplied, and a slot less has room.
    assert across.join and across.pad and across.brought == 64 and across.stages == config.stages - 1
    assert across.slot_bytes == (128 + 192) * 128
    # One block of 64 columns, whose descriptor does not say where the next one is: two products, as narrow as they are.
    apart = width(64, 96).placed(88, False)
    assert not apart.join and not apart.pad and apart.width == 0 and width(64, 96).placed(88, True).width == 96
    assert not width(192, 192).placed(1000, False).pad  # 128 and 64 columns are blocks of 64
    for config in (CONFIGS[0], width(192, 256), replace(width(128, 160), join=False)):
        assert not config.placed(1000, True).join
    plain = width(128, 160).placed(100, True, simulated=True)
    assert not plain.join and plain.width == 0


def test_no_more_columns_are_multiplied_than_c_has():
    assert [width(128, 160).placed(n, True).width for n in (8, 104, 136, 160, 161, 5000)] == [
        16,
        112,
        144,
        160,
        160,
        160,
    ]
    assert CONFIGS[0].placed(216, True).width == 224
    assert width(192, 256).placed(200, True).width == 0  # two products
    narrow, whole = (estimate(5000, n, 8192, CONFIGS[0], 132) for n in (136, 256))
    assert narrow < 0.9 * whole


def test_lines_that_all_blocks_read_at_once_count_more_the_fewer_they_are():
    tile = Traits.of(CONFIGS[1])
    a, b = read_together(12800, 128, tile, 100, COST)
    assert a == 0 and b > 0.5  # a hundred blocks read the same 128 columns of B, and each its own rows of A
    a_of_many, b_of_many = read_together(12800, 12800, tile, 132, COST)
    assert 0 < a_of_many < 0.5 * b and 0 < b_of_many < 0.5 * b
    assert read_together(128, 12800, tile, 100, COST)[0] == b
    cold = estimate(12800, 128, 4096, CONFIGS[1], 132, cost=replace(COST, hot=0.0))
    assert estimate(12800, 128, 4096, CONFIGS[1], 132) > cold


def test_every_width_fits_wherever_b_lies():
    for config in (*CONFIGS, *WIDTHS):
        for along_k in (True, False):
            placed = config.placed(4096, along_k)
            assert placed.shared_bytes <= SHARED_MEMORY - 1024 and placed.stages >= 3


def test_the_transpose_is_a_candidate_where_tma_can_store_it():
    assert any(config.transposed for config in candidates(144, 8000, 4096, 132))
    assert not any(config.transposed for config in candidates(144, 8001, 4096, 132, by_tma=False))
    assert not any(config.transposed and config.pairs for config in candidates(144, 8000, 4104, 132, (1, 1)))
    config = width(128, 144)
    turned = replace(config, transposed=True)
    # The transpose is stored in rows of 128 bytes, C itself in pieces of 16 columns; of 128 x 256 both have 128 bytes.
    assert estimate(144, 8000, 4096, turned, 132, (2, 0)) < estimate(8000, 144, 4096, config, 132, (0, 2))
    alike = estimate(144, 8000, 4096, replace(CONFIGS[0], transposed=True), 132, (2, 0))
    assert alike == estimate(8000, 144, 4096, CONFIGS[0], 132, (0, 2))
    half = torch.zeros(16, 17, dtype=torch.float16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            torch.cuda, "get_device_properties", lambda device: type("Properties", (), {"multi_processor_count": 132})
        )
        with pytest.raises(ValueError, match="stores the transpose of C by TMA"):
            gemm_launch.launch(half[:, :16], half[:, :16], half, turned)


# ---- the PTX -----------------------------------------------------------------------------------------------

PRODUCT = "wgmma.mma_async.sync.aligned.m64n{}k16.f32.f16.f16 {{{}}}, %rd{}, %rd{}, %p1, 1, 1, 0, 0;"


def ptx(between=""):
    sums, others = ",".join(f"%r{i}" for i in range(32)), ",".join(f"%r{i}" for i in range(50, 58))
    return "\n".join(
        [
            "wgmma.fence.sync.aligned;",
            *(PRODUCT.format(64, sums, i, 10 + i) for i in range(2)),
            "wgmma.commit_group.sync.aligned;",
            between,
            "wgmma.fence.sync.aligned;",
            *(PRODUCT.format(16, others, i, 20 + i) for i in range(2)),
            "wgmma.commit_group.sync.aligned;",
            "wgmma.wait_group.sync.aligned 2;",
            "wgmma.wait_group.sync.aligned 0;",
        ]
    )


def test_two_products_become_one_with_the_sums_of_both():
    lines = [line for line in join_products(ptx(), 64, 16).splitlines() if line]
    assert [line.split(".")[1].split(" ")[0] for line in lines] == [
        "fence", "mma_async", "mma_async", "commit_group", "wait_group", "wait_group"
    ]  # fmt: skip
    assert "m64n80k16.f32.f16.f16 {%r0,%r1," in lines[1] and "%r31,%r50," in lines[1]
    assert lines[1].endswith("%r57}, %rd0, %rd10, %p1, 1, 1, 0, 0;")
    assert lines[4].endswith("1;") and lines[5].endswith("0;")


@pytest.mark.parametrize(
    "text, first, what",
    [
        (ptx("mov.b32 %r53, %r9;"), 64, "something else uses"),
        (ptx().replace("wait_group.sync.aligned 2", "wait_group.sync.aligned 0"), 64, "not the loop"),
        (ptx(), 128, "no pairs"),
    ],
)
def test_products_that_cannot_be_joined_are_an_error(text, first, what):
    with pytest.raises(ValueError, match=what):
        join_products(text, first, 16)


def test_narrow_products_keep_their_first_sums():
    text = narrow_products(join_products(ptx(), 64, 16), 80, 48)
    line = next(line for line in text.splitlines() if "mma_async" in line)
    assert "m64n48k16.f32.f16.f16 {%r0,%r1," in line and "%r23}, %rd0" in line and "%r24" not in line
    with pytest.raises(ValueError, match=r"products of \[16, 64\] columns"):
        narrow_products(ptx(), 64, 48)


# In a process of its own: Triton may be interpreting in this one, and a fault of the assembler would end it.
COMPILE = """
import json, re, sys
from dataclasses import replace
from utils.kernels.gemm_launch import compile_for_hopper
from utils.kernels.gemm_plan import CONFIGS, WIDTHS
from utils.kernels.offline import read_assembly

reports = []
for index, n, a_column_major, b_column_major, changes in json.loads(sys.argv[1]):
    config = replace((*CONFIGS, *WIDTHS)[index], **changes)
    kernel = compile_for_hopper(config, a_column_major=a_column_major, b_column_major=b_column_major, n=n)
    assembly = read_assembly(kernel, config.name)
    reports.append({"widths": sorted(set(re.findall(r"HGMMA\\.64x(\\d+)x16", assembly.sass))), "shared": assembly.shared_bytes,
                    "spills": assembly.spill_bytes, "unused": assembly.unused_barriers, "local": assembly.count(r"\\b(?:LDL|STL)\\b"),
                    "turned": assembly.count(r"stmatrix\\S*\\.trans", "ptx"), "stores": assembly.count("stmatrix", "ptx")})
print(json.dumps(reports))
"""
TURNED = {"transposed": True}
VARIANTS = [
    (*(i, 4096, i % 2 > 0, i % 3 > 0), TURNED | ({"split": 2} if i % 4 == 0 else {}))
    for i in range(len(CONFIGS + WIDTHS))
] + [(0, 216, False, True, TURNED), (20, 136, True, False, {"multicast": "B"}), (4, 4096, True, False, {})]


@pytest.mark.slow
@pytest.mark.parametrize("third", [0, *(pytest.param(i, marks=pytest.mark.overnight) for i in (1, 2))])
def test_the_assembly_of_widths_and_transposes(third):
    variants = VARIANTS[third::3]
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, json.dumps(variants)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for variant, report in zip(variants, json.loads(done.stdout.splitlines()[-1]), strict=True):
        index, n, _, b_column_major, changes = variant
        config = (*CONFIGS, *WIDTHS)[index].placed(n, b_column_major)
        expected = {config.width} if config.width else {*config.columns}
        assert {*map(int, report["widths"])} == expected, variant
        assert report["unused"] == [], variant
        assert report["spills"] == report["local"] == 0 and report["shared"] <= SHARED_MEMORY, variant
        assert report["stores"] > 0 and report["turned"] == (report["stores"] if "transposed" in changes else 0), (
            variant
        )


# ---- results -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config, m, n, k, a_column_major, b_column_major",
    [
        (Config(128, 64, stages=3, pieces=2, transposed=True), 104, 200, 264, False, True),
        (Config(128, 80, stages=3, buffers=5, transposed=True, split=2), 168, 136, 264, True, False),
        (Config(128, 144, stages=3, buffers=3, pieces=8, split=3), 136, 296, 264, True, False),
        (Config(256, 96, stages=3, transposed=True, multicast="B", split=2), 104, 520, 136, False, False),
        (Config(192, 160, consumers=3, stages=3, pieces=8, transposed=True, multicast="A"), 328, 200, 136, True, True),
        (Config(64, 64, consumers=1, stages=3, pieces=2, pairs=True), 264, 200, 456, False, False),
    ],
    ids=lambda x: x.name if isinstance(x, Config) else None,
)
def test_widths_and_transposes_in_the_simulator(simulated, config, m, n, k, a_column_major, b_column_major):  # noqa: F811
    a, b = matrix(m, k, a_column_major), matrix(k, n, b_column_major)
    assert_close(simulated(a, b, config, 3), a, b)


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("index", range(len(CONFIGS + WIDTHS)))
@pytest.mark.parametrize("transposed", [False, True])
def test_widths_and_transposes_against_float64(index, transposed):
    """One column of tiles, which is narrower than they are, and many; alone, in parts, and shared by two blocks."""
    dtype = random.choice(list(ROUNDING))
    config = replace((*CONFIGS, *WIDTHS)[index], transposed=transposed)
    fixed = [(8, 8, 8), (72, 136, 2048), (1500, 1032, 520), (328, 200, 1160)]
    drawn = [[8 * random.randint(1, limit) for limit in (190, 190, 90)] for _ in range(4)]
    for m, n, k in (*fixed, *drawn):
        for multicast in ("", random.choice("AB")):
            split = random.choice((1, 1, 2, 4))
            given = replace(config, split=split if 2 * split <= -(-k // 64) else 1, multicast=multicast)
            a = cuda_matrix(m, k, dtype, random.random() < 0.5)
            b = cuda_matrix(k, n, dtype, random.random() < 0.5)
            c = gemm_launch.gemm(a, b, given)
            assert_product(c, a, b, f"{given} {m} x {n} x {k} {dtype} {a.stride()} {b.stride()}")
            assert torch.equal(c, gemm_launch.gemm(a, b, given)), "not the same bits twice"
