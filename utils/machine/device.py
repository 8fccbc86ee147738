"""The devices of this machine, and what it can run.

Each `*_support()` tries once whether something runs. It returns a `Support`: true or false, the reason in a sentence, and
a remedy. These functions do not import Triton, because Triton reads TRITON_INTERPRET at its first import, and the caller
should choose its value.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch

from utils.config import GPU_SPECS
from utils.machine.versions import package_version
from utils.validation import first_line

# CUDA's full names of the GPUs in GPU_SPECS, if a name is not the key itself. A longer name is a different GPU: the A10G,
# H100 NVL, RTX 4090 D, A100 80GB PCIe (1.935 TB/s) and a MIG slice have similar names and different roofs.
_NAMES = {
    "A6000": r"(Quadro )?RTX A6000",
    "A100": r"A100-SXM4?-80GB",
    "A100-40GB": r"A100-(SXM4?|PCIE)-40GB",
    "H100": r"H100 80GB HBM3",
    "H100-PCIe": r"H100 PCIe",
    "4090": r"(GeForce )?RTX 4090",
}


@dataclass(frozen=True)
class Support:
    """Whether something runs on this machine, the reason, and a remedy if it does not run. Usable as a condition."""

    ok: bool
    reason: str = ""
    remedy: str = ""

    def __bool__(self) -> bool:
        return self.ok


def unsupported(reason: str, remedy: str) -> Support:
    """Return a Support that is false."""
    return Support(False, reason, remedy)


def default_device() -> torch.device:
    """Return the device that the labs use: the current NVIDIA GPU if there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def usable_device(device: torch.device | str | int | None) -> torch.device:
    """Return `device` as a torch.device, or the default device for None. Raise ValueError if this machine does not have it.

    Args:
        device: "cpu", "cuda", "cuda:1", a GPU's number or a torch.device.
    """
    if device is None:
        return default_device()
    try:
        chosen = torch.device(f"cuda:{device}" if type(device) is int else device)
    except (RuntimeError, TypeError):
        raise ValueError(f'device is {device!r}, which torch does not know; pass "cpu", "cuda" or "cuda:1".') from None
    count = torch.cuda.device_count()
    if chosen.type == "cuda" and (chosen.index or 0) >= count:
        have = "there is no CUDA GPU here" if count == 0 else f"this machine has {count} CUDA GPUs, counted from 0"
        raise ValueError(f'device is {str(device)!r}, and {have}; pass device="cpu".')
    return chosen


def detect_gpu(name: str | None = None) -> str | None:
    """Return the key in GPU_SPECS of this machine's GPU, or of a CUDA device name; None if GPU_SPECS does not list it.

    A GPU with a similar name would be wrong, because it has different roofs.
    """
    if name is not None:
        # Drivers before 470 leave "NVIDIA" out.
        parts = {row: f"(NVIDIA )?{_NAMES.get(row, row)}" for row in GPU_SPECS}
        return next((row for row, part in parts.items() if re.fullmatch(part, name.strip(), re.IGNORECASE)), None)
    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    row = detect_gpu(properties.name)
    # A MIG slice or an MPS share may have the name of the whole part, but it has fewer SMs.
    if row is not None and properties.multi_processor_count != GPU_SPECS[row]["sm_count"]:
        return None
    return row


def compute_capability() -> tuple[int, int] | None:
    """Return the compute capability of the current GPU, such as (9, 0); None without a GPU."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else None


@functools.cache
def cuda_support() -> Support:
    """Whether torch computes on an NVIDIA GPU here. One addition tries it."""
    if torch.version.cuda is None:
        return unsupported(
            f"torch {torch.__version__} is built without CUDA.",
            "Install a CUDA build of torch on a machine with an NVIDIA GPU.",
        )
    if not torch.cuda.is_available():
        return unsupported(
            f"torch {torch.__version__}, built for CUDA {torch.version.cuda}, finds no usable NVIDIA GPU.",
            "Run on a machine with an NVIDIA GPU, and see with nvidia-smi that its driver answers.",
        )
    name = torch.cuda.get_device_name()
    try:
        (torch.ones(1, device="cuda") + 1).item()
    except RuntimeError as error:
        return unsupported(
            f"{name} is there, but torch {torch.__version__} cannot compute on it: {first_line(error)}",
            f"Install a torch build that lists this GPU's sm_{''.join(map(str, compute_capability() or ()))}.",
        )
    return Support(True, f"torch {torch.__version__} computes on {name}.")


def triton_support() -> Support:
    """Whether Triton kernels run here: on the GPU, or in the simulator if there is no GPU."""
    version = package_version("triton")
    if version is None:
        return unsupported("Triton is not installed.", "Install the package triton; it has wheels for Linux only.")
    if interpreter_requested():
        return unsupported(
            f"Triton {version} interprets kernels in this process, as TRITON_INTERPRET asks.",
            "Restart Python without TRITON_INTERPRET: on a CPU, simulate() of utils.gluon_cpu runs kernels.",
        )
    if not cuda_support():
        return Support(True, f"Triton {version} runs kernels in the simulator: there is no NVIDIA GPU.")
    major, minor = compute_capability() or (0, 0)
    if major < 8:
        return unsupported(
            f"Triton {version} compiles for compute capability 8.0 and newer; this GPU has {major}.{minor}.",
            "Use a GPU of the Ampere generation or newer.",
        )
    return _c_compiler() and Support(True, f"Triton {version} compiles kernels for compute capability {major}.{minor}.")


def interpreter_requested() -> bool:
    """Whether Triton interprets kernels: TRITON_INTERPRET is set now, or was set when Triton was imported."""
    if os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y"):
        return True
    standard = sys.modules.get("triton.language.standard")
    return standard is not None and type(standard.sum).__name__ == "InterpretedFunction"


@functools.cache
def gluon_support() -> Support:
    """Whether the Gluon kernels of lab 3 run here: they need a Hopper GPU and Triton 3.6 or newer."""
    capability = compute_capability()
    if capability != (9, 0):
        gpu = "there is no NVIDIA GPU" if capability is None else "this GPU has {}.{}".format(*capability)
        return unsupported(
            f"The Gluon kernels use Hopper's wgmma and TMA, compute capability 9.0, and {gpu}.",
            "Run them on an H100 or H200.",
        )
    return _gluon_compiles((3, 6))


@functools.cache
def gluon_on_blackwell() -> Support:
    """Whether Gluon compiles the kernel for Blackwell here, on compute capability 10. No GPU has run the kernel yet."""
    return _gluon_compiles((3, 7))


def _gluon_compiles(oldest: tuple[int, int]) -> Support:
    version, needed = package_version("triton"), ".".join(map(str, oldest))
    if version is None or tuple(map(int, re.findall(r"\d+", version)[:2])) < oldest:
        installed = f"{version} is installed" if version else "none is installed"
        return unsupported(f"Gluon needs Triton {needed} or newer and {installed}.", f"Install triton>={needed}.")
    major, minor = compute_capability() or (0, 0)
    return _c_compiler() and Support(
        True, f"Gluon of Triton {version} compiles for compute capability {major}.{minor}."
    )


@functools.cache
def offline_compile_support() -> Support:
    """Whether Triton can compile for a Hopper GPU without a GPU. Triton's wheel for Linux contains ptxas."""
    version = package_version("triton")
    if version is None:
        return unsupported("Triton is not installed.", "Install the package triton; it has wheels for Linux only.")
    files = metadata.files("triton") or []
    if not any(str(file).endswith("backends/nvidia/bin/ptxas") and Path(file.locate()).exists() for file in files):
        return unsupported(f"Triton {version} came without ptxas.", "Install triton from its wheel.")
    return Support(True, f"Triton {version} compiles for sm_90a with its own ptxas; no GPU is needed.")


def compile_support() -> Support:
    """Whether torch.compile works here: a CPU needs a C++ compiler and AVX2, a GPU needs Triton."""
    return _compile_on_cpu() if default_device().type == "cpu" else triton_support()


@functools.cache
def _compile_on_cpu() -> Support:
    if sys.platform == "win32":
        return unsupported("torch.compile on a CPU is not tested on Windows.", "Use WSL 2.")
    if not torch.cpu._is_avx2_supported():
        return unsupported(
            "torch.compile of FlexAttention on a CPU needs AVX2, which this CPU does not have.",
            "Run on an x86 CPU with AVX2 or on an NVIDIA GPU.",
        )
    # Inductor also takes CXX, or else g++ (clang++ on macOS).
    command = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    if fault := _build_fault(command):
        return unsupported(
            f"torch.compile needs a C++ compiler, and {command!r} builds no Python extension with AVX2: {fault}",
            "Install a complete g++ and this Python's header files (on Debian or Ubuntu: g++ python3-dev), or set CXX.",
        )
    return Support(True, f"torch.compile builds C++ with {command} for a CPU with AVX2.")


def _build_fault(compiler: str) -> str | None:
    """Build a shared object with Python.h and AVX2, as Inductor does. Return the first line of the error, or None."""
    source = "#include <Python.h>\n#include <cmath>\n#include <immintrin.h>\n"
    source += "__m256 twice(__m256 x) { return _mm256_add_ps(x, x); }\n"
    flags = ["-shared", "-fPIC", "-mavx2", f"-I{sysconfig.get_paths()['include']}"]
    flags += ["-undefined", "dynamic_lookup"] if sys.platform == "darwin" else ["-fopenmp"]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "probe.cpp"
        file.write_text(source)
        command = [compiler, *flags, str(file), "-o", str(file.with_suffix(".so"))]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        except (OSError, subprocess.TimeoutExpired) as error:
            return first_line(error)
    return first_line(done.stderr.strip() or f"exit status {done.returncode}") if done.returncode else None


# FlashAttention's version -> its package, its lowest compute capability, and the extra that installs it
_FLASH_ATTENTION = {4: ("flash-attn-4", (9, 0), "gpu"), 2: ("flash-attn", (8, 0), "flash2")}


@functools.cache
def flash_attn_support(version: int = 4) -> Support:
    """Whether FlashAttention's own package runs here: version 4 (CuTe DSL, from Hopper on) or 2 (from Ampere on)."""
    package, needed, extra = _FLASH_ATTENTION[version]
    if not (cuda := cuda_support()):
        return unsupported(f"FlashAttention {version} needs an NVIDIA GPU: {cuda.reason}", cuda.remedy)
    capability = compute_capability() or (0, 0)
    if capability < needed:
        return unsupported(
            f"FlashAttention {version} needs compute capability {needed[0]}.{needed[1]} or newer, "
            f"and this GPU has {capability[0]}.{capability[1]}.",
            f"Use a GPU of the {'Hopper' if version == 4 else 'Ampere'} generation or newer.",
        )
    installed = package_version(package)
    if installed is None:
        return unsupported(
            f"The package {package} is not installed.", f"Run pip install '.[{extra}]' in the course's folder."
        )
    return Support(True, f"{package} {installed} on compute capability {capability[0]}.{capability[1]}.")


def cuda_graph_support() -> Support:
    """Whether CUDA graphs work here. They work if torch computes on an NVIDIA GPU."""
    cuda = cuda_support()
    return cuda or unsupported(f"CUDA graphs need an NVIDIA GPU: {cuda.reason}", cuda.remedy)


@functools.cache
def _c_compiler() -> Support:
    """Whether there is a C compiler. Triton builds each kernel's launcher with CC, or else with gcc or clang."""
    chosen = os.environ.get("CC")
    for command in [chosen] if chosen else ["gcc", "clang"]:
        if shutil.which(command):
            return Support(True, f"C compiler {command}.")
    missing = f"CC names {chosen!r}, which is not on PATH" if chosen else "neither gcc nor clang is on PATH"
    return unsupported(
        f"Triton needs a C compiler to build its launchers, and {missing}.",
        "Install gcc (on Debian or Ubuntu: apt install gcc), or name a compiler in CC.",
    )
