"""What is published: the pages, the students' notebooks with outputs, and the links between them."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import nbformat

from tools.address import hosted
from utils.files import ROOT, repository_address

# {file of the repository: page of the site}, in the order of the navigation, under the headings of HEADINGS.
GLOSSARY = "docs/glossary.md"
HEADINGS = {
    "Start": {"docs/students.md": "students.md", GLOSSARY: "glossary.md"},
    "Labs": {
        "lab1.ipynb": "lab1.ipynb",
        "lab2_flexattention.ipynb": "lab2_flexattention.ipynb",
        "lab3_gluon.ipynb": "lab3_gluon.ipynb",
        "lab4_sdpa.ipynb": "lab4_sdpa.ipynb",
        "docs/points.md": "points.md",
    },
    "How and how fast": {
        "tools/site/roofline.html": "roofline.md",
        "docs/measuring.md": "measuring.md",
        "docs/kernels/attention.md": "attention.md",
        "docs/kernels/backward.md": "backward.md",
        "docs/kernels/decode.md": "decode.md",
        "docs/kernels/gemm.md": "gemm.md",
        "docs/flexattention.md": "flexattention.md",
    },
    "Reference": {"docs/utils.md": "utils.md", "api": "api.md"},
    "Teach and contribute": {
        "docs/instructors.md": "instructors.md",
        "instructor/README.md": "instructor-sources.md",
        "docs/grading.md": "grading.md",
        "docs/contributing.md": "contributing.md",
        "docs/versions.md": "versions.md",
        "tests/README.md": "tests.md",
        "CHANGELOG.md": "changelog.md",
    },
}
PAGES = {"README.md": "index.md", **{file: page for pages in HEADINGS.values() for file, page in pages.items()}}
OTHER_MEANINGS = ("kernel", "block (CTA)", "grid")  # of Jupyter, of `with`, of a table: no link at their first use
WITHHELD = "This output quotes lines of the answer, so it is left out here. Run the cell to see yours.\n"
_LINK = re.compile(r"(!?\[[^\]]*\]\()([^)\s#]+)(#[^)\s]*)?\)")
_SOURCE = re.compile(r'(?<=src=")([^":]+)(?=")')  # of an image that stands as HTML
_PART = re.compile(r"^# (Part (\d+): .+)", re.MULTILINE)
_TERM = re.compile(r"^\| (?!Word|-)([^|]+?) \|", re.MULTILINE)  # first cell of a row of the glossary
# What no word of the glossary is linked in: folded hints, code, formulas, links, tags, headings.
_NOT_PROSE = re.compile(
    r"(<details>\s*<summary>Hint.*?</details>|```.*?```|`[^`\n]*`|\$\$.*?\$\$|\$[^$\n]*\$|!?\[[^\]]*\]\([^)]*\)|<[^>]*>|^#.*?$)",
    re.DOTALL | re.MULTILINE,
)


def with_outputs(student: str, executed: Mapping[str, Any]) -> str:
    """Return the students' notebook with the outputs that the same cells had in a run of the solved lab.

    Args:
        student: the notebook that students get, as text.
        executed: the executed notebook of the instructor.
    """
    notebook = nbformat.reads(student, as_version=4)
    ran = {cell["id"]: cell for cell in executed["cells"] if cell["cell_type"] == "code"}
    for cell in notebook.cells:
        if cell.cell_type == "code" and cell.id in ran:
            cell.execution_count = ran[cell.id].get("execution_count")
            cell.outputs = said_once([nbformat.from_dict(output) for output in ran[cell.id].get("outputs", [])])
    return nbformat.writes(notebook) + "\n"


def said_once(outputs: list[nbformat.NotebookNode]) -> list[nbformat.NotebookNode]:
    """Return outputs without empty ones, and without a second "passed", which comes from the hidden check."""
    kept: list[nbformat.NotebookNode] = []
    for output in outputs:
        if output.output_type == "stream":
            output.text = re.sub(r"^(✓.*\n)\1", r"\1", output.text, flags=re.MULTILINE)
        text = output.get("text", "a picture or a table")
        if text.strip() and not (text.startswith("✓") and output in kept):
            kept.append(output)
    return kept


def withhold(notebook: str, leaks: Callable[[str], bool]) -> str:
    """Return a notebook in which a sentence stands in place of each output that quotes an answer.

    The cells of lab 3 that show the machine code of a kernel print the kernel's lines beside it, for example.

    Args:
        notebook: the notebook, as text.
        leaks: whether a text, an output as JSON, holds lines of a solution.
    """
    document = nbformat.reads(notebook, as_version=4)
    for cell in document.cells:
        if cell.cell_type == "code":
            cell.outputs = [
                nbformat.v4.new_output("stream", text=WITHHELD) if leaks(json.dumps(output)) else output
                for output in cell.outputs
            ]
    return nbformat.writes(document) + "\n"


def anchor_of(term: str) -> str:
    """Return the anchor of a word on the glossary's page."""
    return "word-" + re.sub(r"\W+", "-", term.lower())


def link_first_uses(text: str, terms: list[str]) -> str:
    """Return Markdown in which each word of the glossary leads there where it stands first; it is taken out of `terms`."""
    names = {name.lower(): term for term in terms for name in re.sub(r" \(.*", "", term).split(", ")}

    def link(match: re.Match) -> str:
        term = names[match[1].lower()]
        if term not in terms or (term.isupper() and match[1] != term):
            return match[0]
        terms.remove(term)
        return f'<a href="glossary.html#{anchor_of(term)}">{match[0]}</a>'

    any_name = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
    words = re.compile(rf"\b({any_name})s?\b", re.IGNORECASE)
    parts = _NOT_PROSE.split(text)
    return "".join(words.sub(link, part) if names and i % 2 == 0 else part for i, part in enumerate(parts))


class Links:
    """Rewrites the links of a document for the site, and remembers the files that they need.

    A link to a page of the site leads to the page, a link to another file to a copy of it, and a link to a folder becomes
    its text: the site has no folders.
    """

    def __init__(self, root: Path = ROOT):
        self.root = root
        self.files: dict[str, str] = {}  # {file of the repository: path on the site}

    def rewrite(self, text: str, document: str) -> str:
        """Return the Markdown `text` of a document of the repository with the links of the site."""
        text = re.sub(r"\[(!\[[^\]]*\]\([^)]+\))\]\([^)]+\)", r"\1", text)  # a badge is no link here
        parts = re.split(r"(```.*?```)", text, flags=re.DOTALL)  # code stays as it is
        return "".join(
            part
            if part.startswith("```")
            else _SOURCE.sub(lambda match: self._copy(match[1], document), self._links(part, document))
            for part in parts
        )

    def _links(self, text: str, document: str) -> str:
        return _LINK.sub(lambda match: self._link(match, document), text)

    def _copy(self, target: str, document: str) -> str:
        """Return the path on the site of a file that a document shows, and remember to copy it."""
        file = os.path.normpath(Path(document).parent / target)
        self.files[file] = f"files/{file}"
        return self.files[file]

    def _link(self, match: re.Match, document: str) -> str:
        opening, target, anchor = match.groups()
        if re.match(r"[a-z]+:", target):
            return match[0]
        file = os.path.normpath(Path(document).parent / target)
        if file in PAGES:
            return f"{opening}{PAGES[file]}{anchor or ''})"
        place = self.root / file
        if place.is_dir():
            return opening.removesuffix("](").removeprefix("[")
        if not place.is_file():
            raise FileNotFoundError(f"{document} links to {target}, which is not there.")
        # Browsers show a text file, and download one that ends in .py or has no ending.
        path = f"files/{file}" if place.suffix in (".svg", ".png", ".md", ".json") else f"files/{file}.txt"
        self.files[file] = path
        if opening.startswith("!"):
            return f"{opening}{path})"
        return f"{opening}{path})" if opening.startswith("[!") else f'<a href="{path}">{opening[1:-2]}</a>'


def collect(folder: Path, notebooks: Mapping[str, str]) -> dict[str, bytes]:
    """Write the sources of the site into `folder`; return {path: bytes} of all that will be published.

    Args:
        folder: an empty folder.
        notebooks: {name of a lab: its notebook with outputs, as text}.
    """
    links = Links()
    published: dict[str, bytes] = {}
    glossary = (ROOT / GLOSSARY).read_text(encoding="utf-8")
    for file, page in PAGES.items():
        if file.endswith(".ipynb"):
            lab = file.removesuffix(".ipynb")
            notebook = json.loads(notebooks[lab])
            for cell in notebook["cells"]:
                if cell["cell_type"] == "markdown":
                    cell["source"] = links.rewrite("".join(cell["source"]), file)
                cell["metadata"].pop("nbgrader", None)
            terms = [term for term in _TERM.findall(glossary) if term not in OTHER_MEANINGS]
            for name, part in parts_of(notebook, lab).items():
                for cell in part["cells"] if "-part" in name else ():
                    if cell["cell_type"] == "markdown":
                        cell["source"] = link_first_uses(cell["source"], terms)
                published[name] = json.dumps(part, indent=1).encode()
            published[f"files/{file}"] = (ROOT / file).read_bytes()  # to download, without outputs
        elif file.endswith(".html"):
            published[page] = roofline_page((ROOT / file).read_text(encoding="utf-8")).encode()
        elif file == "api":
            published[page] = api_page().encode()
        else:
            text = links.rewrite((ROOT / file).read_text(encoding="utf-8"), file)
            if file == GLOSSARY:
                text = _TERM.sub(lambda match: f'| <a id="{anchor_of(match[1])}"></a>{match[1]} |', text)
            published[page] = (text + (navigation() if file == "README.md" else "")).encode()
    for file, path in links.files.items():
        published[path] = (ROOT / file).read_bytes()
    for path, data in published.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
    shutil.copy(Path(__file__).with_name("conf.py"), folder)
    return published


def parts_of(notebook: dict, lab: str) -> dict[str, dict]:
    """Split a lab's notebook: {page: notebook} of what stands before Part 1, and of each part."""
    pages, titles, page = {f"{lab}.ipynb": []}, {}, f"{lab}.ipynb"
    for cell in notebook["cells"]:
        heading = _PART.search(cell["source"]) if cell["cell_type"] == "markdown" else None
        if heading:
            if before := cell["source"][: heading.start()].strip():  # the end of the part before, in the same cell
                pages[page].append({**cell, "id": f"{cell['id']}-end", "source": before})
                cell["source"] = cell["source"][heading.start() :]
            page = f"{lab}-part{heading[2]}.ipynb"
            pages[page], titles[page] = [], heading[1]
        pages[page].append(cell)
    entries = "\n".join(f"{title} <{Path(page).stem}>" for page, title in titles.items())
    hosts = "".join(
        f' · <a href="{target}">open in {host}</a>' for host, target in hosted(repository_address(), lab).items()
    )
    download = f'<a href="files/{lab}.ipynb" download>Download this lab</a>{hosts}'
    first = pages[f"{lab}.ipynb"]
    first.insert(1, nbformat.v4.new_markdown_cell(f"```{{toctree}}\n:hidden:\n\n{entries}\n```"))
    first.insert(1, nbformat.v4.new_markdown_cell(download))
    return {page: {**notebook, "cells": cells} for page, cells in pages.items()}


def roofline_page(template: str) -> str:
    """Return the page of the roofline with sliders: a template with the rates of `GPU_SPECS` in it."""
    from utils.config import DTYPES, GPU_SPECS

    rates = {
        name: {"bandwidth": spec["memory_bandwidth_tb_s"], **{dtype: spec[f"{dtype}_tflops"] for dtype in DTYPES}}
        for name, spec in GPU_SPECS.items()
    }
    body = template.replace("GPU_SPECS", json.dumps(rates))
    return f"# A roofline to move\n\nChoose, and see what sets the pace: arithmetic or memory.\n\n```{{raw}} html\n{body}```\n"


def navigation() -> str:
    """Return the tables of contents that Sphinx makes the navigation from."""
    return "".join(
        f"\n```{{toctree}}\n:hidden:\n:caption: {heading}\n\n" + "\n".join(map(_entry, pages.values())) + "\n```\n"
        for heading, pages in HEADINGS.items()
    )


def _entry(page: str) -> str:
    """Return the line of a page in a table of contents; the titles of labs are too long for it."""
    stem = Path(page).stem
    return f"Lab {stem[3]} <{stem}>" if page.endswith(".ipynb") else stem


def api_page() -> str:
    """Return the page of the names that `utils` exports, for Sphinx to fill from their docstrings."""
    import inspect

    import utils

    text = "# API reference\n\nWhat `from utils import *` brings, from the docstrings.\n"
    for name in utils.__all__:
        thing = getattr(utils, name)
        home = f"utils.{utils._MODULE_OF[name]}.{name}"
        if inspect.isclass(thing):
            body = f"```{{eval-rst}}\n.. autoclass:: {home}\n   :members:\n```"
        elif inspect.isroutine(thing):
            body = f"```{{eval-rst}}\n.. autofunction:: {home}\n```"
        else:
            body = f"A constant of [`utils.{utils._MODULE_OF[name]}`](utils.md)."
        text += f"\n## `{name}`\n\n{body}\n"
    return text
