"""Facts for the record of a result: machine, versions, commit, and the GPU's clocks, power and heat (read, never set)."""

from __future__ import annotations

import functools
import os
import platform
import subprocess
from pathlib import Path

import psutil
import torch

from utils.files import ROOT
from utils.machine.versions import package_version
from utils.validation import first_line

# Reasons of NVML for low clocks; source: nvmlClocksEventReasons in nvml.h.
CLOCK_REASONS = {
    0x001: "idle",
    0x002: "application clocks set",
    0x004: "software power cap",
    0x008: "hardware slowdown",
    0x010: "sync boost",
    0x020: "software thermal slowdown",
    0x040: "hardware thermal slowdown",
    0x080: "hardware power brake",
    0x100: "display clocks set",
}
# Low clocks for these two reasons are no fault.
HARMLESS_REASONS = {"idle", "application clocks set"}


@functools.cache
def cpu_model() -> str:
    """Return the system's name of the CPU, such as "AMD EPYC 9454".

    psutil does not know the name. py-cpuinfo needs more than a second for it and starts processes.
    """
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() in ("model name", "Model"):
                return value.strip()
    except OSError:
        pass
    return platform.processor() or platform.machine() or "unknown"


@functools.cache
def last_level_cache_bytes() -> int | None:
    """Return the bytes of the last-level cache of core 0, from Linux's sysfs; None if sysfs does not know.

    psutil does not know the size, and py-cpuinfo adds up the caches of all cores.
    """
    caches = sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"))  # by level; "32768K"
    try:
        return 1024 * int(caches[-1].read_text().strip().removesuffix("K"))
    except (IndexError, OSError, ValueError):
        return None


def available_memory_bytes(device: torch.device) -> int:
    """Return the bytes that are free for new tensors: on a CPU without swapping."""
    if device.type == "cuda":  # torch's allocator may hold memory that it does not use
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    return psutil.virtual_memory().available


@functools.cache
def git_state(root: Path = ROOT) -> dict:
    """Return {"commit": hash or None, "dirty": bool or None} of the project. Both are None without a git repository.

    For a copy without history, the environment variable LABS_COMMIT names the commit, followed by "-dirty" if files
    differ from it. If the copy lies inside a different repository, the commit of that repository is not reported.
    """
    if commit := os.environ.get("LABS_COMMIT"):
        return {"commit": commit.removesuffix("-dirty"), "dirty": commit.endswith("-dirty")}
    command = ["git", f"--git-dir={root / '.git'}", f"--work-tree={root}", "status", "--porcelain=v2", "--branch"]
    try:
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return {"commit": None, "dirty": None}
    (_, _, commit), *changes = (line.split(" ", 2) for line in done.stdout.splitlines())
    return {"commit": None if commit == "(initial)" else commit, "dirty": any(mark != "#" for mark, *_ in changes)}


def float32_matmul_precision() -> str:
    """Return torch's setting: "highest", "high" or "medium". If its two interfaces disagree, the newer interface counts."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # torch refuses to answer after both interfaces were used
        newer = torch.backends.cuda.matmul.fp32_precision
        return {"ieee": "highest", "tf32": "high", "bf16": "medium"}.get(newer, "highest")


def environment(device: torch.device | str | None = None) -> dict:
    """Return machine, versions and commit for the record of a result. It has no host names, user names or paths."""
    gpu = None
    if torch.cuda.is_available() and torch.device(device or "cuda").type == "cuda":
        gpu = torch.cuda.get_device_properties(device or torch.cuda.current_device())
    return {
        "gpu": gpu and gpu.name,
        "gpu_sm_count": gpu and gpu.multi_processor_count,
        "compute_capability": gpu and f"{gpu.major}.{gpu.minor}",
        "driver": gpu and _read_nvml("nvmlSystemGetDriverVersion"),
        "cuda": torch.version.cuda,
        "cudnn": gpu and torch.backends.cudnn.version(),
        "torch": torch.__version__,
        **{name: package_version(name) for name in ("triton", "numpy", "transformers")},
        "flash_attn_4": package_version("flash-attn-4"),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": cpu_model(),
        "cpu_count": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "float32_matmul_precision": float32_matmul_precision(),
        **git_state(),
    }


@functools.cache
def _nvml():
    """Return the initialised binding of NVML. Raise NVML's error without a driver, or ImportError without the binding."""
    import pynvml

    pynvml.nvmlInit()
    return pynvml


def _read_nvml(function: str, *arguments):
    """Call a function of NVML; return None without NVML, or if this GPU or driver does not support the function."""
    try:
        return getattr(_nvml(), function)(*arguments)
    except Exception:
        return None


@functools.cache
def _nvml_handle(index: int):
    """Return NVML's handle of torch's GPU `index`. It is found by UUID, because CUDA_VISIBLE_DEVICES changes torch's indices."""
    uuid = str(torch.cuda.get_device_properties(index).uuid)
    if not uuid.startswith(("GPU-", "MIG-")):
        uuid = f"GPU-{uuid}"
    return _nvml().nvmlDeviceGetHandleByUUID(uuid)


def gpu_state(device: torch.device | str | int | None = None) -> dict:
    """Read the GPU's clocks (MHz), power (W), temperature (C) and throttle reasons, or {"unavailable": why}."""
    if not torch.cuda.is_available():
        return {"unavailable": "There is no CUDA GPU here."}
    index = torch.device("cuda" if device is None else device).index
    try:
        nvml, handle = _nvml(), _nvml_handle(torch.cuda.current_device() if index is None else index)
    except Exception as error:
        return {"unavailable": f"NVML is not read: {first_line(error)}."}

    def read(function, *arguments):
        return _read_nvml(function, handle, *arguments)

    milliwatts, limit = read("nvmlDeviceGetPowerUsage"), read("nvmlDeviceGetEnforcedPowerLimit")
    bits = read("nvmlDeviceGetCurrentClocksEventReasons")
    return {
        "sm_clock_mhz": read("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM),
        "sm_clock_max_mhz": read("nvmlDeviceGetMaxClockInfo", nvml.NVML_CLOCK_SM),
        "memory_clock_mhz": read("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_MEM),
        "power_w": None if milliwatts is None else milliwatts / 1000.0,
        "power_limit_w": None if limit is None else limit / 1000.0,
        "temperature_c": read("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU),
        "throttle_reasons": None if bits is None else [name for bit, name in CLOCK_REASONS.items() if bits & bit],
    }


def slowdown_reasons(state: dict | None) -> set[str]:
    """Return the reasons that hold the clocks back, such as power or heat; empty if the clocks are free."""
    return set((state or {}).get("throttle_reasons") or ()) - HARMLESS_REASONS
