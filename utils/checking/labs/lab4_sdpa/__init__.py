"""The visible checks of lab 4, a file for each part, and what they share with the hidden ones."""

# ruff: noqa: F401
from utils.checking.labs.lab4_sdpa.costs import check_attention_costs, check_errors, check_intensities, check_splits
from utils.checking.labs.lab4_sdpa.dispatch import (
    check_backends_in,
    check_default_backend,
    check_pinned_sdpa,
    check_why_not,
)
from utils.checking.labs.lab4_sdpa.grid import check_choose_backend, check_fastest_and_default, check_grid_answers
from utils.checking.labs.lab4_sdpa.layouts import check_knock_outs, check_strides, check_unpack
from utils.checking.labs.lab4_sdpa.numerics import (
    check_distinct_results,
    check_fp8,
    check_rounded_attention,
    check_ulps_apart,
)
from utils.checking.labs.lab4_sdpa.splitting import (
    check_attend_part,
    check_attention_backward,
    check_split_kv_attention,
)

__all__ = sorted(name for name in dir() if name.startswith("check_"))
