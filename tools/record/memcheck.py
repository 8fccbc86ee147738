"""Run random small cases of the Gluon kernels under compute-sanitizer, and compare each with float64 on the CPU.

    python -m tools.record.memcheck --out assets/results/h200/memcheck.json              all families
    python -m tools.record.memcheck --families decode,gemm --cases 8 --seconds 200       these

Each case is drawn by its number: shapes with tails, strides, masks, caches in pages, the GEMM's configurations. A process of
compute-sanitizer runs some of them; torch's caching allocator is off in it, so that each tensor is an allocation of its
own and a kernel that reads behind one is seen. A case counts as clean if it is right and the sanitizer has reported nothing
in its process.
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import torch

from tools.record.common import Record, arguments_parser
from tools.record.gluon_verdicts import sanitizer
from utils.files import ROOT

_SUMMARY = re.compile(r"ERROR SUMMARY: (\d+) error")
_ERROR = re.compile(r"========= (?!COMPUTE-SANITIZER|ERROR SUMMARY)(\S.*)")


def _matrix(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape).to(dtype)


def _on_gpu(*tensors: torch.Tensor | None) -> list[torch.Tensor | None]:
    return [x if x is None else x.cuda() for x in tensors]


def _error(out: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the relative error in the norm; where nothing is expected, the largest value."""
    out, norm = out.cpu().double(), expected.norm()
    return ((out - expected).norm() / norm).item() if norm > 1e-9 else out.abs().max().item()


def _draw_attention(rng: random.Random) -> tuple[dict, list[torch.Tensor], dict]:
    dtype = rng.choice((torch.bfloat16, torch.float16))
    batch, kv_heads, group = rng.choice((1, 2)), rng.choice((1, 2)), rng.choice((1, 2, 3))
    head_dim, sq = rng.choice((64, 128, 256, 80)), rng.choice((1, 65, 128, 200, 513, 700))
    sk = rng.choice((sq, sq, sq + 77, 300))
    options = {"causal": rng.random() < 0.6, "window": rng.choice((None, None, None, 100))}
    shapes = (batch, kv_heads * group, sq, head_dim), *2 * [(batch, kv_heads, sk, head_dim)]
    return {"shapes": shapes[:2], "dtype": str(dtype), **options}, [_matrix(*s, dtype=dtype) for s in shapes], options


def forward_case(rng: random.Random) -> tuple[dict, float, float]:
    """Draw one forward: what it was, its error and the error that is allowed."""
    from utils.attention import attention, reference

    what, (q, k, v), options = _draw_attention(rng)
    out = attention(*_on_gpu(q, k, v), backend="gluon", **options)
    return what, _error(out, reference(q, k, v, **options)[0]), 8e-3


def backward_case(rng: random.Random) -> tuple[dict, float, float]:
    """Draw one backward, a quarter of them deterministic: what it was, the largest error of dQ, dK and dV, the limit."""
    from utils.attention import attention, reference_gradients

    what, (q, k, v), options = _draw_attention(rng)
    deterministic = rng.random() < 0.25
    torch.use_deterministic_algorithms(deterministic)
    inputs, dout = [x.requires_grad_() for x in _on_gpu(q, k, v)], torch.randn(q.shape).to(q.dtype)
    gradients = torch.autograd.grad(attention(*inputs, backend="gluon", **options), inputs, dout.cuda())
    _, expected = reference_gradients(q, k, v, dout, **options)
    worst = max(_error(x, y) for x, y in zip(gradients, expected, strict=True))
    # With few keys dS is a difference of nearly equal numbers, of which one has been rounded.
    return {**what, "deterministic": deterministic}, worst, 8e-3 if k.shape[2] > 64 and q.shape[2] > 1 else 5e-2


def decode_case(rng: random.Random) -> tuple[dict, float, float]:
    """Draw one decode step over a whole cache, one with lengths, one in pages, or one in fp8."""
    from tests.utils.attention.decode_cases import random_cache
    from utils.attention import attention_decode, decode_reference

    dtype, fp8 = rng.choice((torch.bfloat16, torch.float16)), rng.random() < 0.25
    batch, kv_heads, group = rng.choice((1, 2, 8)), rng.choice((1, 2, 8)), rng.choice((1, 4, 8))
    sq, head_dim = rng.choice((1, 1, 7, 16, 40)), rng.choice((64, 128, 128, 256))
    slots, page = rng.choice((64, 700, 1024, 1500)), rng.choice((None, None, 16, 64, 256))
    options = {"causal": rng.random() < 0.7, "window": rng.choice((None, None, 100))}
    k, v, lengths, table = random_cache(batch, kv_heads, slots, head_dim, dtype, rng.randrange(1 << 30), page)
    if page is None and rng.random() < 0.6:
        k, v, lengths = *(_matrix(batch, kv_heads, slots, head_dim, dtype=dtype) for _ in range(2)), None
    scales = None
    if fp8:
        k, v, scales = k.to(torch.float8_e4m3fn), v.to(torch.float8_e4m3fn), torch.rand(2, kv_heads) + 0.5
    q = _matrix(batch, kv_heads * group, sq, head_dim, dtype=dtype)
    what = {
        "q": q.shape,
        "slots": slots,
        "kv_heads": kv_heads,
        "page": page,
        "lengths": lengths is not None,
        "fp8": fp8,
    }

    def call(function, tensors: list, **backend: str) -> torch.Tensor:
        q, k, v, lengths, table, scales = tensors
        return function(q, k, v, seqlens=lengths, block_table=table, kv_scales=scales, **options, **backend)

    tensors = [q, k, v, lengths, table, scales]
    out = call(attention_decode, _on_gpu(*tensors), backend="gluon")
    return what | options, _error(out, call(decode_reference, tensors)), 8e-3


def gemm_case(rng: random.Random) -> tuple[dict, float, float]:
    """Draw one product, any plan and any number of parts."""
    from utils.kernels.gemm_launch import gemm_and_launch
    from utils.kernels.gemm_plan import PLANS, SPLITS

    dtype = rng.choice((torch.bfloat16, torch.float16))
    m, n, k = (8 * rng.randint(1, limit) for limit in (100, 100, 250))
    columns = rng.random() < 0.5, rng.random() < 0.5
    a, b = (
        _matrix(y, x, dtype=dtype).T if by_columns else _matrix(x, y, dtype=dtype)
        for (x, y), by_columns in zip(((m, k), (k, n)), columns, strict=True)
    )
    a, b = (x.cuda() if x.is_contiguous() else x.T.cuda().T for x in (a, b))
    plan, split = rng.choice(PLANS), rng.choice([split for split in SPLITS if split <= max(1, k // 64)])
    out = gemm_and_launch(a, b, plan, split)[0]
    return (
        {"shape": (m, n, k), "by columns": columns, "plan": f"{plan.name} / {split}"},
        _error(out, a.cpu().double() @ b.cpu().double()),
        6e-3,
    )


FAMILIES = {"forward": forward_case, "backward": backward_case, "decode": decode_case, "gemm": gemm_case}


def run_cases(family: str, numbers: list[int]) -> None:
    """Run these cases in this process and print a line of JSON for each."""
    for number in numbers:
        rng = random.Random(f"{family} {number}")
        torch.manual_seed(number)
        what, error, limit = FAMILIES[family](rng)
        torch.cuda.synchronize()
        row = {"family": family, "number": number, **what, "error": error, "right": error < limit}
        print("case " + json.dumps(row, default=str), flush=True)


def check(job: tuple[str, list[int]], tool: str, seconds: float) -> list[dict]:
    """Run some cases of a family in a process of the sanitizer and return their rows."""
    family, numbers = job
    command = [str(sanitizer()), "--tool", tool, sys.executable, "-m", "tools.record.memcheck", "--inside", family]
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    try:
        done = subprocess.run(
            [*command, *map(str, numbers)],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=max(seconds, 1),
        )
        text = done.stdout
    except subprocess.TimeoutExpired as expired:
        text = (expired.stdout or b"").decode(errors="replace")
    rows = [json.loads(line[5:]) for line in text.splitlines() if line.startswith("case ")]
    summary = _SUMMARY.search(text)
    errors = int(summary[1]) if summary else None
    for row in rows:
        row["errors of its process"] = errors
    for number in numbers[len(rows) :]:
        first = [x for x in _ERROR.findall(text)[:2]] or text.splitlines()[-3:]
        rows.append(
            {"family": family, "number": number, "not ended": True, "errors of its process": errors, "seen": first}
        )
    return rows


def is_clean(row: dict) -> bool:
    """Whether the case is right and its process had no report."""
    return bool(row.get("right")) and row["errors of its process"] == 0


def main() -> int:
    """Check as many cases as the command line says; return 1 if one is not clean."""
    parser = arguments_parser(__doc__)
    parser.add_argument("--families", default=",".join(FAMILIES), help="with commas between them")
    parser.add_argument("--cases", type=int, default=16, help="cases of each family")
    parser.add_argument("--first", type=int, default=0, help="number of the first")
    parser.add_argument("--each", type=int, default=4, help="cases of one process")
    parser.add_argument("--processes", type=int, default=14, help="at a time")
    parser.add_argument("--tool", default="memcheck", help="of compute-sanitizer")
    parser.add_argument("--seconds", type=float, default=600, help="then what runs is ended")
    parser.add_argument("--inside", nargs="+", metavar="FAMILY", help="of a process that the sanitizer watches")
    options = parser.parse_args()
    if options.inside:
        run_cases(options.inside[0], [int(number) for number in options.inside[1:]])
        return 0
    if not torch.cuda.is_available() or sanitizer() is None:
        print(
            "error: the kernels are checked on an NVIDIA GPU by compute-sanitizer: torch.cuda.is_available() is "
            f"{torch.cuda.is_available()}, and compute-sanitizer is {sanitizer() or 'not found: COMPUTE_SANITIZER names it'}.",
            file=sys.stderr,
        )
        return 1
    deadline = time.monotonic() + options.seconds
    numbers = range(options.first, options.first + options.cases)
    slices = [
        list(numbers[i :: max(1, -(-len(numbers) // options.each))]) for i in range(-(-len(numbers) // options.each))
    ]
    # In turns, so that what there is no time for is not one family.
    jobs = [(family, part) for part in slices for family in options.families.split(",")]
    record = Record(options.out, f"random cases under compute-sanitizer's {options.tool}", "cuda", tool=options.tool)
    rows = record.contents["rows"] = []
    with ThreadPoolExecutor(options.processes) as pool:
        for found in pool.map(lambda job: check(job, options.tool, deadline - time.monotonic()), jobs):
            rows += found
            record.save()
            for row in found:
                print("clean" if is_clean(row) else f"NOT CLEAN {row}", row["family"], row["number"], flush=True)
    record.finish()
    for family in options.families.split(","):
        own = [row for row in rows if row["family"] == family]
        print(
            f"{family}: {sum(map(is_clean, own))} of {len(own)} clean, {sum('not ended' in row for row in own)} not ended"
        )
    return int(not all(map(is_clean, rows)))


if __name__ == "__main__":
    sys.exit(main())
