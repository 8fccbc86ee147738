"""`from utils import *` gives the documented names and nothing else, and `import utils` is cheap."""

import json
import subprocess
import sys

import pytest

import utils


def test_a_star_import_brings_the_listed_names_and_heavy_libraries_wait_until_they_are_used():
    code = (
        "import sys, utils, json\nbefore = sorted(sys.modules)\nspace = {}\nexec('from utils import *', space)\n"
        "print(json.dumps([before, sorted(sys.modules), sorted(space.keys() - {'__builtins__'}), utils.__all__]))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    before, after, names, listed = json.loads(run.stdout.splitlines()[-1])
    assert names == listed
    for library in ("torch", "transformers", "matplotlib", "pandas", "triton"):
        assert library not in before, library
    for library in ("matplotlib", "pandas", "triton", "transformers.models.gemma3.modeling_gemma3"):
        assert library not in after, library


def test_the_profilers_warning_about_cycles_is_silent_and_others_are_not():
    text = "import warnings, utils\nfor text in ('Warning: Profiler clears events at the end of each cycle. Only', 'other'):\n"
    text += "    warnings.warn(text)"
    result = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    assert "other" in result.stderr and "Profiler" not in result.stderr.replace("warnings.warn", "")


def test_an_unknown_name_lists_what_there_is():
    with pytest.raises(AttributeError, match=r"no attribute 'benchmark_latencies'.*benchmark_latency"):
        utils.benchmark_latencies  # noqa: B018


def test_no_module_hides_an_exported_name():
    """The import system binds a submodule over an attribute of the same name: measure.py would hide measure()."""
    from pathlib import Path

    folder = Path(utils.__file__).parent
    modules = {path.stem for path in folder.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert not modules & set(utils.__all__)
