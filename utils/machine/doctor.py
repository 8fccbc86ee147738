"""`labs doctor`: which parts of each lab this machine can run, and whether the installation is complete."""

from __future__ import annotations

import platform
from collections.abc import Callable
from importlib import metadata

import torch

from utils.files import ROOT
from utils.machine import device
from utils.machine.environment import cpu_model
from utils.machine.versions import package_version

DISTRIBUTION = "gpu-efficiency-labs"
YES, NO = "[green]yes[/]", "[red]no[/]"


# Lab -> its topic, and a probe for each part that needs more than Python and torch
LABS: dict[str, tuple[str, dict[str, Callable[[], device.Support]]]] = {
    "lab1": (
        "GEMM, roofline, Gemma-3 layer, fusion, flash attention",
        {
            "Triton GEMM": device.triton_support,
            "torch.compile": device.compile_support,
            "CUDA graphs": device.cuda_graph_support,
        },
    ),
    "lab2_flexattention": (
        "FlexAttention: masks, block sparsity, compilation",
        {"compiled FlexAttention": device.compile_support, "CuTe path": device.flash_attn_support},
    ),
    "lab3_gluon": (
        "A warp-specialized FlashAttention in Gluon",
        {"compiling for sm_90a": device.offline_compile_support, "running on Hopper": device.gluon_support},
    ),
    "lab4_sdpa": ("SDPA backends and cuDNN", {"cuDNN and efficient backends": device.cuda_support}),
}


def examine_lab(lab: str) -> dict:
    """Examine one lab on this machine: whether its notebook is here, and which of its parts run."""
    title, probes = LABS[lab]
    parts = []
    for name, probe in probes.items():
        support = probe()
        parts.append({"part": name, "runs": bool(support), "reason": support.reason, "remedy": support.remedy})
    return {"lab": lab, "title": title, "notebook": (ROOT / f"{lab}.ipynb").exists(), "parts": parts}


def installation_faults() -> list[str]:
    """List the faults of the installation: required packages that are missing or have a wrong version."""
    from packaging.requirements import Requirement

    try:
        lines = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        return [f"{DISTRIBUTION} is not installed in this Python: run `make env`, then use .venv/bin/labs."]
    faults = []
    for line in lines:
        requirement = Requirement(line)
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        version = package_version(requirement.name)
        if version is None:
            faults.append(f"{requirement.name} is missing ({requirement} is needed): run `make env`.")
        elif not requirement.specifier.contains(version, prereleases=True):
            faults.append(f"{requirement.name} {version} is installed and {requirement} is needed: run `make env`.")
    return faults


def examine_machine(providers: list[dict]) -> dict:
    """Return the report of `labs doctor` as plain data. providers: the rows of `backend_table()`."""
    chosen = device.default_device()
    packages = ("torch", "triton", "transformers", "nbgrader", "jupyterlab", "flash-attn-4", "flash-attn")
    return {
        "machine": {
            "device": str(chosen),
            "name": torch.cuda.get_device_name() if chosen.type == "cuda" else cpu_model(),
            "gpu_specs_row": device.detect_gpu(),
            "no_gpu": [] if (cuda := device.cuda_support()) else [cuda.reason, cuda.remedy],
            "python": platform.python_version(),
            "versions": {name: package_version(name) for name in packages},
        },
        "labs": [examine_lab(lab) for lab in LABS],
        "attention_providers": providers,
        "faults": installation_faults(),
    }


def print_report(report: dict) -> None:
    """Print the report as a table, with the reason and the remedy for each part and backend that does not run."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Column, Table

    console = Console()
    machine = report["machine"]
    known = f", GPU_SPECS row {machine['gpu_specs_row']}" if machine["gpu_specs_row"] else ""
    versions = " · ".join(f"{name} {version}" for name, version in machine["versions"].items() if version)
    console.print(f"[bold]{machine['name']}[/] ({machine['device']}{known})")
    console.print(f"Python {machine['python']} · {versions}\n")
    no_gpu = machine["no_gpu"]  # printed once here, and removed from each row
    if no_gpu:
        console.print(escape(f"No GPU can be used here: {' '.join(no_gpu)}\n"))
    wide = Column("What it is; why not, and what to do", ratio=1)
    table = Table(Column("Lab", no_wrap=True), Column("Part", max_width=24), "Here", wide, pad_edge=False)
    first_of: dict[str, str] = {}  # a reason -> the first part with this reason

    def add_part(name: str, runs: bool, note: str, entry: dict) -> None:
        if not runs:
            note = f"{entry['reason']} {entry['remedy']}"
            for sentence in (*no_gpu, "there is no NVIDIA GPU. Use a machine with an NVIDIA GPU."):
                note = note.replace(sentence, "")
            note = note.strip().rstrip(":") or "It needs a GPU."
            first = first_of.setdefault(note, name)
            note = note if first == name else f"As for {first!r} above."
        table.add_row("", name, YES if runs else NO, escape(note))

    for lab in report["labs"]:
        table.add_section()
        note = lab["title"] if lab["notebook"] else f"{lab['lab']}.ipynb is not in this folder."
        table.add_row(f"[bold]{lab['lab']}[/]", "", YES if lab["notebook"] else NO, note)
        for part in lab["parts"]:
            add_part(part["part"], part["runs"], part["reason"], part)
    table.add_section()
    table.add_row("[bold]attention[/]", "", YES, "the backends of utils.attention")
    for row in report["attention_providers"]:
        ran = row["implementation"]
        version = f" ({ran})" if ran and torch.__version__ not in ran else ""  # torch's version is printed above
        add_part(row["backend"], row["ok"], row["summary"] + version, row)
    console.print(table)
    for fault in report["faults"]:
        console.print(f"[bold red]Broken installation:[/] {escape(fault)}")
