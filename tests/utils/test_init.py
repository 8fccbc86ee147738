"""`from utils import *` gives the documented names and nothing else, and `import utils` is cheap."""

import json
import subprocess
import sys

import pytest

import utils

DOCUMENTED = {
    "GEMMA_CONFIG",
    "GPU_SPECS",
    "get_ridge_point",
    "benchmark_latency",
    "benchmark_memory",
    "count_cuda_kernels",
    "default_schedule",
    "plot_roofline",
    "plot_gemm_torch_matmul_latency",
    "plot_flash_attn_improvement",
    "create_prefill_inputs",
    "create_decode_inputs_with_cache",
    "create_decode_inputs_without_cache",
    "get_position_embeddings",
    "initialize_kv_cache",
    "prefill_forward",
    "decode_forward",
}


def in_fresh_python(code: str) -> dict:
    """Run code in a new interpreter and return the dictionary `result` that it leaves."""
    script = f"{code}\nimport json\nprint(json.dumps(result))"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return json.loads(run.stdout.splitlines()[-1])


def test_the_documented_names_are_exported():
    assert set(utils.__all__) >= DOCUMENTED
    for name in utils.__all__:
        assert getattr(utils, name) is not None


def test_a_star_import_brings_exactly_the_listed_names():
    result = in_fresh_python(
        "space = {}\nexec('from utils import *', space)\n"
        "import utils\nresult = {'names': sorted(n for n in space if n != '__builtins__'), 'all': utils.__all__}"
    )
    assert result["names"] == result["all"]


def test_heavy_libraries_wait_until_they_are_used():
    result = in_fresh_python(
        "import sys\nimport utils\n"
        "before = sorted(sys.modules)\n"
        "from utils import *\n"
        "after = sorted(sys.modules)\n"
        "result = {'before': before, 'after': after}"
    )
    for library in ("torch", "transformers", "matplotlib", "pandas", "triton"):
        assert library not in result["before"], library
    for library in ("matplotlib", "pandas", "triton", "transformers.models.gemma3.modeling_gemma3"):
        assert library not in result["after"], library


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
