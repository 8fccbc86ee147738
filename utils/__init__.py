"""The course's helper package: what the notebooks use, by `from utils import *`.

Each name is loaded from its module when it is first used, so `import utils` costs next to nothing.
"""

import os
import warnings
from importlib import import_module

from utils.machine.versions import untested_versions

for _sentence in untested_versions():
    warnings.warn(_sentence, stacklevel=2)

# Silences the lines "USDT: ... profiler_start" of torch's profiler, which reads this when it first starts.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
# A schedule's profiler warns of this at each second start, in red below the cell; the labs record one cycle only.
warnings.filterwarnings("ignore", "Warning: Profiler clears events at the end of each cycle", UserWarning)

_MODULE_OF = {
    # facts and roofs
    "GEMMA_CONFIG": "config",
    "GPU_SPECS": "config",
    "get_ridge_point": "config",
    "detect_gpu": "machine.device",
    "default_device": "machine.device",
    "Roofs": "benchmark.roofs",
    "datasheet_roofs": "benchmark.roofs",
    "machine_roofs": "benchmark.roofs",
    "measure_roofs": "benchmark.roofs",
    # measuring
    "measure": "benchmark.measuring",
    "compare": "benchmark.measuring",
    "Measurement": "benchmark.result",
    "Comparison": "benchmark.result",
    "benchmark_latency": "benchmark",
    "benchmark_memory": "benchmark",
    "count_cuda_kernels": "benchmark",
    "default_schedule": "benchmark",
    "export_chrome_trace": "benchmark.profiling",
    "nvtx_range": "benchmark.profiling",
    "profile": "benchmark.profiling",
    "read_trace": "benchmark.profiling",
    "summarize_trace": "benchmark.profiling",
    # the Gemma-3 decoder layer
    "build_decoder_layer": "model",
    "create_decode_inputs_with_cache": "model",
    "create_decode_inputs_without_cache": "model",
    "create_prefill_inputs": "model",
    "decode_forward": "attention.decode_step",
    "get_position_embeddings": "model",
    "initialize_kv_cache": "model",
    "prefill_forward": "model",
    # plots
    "plot_flash_attn_improvement": "visualization",
    "plot_gemm_torch_matmul_latency": "visualization",
    "plot_latency": "visualization",
    "plot_roofline": "visualization",
    "plot_timeline": "visualization",
}

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str):
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'utils' has no attribute {name!r}; it offers {', '.join(__all__)}")
    value = getattr(import_module(f"utils.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__


# A Jupyter server names the notebook to the kernels that it starts. Those of `nbgrader` and of the grader have no such name.
if "JPY_SESSION_NAME" in os.environ:
    import_module("utils.progress.panel").install()
