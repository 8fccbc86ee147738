"""JupyterLab as the course starts it: quiet, on one lab, and without what only instructors use.

`labs open` starts it. This package is also an extension of the server: it keeps `git status` clean when a lab was only
looked at, and starts the kernels of labs' sources where the labs are. The folders `student` and `instructor` hold the settings of JupyterLab for each of them.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

import zmq
from jupyter_core.utils import ensure_async

from utils.files import ROOT

FIRST_PORT, TRIED_PORTS = 8888, 50
# Folders and files that a student does not need. They are hidden from the list of files, not locked away.
HIDDEN = (
    *("instructor", "tests", "tools", "expectations", "build", "course", "*.egg-info", "__pycache__", "*.pyc", "*~"),
    *("Makefile", "pyproject.toml", "constraints.txt", "*.yml", "nbgrader_config.py", "CITATION.cff", "C*.md"),
)


def has_display() -> bool:
    """Whether a browser window could open here."""
    if sys.platform in ("darwin", "win32"):
        return "SSH_CONNECTION" not in os.environ
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def free_port(first: int = FIRST_PORT) -> int:
    """Return the first free port from `first` on; 0, which lets the system choose one, if all tried ones are taken."""
    for port in range(first, first + TRIED_PORTS):
        with socket.socket() as probe:
            # Without it, a port whose last connection was closed a moment ago would count as taken.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    return 0


def jupyter_command(notebook: Path, port: int | None, instructor: bool = False) -> list[str]:
    """Return the command that starts JupyterLab on one notebook, from the folder of the labs.

    Args:
        notebook: a file below the folder of the labs.
        port: the port to serve on; None leaves it to JupyterLab's own settings.
        instructor: show nbgrader's formgrader and all files; students see neither.
    """
    # The notebook is the default address, not a file to open: the address that Jupyter prints then leads to it.
    command = [
        sys.executable,
        "-m",
        "jupyterlab",
        f"--ServerApp.root_dir={ROOT}",
        "--log-level=ERROR",
        "--LabApp.log_level=ERROR",
    ]
    command.append(f"--LabApp.default_url=/lab/tree/{notebook.relative_to(ROOT)}")
    settings = Path(__file__).parent / ("instructor" if instructor else "student")
    command.append(f"--LabApp.app_settings_dir={settings}")
    command.append(f"--ServerApp.jpserver_extensions={__name__}=True")
    if not instructor:
        command.append(f"--ContentsManager.hide_globs={list(HIDDEN)}")
    if zmq.has("curve"):  # otherwise every kernel warns on the terminal that its connection is not encrypted
        command.append("--KernelManager.transport_encryption=auto")
    if port is not None:
        command.append(f"--ServerApp.port={port}")
    if not has_display():
        command.append("--no-browser")
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        command.append("--allow-root")
    return command


def forwarding_command(port: int) -> str | None:
    """Return the command that makes this server reachable from the user's own machine; None unless this is SSH."""
    connection = os.environ.get("SSH_CONNECTION", "").split()
    if len(connection) != 4:
        return None
    return f"ssh -L {port}:localhost:{port} {os.environ.get('USER', 'you')}@{connection[2]}"


def keep_language_version(model: dict[str, Any], path: str, contents_manager: Any, **_: Any) -> None:
    """Keep the `language_info` that a notebook has on disk, so that opening a lab does not change its file.

    JupyterLab fills in the version of the running kernel and saves it, although nobody has edited anything.
    """
    if model.get("type") != "notebook" or not path.endswith(".ipynb") or not model.get("content"):
        return
    try:
        stored = json.loads(Path(contents_manager.root_dir, path).read_text(encoding="utf-8"))["metadata"][
            "language_info"
        ]
    except (OSError, ValueError, KeyError):
        return  # a new notebook
    model["content"]["metadata"]["language_info"] = stored


def show_language_version(contents_manager: Any) -> None:
    """Give out notebooks with the version of Python that JupyterLab would fill in; or a lab that was only opened is unsaved."""
    from ipykernel.ipkernel import IPythonKernel

    usual = contents_manager.get

    async def get(*arguments: Any, **options: Any) -> dict[str, Any]:
        model = await ensure_async(usual(*arguments, **options))
        if model.get("type") == "notebook" and model.get("content"):
            model["content"]["metadata"]["language_info"] = IPythonKernel.language_info
        return model

    contents_manager.get = get


def start_sources_at_the_top(kernel_manager: Any) -> None:
    """Let the kernel of a lab's source, opened as a notebook, start in the folder of the labs and not in `instructor/labs`.

    Its cells then find pictures and records as a student's do, and write nothing beside the source.
    """
    usual = kernel_manager.cwd_for_path

    def cwd_for_path(path: str, **options: Any) -> str:
        folder = usual(path, **options)
        return str(ROOT) if Path(folder).resolve() == ROOT.resolve() / "instructor" / "labs" else folder

    kernel_manager.cwd_for_path = cwd_for_path


def _jupyter_server_extension_points() -> list[dict[str, str]]:
    return [{"module": __name__}]


def _load_jupyter_server_extension(server: Any) -> None:
    server.no_browser_open_file = not has_display()  # nobody can open a file of this machine
    server.contents_manager.register_pre_save_hook(keep_language_version)
    show_language_version(server.contents_manager)
    start_sources_at_the_top(server.kernel_manager)
