"""The documents are true: links lead somewhere, commands exist, Python examples run as they stand, tables are current."""

import io
import json
import os
import re
import shlex
import tomllib
import urllib.parse
import zipfile
from pathlib import Path

import click
import matplotlib
import matplotlib.pyplot as plt
import pytest
import typer.main
import yaml

import utils
from tests.marks import slow_but_first
from tools import address
from tools.figures import gallery
from utils import cli
from utils.files import repository_address

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCUMENTS = sorted(
    path.relative_to(ROOT).as_posix()
    for folder in (ROOT, ROOT / "docs", ROOT / "instructor", ROOT / "tools" / "record", ROOT / "tests")
    for path in folder.glob("*.md")
)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def code_of(text: str, *languages: str) -> list[str]:
    """The fenced code blocks of a document in these languages."""
    return [code for language, code in re.findall(r"```(\w*)\n(.*?)```", text, re.DOTALL) if language in languages]


def anchors(text: str) -> set[str]:
    """The anchors that GitHub makes of a document's headings."""
    titles = re.findall(r"^#+ +(.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_the_first_screen_says_what_it_is_and_how_to_start():
    first_screen = "\n".join(README.splitlines()[:20])
    for part in ("make lab ", "make test ", "docs/gallery/waiting.svg", "Apache-2.0"):
        assert part in first_screen
    for way in ("Student", "Instructor", "Contributor"):
        assert f"**{way}**" in README
    assert len(README.splitlines()) < 90, "three screens: what is longer belongs into docs/"


@pytest.mark.parametrize("name", ["README.md", "docs/students.md"])
def test_the_address_of_the_repository_stands_where_one_setting_writes_it(name):
    assert address.written(text_of(name), repository_address()) == text_of(name), "run: python -m tools.address"
    published = address.written(text_of(name), "https://github.com/us/labs")
    assert "git clone" in published and "git clone" not in address.written(published, "")


@pytest.mark.parametrize("source, hosts", [("", 0), ("https://example.org/labs", 0), ("https://github.com/us/labs", 8)])
def test_a_lab_opens_on_a_host_only_from_a_public_address(source, hosts):
    assert address.start(source).count("](https://") == hosts
    assert ("git clone" in address.start(source)) == bool(source)


def test_the_api_page_lists_exactly_what_utils_exports():
    section = text_of("docs/utils.md").split("```")[0]
    rows = [line.split("|")[2] for line in section.splitlines() if line.startswith("| ") and "Names" not in line]
    listed = set(re.findall(r"`(\w+)`", " ".join(rows)))
    assert listed == set(utils.__all__)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name for name in DOCUMENTS if "from utils import" in text_of(name) and "contributing" not in name]
)
def test_python_examples_run_as_they_stand(name):
    for code in code_of(text_of(name), "python"):
        if "utils" in code:
            exec(code, {})
            plt.close("all")


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_lead_somewhere(name):
    text = re.sub(r"```.*?```", "", text_of(name), flags=re.DOTALL)
    for target in {*re.findall(r"\]\(([^)\s]+)\)", text), *re.findall(r'src="([^"]+)"', text)}:
        if urllib.parse.urlparse(target).scheme:
            continue
        path, _, anchor = target.partition("#")
        place = (ROOT / name).parent / path if path else ROOT / name
        assert place.exists(), f"{name}: {target}"
        assert not anchor or anchor in anchors(place.read_text(encoding="utf-8")), f"{name}: {target}"


@pytest.mark.parametrize("name", DOCUMENTS)
def test_commands_exist(name):
    """Every `make VERB` and every `labs COMMAND` of a document, also inside of its sentences."""
    text, makefile = text_of(name), text_of("Makefile")
    spoken = "\n".join(re.findall(r"`([^`\n]+)`", text)) + "\n" + "\n".join(code_of(text, "bash", "sh", ""))
    for verb in re.findall(r"\bmake ([a-z][a-z0-9-]*)", spoken):
        assert re.search(rf"^{verb}:", makefile, re.MULTILINE), f"{name}: make {verb}"
    commands = known_commands()
    for words in re.findall(r"(?:^|[\s/(])labs ((?:bench )?[a-z][a-z-]*)\b", spoken):
        assert tuple(words.split()) in commands, f"{name}: labs {words}"


def known_commands() -> dict[tuple[str, ...], click.Command]:
    """The commands of `labs`, and of `labs bench`."""
    from instructor.cli import app as instructor

    student, teacher = (typer.main.get_command(app).commands for app in (cli.app, instructor))
    first = {(name,): command for name, command in {**student, **teacher}.items()}
    return first | {("bench", name): command for name, command in student["bench"].commands.items()}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_options_in_command_lines_exist(name):
    """Each `--option` in a line of a shell example that calls labs is one of that command."""
    commands = known_commands()
    for line in "\n".join(code_of(text_of(name), "bash", "sh", "")).splitlines():
        if re.match(r"(\S*/)?labs ", line):
            words = shlex.split(line, comments=True)[1:]
            command = commands[tuple(words[: 2 if words[0] == "bench" else 1])]
            known = {"--help", *(option for parameter in command.params for option in parameter.opts)}
            assert {word.split("=")[0] for word in words if word.startswith("--")} <= known, f"{name}: {line}"


LABS = sorted(path.stem for path in ROOT.glob("lab*.ipynb"))


@pytest.mark.parametrize("lab", slow_but_first(LABS))
def test_points_tables_are_the_labs(lab):
    from instructor.points import put_points_table

    text = text_of("docs/points.md")
    assert put_points_table(text, lab) == text, f"run: labs points {lab} --readme docs/points.md"


@pytest.mark.parametrize("lab", LABS)
def test_the_table_of_labs_has_their_points(lab):
    table = text_of("docs/points.md").split(f"<!-- points:{lab} -->")[1].split("<!-- /points -->")[0]
    regular, bonus = re.search(r"\*\*(\d+) \+ (\d+) bonus\*\*", table).groups()
    (row,) = [line for line in README.splitlines() if f"({lab}.ipynb)" in line]
    assert f"{regular} + {bonus}" in row.replace("&nbsp;", " ")


def test_the_readmes_versions_are_those_of_pyproject():
    (torch,) = [line for line in PROJECT["dependencies"] if line.startswith("torch")]
    said = []
    for name, versions in (("Python", PROJECT["requires-python"]), ("torch", torch)):
        low, major, above = re.search(r">=([\d.]+),<(\d+)\.(\d+)", versions).groups()
        said.append(f"{name} {low} to {major}.{int(above) - 1}")
    assert f"[{PROJECT['license']}](LICENSE) · {' · '.join(said)} · GPU optional" in README


def test_citation_and_licence_agree_with_pyproject():
    citation = yaml.safe_load(text_of("CITATION.cff"))
    assert citation["license"] == PROJECT["license"] and "version" not in citation, "pyproject.toml has the version"
    assert citation["authors"] == PROJECT["authors"]
    assert "Apache License" in text_of("LICENSE") and f"## {PROJECT['version']}" in text_of("CHANGELOG.md")


def test_every_picture_of_the_gallery_is_in_the_readme_and_says_where_it_comes_from():
    shown = set(re.findall(r"docs/gallery/(\w+)\.svg", README))
    assert shown == set(gallery.PICTURES) == {path.stem for path in gallery.FOLDER.glob("*.svg")}


@pytest.mark.parametrize("name", ["waiting", "ladder", "roofline", "decode", "attention"])
def test_the_caption_of_a_recorded_picture_names_machine_and_commit(name, monkeypatch):
    captions = []
    monkeypatch.setattr(gallery, "_signed", lambda figure, text: captions.append(text) or figure)
    plt.close(gallery.PICTURES[name]())
    assert re.search(r"NVIDIA H200, torch [\d.]+\S*, Triton [\d.]+, commit \w{7}", captions[0])


@pytest.mark.slow
def test_the_gallery_is_what_its_script_draws():
    made_by = {re.search(r"Matplotlib v([\w.]+)", path.read_text())[1] for path in gallery.FOLDER.glob("*.svg")}
    if made_by != {matplotlib.__version__}:
        pytest.skip(f"drawn with matplotlib {made_by}, and this is {matplotlib.__version__}")
    for name in gallery.PICTURES:
        committed = (gallery.FOLDER / f"{name}.svg").read_text(encoding="utf-8")
        assert gallery.draw(name) == committed, f"{name}: run python -m tools.figures.gallery"


@pytest.fixture(scope="module")
def bundle():
    from instructor.build import build_lab
    from instructor.grading.release import bundle_files
    from instructor.points import lab_path

    return bundle_files(build_lab(lab_path("lab3_gluon")))


def test_documents_of_the_students_bundle_link_to_what_is_in_it(bundle):
    folders = {str(parent) for name in bundle for parent in Path(name).parents}
    for name in [name for name in bundle if name.endswith(".md")]:
        for target in re.findall(r"\]\(([^)\s#:]+)\)", bundle[name].decode()):
            place = os.path.normpath(Path(name).parent / target)
            assert place in bundle or place in folders, f"{name} of the bundle: {target}"


def test_the_students_bundle_speaks_of_its_lab_alone(bundle):
    text = bundle["README.md"].decode()
    assert text.startswith("# Lab 3: ") and "make lab LAB=lab3_gluon" in text and "make test" not in text
    assert "nbgrader_config.py" in bundle and "LICENSE" in bundle


def test_everyone_may_read_the_files_of_a_bundle():
    from instructor.grading.release import packed

    with zipfile.ZipFile(io.BytesIO(packed({"a.txt": b"a"}, "lab"))) as archive:
        assert archive.getinfo("lab/a.txt").external_attr >> 16 == 0o644


def test_the_pictures_words_are_those_of_the_records():
    """What stands for the first picture where it is not shown: five steps of the ladder, and the others at the same shape."""
    records = ROOT / "assets/results/h200"
    shape = {"head_dim": 128, "length": 16384, "causal": True}
    ladder, ratios = (
        [row for row in json.loads((records / name).read_text())["rows"] if shape.items() <= row.items()]
        for name in ("attention_ladder.json", "attention_ratios.json")
    )
    steps = [f"{row['tflops']:.0f}" for row in sorted(ladder, key=lambda row: row["step"])]
    others = {row["against"]: f"{row['against_tflops']:.0f}" for row in ratios}
    cudnn = f"{sorted(row['against_tflops'] for row in ladder)[2]:.0f}"
    said = f"{', '.join(steps[:-1])} and {steps[-1]} TFLOP/s on an H200, where cuDNN reaches {cudnn}, flash-attn-4 "
    assert f'{said}{others["cute"]} and FlashAttention 3 {others["fa3"]}">' in README
    tables = json.loads((records / "lab1.json").read_text())["tables"]
    share = {row["operation"]: 100 * row["share"] for row in (*tables["roofline"], *tables["layer_roofline"])}
    gelu = {row["GELU"]: row["GB/s of one read and one write"] / 48 for row in tables["gelu"]}
    said = (share["gemm 8192"], share["gemm 256"], gelu["by hand"], gelu["Triton kernel"], share["decode B1"])
    (picture,) = re.findall(r"!\[([^]]+)\]\(docs/gallery/waiting.svg\)", README)
    assert [float(number) for number in re.findall(r"([\d.]+)%", picture)] == pytest.approx(said, rel=0.06)


def test_the_gallery_is_drawn_for_its_place():
    """A picture that is shown 400 px wide has text of 9 px and more: its smallest is `SMALL` points."""
    for path in gallery.FOLDER.glob("*.svg"):
        width = float(re.search(r'width="([\d.]+)pt"', path.read_text())[1])
        assert 400 / width * gallery.SMALL >= 9, path.name


def test_the_labs_times_are_those_of_the_records():
    runs = [json.loads(text_of(f"assets/results/h200/lab{n}_run.json"))["total_seconds"] for n in (1, 2, 3, 4)]
    assert "run in {:.0f}, {:.0f}, {:.0f} and {:.0f} s".format(*runs) in README
    assert "from top to bottom | {:.0f} s, {:.0f} s, {:.0f} s, {:.0f} s |".format(*runs) in text_of("docs/measuring.md")
    graded = [json.loads(text_of(f"assets/results/cpu/grading_speed_{lab}.json"))["stock_seconds"] for lab in LABS]
    assert "{:.0f}, {:.0f}, {:.0f} and {:.0f} s on two cores".format(*graded) in text_of("docs/students.md")
