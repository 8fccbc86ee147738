"""Record what the simulator, and on a Hopper GPU Triton's ConSan and compute-sanitizer, say of the kernels with planted bugs.

    python -m tools.record.gluon_verdicts simulate --out assets/results/gluon_verdicts.json       # any machine
    python -m tools.record.gluon_verdicts gpu --out gpu.json [--seconds 600] [--judges consan,memcheck]
    python -m tools.record.gluon_verdicts table assets/results/gluon_verdicts.json gpu.json [...] --out verdicts.json

The cases are those of tests/utils/gluon_cpu/verdict_cases.py. On the GPU every launch has a process of its own with a time limit,
because a planted bug may wait for ever. The judges there:

- plain: the launch alone; it may end with the right numbers, with wrong ones, with an error of CUDA, or not at all.
- consan: Triton's concurrency sanitizer (Triton 3.6 and later, switched on by TRITON_INSTRUMENTATION_MODE=consan). It knows
  shared memory, barriers and asynchronous copies, and stops the kernel with a device-side assertion.
- memcheck, racecheck, synccheck: compute-sanitizer of the CUDA toolkit, or of the package nvidia-cuda-sanitizer-api.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.utils.gluon_cpu.verdict_cases import CASES, Case, agrees, launch, simulate_case
from tools.record.common import Record, arguments_parser, read_record
from utils.files import ROOT

SEEDS = (None, 1, 2, 3)
TOOLS = ("memcheck", "racecheck", "synccheck")
JUDGES = ("plain", "consan", *TOOLS)
PROCESSES = 6  # launches at a time
LIMIT_S = 45  # of one process; Triton compiles in it, and with ConSan that takes seconds
SAME, DIFFERENT = "result: right", "result: wrong"


# ---- the simulator -------------------------------------------------------------------------------------------------


def simulated_row(case: Case) -> dict:
    """Simulate a case in four timings and return its row."""
    verdicts = [simulate_case(case, seed) for seed in SEEDS]
    first = verdicts[0]
    return {
        "case": case.label,
        "bug": case.bug,
        "reason": case.reason,
        "runs": len(verdicts),
        "right": sum(verdict["right"] for verdict in verdicts),
        "kinds": sorted({verdict["kind"] or "none" for verdict in verdicts}),
        "line": first["line"],
        "report": first["report"],
        "seconds": round(sum(verdict["seconds"] for verdict in verdicts) / len(verdicts), 3),
    }


# ---- a GPU ---------------------------------------------------------------------------------------------------------


def run_file(label: str) -> None:
    """Launch one case on the GPU, in this process, and print whether its numbers are right."""
    import torch
    import triton

    # ConSan keeps what it knows in global memory that Triton asks for at launch.
    triton.set_allocator(lambda size, alignment, stream: torch.empty(size, device="cuda", dtype=torch.int8))
    output, expected = launch(CASES[label], "cuda")
    torch.cuda.synchronize()
    print(SAME if agrees(output, expected) else DIFFERENT, flush=True)


def sanitizer() -> str | None:
    """Return the path of compute-sanitizer; None if this machine has none."""
    places = [os.environ.get("COMPUTE_SANITIZER"), shutil.which("compute-sanitizer")]
    places += ["/usr/local/cuda/bin/compute-sanitizer"]
    places += [str(path) for path in Path(sys.prefix).glob("lib/python*/site-packages/nvidia/**/compute-sanitizer")]
    return next((place for place in places if place and os.access(place, os.X_OK) and Path(place).is_file()), None)


def judge_verdict(judge: str, code: int | None, text: str) -> dict:
    """Return what one process said.

    Args:
        judge: one of JUDGES.
        code: its exit status; None if its time was over.
        text: what it printed.
    """
    said = next((line.strip() for line in text.splitlines() if is_finding(judge, line)), "")
    if code is None:
        result = "did not end"
    elif SAME in text:
        result = "right numbers"
    else:
        result = "wrong numbers" if DIFFERENT in text else "error"
    # The plain launch has no reports of its own: its errors are what it says.
    reported = bool(said) or (judge == "plain" and result == "error")
    if result == "error" and not said:
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        said = next((line for line in reversed(lines) if "rror" in line), lines[-1] if lines else "")
    return {"result": result, "reported": reported, "message": said[:300]}


def is_finding(judge: str, line: str) -> bool:
    """Return whether a line of output is a report of the judge."""
    if judge == "consan":
        return bool(re.search(r"Assertion `|device-side assert triggered", line))
    failed = "attachable process" in line or "Target application terminated" in line  # the tool itself, not the kernel
    if judge in TOOLS and not failed:
        return bool(re.search(r"=========\s+(Invalid|Error|Race|Barrier error|Uninitialized|Divergent|Hazard)", line))
    return False


def judge_row(point: tuple[Case, str]) -> dict:
    """Let one judge look at one case, in a process of its own with a time limit."""
    case, judge = point
    command = [sys.executable, "-m", "tools.record.gluon_verdicts", "run", case.label]
    # Without torch's cache of memory each tensor has its own allocation, and memcheck sees where it ends.
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": path}
    if judge == "consan":
        environment |= {"TRITON_INSTRUMENTATION_MODE": "consan", "CUDA_LAUNCH_BLOCKING": "1"}
    elif judge in TOOLS:
        command = [str(sanitizer()), "--tool", judge, "--kernel-name", f"kernel_substring={case.kernel}", *command]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        text, _ = process.communicate(timeout=LIMIT_S)
        code: int | None = process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)  # compute-sanitizer has a child of its own
        text, code = process.communicate()[0] or "", None
    return {"case": case.label, "bug": case.bug, "judge": judge, **judge_verdict(judge, code, text)}


def gpu_rows(points: list[tuple[Case, str]]) -> Iterator[dict]:
    """Judge the points, several processes at a time: most of a process is imports and compilation."""
    pool = ThreadPoolExecutor(PROCESSES)
    try:
        yield from pool.map(judge_row, points)
    finally:
        pool.shutdown(cancel_futures=True)  # when the time is over, what has begun ends within its limit


# ---- side by side --------------------------------------------------------------------------------------------------


# Why a judge differs from what is planted. The first that fits is the reason: (judge, class of bug or "correct", what was
# seen, part of the case's label, the reason).
UNSEEN = "right numbers", "wrong numbers"
REASONS = (
    (
        "consan",
        "missing fence",
        UNSEEN,
        "",
        "ConSan does not know that TMA and wgmma see memory through a proxy of their own",
    ),
    ("consan", "out of bounds", UNSEEN, "", "ConSan looks at shared memory only, not at the bounds of global memory"),
    ("consan", "uninitialized read", UNSEEN, "", "ConSan does not record what was never written"),
    ("consan", "wait left out", UNSEEN, "at the end", "ConSan does not look at what is under way when a kernel ends"),
    (
        "consan",
        "wait left out",
        UNSEEN,
        "nobody waits for",
        "ConSan does not look at what is under way when a kernel ends",
    ),
    ("consan", "", ("error",), "", "the launch ended with an error of CUDA; ConSan's own sentence was not printed"),
    (
        "consan",
        "correct",
        ("reported",),
        "signals",
        "false: the kernel waits by the mbarrier on which cp.async arrives, and ConSan goes by groups of cp.async",
    ),
    (
        "consan",
        "correct",
        ("reported",),
        "product",
        "false: a deadlock is reported at the wait for a ring's slot. These are the "
        "only cases where two copies arrive on one mbarrier; why ConSan counts them so is not known",
    ),
    ("", "", ("did not end",), "product", "not judged: the time of the process was over, and Triton compiles in it"),
    ("", "correct", ("did not end",), "", "not judged: the process had too little time"),
    (
        "",
        "",
        ("did not end",),
        "",
        "the launch waits for ever, or longer than the process had; nothing was reported until then",
    ),
    ("consan", "", UNSEEN, "", "nothing wrong happened in this run, and ConSan checks what happens, not what could"),
    (
        "racecheck",
        "correct",
        ("reported",),
        "",
        "false: two partitions hand shared memory over by mbarriers alone, which racecheck seems not to follow; it reports "
        "the same line with the bug and without it",
    ),
    (
        "racecheck",
        "",
        UNSEEN,
        "",
        "racecheck looks at what threads read and write in shared memory, not at copies by TMA",
    ),
    ("memcheck", "", UNSEEN, "", "memcheck looks at addresses, and every address is allowed"),
    ("synccheck", "", UNSEEN, "", "synccheck looks at barriers, and each is used as it may be"),
)


def reason_of_difference(row: dict, judge: str, said: str) -> str:
    """Return why a judge said something else of a case than what is planted in it."""
    kind = row["bug"] or "correct"
    for of_judge, of_kind, seen, part, reason in REASONS:
        if of_judge in ("", judge) and of_kind in ("", kind) and said in seen and part in row["case"]:
            return reason
    return "not explained"


def side_by_side(simulated: dict, judged: list[dict]) -> list[dict]:
    """Return a row for each case with the verdicts of all judges, those that differ from what is planted first.

    A case that was judged twice has the last verdict that came to an end. A judge's message counts as a report only if it is
    one by the rules of today, so that older records are read as newer ones are.
    """
    by_case: dict[str, dict] = {}
    for row in (row for record in judged for row in record["rows"]):
        judges = by_case.setdefault(row["case"], {})
        if row["judge"] not in judges or row["result"] != "did not end":
            judges[row["judge"]] = row
    rows = []
    for row in simulated["rows"]:
        judges = by_case.get(row["case"], {})
        reported = {name: is_finding(name, j["message"]) for name, j in judges.items() if name != "plain"}
        said = {name: ("reported" if reported.get(name) else j["result"]) for name, j in judges.items()}
        # A plain launch has no verdict: a bug may well give the right numbers, or hang.
        differs = [name for name, found in reported.items() if found != bool(row["bug"]) or said[name] == "did not end"]
        rows.append(
            {
                "case": row["case"],
                "bug": row["bug"],
                "simulator": "reported" if row["kinds"] != ["none"] else "silent",
                **said,
                "differs": differs,
                "reasons": {name: reason_of_difference(row, name, said[name]) for name in differs},
                "messages": {
                    name: re.sub(r"\S*/(?=\w+\.py)", "", j["message"]) for name, j in judges.items() if j["message"]
                },
            }
        )
    return sorted(rows, key=lambda row: -len(row["differs"]))


def main() -> None:
    """Do what the first argument says."""
    command, rest = (sys.argv[1:2] or ["--help"])[0], sys.argv[2:]
    if command == "run":
        run_file(" ".join(rest))
        return
    parser = arguments_parser(__doc__ or "")
    parser.add_argument("command", choices=("simulate", "gpu", "table", "run"))
    parser.add_argument("files", nargs="*", type=Path, help="table: the simulator's record, then those of a GPU")
    parser.add_argument("--judges", default=",".join(JUDGES), help="gpu: which judges, with commas between them")
    options = parser.parse_args()
    if command == "simulate":
        record = Record(options, "small Gluon kernels with and without a planted bug, in the simulator", "cpu")
        record.fill(CASES.values(), simulated_row, lambda row: f"{row['case']}: {row['right']} of {row['runs']} right")
    elif command == "gpu":
        judges = options.judges.split(",")
        if unknown := set(judges) - set(JUDGES):
            parser.error(f"{', '.join(sorted(unknown))}: the judges are {', '.join(JUDGES)}.")
        if set(judges) & set(TOOLS) and sanitizer() is None:
            print(
                "There is no compute-sanitizer: put it on PATH, or name it in COMPUTE_SANITIZER. Its judges are left out."
            )
            judges = [judge for judge in judges if judge not in TOOLS]
        points = [(case, judge) for case in CASES.values() for judge in judges]
        record = Record(options, "the same kernels on a GPU, judged by its own tools", "cuda", judges=judges)
        rows = gpu_rows(points)
        record.fill(
            points,
            lambda point: next(rows),
            lambda row: f"{row['judge']}, {row['case']}: {row['result']} {row['message'][:80]}",
        )
    else:
        if len(options.files) < 2:
            parser.error("table takes the simulator's record and at least one of a GPU.")
        simulated, *judged = map(read_record, options.files)
        record = Record(options, "verdicts of the simulator, of ConSan and of compute-sanitizer", "cpu")
        record.contents |= {"simulated_in": simulated["environment"], "judged_in": [j["environment"] for j in judged]}
        record.fill(
            side_by_side(simulated, judged), dict, lambda row: f"{row['case']}: {', '.join(row['differs']) or 'agree'}"
        )
    record.finish()


if __name__ == "__main__":
    main()
