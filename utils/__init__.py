"""The course's helper package. The notebooks use its names by `from utils import *`.

The first use of a name imports its module, so `import utils` takes almost no time.
"""

import os
import warnings
from importlib import import_module

from utils.machine.versions import untested_versions

for _sentence in untested_versions():
    warnings.warn(_sentence, stacklevel=2)

# Without this variable torch's profiler prints lines "USDT: ... profiler_start" at its first start.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
# A profiler with a schedule prints this warning in red below the cell. It does not matter: the labs record one cycle only.
warnings.filterwarnings("ignore", "Warning: Profiler clears events at the end of each cycle", UserWarning)

_NAMES_OF = {
    "config": "GEMMA_CONFIG GPU_SPECS get_ridge_point",
    "machine.device": "default_device detect_gpu",
    "benchmark.roofs": "Roofs datasheet_roofs machine_roofs measure_roofs",
    "benchmark.measuring": "compare measure",
    "benchmark.result": "Comparison Measurement",
    "benchmark": "benchmark_latency benchmark_memory count_cuda_kernels default_schedule",
    "benchmark.profiling": "export_chrome_trace nvtx_range profile read_trace summarize_trace",
    "model": (
        "build_decoder_layer create_decode_inputs_with_cache create_decode_inputs_without_cache create_prefill_inputs "
        "get_position_embeddings initialize_kv_cache prefill_forward"
    ),
    "attention.decode_step": "decode_forward",
    "visualization": (
        "plot_flash_attn_improvement plot_gemm_torch_matmul_latency plot_latency plot_roofline plot_timeline"
    ),
}
_MODULE_OF = {name: module for module, names in _NAMES_OF.items() for name in names.split()}

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str):
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'utils' has no attribute {name!r}; it offers {', '.join(__all__)}")
    value = getattr(import_module(f"utils.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__


# A Jupyter server sets this variable for its kernels. The kernels of `nbgrader` and of the grader do not have it.
if "JPY_SESSION_NAME" in os.environ:
    import_module("utils.progress.panel").install()
