"""What instructors have and students do not: the sources of the labs, hidden checks, the build and the grading."""

import sys

# jsonschema imports this if it is installed, and that builds a grammar for seconds. No notebook's schema needs it.
sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]
