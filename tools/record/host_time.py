"""Measure the host time of one attention call and of one matrix product, through the course's door and without it.

    python -m tools.record.host_time --out assets/results/h200/host_time.json

A row is a call: its host time (from the call to its return, the GPU's queue never full), its device time, and, where a
library has a function of its own, the host time of that function on the same tensors. bf16, causal, few tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F

from tools.record.common import Record, arguments_parser
from utils.attention import attention, find_backend, last_run, make_problem, prepare
from utils.benchmark.host import host_time_us
from utils.benchmark.measuring import measure

SHAPE = (1, 16, 512, 128)  # B, H, S, D
BACKENDS = ("gluon", "auto", "cudnn", "flash", "sdpa", "fa3", "cute", "flex", "triton", "flex_flash")
SIZE = 512  # M = N = K


def attention_row(name: str) -> dict:
    """Measure `attention(backend=name)` and the library's own function."""
    q, k, v = (torch.randn(SHAPE, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    row = {"call": f"attention, {name}"}
    if name != "auto" and not (support := find_backend(name).support(make_problem(q, k, v, causal=True))):
        return row | {"refused": support.reason}

    def through_the_door() -> torch.Tensor:
        return attention(q, k, v, causal=True, backend=name)

    try:
        through_the_door()
    except (RuntimeError, ValueError) as error:
        return row | {"refused": str(error)[:300]}
    row["ran"] = last_run().backend
    return row | in_turns(through_the_door, library_call(row["ran"], q, k, v))


def in_turns(call: Callable, library: Callable | None) -> dict:
    """Measure a call's host and device time, and the library's host time in turns with it: the smallest of five."""
    row = {"host_us": host_time_us(call)}
    if library is not None:
        row["library_host_us"] = host_time_us(library)
        for _ in range(4):
            row["host_us"] = min(row["host_us"], host_time_us(call))
            row["library_host_us"] = min(row["library_host_us"], host_time_us(library))
    row["device_us"] = 1e3 * measure(call, warmup=5, iterations=30, floor=False).median_ms
    return row


def library_call(name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Callable | None:
    """Return the call of a library's own function on these tensors, viewed in its layout; None if it has none."""
    rows_first = [x.transpose(1, 2) for x in (q, k, v)]
    if name in ("sdpa", "cudnn", "flash"):
        return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)
    if name == "fa3":
        return lambda: torch.ops.flash_attn_3.fwd(*rows_first, is_causal=True)
    if name == "cute":
        from flash_attn.cute import flash_attn_func

        return lambda: flash_attn_func(*rows_first, causal=True)
    if name in ("flex", "flex_flash"):
        attend = prepare(q, k, v, causal=True, backend=name).fn
        return lambda: attend(q, k, v)
    return None


def gemm_row(name: str) -> dict:
    """Measure a rung of the GEMM ladder next to torch.matmul."""
    from utils.kernels.gemm import LADDER

    a, b = (torch.randn(SIZE, SIZE, device="cuda", dtype=torch.bfloat16) for _ in "ab")
    rung = LADDER[name]
    return {"call": name} | in_turns(lambda: rung(a, b), lambda: torch.matmul(a, b))


def show(row: dict) -> str:
    """Return the line that is printed for a row."""
    if "refused" in row:
        return f"{row['call']:<24} refused: {row['refused'][:90]}"
    own = f", library {row['library_host_us']:6.1f} us" if "library_host_us" in row else ""
    return f"{row['call']:<24} host {row['host_us']:7.1f} us{own}, device {row['device_us']:7.1f} us"


def main() -> int:
    """Measure and record the table; return the exit status."""
    options = arguments_parser(__doc__).parse_args()
    if not torch.cuda.is_available():
        print(
            "error: host times of GPU calls need an NVIDIA GPU: torch.cuda.is_available() is False here.",
            file=sys.stderr,
        )
        return 1
    torch.manual_seed(0)
    record = Record(options.out, "host time of one call", "cuda", shape=SHAPE, size=SIZE)
    with torch.no_grad():
        record.fill(("gemm_warp_specialized",), gemm_row, show)
        record.fill(BACKENDS, attention_row, show)
    record.finish()
    return 0


if __name__ == "__main__":
    sys.exit(main())
