"""Where the course lies, files that are whole or not there, and the tables that another machine recorded."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

ROOT = Path(__file__).resolve().parent.parent  # the folder of the labs


def write_whole(path: Path, content: str | bytes) -> None:
    """Replace a file in one step: a reader, or a run that is killed, finds the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)  # mkstemp's files are private
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def recorded_table(path: str | Path, table: str) -> pd.DataFrame | None:
    """A table of a lab's record (as the lab's last cell saves it); None, said in a line, if there is no such table.

    Above the table stands which machine measured it, at which commit, and that this one did not.
    """
    import pandas as pd

    path = Path(path)
    record = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"tables": {}}
    if table not in record["tables"]:
        print(f"No recorded table {table!r} in {path}.")
        return None
    print(f"Recorded on {record['machine']}, commit {record['commit']}. Not measured here:")
    return pd.DataFrame(record["tables"][table])
