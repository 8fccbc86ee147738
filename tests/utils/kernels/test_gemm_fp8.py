"""The FP8 GEMM: on a CPU its checks, its kernel in the simulator and its assembly; on a Hopper GPU its results."""

import importlib.util
import json
import os
import random
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from utils.kernels.gemm_fp8 import check_operands, gemm_fp8, quantize_fp8
from utils.kernels.gemm_fp8_plan import FAST_CONFIGS, PROMOTED_CONFIGS, Fp8Config, candidates, choose

CONFIGS = (*FAST_CONFIGS, *PROMOTED_CONFIGS)
SHARED_MEMORY = 232448  # bytes a block may have on compute capability 9.0
ROUNDING = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
SMS = 3
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)


def operands(m, n, k, by="tensor", device="cpu"):
    """Random A, B and their scales. The rows of A and the columns of B differ in size by up to 1000."""
    a = torch.randn(m, k, device=device) * 10 ** (-3 * torch.rand(m, 1, device=device))
    w = torch.randn(n, k, device=device) * 10 ** (-3 * torch.rand(n, 1, device=device))
    (a, scale_a), (w, scale_w) = quantize_fp8(a, by), quantize_fp8(w, by)
    return a, w.T, scale_a, scale_w.T if by == "row" else scale_w


def assert_product(c, given, what="", fast=False):
    """C is the scaled product of the operands as they are: one rounding, and sums that are fp32 or nearly so.

    The tensor cores cut a sum off at about 14 bits, in each of K / 32 instructions with `fast`, in each of four without.
    """
    a, b, scale_a, scale_b = (x.double() for x in given)
    exact, size = a @ b * scale_a * scale_b, a.abs() @ b.abs() * scale_a * scale_b
    bits = 2.0**-12 * (1 + a.shape[1] / 32) if fast else 2.0**-11
    allowed = ROUNDING[c.dtype] * exact.abs() + bits * size + 1e-7
    assert c.shape == exact.shape and c.is_contiguous(), what
    worst = ((c.double() - exact).abs() / allowed).max().item()
    assert worst <= 1.0, f"{what}: {worst:.3g} times the allowed error"
    # Errors of single elements cancel out in their norm: 2.4e-4 with fp16, 1.7e-3 with bf16, and up to 2e-3 more with
    # `fast` for the K of these tests (docs/gemm-log.md, entry 18).
    error = (c.double() - exact).norm() / exact.norm()
    assert error <= ROUNDING[c.dtype] + (2.5e-3 if fast else 0.0), f"{what}: {error:.3g}"


# ---- rounding to e4m3 --------------------------------------------------------------------------------------


@pytest.mark.parametrize("by, scales", [("tensor", ()), ("row", (37, 1))])
def test_quantized_numbers_are_near_and_fill_the_range(by, scales):
    x = torch.randn(37, 64) * 10 ** (4 * torch.rand(37, 1) - 2)
    x[5] = 0
    e4m3, scale = quantize_fp8(x, by)
    assert e4m3.dtype == torch.float8_e4m3fn and scale.dtype == torch.float32 and scale.shape == scales
    assert e4m3.float().abs().max() == 448 and not e4m3[5].float().any()
    back, largest = e4m3.float() * scale, x.abs().amax(1, keepdim=True) if by == "row" else x.abs().max()
    # Half a step of three bits of mantissa, or of the smallest numbers, which are 2**-9 apart.
    assert ((back - x).abs() <= 2.0**-4 * x.abs() + 2.0**-10 * largest / 448 * 1.001).all()


def test_quantized_numbers_never_become_nan():
    """The quotient of the largest number and the scale may be a little over 448."""
    x = torch.rand(4096, 1) + torch.arange(4096)[:, None]
    assert torch.isfinite(quantize_fp8(x.half(), "row")[0].float()).all()
    assert not quantize_fp8(torch.zeros(3, 4))[0].float().any()


@pytest.mark.parametrize(
    "given, said", [((torch.ones(4), "row"), r"got \(4,\)"), ((torch.ones(2, 2), "column"), "'column'")]
)
def test_what_cannot_be_quantized(given, said):
    with pytest.raises(ValueError, match=said):
        quantize_fp8(*given)


# ---- what is refused ---------------------------------------------------------------------------------------


def test_operands_that_the_kernel_takes():
    for by in ("tensor", "row"):
        check_operands("gemm_fp8", *operands(5, 7, 32, by))
    a, b, scale_a, scale_b = operands(5, 7, 32)
    check_operands("gemm_fp8", a, b, scale_a.reshape(1, 1), scale_b.reshape(1))
    wide = operands(5, 7, 48)[0]
    check_operands("gemm_fp8", wide[:, :32], b, scale_a, scale_b)  # rows may be further apart than K
    check_operands("gemm_fp8", a[:, :20][:1], b[:20][:, :1], scale_a, scale_b)  # one row has no pitch


@pytest.mark.parametrize(
    "change, error, said",
    [
        (lambda a, b, s, t: ([1.0], b, s, t), TypeError, "A is a list"),
        (lambda a, b, s, t: (a, b, 1.0, t), TypeError, "scale_a is a float"),
        (lambda a, b, s, t: (a, b.T, s, t), ValueError, r"got A \(5, 32\) and B \(7, 32\).*its \.T"),
        (lambda a, b, s, t: (a.bfloat16(), b, s, t), TypeError, r"got A .*bfloat16 and .*e4m3fn.*quantize_fp8"),
        (
            lambda a, b, s, t: (a, b.T.clone().T.contiguous(), s, t),
            ValueError,
            r"B column-major.*b\.T\.contiguous\(\)\.T",
        ),
        (
            lambda a, b, s, t: (a.T.contiguous().T, b, s, t),
            ValueError,
            r"A row-major.*A \(5, 32\) has strides \(1, 5\)",
        ),
        (lambda a, b, s, t: (a[:, 8:24], b[8:24], s, t), ValueError, "8 bytes past a multiple of 16"),
        (lambda a, b, s, t: (a[:, :24].clone(), b[:24], s, t), ValueError, r"strides \(24, 1\).*Pad K"),
        (lambda a, b, s, t: (a, b, s.double(), t), TypeError, r"scale_a in torch\.float64"),
        (
            lambda a, b, s, t: (a, b, s, t.reshape(7, 1)),
            ValueError,
            r"got \(5, 1\) and \(7, 1\).*scale_b should be \(1, 7\)",
        ),
        (lambda a, b, s, t: (a, b, s[0], t), ValueError, r"got \(1,\) and \(1, 7\).*scale_a should be \(5, 1\)"),
        (lambda a, b, s, t: (a, b, s, t.to("meta")), ValueError, "one device.*cpu.*meta"),
        (lambda a, b, s, t: (a, b, s.requires_grad_(), t), ValueError, "forward only"),
        (lambda a, b, s, t: (a, b, s, t, torch.float32), TypeError, "out_dtype=torch.float32"),
        (lambda a, b, s, t: (a, b, s, t), ValueError, r"Hopper GPU.*A \(5, 32\) and B \(32, 7\) on the CPU"),
    ],
)
def test_refusals_say_what_was_given(change, error, said):
    with pytest.raises(error, match=said) as refusal:
        gemm_fp8(*change(*operands(5, 7, 32, "row")))
    assert "gemm_fp8" in str(refusal.value)


# ---- tiles -------------------------------------------------------------------------------------------------


def test_every_configuration_fits():
    for config in CONFIGS:
        assert config.shared_bytes <= SHARED_MEMORY - 16 * config.stages
        assert config.rows in (64, 128) and config.block_k == 128
        pieces = config.block_n // config.piece[1]
        assert pieces % config.buffers == 0 and pieces * config.piece[1] == config.block_n == sum(config.columns)
        assert not config.promote or (config.rows == 64 and config.columns[0] <= 128)  # registers for two sums
    assert len({config.name for config in CONFIGS}) == len(CONFIGS)


@pytest.mark.parametrize("fast", [True, False])
def test_the_choice_of_tile(fast):
    large = choose(8192, 8192, 8192, 132, fast)
    assert large.block_m * large.block_n >= 128 * 192 and large.promote == (not fast)
    assert choose(64, 64, 16384, 132, fast).split > 1  # one tile and long sums
    assert choose(64, 64, 128, 132, fast).split == 1
    for shape in ((1, 1, 16), (4096, 4096, 4096), (512, 16384, 528)):
        for config in candidates(*shape, 132, fast):
            assert config.split == 1 or 2 * config.split <= -(-shape[2] // 128)


# ---- in the simulator --------------------------------------------------------------------------------------


@pytest.fixture
def simulated(monkeypatch):
    """Return a function that computes a product by a configuration on a GPU of three SMs, in the simulator."""
    from utils import gluon_cpu
    from utils.kernels import gemm_fp8_launch

    properties = type("Properties", (), {"multi_processor_count": SMS})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    kept = []

    def workspace(c, partial_sums, counters):
        kept.append(torch.zeros(max(1, counters), dtype=torch.int32))
        return torch.full((max(1, partial_sums),), float("nan")), kept[-1]

    monkeypatch.setattr(gemm_fp8_launch, "workspace", workspace)

    def product(given, config, dtype=torch.bfloat16, seed=None):
        c = torch.full((given[0].shape[0], given[1].shape[1]), float("nan"), dtype=dtype)
        with gluon_cpu.simulate(seed=seed) as run:
            assert gemm_fp8_launch.launch(*given, c, not config.promote, config) is None
        assert run.ok
        assert not kept[-1].any()  # the next launch finds the counters as this one did
        return c

    return product


@needs_triton
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
@pytest.mark.parametrize("by", ["tensor", "row"])
def test_random_shapes_in_the_simulator(simulated, config, by):
    """More tiles than SMs, edges in all directions, and more steps than slots at some."""
    m, n, k = random.randint(1, 2 * config.block_m), random.randint(1, 2 * config.block_n), 16 * random.randint(1, 80)
    given, dtype = operands(m, n, k, by), random.choice(list(ROUNDING))
    steps = -(-k // config.block_k)
    config = replace(config, split=random.choice([split for split in (1, 2, 3) if split <= steps]))
    c = simulated(given, config, dtype, seed=random.randint(0, 99))
    assert_product(c, given, f"{config.name} {m} x {n} x {k} {by} {dtype}")


@needs_triton
def test_scales_of_rows_that_tma_cannot_store_and_parts(simulated):
    """N is odd, so C is stored from registers; three parts of some tiles, scaled where their sums come together."""
    given = operands(150, 205, 1040, "row")
    for config in (
        Fp8Config(128, 64, stages=3, pieces=2, split=3),
        Fp8Config(128, 64, stages=3, pieces=2, promote=True),
    ):
        assert_product(simulated(given, config), given, config.name)


@needs_triton
@pytest.mark.parametrize("k", [144, pytest.param(1040, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "changes",
    [
        {"early": False},
        {"multicast": "A"},
        {"multicast": "B", "split": 2},
        {"stages": 3, "buffers": 4},  # a buffer for each piece of C
        {"block_n": 192, "stages": 3, "pieces": 2, "buffers": 3},
        {"pairs": True},
        {"pairs": True, "promote": True, "split": 2},
    ],
    ids=str,
)
def test_variants_in_the_simulator(simulated, changes, k):
    config = Fp8Config(**{"block_m": 128, "block_n": 128, "stages": 4} | changes)
    for seed, (m, n) in enumerate(((300, 296), (300, 296), (100, 64))):  # several tiles an SM, and one
        given = operands(m, n, k, "row")
        assert_product(simulated(given, config, seed=seed), given, str(config))


@needs_triton
def test_rows_by_parity_need_pairs_of_rows(simulated):
    with pytest.raises(ValueError, match="an even number of rows"):
        simulated(operands(301, 296, 144), Fp8Config(128, 128, stages=4, pairs=True))


@needs_triton
def test_parts_shorter_than_a_step_are_refused(simulated):
    with pytest.raises(ValueError, match="4 parts of K = 64 would be shorter than one step of 128"):
        simulated(operands(64, 64, 64), replace(FAST_CONFIGS[0], split=4))


# ---- assembly ----------------------------------------------------------------------------------------------

# In a process of its own: Triton may be interpreting in this one, and a fault of the assembler would end it.
COMPILE = """
import json, re, sys
from dataclasses import replace
from utils.kernels.gemm_fp8_launch import compile_for_hopper
from utils.kernels.gemm_fp8_plan import FAST_CONFIGS, PROMOTED_CONFIGS
from utils.kernels.offline import read_assembly

reports = []
for index, split, dtype, by_row, by_tma in json.loads(sys.argv[1]):
    config = replace((*FAST_CONFIGS, *PROMOTED_CONFIGS)[index], split=split)
    assembly = read_assembly(compile_for_hopper(config, dtype, by_row=by_row, by_tma=by_tma), config.name)
    columns = (config.block_n, 0) if config.can_join else config.columns
    wgmma = r"wgmma\\.mma_async\\.sync\\.aligned\\.m64n%dk32\\.f32\\.e4m3\\.e4m3"
    reports.append({
        "spills": assembly.spill_bytes, "unused": assembly.unused_barriers, "local": assembly.count("LDL|STL"), "shared": assembly.shared_bytes,
        "wgmma": [assembly.count(wgmma % columns, "ptx") for columns in columns],
        "QGMMA": assembly.count("QGMMA"), "from_zero": assembly.count(r"QGMMA[^;]*RZ, !UPT"),
        "in_flight": sorted(int(depth, 16) for depth in re.findall(r"DEPBAR\\.LE gsb0, (0x[012])", assembly.sass)),
        "stores": assembly.count("UTMASTG"), "atomics": assembly.count(r"\\batom\\.", "ptx"),
    })
print(json.dumps(reports))
"""


def compiled(variants, folder):
    """Return a report of the assembly of each variant: configuration, parts, dtype of C, scales by row, stored by TMA."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(folder)  # compiled here and now
    command = [sys.executable, "-c", COMPILE, json.dumps(variants)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def check_assembly(variant, report):
    """The tensor cores multiply e4m3, nothing spills, and a promoted step starts each product from zero."""
    index, split, _, _, by_tma = variant
    config = CONFIGS[index]
    assert report["unused"] == []
    assert report["spills"] == report["local"] == 0 and report["shared"] <= SHARED_MEMORY
    once = config.block_m // 64 * (config.block_k // 32)  # instructions of a step of all consumers, unrolled
    products = 2 if config.columns[1] and not config.can_join else 1
    if config.columns[0] == config.columns[1]:
        assert report["wgmma"] == [2 * once, 2 * once]
    else:
        assert report["wgmma"] == [once, once if products == 2 else 0]
    assert report["QGMMA"] == once * products
    assert report["from_zero"] == (config.consumers * products if config.promote else 0)
    if config.promote:  # a wait for each product, or for the first one while the second is under way
        assert report["in_flight"] == sorted([0, 1 if config.both_halves else 0][:products] * config.consumers)
    else:  # the products of one step stay queued in the loop, none after it
        assert report["in_flight"] == [0] * config.consumers + [products] * config.consumers
    assert (report["stores"] > 0) == by_tma
    assert report["atomics"] == (2 * config.consumers if split > 1 else 0)


def variant_of(name, split, dtype, by_row, by_tma):
    return [config.name for config in CONFIGS].index(name), split, dtype, by_row, by_tma


@needs_triton
@pytest.mark.slow
def test_the_assembly_of_a_promoted_tile(tmp_path):
    variant = variant_of("128x256/1 promoted", 1, "bf16", True, True)
    check_assembly(variant, compiled([variant], tmp_path)[0])


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("third", [0, *(pytest.param(i, marks=pytest.mark.overnight) for i in (1, 2))])
def test_the_assembly_of_every_configuration(tmp_path, third):
    variants = [(i, 1 + i % 2, ("bf16", "fp16")[i // 2 % 2], i % 3 > 0, i % 5 > 0) for i in range(len(CONFIGS))]
    variants = variants[third::3]
    for variant, report in zip(variants, compiled(variants, tmp_path), strict=True):
        check_assembly(variant, report)


# ---- on a GPU ----------------------------------------------------------------------------------------------


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
def test_random_shapes_against_float64(config):
    from utils.kernels import gemm_fp8_launch

    for _ in range(4):
        m, n, k = random.randint(1, 1500), random.randint(1, 1500), 16 * random.randint(1, 120)
        by, dtype = random.choice(("tensor", "row")), random.choice(list(ROUNDING))
        given = operands(m, n, k, by, "cuda")
        steps = -(-k // config.block_k)
        tried = replace(config, split=random.choice([split for split in (1, 2, 4) if split <= steps]))
        zone = torch.full((4096 + m * n + 4096,), 7.0, device="cuda", dtype=dtype)
        c = zone[4096:-4096].view(m, n)
        gemm_fp8_launch.launch(*given, c, not config.promote, tried)
        assert_product(c, given, f"{tried} {m} x {n} x {k} {by} {dtype}", fast=not config.promote)
        first = c.clone()
        gemm_fp8_launch.launch(*given, c, not config.promote, tried)
        assert torch.equal(c, first), "not the same bits twice"
        c.fill_(7.0)
        assert (zone == 7.0).all(), "written outside of C"


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("by", ["tensor", "row"])
def test_errors_are_those_of_torch(by, fast):
    """Both add 14 bits in the tensor cores, or each 128 terms in fp32: so errors of fp16 results grow alike with K."""
    given = operands(512, 512, 4096, by, "cuda")
    exact = given[0].double() @ given[1].double() * given[2].double() * given[3].double()
    theirs = torch._scaled_mm(*given, out_dtype=torch.bfloat16, use_fast_accum=fast)
    errors = [(c.double() - exact).norm() / exact.norm() for c in (gemm_fp8(*given, fast=fast), theirs)]
    assert errors[0] <= 1.05 * errors[1]
    assert_product(gemm_fp8(*given, fast=fast), given, fast=fast)


@pytest.mark.gpu
@hopper
def test_a_kept_launch_takes_other_operands_and_scales():
    for by in ("tensor", "row"):
        for _ in range(3):
            given = operands(256, 384, 512, by, "cuda")
            assert_product(gemm_fp8(*given), given)
            assert_product(gemm_fp8(*given, out_dtype=torch.float16), given)
    a, b, scale_a, scale_b = operands(256, 384, 512, "row", "cuda")
    zone = torch.ones(257, 1, device="cuda")[1:]  # four bytes past a multiple of 16
    assert_product(gemm_fp8(a, b, zone, scale_b), (a, b, zone, scale_b))
    assert_product(gemm_fp8(a, b, scale_a, scale_b), (a, b, scale_a, scale_b))


@pytest.mark.gpu
@hopper
def test_empty_products():
    def e4m3(rows, columns):
        return torch.ones(rows, columns, device="cuda").to(torch.float8_e4m3fn)

    one = torch.ones((), device="cuda")
    assert gemm_fp8(e4m3(0, 16), e4m3(8, 16).T, one, one).shape == (0, 8)
    assert (gemm_fp8(e4m3(3, 0), e4m3(5, 0).T, one, one) == torch.zeros(3, 5, device="cuda")).all()
