"""Hidden checks of lab 4: each takes the student's functions and a seed, and returns a Verdict.

`seed=None` draws fresh inputs at each call. All inputs live on the CPU, and the dispatcher is torch's for CPU tensors,
so the verdict is the same with and without a GPU.
"""

from instructor.checks.lab4_sdpa.costs import attention_costs, errors, intensities, splits
from instructor.checks.lab4_sdpa.dispatch import backends_in, default_backend, why_not
from instructor.checks.lab4_sdpa.grid import grid_answers
from instructor.checks.lab4_sdpa.layouts import knock_outs, strides, unpack
from instructor.checks.lab4_sdpa.numerics import distinct_results, fp8, rounded_attention, ulps_apart
from instructor.checks.lab4_sdpa.pins import pinned_sdpa
from instructor.checks.lab4_sdpa.splitting import attend_part, attention_backward, split_kv_attention

__all__ = [
    "attend_part",
    "attention_backward",
    "attention_costs",
    "backends_in",
    "default_backend",
    "distinct_results",
    "errors",
    "fp8",
    "grid_answers",
    "intensities",
    "knock_outs",
    "pinned_sdpa",
    "rounded_attention",
    "split_kv_attention",
    "splits",
    "strides",
    "ulps_apart",
    "unpack",
    "why_not",
]
