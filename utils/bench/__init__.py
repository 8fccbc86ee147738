"""The benchmark harness behind `labs bench`: targets, runs, results, comparisons, expectations.

A target has a baseline and an optimized side. A run checks both against a float64 reference, proves from the
launched kernels or operators what ran, times them interleaved, and leaves a results file that can be compared,
reported and checked against what this GPU is expected to do.
"""
