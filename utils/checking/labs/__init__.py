"""The visible checks of the labs, a module or a package for each lab: what a test cell runs in one line, open to students.

A visible check raises by itself; `check_causal.judge` is the same check as one that returns a `Verdict`.
"""
