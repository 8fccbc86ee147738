"""`labs doctor`: which parts of each lab this machine can run, and whether the installation is complete."""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch

from utils.files import ROOT
from utils.machine import device
from utils.machine.environment import cpu_model, package_version
from utils.machine.versions import untested_versions

DISTRIBUTION = "gpu-efficiency-labs"
YES, NO = "[green]yes[/]", "[red]no[/]"


@dataclass(frozen=True)
class Part:
    """A part of a lab that needs more than Python and torch, and the probe that finds out whether it runs here."""

    name: str
    support: Callable[[], device.Support]


@dataclass(frozen=True)
class Lab:
    """A lab and the parts of it that need more than Python and torch."""

    name: str
    title: str
    parts: tuple[Part, ...]

    @property
    def notebook(self) -> Path:
        """Path of the notebook, whether it exists or not."""
        return ROOT / f"{self.name}.ipynb"


LABS = (
    Lab(
        "lab1",
        "GEMM, roofline, Gemma-3 layer, fusion, flash attention",
        (
            Part("Triton GEMM", device.triton_support),
            Part("torch.compile", device.compile_support),
            Part("CUDA graphs", device.cuda_graph_support),
        ),
    ),
    Lab(
        "lab2_flexattention",
        "FlexAttention: masks, block sparsity, compilation",
        (Part("compiled FlexAttention", device.compile_support), Part("CuTe path", device.flash_attn_support)),
    ),
    Lab(
        "lab3_gluon",
        "A warp-specialized FlashAttention in Gluon",
        (Part("compiling for sm_90a", device.offline_compile_support), Part("running on Hopper", device.gluon_support)),
    ),
    Lab("lab4_sdpa", "SDPA backends and cuDNN", (Part("cuDNN and efficient backends", device.cuda_support),)),
)


def examine_lab(lab: Lab) -> dict:
    """Examine one lab on this machine: `status` is "runs", "runs in part" or "no notebook"."""
    parts = []
    for part in lab.parts:
        support = part.support()
        parts.append({"part": part.name, "runs": bool(support), "reason": support.reason, "remedy": support.remedy})
    if not lab.notebook.exists():
        status = "no notebook"
    else:
        status = "runs" if all(part["runs"] for part in parts) else "runs in part"
    return {"lab": lab.name, "title": lab.title, "status": status, "parts": parts}


def installation_faults() -> list[str]:
    """List what is broken in the installation: required packages that are missing or outside their range."""
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
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            faults.append(f"{requirement.name} is missing ({requirement} is needed): run `make env`.")
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            faults.append(f"{requirement.name} {version} is installed and {requirement} is needed: run `make env`.")
    return [*faults, *untested_versions()]


def examine_machine(providers: list[dict]) -> dict:
    """Return everything that `labs doctor` says, as plain data.

    Args:
        providers: the rows of `utils.attention.backend_table()`.
    """
    chosen = device.default_device()
    packages = ("torch", "triton", "transformers", "nbgrader", "jupyterlab", "flash-attn-4", "flash-attn")
    return {
        "machine": {
            "device": str(chosen),
            "name": torch.cuda.get_device_name() if chosen.type == "cuda" else cpu_model(),
            "gpu_specs_row": device.detect_gpu(),
            "python": platform.python_version(),
            "versions": {name: package_version(name) for name in packages},
        },
        "labs": [examine_lab(lab) for lab in LABS],
        "attention_providers": providers,
        "faults": installation_faults(),
    }


def print_report(report: dict) -> None:
    """Print the report as tables, with the reason and the remedy for each part that does not run."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    machine = report["machine"]
    row = machine["gpu_specs_row"]
    known = f", GPU_SPECS row {row}" if row else ""
    versions = " · ".join(f"{name} {version}" for name, version in machine["versions"].items() if version)
    console.print(f"[bold]{machine['name']}[/] ({machine['device']}{known})")
    console.print(f"Python {machine['python']} · {versions}\n")

    table = Table(pad_edge=False)
    table.add_column("Lab", no_wrap=True)
    table.add_column("Part", max_width=24)
    table.add_column("Here", no_wrap=True)
    table.add_column("Why, and what to do", ratio=1)
    for lab in report["labs"]:
        table.add_section()
        missing = lab["status"] == "no notebook"
        note = f"{lab['lab']}.ipynb is not in this folder." if missing else lab["title"]
        table.add_row(f"[bold]{lab['lab']}[/]", "", NO if missing else YES, note)
        for part in lab["parts"]:
            note = part["reason"] if part["runs"] else f"{part['reason']} {part['remedy']}".rstrip()
            table.add_row("", part["part"], YES if part["runs"] else NO, escape(note))
    console.print(table)

    table = Table(pad_edge=False)
    table.add_column("Attention backend", no_wrap=True)
    table.add_column("Here", no_wrap=True)
    table.add_column("What it is; why not, and what to do", ratio=1)
    for row in report["attention_providers"]:
        if row["ok"]:
            note = row["summary"] + (f" ({row['implementation']})" if row["implementation"] else "")
        else:
            note = f"{row['reason']} {row['remedy']}".rstrip()
        table.add_row(row["backend"], YES if row["ok"] else NO, escape(note))
    console.print(table)
    for fault in report["faults"]:
        console.print(f"[bold red]Broken installation:[/] {escape(fault)}")
