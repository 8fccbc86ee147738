"""The course as a static site: `python -m tools.site [folder]` builds it, to `build/site` by default.

It needs the extra `site`; `make site` adds it. It is made by Sphinx with MyST-NB, which is what was tried: it reads Markdown
and notebooks with their outputs, makes the API pages from the docstrings by itself, reports every link between pages that
leads nowhere, and builds without a network from packages of pip alone. Jupyter Book 2 (MyST) and Material for MkDocs were not
tried, only read about: the first needs Node and has no API pages of its own, the second needs one plugin for notebooks and
another for docstrings.

The notebooks on the site are the students' own. Their outputs come from a run of the solved labs (`labs demo`), cell by
cell. An output that quotes lines of an answer is left out. What is published is searched for solutions before it is built, as
every bundle for students is.
"""
