"""Limits of nbgrader's commands and of the Validate button when they run in this folder.

nbgrader's own limits are 30 s for a cell and 4 s for its output. The first compilation of FlexAttention takes longer than that.
"""

c = get_config()  # noqa: F821  (nbgrader defines it)
c.Execute.timeout = 600  # seconds for one cell
c.Execute.iopub_timeout = 60  # seconds until a cell's output has arrived
