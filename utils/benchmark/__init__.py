"""One way to measure: `measure` and `compare`, what they return, and what ran while they did.

`from utils.benchmark import benchmark_latency` is the course's documented call; the modules hold the rest.
"""

from utils.benchmark.latency import benchmark_latency, benchmark_memory, count_cuda_kernels, default_schedule

__all__ = ["benchmark_latency", "benchmark_memory", "count_cuda_kernels", "default_schedule"]
