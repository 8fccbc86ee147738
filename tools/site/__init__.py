"""The course as a static site: `python -m tools.site [folder]` builds it, to `build/site` by default.

It needs the extra `site`; `make site` adds it. Sphinx with MyST-NB was chosen of three that were tried:

- Sphinx reads Markdown and notebooks with their outputs (MyST-NB), makes the API pages from the docstrings by itself, checks
  every link between pages, and builds without a network from packages of pip alone.
- Jupyter Book 2 (MyST) has the nicer notebooks, but it needs Node, fetches its theme while it builds, and has no API pages.
- Material for MkDocs needs a plugin for notebooks and another for docstrings, and either may fall behind.

The notebooks on the site are the students' own. Their outputs come from a run of the solved labs (`labs execute`), cell by
cell. What is published is searched for solutions first, as every bundle for students is.
"""
