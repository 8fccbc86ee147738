"""Sphinx's settings for the site of the course."""

from docutils import nodes
from latex2mathml.converter import convert

project = "GPU Efficiency Labs"
author = copyright = "The GPU Efficiency Labs authors"
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
html_theme = "pydata_sphinx_theme"
html_title = project
html_context = {"default_mode": "auto"}
html_theme_options = {
    "show_toc_level": 2,
    "header_links_before_dropdown": 6,
    "navbar_align": "left",
    "navigation_with_keys": True,
    "secondary_sidebar_items": ["page-toc"],
    "pygments_light_style": "tango",
    "pygments_dark_style": "github-dark",
}
html_sidebars = {"lab*": ["sidebar-nav-bs"], "[!l]*": []}
html_math_renderer = "mathml"  # browsers draw it by themselves: no script, no network
html_css_files = ["print.css"]
html_static_path = ["_static"]
html_copy_source = False
html_show_sourcelink = False
html_extra_path = ["extra"]
nb_execution_mode = "off"  # outputs are those of the run that was given
nb_render_markdown_format = "myst"
myst_enable_extensions = ["dollarmath", "amsmath"]
myst_heading_anchors = 4
exclude_patterns = ["files", "extra"]
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
toc_object_entries = False  # each name has a heading already
napoleon_google_docstring = True
# Kept: a link that leads nowhere fails the build (-W). Left out: what notebooks and docstrings cannot help.
suppress_warnings = [
    "mystnb.unknown_mime_type",
    "myst.header",
    "toc.not_included",
    "misc.highlighting_failure",
    "docutils",
]


def setup(app):
    """Write formulas as MathML."""

    def visit(display):
        def write(self, node):
            self.body.append(convert(node.astext(), display=display))
            raise nodes.SkipNode

        return write

    app.add_html_math_renderer("mathml", (visit("inline"), None), (visit("block"), None))
