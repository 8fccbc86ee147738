"""Grading a class: every submission isolated, its tests out of its reach, in parallel, into nbgrader's gradebook."""
