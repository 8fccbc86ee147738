"""The FP8 GEMM's recording: its shapes, what it times, and the error that it computes."""

import importlib.util
import math

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

from tools.record import gemm_fp8
from tools.record.common import read_record
from utils.files import ROOT
from utils.kernels.gemm_fp8 import quantize_fp8
from utils.kernels.gemm_fp8_plan import COST


def test_shapes_are_drawn_by_seed_and_are_not_those_of_the_choice():
    shapes = gemm_fp8.draw_shapes(gemm_fp8.SEED, 20)
    assert shapes == gemm_fp8.draw_shapes(gemm_fp8.SEED, 20) and len(set(shapes)) == 22
    assert shapes[-2:] == [(4096,) * 3, (8192,) * 3]
    for shape in shapes:
        assert all(512 <= size <= 16384 and size % 16 == 0 for size in shape)
    others = gemm_fp8.draw_shapes(gemm_fp8.CHOICE_SEED, gemm_fp8.CHOICE_SHAPES)
    assert not set(others[:-2]) & set(shapes)


def test_what_is_timed_contains_what_a_call_takes():
    for shape in ((1568, 864, 4880), (8192, 8192, 8192)):
        for fast in (True, False):
            configs = gemm_fp8.ranked(shape, fast)
            late = shape[2] % 32 > 0
            assert len(set(configs)) == len(configs) > (8 if late else 3)
            assert all(config.promote != fast for config in configs)
            chosen = gemm_fp8.chosen(shape, fast)
            assert chosen in configs
            assert any(config.multicast for config in configs) == any(config.pairs for config in configs) == late
            variants = gemm_fp8.variants(shape, "tensor", fast)
            assert (
                variants[""] == chosen
                and not variants["waiting"].early
                and len(set(variants.values())) == len(variants)
            )
            assert not any(x.multicast or x.pairs for x in [variants.get("before", variants[""])]) or not late


def test_the_error_is_that_of_the_rows_that_are_computed():
    a, scale_a = quantize_fp8(torch.randn(200, 64), "row")
    w, scale_w = quantize_fp8(torch.randn(32, 64), "row")
    given = a, w.T, scale_a, scale_w.T
    c = (a.double() * scale_a.double()) @ (w.T.double() * scale_w.T.double())
    assert gemm_fp8.relative_error(c, given) < 1e-12
    c[100] = 0  # the first and last 32 rows are looked at
    assert gemm_fp8.relative_error(c, given) < 1e-12
    looked_at, off = torch.cat([c[:32], c[-32:]]).norm(), 0.1 * c[199].norm()
    c[199] *= 1.1
    assert gemm_fp8.relative_error(c, given) == pytest.approx((off / looked_at).item())


def test_rows_are_shown_with_the_way_they_were_added():
    row = {
        "m": 512,
        "n": 512,
        "k": 512,
        "fast": False,
        "torch_us": 10.0,
        "times": [("64x64/1", 8.0), ("128x128/1", 5.0)],
    }
    assert "promoted" in gemm_fp8.show_choice(row) and "128x128/1 2.000  64x64/1 1.250" in gemm_fp8.show_choice(row)


def test_the_model_chooses_well_at_the_recorded_shapes():
    rows = read_record(ROOT / "assets/results/h200/gemm_fp8_choice.json")["rows"]
    shares = []
    for row in rows:
        chosen = min(gemm_fp8.estimates(row, COST))[1]
        shares.append(min(us for _, us in gemm_fp8.times_of(row)) / chosen)
    assert len(shares) == len(rows) == 32 and math.prod(shares) ** (1 / len(shares)) > 0.975 and min(shares) > 0.85
