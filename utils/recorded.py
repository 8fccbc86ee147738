"""A lab's tables as another machine recorded them: shown with where they come from, never as measured here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd


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
