"""JSON files with a schema. A file is always written whole. A damaged or foreign file raises an error."""

from __future__ import annotations

import datetime
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from utils.bench.errors import BenchError
from utils.files import write_whole


def utc_now() -> str:
    """Return the time in UTC, such as "2026-01-31T12:00:00+00:00"."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _finite(value: Any) -> Any:
    """Replace NaN and infinity by null. JSON has no such numbers, and many readers would refuse the file."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


def to_json(document: dict) -> str:
    """Return a document as JSON text; numbers that are not finite become null."""
    return json.dumps(_finite(document), indent=1, allow_nan=False) + "\n"


def write_json(path: Path, document: dict) -> Path:
    """Write a document as JSON, replacing the file in one step, and return the path."""
    write_whole(path, to_json(document))
    return path


@dataclass(frozen=True)
class Schema:
    """A kind of document: its name, its version, and the fields that every document of this kind has."""

    name: str
    version: int
    fields: tuple[str, ...] = ()

    def document(self, **fields: Any) -> dict:
        """Make a document of this schema with these fields."""
        return {"schema": self.name, "version": self.version, **fields}

    def read(self, path: Path) -> dict:
        """Read a document; raise BenchError if the file is truncated, or of another schema or version."""
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise BenchError(f"{path} cannot be read: {error.strerror}.") from None
        except (ValueError, RecursionError) as error:  # ValueError also if the bytes are no text
            raise BenchError(f"{path} is truncated or not JSON ({error}). Run again to make a whole one.") from None
        schema = document.get("schema") if isinstance(document, dict) else None
        if schema != self.name:
            raise BenchError(f"{path} is JSON but no {self.name} document: its schema is {schema!r}.")
        if (version := document.get("version")) != self.version:
            raise BenchError(
                f"{path} has version {version!r} of the schema {self.name}; this program reads version {self.version}. "
                "Run again to make a file of this version."
            )
        if missing := [field for field in self.fields if field not in document]:
            raise BenchError(f"{path} is truncated: {', '.join(missing)} missing from a {self.name} document.")
        return document
