"""The course's folder, safe replacement of files, and tables from a lab's record."""

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
    """Return the address of the published course: `Source` of `[project.urls]` in pyproject.toml, or "" without an entry."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return project.get("urls", {}).get("Source", "").rstrip("/")


def write_whole(path: Path, content: str | bytes) -> None:
    """Replace a file in one step. Readers find the old or the new file, never a part of it, even if the process is killed."""
    data, place = content.encode() if isinstance(content, str) else content, path.resolve()  # a link stays a link
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not path.is_file():  # a device such as /dev/stdout or a pipe: do not put a file in its place
        path.write_bytes(data)
        return
    part = place.with_name(f".{place.name}.{secrets.token_hex(8)}.part")
    try:
        part.write_bytes(data)
        os.replace(part, place)
    except OSError as error:
        raise type(error)(error.errno, error.strerror, str(path)) from None  # name the caller's file, not the part
    finally:
        part.unlink(missing_ok=True)


def output_path(name: str) -> Path:
    """Return the path for a lab's result: in the folder `out` beside the notebook, in the current folder."""
    folder = Path.cwd() / "out"
    folder.mkdir(exist_ok=True)
    return folder / name


def recorded_table(path: str | Path, table: str) -> pd.DataFrame | None:
    """Return a table from a lab's record, the file that the lab's last cell saves. If it is missing, print a line and return None.

    A line above the table names the machine and the commit of the measurement, and says that this machine did not measure it.
    """
    import pandas as pd

    path = Path(path)
    record = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"tables": {}}
    if table not in record["tables"]:
        print(f"No recorded table {table!r} in {path}.")
        return None
    print(f"Recorded on {record['machine']}, commit {record['commit']}. Not measured here:")
    return pd.DataFrame(record["tables"][table])
