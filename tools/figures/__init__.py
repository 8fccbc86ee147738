"""The drawings of the labs, as SVG: `python -m tools.figures`."""
