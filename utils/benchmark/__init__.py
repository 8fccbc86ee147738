"""Timing, memory and profiles of functions.

The notebooks import the functions below. `measuring` holds `measure` and `compare`, the one way to take a time.
"""

from utils.benchmark.latency import benchmark_latency, benchmark_memory, count_cuda_kernels, default_schedule

__all__ = ["benchmark_latency", "benchmark_memory", "count_cuda_kernels", "default_schedule"]
