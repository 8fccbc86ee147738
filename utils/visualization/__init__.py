"""Plots: rooflines, latencies, FlashAttention, masks, sweeps, profiler timelines; each kind of picture in its own file.

Every function returns `(Figure, Axes)` and takes `ax=`. It leaves matplotlib's global style unchanged and never calls
`plt.show()`: a notebook shows the figure once, at the end of the cell, and a script saves it with `fig.savefig(...)`.
A notebook that draws a picture of its own takes the colours and lines of `series(i)`, and calls `style_axes` at the end.
"""

# ruff: noqa: F401 (these imports are the names of the package)
from .attention import plot_flash_attn_improvement
from .latency import plot_gemm_torch_matmul_latency, plot_latency
from .masks import plot_mask
from .roofline import plot_roofline
from .style import series, style_axes
from .sweep import plot_sparsity_sweep
from .timeline import plot_timeline
