"""The visible checks of lab 2. If the answer is wrong, a check raises an exception with advice."""

from utils.checking.labs.lab2_flexattention.blocks import *  # noqa: F403
from utils.checking.labs.lab2_flexattention.kernels import *  # noqa: F403
from utils.checking.labs.lab2_flexattention.masks import *  # noqa: F403

__all__ = [name for name in globals() if name.startswith("check_") or name == "arrivals"]
