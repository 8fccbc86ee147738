"""The benchmark harness behind `labs bench`: targets, runs, results, comparisons, expectations.

A target has a baseline and an optimized side. A run compares the outputs of both with a float64 reference, proves by
the launched kernels or operators what really ran, and times the two sides interleaved. It writes a results file, which
can be reported, compared with another run, and checked against what this GPU is expected to do.
"""
