"""The visible checks of lab 2; each raises if the answer is wrong, and says what to look at."""

from utils.checking.labs.lab2_flexattention.blocks import *  # noqa: F403
from utils.checking.labs.lab2_flexattention.kernels import *  # noqa: F403
from utils.checking.labs.lab2_flexattention.masks import *  # noqa: F403

__all__ = [name for name in globals() if name.startswith("check_") or name == "arrivals"]
