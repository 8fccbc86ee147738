"""The Gluon GEMM: without a GPU its assembly for sm_90a and its host side, on a Hopper GPU its results."""

import importlib.util
import json
import os
import random
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from tests.utils.kernel_keys import keys_in_two_processes

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

SHARED_MEMORY = 232448  # bytes a block may have on compute capability 9.0
ROUNDING = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)

# In a process of its own: Triton may be interpreting in this one, and a fault of the assembler would end it.
COMPILE = """
import json, re, sys
from dataclasses import replace
from utils.kernels.gemm_launch import compile_for_hopper
from utils.kernels.gemm_plan import CONFIGS, SHORT_CONFIGS
from utils.kernels.offline import disassemble

reports = []
for index, split, dtype, a_column_major, b_column_major, pairs, by_tma in json.loads(sys.argv[1]):
    config = replace((*CONFIGS, *SHORT_CONFIGS)[index], split=split, pairs=pairs)
    kernel = compile_for_hopper(config, dtype, a_column_major=a_column_major, b_column_major=b_column_major,
                                by_tma=by_tma)
    ptx, sass = kernel.asm["ptx"], disassemble(kernel)
    config = config.placed(4096, b_column_major)
    product = config.block_n if config.join else config.columns[0]
    kind = dtype.replace("fp16", "f16")
    patterns = {
        "loads": r"cp\\.async\\.bulk\\.tensor\\.[23]d\\.shared", "stores": r"cp\\.async\\.bulk\\.tensor\\.[23]d\\.global",
        "waits": r"mbarrier\\.try_wait", "setmaxnreg": r"setmaxnreg\\.(?:inc|dec)\\S+\\s+(?:232|160|32|24);",
        "wgmma": r"wgmma\\.mma_async\\.sync\\.aligned\\.m64n%dk16\\.f32\\.%s\\.%s" % (product, kind, kind),
        "wgmma2": r"wgmma\\.mma_async\\.sync\\.aligned\\.m64n%dk16\\." % config.columns[1],
    }
    report = {name: len(re.findall(pattern, ptx)) for name, pattern in patterns.items()}
    report |= {name: len(re.findall(name, sass)) for name in ("HGMMA", "UTMALDG", "UTMASTG", "LDL", "STL", "HMMA")}
    in_flight = [int(depth, 16) for depth in re.findall(r"WARPGROUP\\.DEPBAR\\.LE gsb0, (0x[012])", sass)]
    report["atomics"] = len(re.findall(r"\\batom\\.", ptx))
    report |= {"in_flight": in_flight, "target": re.search(r"\\.target (\\S+)", ptx)[1],
               "shared": kernel.metadata.shared,
               "expected_shared": config.shared_bytes, "block": [config.block_m, config.block_n, config.block_k],
               "consumers": config.consumers, "short": config.short, "stages": config.stages, 
               "columns": (config.block_n, 0) if config.join else config.columns,
               "threads": int(re.search(r"\\.reqntid (\\d+)", ptx)[1])}
    reports.append(report)
print(json.dumps(reports))
"""
# configuration, parts, dtype, A and B column-major, rows by parity, C stored by TMA
VARIANTS = [
    (0, 1, "bf16", False, False, True, True),
    (1, 1, "fp16", True, True, False, True),
    (10, 8, "fp16", False, True, False, False),
    (3, 4, "bf16", True, True, False, True),
    (6, 4, "bf16", False, True, False, True),
    (12, 6, "fp16", True, False, False, True),
    (14, 4, "bf16", False, True, False, True),
]


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))  # compiled here and now
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, json.dumps(VARIANTS)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(zip(VARIANTS, json.loads(done.stdout.splitlines()[-1]), strict=True))


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.slow
def test_the_assembly_does_what_the_header_says(reports, variant):
    report, by_tma = reports[variant], variant[-1]
    consumers, split = report["consumers"], variant[1]
    assert report["target"] == "sm_90a"
    assert report["LDL"] == report["STL"] == report["HMMA"] == 0  # nothing spills
    assert report["shared"] <= SHARED_MEMORY
    if report["short"]:
        assert report["threads"] == 128 and report["setmaxnreg"] == 0
        assert report["loads"] == 2 * (report["stages"] + 1)  # of each slot before the first step, and in the loop
        assert sorted(report["in_flight"]) == [0, 1] and report["HGMMA"] == report["wgmma"] == 4
        assert report["atomics"] == 2 and report["UTMASTG"] == 1
        assert report["expected_shared"] <= report["shared"] <= report["expected_shared"] + 1024
        return
    assert report["threads"] == (consumers + 1) * 128  # the consumers, a producer warp and 3 idle
    assert report["loads"] >= 2 and report["UTMALDG"] == report["loads"]
    assert (report["stores"] > 0) == by_tma and report["UTMASTG"] == report["stores"]
    assert report["waits"] == 1 + consumers  # the producer for "empty", each consumer for "full"
    rows, _, depth = report["block"]
    first, second = report["columns"]
    once = rows // 64 * (depth // 16)  # a step of all consumers, unrolled
    if first == second:
        assert report["wgmma"] == report["HGMMA"] == 2 * once
    else:
        assert report["wgmma"] == once and report["wgmma2"] == (once if second else 0)
        assert report["HGMMA"] == report["wgmma"] + report["wgmma2"]
    # The products of one step stay queued in the loop, none after it.
    assert sorted(report["in_flight"]) == [0] * consumers + [2 if second else 1] * consumers
    assert report["setmaxnreg"] >= 1
    assert report["atomics"] == (2 * consumers if split > 1 else 0)
    if by_tma:
        assert report["expected_shared"] <= report["shared"] <= report["expected_shared"] + 1024  # and the barriers


@pytest.mark.slow
def test_a_compiled_kernel_is_found_again_by_another_process():
    keys = keys_in_two_processes(
        "from utils.kernels import gemm_fp8_gluon, gemm_gluon, gemm_short as short\n"
        "kernels = gemm_gluon.gemm_kernel, short.short_kernel, gemm_fp8_gluon.gemm_fp8_kernel"
    )
    assert keys[0] == keys[1] and len(keys[0]) > 100


def test_every_configuration_fits_and_is_whole():
    from utils.kernels.gemm_plan import CONFIGS, SHORT_CONFIGS, WIDTHS

    for config in (*CONFIGS, *WIDTHS):
        assert config.shared_bytes <= SHARED_MEMORY - 16 * config.stages
        assert config.rows in (64, 128) and config.block_k * 2 == 128
        pieces = config.block_n // config.piece[1]
        assert pieces % config.buffers == 0 and pieces * config.piece[1] == config.block_n == sum(config.columns)
    for config in SHORT_CONFIGS:
        assert config.consumers == config.pieces == 1 and config.columns[1] == 0  # one warpgroup, C in one piece
        assert 1 <= config.blocks <= 4 and (config.blocks + 1) * config.shared_bytes > SHARED_MEMORY


def test_the_choice_of_tile_fills_the_gpu():
    from utils.kernels.gemm_candidates import candidates
    from utils.kernels.gemm_choose import choose
    from utils.kernels.gemm_plan import clusters_at_once, parts_of

    large = choose(8192, 8192, 8192, 132)
    assert large.block_m * large.block_n >= 128 * 256
    few = choose(320, 112, 12712, 132)  # six tiles at most, and long sums: parts keep more SMs busy
    whole, rest = parts_of(*((112, 320) if few.transposed else (320, 112)), few, 132)
    assert few.split > 1 and (whole == 0 or few.in_cluster) and (whole + rest) * few.split > 20
    assert choose(8, 8, 8, 132).split == 1
    for m, n, k in ((1, 1, 1), (5000, 5000, 5000), (64, 16384, 200), (320, 112, 12712)):
        for config in candidates(m, n, k, 132):
            sizes = (n, m) if config.transposed else (m, n)
            whole, rest = parts_of(*sizes, config, 132)
            rows, columns = config.cluster_tile
            tiles, at_once = -(-sizes[0] // rows) * -(-sizes[1] // columns), clusters_at_once(config.cluster, 132)
            assert whole + rest == tiles and (config.split == 1 or config.in_cluster or rest > 0)
            one_round = tiles <= at_once
            assert one_round if config.in_cluster else config.short or whole % at_once in (0, tiles % at_once)
            assert config.short or rest < at_once
            assert config.split == 1 or 2 * config.split <= -(-k // config.block_k)


def test_parts_shorter_than_a_step_are_refused():
    from utils.kernels.gemm_launch import CONFIGS, launch

    half = torch.zeros(64, 64, dtype=torch.float16)
    properties = type("Properties", (), {"multi_processor_count": 132})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        with pytest.raises(ValueError, match="4 parts of K = 64 would be shorter than one step of 64"):
            launch(half, half, half, replace(CONFIGS[0], split=4))


def test_operands_that_tma_can_copy_and_those_it_cannot():
    from utils.kernels.gemm_launch import operand

    def described(x):
        descriptor, column_major = operand("A", x, [128, 64])
        return descriptor.shape, descriptor.strides, column_major, descriptor.block_shape

    half = lambda *shape: torch.zeros(*shape, dtype=torch.float16)  # noqa: E731
    assert described(half(10, 24)) == ([10, 24], [24, 1], False, [128, 64])
    assert described(half(24, 16).T) == ([24, 16], [16, 1], True, [64, 128])
    assert described(half(10, 40)[:, :33]) == ([10, 33], [40, 1], False, [128, 64])  # the pitch counts, not K
    assert described(half(1, 33)) == ([1, 33], [40, 1], False, [128, 64])  # one row has no pitch
    assert described(half(33, 1)) == ([1, 33], [40, 1], True, [64, 128])
    for x in (half(10, 33), half(10, 40)[:, 1:], half(10, 80)[:, ::2], half(1, 40).expand(10, 40)):
        with pytest.raises(ValueError, match=r"copies A by TMA.*multiples of 16 bytes; got A \(10, .*gemm_autotuned"):
            operand("A", x, [128, 64])


def test_without_a_hopper_gpu_the_kernel_says_so():
    from utils.kernels.gemm import gemm_warp_specialized

    with pytest.raises(ValueError, match=r"runs on a Hopper GPU.*A \(2, 8\) and B \(8, 8\) on the CPU"):
        gemm_warp_specialized(torch.ones(2, 8).half(), torch.ones(8, 8).half())
    with pytest.raises(TypeError, match=r"takes float16 or bfloat16; got .*float32"):
        gemm_warp_specialized(torch.ones(2, 8), torch.ones(8, 8))


def assert_product(c, a, b, what):
    exact = a.double() @ b.double()
    allowed = ROUNDING[a.dtype] * exact.abs() + 2.0**-20 * (a.double().abs() @ b.double().abs()) + 1e-7
    assert c.shape == exact.shape and c.dtype == a.dtype and c.is_contiguous(), what
    worst = ((c.double() - exact).abs() / allowed).max().item()
    assert worst <= 1.0, f"{what}: {worst:.3g} times the allowed error"


def matrix(rows, columns, dtype, column_major):
    """A random matrix whose rows (or columns) start at multiples of 16 bytes, however long they are."""
    outer, inner = (columns, rows) if column_major else (rows, columns)
    x = torch.randn(outer, -(-inner // 8) * 8, device="cuda").to(dtype)[:, :inner]
    return x.T if column_major else x


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("index", range(11))
@pytest.mark.parametrize("a_column_major", [False, True])
@pytest.mark.parametrize("b_column_major", [False, True])
def test_random_shapes_against_float64(index, a_column_major, b_column_major):
    from utils.kernels import gemm_launch, gemm_plan

    dtype = random.choice(list(ROUNDING))
    fixed = [(1, 8, 8), (1, 1, 1), (128, 256, 64), (129, 257, 65), (127, 248, 2048), (3000, 1032, 520)]
    drawn = [[random.randint(1, limit) for limit in (1500, 1500, 700)] for _ in range(6)]
    splits = [random.choice(gemm_plan.SPLITS) for _ in (*fixed, *drawn)]
    for split, (m, n, k) in zip(splits, [*fixed, *drawn], strict=True):
        config = replace(gemm_plan.CONFIGS[index], split=split if split <= -(-k // 64) else 1)
        a, b = matrix(m, k, dtype, a_column_major), matrix(k, n, dtype, b_column_major)
        c = gemm_launch.gemm(a, b, config)
        assert_product(c, a, b, f"{config} {m} x {n} x {k} {dtype} A^T {a_column_major} B^T {b_column_major}")
        assert torch.equal(c, gemm_launch.gemm(a, b, config)), "not the same bits twice"


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("index", range(13))
@pytest.mark.parametrize("multicast", "AB")
@pytest.mark.parametrize("a_column_major, b_column_major", [(False, True), (True, False)])
def test_tiles_that_two_blocks_share_against_float64(index, multicast, a_column_major, b_column_major):
    """Odd tails, one tile without a neighbour, fewer steps than slots, and rings that run on for many rounds."""
    from utils.kernels import gemm_launch, gemm_plan

    dtype = random.choice(list(ROUNDING))
    config = replace(gemm_plan.CONFIGS[index], multicast=multicast)
    fixed = [(8, 8, 8), (129, 257, 65), (127, 248, 2048), (3000, 1032, 520), (2600, 5000, 1160)]
    drawn = [[random.randint(1, limit) for limit in (1500, 1500, 700)] for _ in range(5)]
    for m, n, k in (*fixed, *drawn):
        split = random.choice((1, 1, 2, 4))
        pairs = not a_column_major and m % 2 == n % 8 == 0 and random.random() < 0.5
        given = replace(config, split=split if split <= -(-k // 64) else 1, pairs=pairs)
        a, b = matrix(m, k, dtype, a_column_major), matrix(k, n, dtype, b_column_major)
        c = gemm_launch.gemm(a, b, given)
        assert_product(c, a, b, f"{given} {m} x {n} x {k} {dtype} A^T {a_column_major} B^T {b_column_major}")
        for _ in range(5):
            assert torch.equal(c, gemm_launch.gemm(a, b, given)), f"{given}: not the same bits twice"


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("shape", ["4x1", "1x4", "2x2", "4x2", "2x4"])
@pytest.mark.parametrize("a_column_major, b_column_major", [(False, True), (True, False), (False, False)])
def test_tiles_that_four_and_eight_blocks_share_against_float64(shape, a_column_major, b_column_major):
    """Clusters that hang over both edges, more of them than run at once, parts, and rows by parity."""
    from utils.kernels import gemm_launch, gemm_plan

    dtype = random.choice(list(ROUNDING))
    tiles = [x for x in (*gemm_plan.CONFIGS, *gemm_plan.WIDTHS, *gemm_plan.DEEP) if x.columns[1] != 16]
    sizes = [(8, 8, 8), (129, 264, 65), (232, 2000, 1048), (4000, 96, 1160), (1500, 1032, 520)]
    sizes += [[random.randint(1, 1500), 8 * random.randint(1, 190), random.randint(1, 1500)] for _ in range(5)]
    for m, n, k in sizes:
        pairs = not a_column_major and m % 2 == 0 and random.random() < 0.5
        split = random.choice((1, 1, 2, 4))
        given = replace(random.choice(tiles), multicast=shape, pairs=pairs, split=split if split <= -(-k // 64) else 1)
        given = replace(given, transposed=not pairs and random.random() < 0.5)
        a, b = matrix(m, k, dtype, a_column_major), matrix(k, n, dtype, b_column_major)
        c, launch = gemm_launch.gemm_and_launch(a, b, given)
        assert_product(c, a, b, f"{given} {m} x {n} x {k} {dtype} A^T {a_column_major} B^T {b_column_major}")
        assert all(torch.equal(c, launch(a, b)) for _ in range(20)), f"{given}: not the same bits twice"


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("stream", "AB")
@pytest.mark.parametrize("early", [True, False])
def test_streams_and_launches_that_wait_against_float64(stream, early):
    """Alone, shared, in parts, by parity and transposed, with the hint on copies to this block and to all that share."""
    from utils.kernels import gemm_launch, gemm_plan

    dtype = random.choice(list(ROUNDING))
    tile = gemm_plan.CONFIGS[random.choice((0, 1, 4, 8, 9))]
    configs = [tile, replace(tile, transposed=True), replace(tile, pairs=True), gemm_plan.as_cluster(tile, 2)]
    configs += [replace(tile, multicast=shape) for shape in ("B", "A", "4x1", "1x4", "2x4")]
    for config in configs:
        if config.shared_bytes > gemm_plan.SHARED_BYTES:
            continue
        given = replace(config, stream=stream, early=early)
        for m, n, k in ((136, 264, 1032), (2000, 1032, 264)):
            a, b = matrix(m, k, dtype, False), matrix(k, n, dtype, random.random() < 0.5)
            c, launch = gemm_launch.gemm_and_launch(a, b, given)
            assert_product(c, a, b, f"{given} {m} x {n} x {k} {dtype}")
            assert all(torch.equal(c, launch(a, b)) for _ in range(10)), f"{given}: not the same bits twice"


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("index", [1, 4, 5, 8, 9, 10, 11, 12])
@pytest.mark.parametrize("transposed", [False, True])
def test_parts_that_a_cluster_adds_up_against_float64(index, transposed):
    """Odd tails, tiles wider than C, and more tiles than run at once: the same bits as the first time, again and again."""
    from utils.kernels import gemm_launch, gemm_plan

    dtype = random.choice(list(ROUNDING))
    base = replace(gemm_plan.CONFIGS[index], transposed=transposed)
    fixed = [(8, 8, 1024), (129, 264, 2048), (127, 248, 1096), (3000, 1032, 1160)]
    drawn = [[random.randint(1, 1500), 8 * random.randint(1, 100), random.randint(1024, 3000)] for _ in range(4)]
    for m, n, k in (*fixed, *drawn):
        given = gemm_plan.as_cluster(base, random.randint(2, gemm_plan.MOST_IN_CLUSTER))
        if given.shared_bytes > gemm_plan.SHARED_BYTES:
            continue
        columns = random.random() < 0.5
        a, b = matrix(m, k, dtype, columns), matrix(k, n, dtype, not columns)
        c, launch = gemm_launch.gemm_and_launch(a, b, given)
        assert_product(c, a, b, f"{given} {m} x {n} x {k} {dtype} columns {columns}")
        assert all(torch.equal(c, launch(a, b)) for _ in range(20)), f"{given}: not the same bits twice"


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("change", [{}, {"lean": False, "early": False, "prefetch": False}], ids=["all", "none"])
@pytest.mark.parametrize("index", [0, 5, 9, 12, 13, 14, 15, 16, 17])
def test_rewritten_kernels_against_float64(index, change):
    """Without barriers of all warps that protect nothing, and with launches that begin early, one behind the other."""
    from utils.kernels import gemm_launch, gemm_plan

    dtype = random.choice(list(ROUNDING))
    config = replace((*gemm_plan.CONFIGS, *gemm_plan.SHORT_CONFIGS)[index], **change)
    fixed = [(8, 8, 8), (129, 257, 65), (127, 248, 2048), (1500, 1032, 520)]
    drawn = [[random.randint(1, limit) for limit in (900, 900, 1500)] for _ in range(4)]
    for m, n, k in (*fixed, *drawn):
        given = replace(config, split=2 if k > 64 and random.random() < 0.4 else 1)
        columns = random.random() < 0.5
        a, b = matrix(m, k, dtype, columns), matrix(k, n, dtype, columns)
        c, launch = gemm_launch.gemm_and_launch(a, b, given)
        assert_product(c, a, b, f"{given} {m} x {n} x {k} {dtype} columns {columns}")
        again = [launch(a, b) for _ in range(30)]
        assert all(torch.equal(c, other) for other in again), f"{given}: not the same bits twice"


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize(
    "index, change",
    [(1, {}), (9, {"split": 4}), (0, {"multicast": "B"}), (14, {"prefetch": False}), (14, {"split": 4})],
)
def test_a_launch_that_begins_early_waits_for_what_it_reads(index, change):
    """A chain of products, each of the one before it, and each with the memory that the one before that has left."""
    from utils.kernels import gemm_launch, gemm_plan

    config = replace((*gemm_plan.CONFIGS, *gemm_plan.SHORT_CONFIGS)[index], **change)
    x = matrix(520, 520, torch.float16, False)
    weight = torch.linalg.qr(torch.randn(520, 520, device="cuda"))[0].half()
    results = []
    for early in (False, True):
        y, launch = gemm_launch.gemm_and_launch(x, weight, replace(config, early=early))
        for _ in range(300):
            y = launch(y, weight)
        results.append(y)
    assert results[0].float().norm() > 100 and torch.equal(*results)


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("size", [1024, 4096])
def test_many_tiles_an_sm(size):
    """More tiles than SMs: the ring runs on from tile to tile, and the phases of the barriers wrap many times."""
    from utils.kernels.gemm import gemm_warp_specialized

    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in "ab")
    assert_product(gemm_warp_specialized(a, b), a, b, f"{size} cubed")


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("columns", [256, 203])
def test_nothing_is_written_outside_of_c(columns):
    from utils.kernels import gemm_launch, gemm_plan

    a, b = matrix(131, 72, torch.float16, False), matrix(72, columns, torch.float16, False)
    zone = torch.full((8192 + 131 * columns + 8192,), 7.0, device="cuda", dtype=torch.float16)
    c = zone[8192:-8192].view(131, columns)
    for config in gemm_plan.CONFIGS:
        gemm_launch.launch(a, b, c, config)
        assert_product(c, a, b, str(config))
        c.fill_(7.0)
        assert (zone == 7.0).all(), config


@pytest.mark.gpu
@hopper
def test_empty_products():
    from utils.kernels.gemm import gemm_warp_specialized

    half = lambda *shape: torch.ones(*shape, device="cuda", dtype=torch.float16)  # noqa: E731
    assert gemm_warp_specialized(half(0, 8), half(8, 8)).shape == (0, 8)
    assert (gemm_warp_specialized(half(3, 0), half(0, 5)) == torch.zeros(3, 5, device="cuda")).all()
    with pytest.raises(ValueError, match="copies A by TMA"):
        gemm_warp_specialized(half(10, 33), half(33, 8))
