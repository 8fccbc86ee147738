"""Count wrong results of decode's clusters while many processes share the GPU, and say where they stand.

    python -m tools.record.decode_shared --processes 16 --seconds 40 --out decode_shared.json

A process that shares a GPU is interrupted in the middle of its kernels. The backward's nan was seen only then (entry 44 of its log).
Each process repeats the clusters' cases with lengths and pages of `tests/utils/attention/test_decode_gpu.py`, each from another kernel on, so
that they compile one another's; in between it repeats SUSPECT, the case that failed once. The first call of a case is held against float64, the
later ones against the first one's bits. A call that is not the same is written down with how many numbers differ, how many are nan, and the first
places; an exception with its text.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from collections.abc import Iterator

import torch

from tools.record.common import Record, arguments_parser, in_many_processes, machine_name
from tools.record.decode_variants import WRONG, bound, error_of
from utils.attention import decode_reference

CHOICES = (
    {"cluster": 2, "consumers": 1, "block_n": 64},
    {"cluster": 2, "consumers": 0},
    {"cluster": 4, "consumers": 0, "block_n": 64, "per_sm": 2},
    {"cluster": 8, "consumers": 0, "block_n": 64, "per_sm": 2, "slots": 4},
)
LENGTHS = (2000, 0, 3, 700), (2000, 2000, 2000, 2000), (1, 0, 0, 0)
PAGES = 256, 64, 16, 0
SUSPECT = CHOICES[0], LENGTHS[0], PAGES[0]
CALLS = 20  # of a case, one after another; the GPU is waited for behind them
SHOWN = 6  # of what was wrong, on the screen; the file has more


def differences(out: torch.Tensor, right: torch.Tensor) -> dict | None:
    """Say how two results differ, None if they have the same bits: how many numbers, how many nan, and the first places."""
    bits = [x.contiguous().view(torch.int16) for x in (out, right)]
    where = (bits[0] != bits[1]).nonzero()
    if not len(where):
        return None
    places = [[*place, float(out[tuple(place)]), float(right[tuple(place)])] for place in where[:8].tolist()]
    return {"numbers": len(where), "nan": int(out.isnan().sum()), "places": places}


def prepare(choices: dict, filled: tuple, page: int) -> tuple:
    """Return a case's call, and its float64 result."""
    from tests.utils.attention.decode_cases import other_table, random_cache

    batch, group, sq, keys = 4, 4, 3, 2000
    k, v, _, table = random_cache(batch, 8, keys, 128, torch.bfloat16, page, page or None, fill=0.5)
    lengths = torch.tensor(filled, dtype=torch.int32)
    if page:
        table = other_table(len(k), filled, page, table)
    k, v, lengths, table = (x if x is None else x.cuda() for x in (k, v, lengths, table))
    q = torch.randn(batch, 8 * group, sq, 128, device="cuda", dtype=torch.bfloat16)
    call = bound(dict(choices), q, k, v, lengths, table)
    return call, decode_reference(q, k, v, seqlens=lengths, block_table=table)


def order(seed: int) -> list[tuple]:
    """Return all cases as process `seed` takes them: kernel after kernel, from the seed's own on."""
    kernels = [*itertools.product(CHOICES, PAGES)]
    turn = seed % len(kernels)
    return [(choices, filled, page) for choices, page in kernels[turn:] + kernels[:turn] for filled in LENGTHS]


def turns(seed: int) -> Iterator[tuple]:
    """Yield the process's cases without end, SUSPECT behind each kernel's."""
    for number, case in enumerate(itertools.cycle(order(seed)), 1):
        yield case
        if number % len(LENGTHS) == 0:
            yield SUSPECT


def repeat(job: tuple[int, float]) -> dict:
    """Repeat all cases until the time is over: how many calls, of SUSPECT too, and those that were wrong."""
    seed, seconds = job
    until = math.inf  # the first case is compiled before the time begins
    torch.manual_seed(seed)
    prepared: dict[str, tuple] = {}
    calls, wrong, failed = Counter[str](), [], Counter[str]()
    for case in turns(seed):
        if time.monotonic() > until:
            break
        name = str(case)
        try:
            if name not in prepared:
                call, expected = prepare(*case)
                right = call()
                error = error_of(right, expected)
                calls[name] += 1
                if not error < WRONG:
                    wrong.append({"case": name, "first": True, "error": error, "nan": int(right.isnan().sum())})
                    continue  # nothing to hold later calls against
                prepared[name] = call, right
            call, right = prepared[name]
            outputs = [call() for _ in range(CALLS)]
            calls[name] += CALLS
            wrong += [{"case": name} | found for out in outputs if (found := differences(out, right))]
        except Exception as problem:
            failed[f"{name}: {type(problem).__name__}: {str(problem)[:300]}"] += 1
            if "CUDA error" in str(problem):
                break  # the context is lost
        finally:
            until = min(until, time.monotonic() + seconds)
    counts = {"calls": calls.total(), "suspect": calls[str(SUSPECT)], "cases": len(prepared)}
    return {"seed": seed, **counts, "wrong": wrong[:50], "failed": dict(failed)}


def main() -> None:
    """Run the processes and print what was wrong."""
    parser = arguments_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=40, help="for each process, from its first case on")
    parser.add_argument("--processes", type=int, default=16, help="that share the GPU")
    options = parser.parse_args()
    record = Record(options.out, "decode: clusters while processes share the GPU", "cuda", processes=options.processes)
    jobs = [(seed, options.seconds) for seed in range(options.processes)]
    answers = in_many_processes(repeat, jobs, options.processes, 2 * options.seconds + 60)
    record.contents["rows"] = [found or {"problem": problem} for found, problem in answers]
    record.finish()
    rows = record.contents["rows"]
    counts = {name: sum(row.get(name, 0) for row in rows) for name in ("calls", "suspect", "cases")}
    print(machine_name(record.contents), counts)
    found = [*itertools.chain(*([*row.get("wrong", ()), *row.get("failed", {}), row.get("problem")] for row in rows))]
    for wrong in [*filter(None, found)][:SHOWN]:
        print(str(wrong)[:400])


if __name__ == "__main__":
    main()
