"""Plots: rooflines, latencies, flash attention, masks, profiler timelines.

Every function returns `(Figure, Axes)`, takes `ax=`, leaves the global style as it found it and never calls
`plt.show()`: a notebook shows the figure once when the cell ends, a script saves it with `fig.savefig(...)`.
"""

from .attention import plot_flash_attn_improvement
from .latency import plot_gemm_torch_matmul_latency, plot_latency
from .masks import plot_mask, plot_sparsity_sweep
from .roofline import plot_roofline
from .timeline import plot_timeline

__all__ = [
    "plot_flash_attn_improvement",
    "plot_gemm_torch_matmul_latency",
    "plot_latency",
    "plot_mask",
    "plot_roofline",
    "plot_sparsity_sweep",
    "plot_timeline",
]
