"""Grade one submission after the other on this machine, each in forks of a warm process.

`grade_notebook` is the whole interface; `instructor.grading.class_.cluster` calls it in many worker processes.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import nbformat

from instructor.build import ROOT, Built
from instructor.grading.sandbox import walls
from instructor.grading.submission.plan import plan_tests
from instructor.grading.submission.results import CellResult, GradingError, SubmissionResult
from instructor.grading.wire.protocol import Channel, Closed, TooLate

# What a student's process keeps of the grader's environment: no tokens, no keys, no paths of the course.
KEPT = (
    "LANG",
    "LC_ALL",
    "TZ",
    "PATH",
    "LD_LIBRARY_PATH",
    "CUDA_HOME",
    "CUDA_VISIBLE_DEVICES",
    "XPU_DEVICE",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "TRITON_PTXAS_PATH",
)
COURSE = ("assets",)  # beside the notebook, as students have it
WARM_SECONDS = 600.0
_zygotes: dict[str, Zygote] = {}


class Zygote:
    """A warm process for one lab."""

    def __init__(self, built: Built, limits: walls.Limits):
        ours, theirs = socket.socketpair()
        self.folder = tempfile.TemporaryDirectory(prefix="grading-")
        environment = {name: os.environ[name] for name in KEPT if name in os.environ}
        environment |= {
            "PYTHONPATH": str(ROOT),
            "PYTHONDONTWRITEBYTECODE": "1",
            "MPLBACKEND": "Agg",
            "HOME": self.folder.name,
            "PYTHONSAFEPATH": "1",
            "PYTHONHASHSEED": "0",
            "HF_HUB_OFFLINE": "1",
            "LABS_COMPILE_CACHE": "off",  # a student's process could write a false result
        }
        environment.setdefault("OMP_NUM_THREADS", "1")
        if limits.gpu:
            environment["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # torch looks for a GPU without starting CUDA
        else:
            environment["CUDA_VISIBLE_DEVICES"] = ""
        # An environment behind a symbolic link: behind the walls there is no link to follow, and a library's file
        # has to have one name on both sides.
        python = str(Path(sys.executable).parent.resolve() / Path(sys.executable).name)
        self.process = subprocess.Popen(
            [python, "-m", "instructor.grading.submission.zygote", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env=environment,
            cwd=self.folder.name,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        theirs.close()
        self.channel = Channel(ours)
        visible = [*walls.visible_paths(), str(ROOT / "utils"), *(str(ROOT / name) for name in COURSE)]
        course = {name: str(ROOT / name) for name in COURSE if (ROOT / name).exists()}
        try:
            self.channel.send(
                {
                    "op": "warm",
                    "setup": setup_cells(built),
                    "folder": self.folder.name,
                    "visible": visible,
                    "course": course,
                    "hidden": hidden_paths(),
                    "limits": limits.as_dict(),
                }
            )
            ready, _ = self.channel.receive(time.monotonic() + WARM_SECONDS)
        except (Closed, TooLate):
            self.process.kill()
            said = self.process.stderr.read().decode(errors="replace")[-2000:]
            raise GradingError(f"the warm process for {built.name} did not start:\n{said}") from None
        if ready["problems"]:
            self.close()
            raise GradingError(f"{built.name} cannot be graded: " + "; ".join(ready["problems"]))

    def grade(self, job: dict, seconds: float) -> dict:
        """Have one submission graded in forks of the warm process."""
        ours, theirs = socket.socketpair()
        channel = Channel(ours)
        try:
            socket.send_fds(self.channel.sock, [b"g"], [theirs.fileno()])
            theirs.close()
            deadline = time.monotonic() + seconds
            channel.send(job, deadline=deadline)
            answer, _ = channel.receive(deadline)
        except (OSError, Closed, TooLate) as error:
            why = type(error).__name__
            raise GradingError(f"the checker of {job['name']} ended without a result ({why})") from None
        finally:
            channel.close()
        if answer["op"] != "graded":
            raise GradingError(f"the checker of {job['name']} failed:\n{answer.get('why', '')}")
        return answer["result"]

    def close(self) -> None:
        """End the warm process and everything below it."""
        self.channel.close()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stderr.close()
        self.folder.cleanup()


def hidden_paths() -> list[str]:
    """What no student's process sees, though a folder in its view holds it: the instructor's files, and every copy of
    them that is installed beside the libraries.
    """
    found = [ROOT / name for name in ("instructor", "tests", "build", "submitted")]
    libraries = [Path(entry) for entry in sys.path if entry]
    for prefix in map(Path, dict.fromkeys((sys.prefix, sys.base_prefix, sys.exec_prefix, "/usr", "/usr/local"))):
        libraries += [*prefix.glob("lib*/python3*/site-packages"), *prefix.glob("lib/python3*/dist-packages")]
    found += [folder / "instructor" for folder in libraries if (folder / "instructor").is_dir()]
    return list(dict.fromkeys(name for path in found for name in (str(path), os.path.realpath(path))))


def setup_cells(built: Built) -> list[tuple[str, str]]:
    """(id, source) of the code cells before the first answer: the same for every submission."""
    found = []
    for cell in nbformat.reads(built.student, as_version=4).cells:
        if cell.metadata.get("nbgrader", {}).get("solution"):
            break
        if cell.cell_type == "code":
            found.append((cell.id, cell.source))
    return found


def _key(built: Built, limits: walls.Limits) -> str:
    return f"{built.name} {hashlib.sha256(built.instructor.encode()).hexdigest()} {limits}"


def is_warm(built: Built, limits: walls.Limits) -> bool:
    """True if this process has a warm process for the lab."""
    return _key(built, limits) in _zygotes


def zygote(built: Built, limits: walls.Limits) -> Zygote:
    """The warm process for a lab in this process, started on first use."""
    key = _key(built, limits)
    found = _zygotes.get(key)
    if found is None or found.process.poll() is not None:
        found = _zygotes[key] = Zygote(built, limits)
    return found


@atexit.register
def close_all() -> None:
    """End all warm processes of this process."""
    while _zygotes:
        _zygotes.popitem()[1].close()


# ---- the hidden tests, and where they run ------------------------------------------------------------------------


def hidden_modules(lab: str) -> dict[str, list]:
    """{module: [source, file, is a package]} of a lab's hidden checks, and of what they import from other labs'."""
    folder = ROOT / "instructor" / "checks"
    files, labs, seen = [ROOT / "instructor" / "__init__.py", folder / "__init__.py"], [lab], set()
    while labs:
        seen.add(name := labs.pop())
        own = sorted((folder / name).rglob("*.py")) if (folder / name).is_dir() else [*folder.glob(f"{name}.py")]
        files += own
        for path in own:
            imported = re.findall(
                r"^\s*(?:from|import) instructor\.checks\.(\w+)", path.read_text(encoding="utf-8"), flags=re.MULTILINE
            )
            labs += [other for other in imported if other not in seen and other not in labs]
    found = {}
    for path in files:
        relative = path.relative_to(ROOT).with_suffix("")
        package = relative.name == "__init__"
        parts = relative.parts[:-1] if package else relative.parts
        found[".".join(parts)] = [path.read_text(encoding="utf-8"), str(path), package]
    return found


def fingerprint(built: Built) -> str:
    """Changes with the lab, its checks, the course's package and this engine."""
    digest = hashlib.sha256(built.instructor.encode())
    for folder in (ROOT / "instructor" / "checks", ROOT / "instructor" / "grading", ROOT / "utils"):
        for path in sorted(folder.rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


_calibrations: dict[str, dict] = {}


def calibrate(built: Built, limits: walls.Limits | None = None, timeout: float = 300) -> dict:
    """Grade the model answers, and so find out for each question where its check can run.

    Returns {"modes": {cell: "distance" or "inside"}, "no_control": [...], "why": {cell: reason}, "seconds": {...}}.
    The model answers have to get every point: `GradingError` names those that do not.
    """
    from instructor.course import answered_notebook

    limits = limits or walls.Limits()
    key = f"{built.name}-{fingerprint(built)}" + ("-gpu" if limits.gpu else "")
    path = ROOT / "build" / "grading" / f"{key}.json"
    if key in _calibrations:
        return _calibrations[key]
    if path.is_file():
        _calibrations[key] = json.loads(path.read_text(encoding="utf-8"))
        return _calibrations[key]
    model = answered_notebook(built)
    job = _job(built, model, timeout, "model answers", {"modes": {}, "no_control": []}, limits.gpu)
    warm = zygote(built, limits)
    first = warm.grade(job, 3600)
    modes = {
        name: first["modes"].get(name, "distance")
        for name, cell in first["cells"].items()
        if cell["status"] != "by_hand"
    }
    why = dict(first["why"])
    for name, cell in first["cells"].items():
        if name in modes and cell["status"] != "passed" and modes[name] == "distance":
            modes[name], why[name] = "inside", cell["message"]
    no_control: list[str] = []
    for _ in range(3):
        result = warm.grade({**job, "modes": modes, "no_control": no_control}, 3600)
        wrong = {n: c for n, c in result["cells"].items() if c["status"] not in ("passed", "by_hand")}
        blind = [n for n, c in wrong.items() if modes[n] == "inside" and c["status"] == "flagged"]
        no_control += blind
        if not wrong:
            break
    if wrong:
        said = "\n".join(f"  {name}: {cell['message']}" for name, cell in wrong.items())
        raise GradingError(f"the model answers of {built.name} do not pass on this machine:\n{said}")
    found = {
        "modes": modes,
        "no_control": no_control,
        "why": why,
        "seconds": {n: c["seconds"] for n, c in result["cells"].items()},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}")
    part.write_text(json.dumps(found, indent=1), encoding="utf-8")
    os.replace(part, path)
    _calibrations[key] = found
    return found


_tests = functools.cache(plan_tests)


def _job(built: Built, notebook: str | bytes, timeout: float, name: str, calibration: dict, gpu: bool) -> dict:
    data = notebook.encode("utf-8", errors="surrogatepass") if isinstance(notebook, str) else notebook
    return {
        "instructor": built.instructor,
        "student": built.student,
        "submission": data.hex(),
        "name": name,
        "lab": built.name,
        "timeout": timeout,
        "modes": calibration["modes"],
        "hidden": hidden_modules(built.name),
        "no_control": calibration["no_control"],
        "tests": _tests(built.instructor),
        "gpu": gpu,
    }


def grade_notebook(
    built: Built,
    notebook: str | bytes | Path,
    *,
    timeout: float = 60,
    student: str = "student",
    limits: walls.Limits | None = None,
) -> SubmissionResult:
    """Grade one submission, isolated.

    Args:
        built: the lab
        notebook: the submission, as text or as the bytes of its file
        timeout: seconds that one cell, or the tests of one question, may take
        student: whose it is
        limits: what the submission may use
    """
    if timeout <= 0:
        raise ValueError(f"timeout is {timeout} s; it should be more than 0.")
    limits = limits or walls.Limits()
    calibration = calibrate(built, limits)
    data = notebook.read_bytes() if isinstance(notebook, Path) else notebook
    if len(data) > 12 << 20:
        return unreadable(built, f"The submitted file has {len(data) >> 20} MB; at most 12 are read.", student)
    job = _job(built, data, timeout, student, calibration, limits.gpu)
    most = 60 + timeout * 2 * (len(calibration["modes"]) + 60)
    said = zygote(built, limits).grade(job, most)
    return SubmissionResult.from_json({k: v for k, v in said.items() if k not in ("modes", "why")})


def unreadable(built: Built, why: str, student: str) -> SubmissionResult:
    """The result of a submission that cannot even be looked at: no points, for the reason given."""
    cells = {}
    for cell in nbformat.reads(built.student, as_version=4).cells:
        said = cell.metadata.get("nbgrader", {})
        if "points" in said:
            cells[said["grade_id"]] = CellResult(0.0, float(said["points"]), "missing", why, 0.0)
    return SubmissionResult(student, built.name, cells, (), {}, built.student)
