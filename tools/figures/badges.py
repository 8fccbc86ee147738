"""The badges of the README, from `pyproject.toml`: `python -m tools.figures.badges` writes them to `docs/badges`.

They are files of the repository, so that they are true without a server that draws them.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from utils.files import ROOT

FOLDER = ROOT / "docs" / "badges"
WIDTH, PADDING = 6.6, 7  # pixels: a character at 11 px, and the space on each side of the text
LEFT, RIGHT = "#4a4a4a", "#0072b2"


def facts() -> dict[str, tuple[str, str]]:
    """Return {name: (left text, right text)} of every badge."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    ranges = {re.match(r"[\w-]+", line)[0]: line for line in project["dependencies"]}
    return {
        "licence": ("licence", project["license"]),
        "python": ("Python", _plain(project["requires-python"])),
        "torch": ("torch", _plain(ranges["torch"])),
        "gpu": ("GPU", "optional"),
    }


def _plain(text: str) -> str:
    """Write ">=3.11,<3.14" as "3.11 to 3.13"."""
    low, high = re.search(r">=([\d.]+),<([\d.]+)", text).groups()
    major, minor = high.split(".")[:2]
    last = f"{major}.{int(minor) - 1}"
    return low if low == last else f"{low} to {last}"


def badge(left: str, right: str) -> str:
    """Return a badge as SVG."""
    widths = [round(len(text) * WIDTH) + 2 * PADDING for text in (left, right)]
    total, middle = sum(widths), widths[0] + widths[1] / 2
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{total}" height="20" role="img" aria-label="{left}: {right}">\n'
        f'<rect width="{total}" height="20" rx="3" fill="{RIGHT}"/>\n'
        f'<path d="M3 0h{widths[0] - 3}v20H3a3 3 0 0 1-3-3V3a3 3 0 0 1 3-3z" fill="{LEFT}"/>\n'
        f'<g fill="#fff" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11" text-anchor="middle">\n'
        f'<text x="{widths[0] / 2}" y="14">{left}</text><text x="{middle}" y="14">{right}</text>\n</g>\n</svg>\n'
    )


def main(folder: Path = FOLDER) -> None:
    """Write every badge to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, texts in facts().items():
        (folder / f"{name}.svg").write_text(badge(*texts), encoding="utf-8")


if __name__ == "__main__":
    main()
