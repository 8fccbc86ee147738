"""Recorded tables are shown with their machine and commit, and missing tables are named."""

import json
import re
from pathlib import Path

import pytest

from utils.files import ROOT, output_path, recorded_table, write_whole

RECORD = {"machine": "NVIDIA H200", "commit": "0cfa907", "tables": {"race": [{"way": "naive", "ms": 2.5}]}}


def test_a_table_comes_with_where_it_was_measured(tmp_path, capsys):
    (tmp_path / "lab.json").write_text(json.dumps(RECORD))
    rows = recorded_table(tmp_path / "lab.json", "race")
    assert rows.to_dict("records") == RECORD["tables"]["race"]
    assert capsys.readouterr().out == "Recorded on NVIDIA H200, commit 0cfa907. Not measured here:\n"


def test_a_missing_table_or_record_is_reported(tmp_path, capsys):
    path = tmp_path / "lab.json"
    assert recorded_table(path, "race") is None
    path.write_text(json.dumps(RECORD))
    assert recorded_table(str(path), "cliff") is None
    assert capsys.readouterr().out == f"No recorded table 'race' in {path}.\nNo recorded table 'cliff' in {path}.\n"


@pytest.mark.parametrize("lab", [1, 2, 3, 4])
def test_every_table_that_a_lab_shows_is_recorded(lab, capsys):
    sources = [
        path.read_text()
        for folder in ("instructor/labs", "utils/labs")
        for path in (ROOT / folder).glob(f"lab{lab}*.py")
    ]
    shown = re.findall(r'^ *show_recorded\("(\w+)"', "\n".join(sources), flags=re.MULTILINE)
    assert shown
    for table in set(shown):
        assert len(recorded_table(ROOT / f"assets/results/h200/lab{lab}.json", table)), table


def test_results_go_to_one_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert output_path("lab1_results.json") == tmp_path / "out" / "lab1_results.json" and (tmp_path / "out").is_dir()


def test_a_file_that_cannot_be_written_is_named_as_the_caller_named_it(tmp_path):
    with pytest.raises(OSError) as refused:
        write_whole(Path("/proc/results.json"), "{}")
    assert refused.value.filename == "/proc/results.json"
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError):
        write_whole(tmp_path / "folder", "{}")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]  # no part is left
    (tmp_path / "link").symlink_to(tmp_path / "file")  # as /dev/stdout is one
    write_whole(tmp_path / "link", "text")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "file").read_text() == "text"
