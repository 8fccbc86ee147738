"""Maintainers' scripts: the environment, the figures, and what writes `assets/results`."""
