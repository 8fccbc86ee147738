"""The visible checks of the labs, a module or a package for each lab. Test cells call them; students may read them.

A visible check raises an exception if the answer is wrong; `check_causal.judge` is the same check, but returns a `Verdict`.
"""
