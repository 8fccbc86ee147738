"""Where the course is published: `python -m tools.address` writes what follows from it into README.md and docs/students.md.

The one setting is `Source` of `[project.urls]` in pyproject.toml. While it is missing, README begins at `make lab`, and no
document and no page of the site shows a link that would lead nowhere. With it, `labs build` also gives each notebook a cell
that fetches the course on a bare machine.
"""

from __future__ import annotations

import re

from utils.files import ROOT, repository_address

LABS = ("lab1", "lab2_flexattention", "lab3_gluon", "lab4_sdpa")


def hosted(address: str, lab: str) -> dict[str, str]:
    """Return {host: address at which it opens the notebook of a lab}; nothing for a repository that is not on GitHub."""
    match = re.fullmatch(r"https://github\.com/([^/]+/[^/]+)", address)
    if match is None:
        return {}
    notebook = f"{match[1]}/blob/main/{lab}.ipynb"
    return {
        "Colab": f"https://colab.research.google.com/github/{notebook}",
        "Kaggle": f"https://kaggle.com/kernels/welcome?src=https://github.com/{notebook}",
    }


def start(address: str) -> str:
    """Return README's first commands, and the links that open a lab without an installation."""
    lines = ["```bash"]
    if address:
        lines.append(f"git clone {address} gpu-efficiency-labs && cd gpu-efficiency-labs")
    lines += ["make lab     # opens lab 1", "make test    # takes four minutes", "```"]
    links = [f"lab {lab[3]} {host}" for lab in LABS for host in hosted(address, lab)]
    targets = [target for lab in LABS for target in hosted(address, lab).values()]
    if links:
        lines += ["", "Open in " + ", ".join(f"[{text}]({to})" for text, to in zip(links, targets, strict=True)) + "."]
    return "\n".join(lines)


def first_cell(address: str) -> str:
    """Return what a notebook on a bare machine runs first: the course beside it, with the tested versions."""
    fetch = [f"!git clone --depth 1 {address} gpu-efficiency-labs", "%cd gpu-efficiency-labs"] if address else []
    return "\n".join(["```", *fetch, "%pip install -c constraints.txt -e .", "```"])


def written(text: str, address: str) -> str:
    """Return a document with the parts between `<!-- start -->` or `<!-- first cell -->` and the mark's end as they should be."""
    for mark, part in (("start", start(address)), ("first cell", first_cell(address))):
        found = re.compile(rf"(<!-- {mark} -->\n).*?(<!-- /{mark} -->)", re.DOTALL)
        text = found.sub(lambda match, part=part: match[1] + part + "\n" + match[2], text)
    return text


if __name__ == "__main__":
    for name in ("README.md", "docs/students.md"):
        document = ROOT / name
        document.write_text(written(document.read_text(encoding="utf-8"), repository_address()), encoding="utf-8")
