"""Recording all tables in one run: what is measured, what is left out, and what becomes of a script that fails."""

import importlib
import itertools
import json
import sys

import pytest

from tools import gpu_tests
from tools.record import everything
from tools.record.everything import TABLES, Table


def script(folder, name, text):
    (folder / f"{name}.py").write_text(text)
    return Table(name, f"record.{name}", 1.0)


@pytest.fixture
def scripts(tmp_path, monkeypatch):
    """Three scripts in place of the tables: one that writes its record, one that fails, one that does not end."""
    tables = {
        "good": 'import json, sys; json.dump({"complete": True, "words": sys.argv}, open(sys.argv[-1], "w"))',
        "bad": "import sys; print('no GPU here'); sys.exit(3)",
        "endless": "import time; time.sleep(600)",
    }
    monkeypatch.setattr(everything, "TABLES", {name: script(tmp_path, name, text) for name, text in tables.items()})

    def command(self, out, seconds):
        return [sys.executable, str(tmp_path / f"{self.name}.py"), "--seconds", f"{seconds:.0f}", "--out", str(out)]

    monkeypatch.setattr(Table, "command", command)
    return tmp_path / "out"


def test_who_fails_stops_nobody_and_what_is_there_is_not_measured_again(scripts, capsys):
    assert everything.main(["--out", str(scripts), "bad", "good"]) == 1
    ended = json.loads((scripts / "everything.json").read_text())
    assert "FAILED with exit status 3, see bad.log" in ended["bad"] and "ended well" in ended["good"]
    assert "no GPU here" in (scripts / "bad.log").read_text()
    assert everything.main(["--out", str(scripts), "good"]) == 0
    assert "there already" in capsys.readouterr().out


def test_the_time_is_kept(scripts, capsys):
    assert everything.main(["--out", str(scripts), "--seconds", "2", "endless", "good"]) == 0
    assert "ended after 2 s: the time was over" in capsys.readouterr().out
    ended = json.loads((scripts / "everything.json").read_text())
    assert ended["good"].startswith("left out: 0 s are left") and not (scripts / "good.json").exists()


def test_a_table_that_does_not_exist_is_named(capsys):
    with pytest.raises(SystemExit):
        everything.main(["--out", "nowhere", "gem_shapes"])
    assert "no table is called gem_shapes; choose from gpu_tests, gemm_shapes" in capsys.readouterr().err


@pytest.mark.parametrize("name", TABLES)
def test_each_command_is_one_that_its_script_takes(name, tmp_path, monkeypatch, capsys):
    """The script reads its command line; it gets no further without a GPU, so the options alone are judged."""
    monkeypatch.setenv(everything.VARIABLE, "/nowhere/_C.so")
    words = TABLES[name].command(tmp_path / "out.json", 100.0)
    assert words[1] == "-m" and ("--fa3" in words) == ("{fa3}" in TABLES[name].words)
    module = importlib.import_module(words[2])
    monkeypatch.setattr(sys, "argv", words[2:])

    class Read(Exception):
        pass

    parse = everything.argparse.ArgumentParser.parse_args

    def stop(self, *arguments, **keywords):
        parse(self, *arguments, **keywords)
        raise Read

    monkeypatch.setattr(everything.argparse.ArgumentParser, "parse_args", stop)
    with pytest.raises(Read):
        module.main()
    assert not capsys.readouterr().err


def test_gpu_tests_are_dealt_out_once_and_their_ends_are_read(tmp_path):
    tests = [f"tests/test_x.py::test_y[{i} of many]" for i in range(7)]
    shards = gpu_tests.deal(tests, 3)
    assert sorted(itertools.chain(*shards)) == sorted(tests) and max(map(len, shards)) == 3
    assert len(gpu_tests.deal(tests[:2], 5)) == 2
    log = "tests/test_x.py::test_y[0 of many] PASSED [ 14%]\ntests/test_x.py::test_y[1 of many] FAILED [ 28%]\nFAILED (1)\n"
    assert gpu_tests.outcomes(log) == {tests[0]: "PASSED", tests[1]: "FAILED"}
