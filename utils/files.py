"""The course's folder, files that are written whole or not at all, and tables that another machine recorded."""

from __future__ import annotations

import json
import os
import secrets
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

ROOT = Path(__file__).resolve().parent.parent  # the folder of the labs


def repository_address() -> str:
    """Return where the course is published: `Source` of `[project.urls]` in pyproject.toml, "" while it has none."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return project.get("urls", {}).get("Source", "").rstrip("/")


def write_whole(path: Path, content: str | bytes) -> None:
    """Replace a file in one step: readers find the old or the new file, never a part, even if the run is killed."""
    data, place = content.encode() if isinstance(content, str) else content, path.resolve()  # a link stays a link
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not path.is_file():  # /dev/stdout or a pipe, in whose place no file may come
        path.write_bytes(data)
        return
    part = place.with_name(f".{place.name}.{secrets.token_hex(8)}.part")
    try:
        part.write_bytes(data)
        os.replace(part, place)
    except OSError as error:
        raise type(error)(error.errno, error.strerror, str(path)) from None  # the caller's name, not the part's
    finally:
        part.unlink(missing_ok=True)


def output_path(name: str) -> Path:
    """Return where a lab writes a result: in `out` of the current folder, where the notebook is."""
    folder = Path.cwd() / "out"
    folder.mkdir(exist_ok=True)
    return folder / name


def recorded_table(path: str | Path, table: str) -> pd.DataFrame | None:
    """Return a table from a lab's record, the file that its last cell saves; print a line and return None if missing.

    A line above the table says which machine measured it, at which commit, and that this machine did not.
    """
    import pandas as pd

    path = Path(path)
    record = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"tables": {}}
    if table not in record["tables"]:
        print(f"No recorded table {table!r} in {path}.")
        return None
    print(f"Recorded on {record['machine']}, commit {record['commit']}. Not measured here:")
    return pd.DataFrame(record["tables"][table])
