"""The visible checks of lab 4, a file for each part. The hidden checks use their functions, too."""

from utils.checking.labs.lab4_sdpa.costs import *  # noqa: F403
from utils.checking.labs.lab4_sdpa.dispatch import *  # noqa: F403
from utils.checking.labs.lab4_sdpa.grid import *  # noqa: F403
from utils.checking.labs.lab4_sdpa.layouts import *  # noqa: F403
from utils.checking.labs.lab4_sdpa.numerics import *  # noqa: F403
from utils.checking.labs.lab4_sdpa.splitting import *  # noqa: F403

__all__ = [name for name in globals() if name.startswith("check_")]
