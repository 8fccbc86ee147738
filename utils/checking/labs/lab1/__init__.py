"""The visible checks of lab 1, which the test cells call. The hidden checks test the same on other inputs."""

from utils.checking.labs.lab1.attention import *  # noqa: F403
from utils.checking.labs.lab1.gemm import *  # noqa: F403
from utils.checking.labs.lab1.gemma import *  # noqa: F403
from utils.checking.labs.lab1.profiling import *  # noqa: F403
from utils.checking.labs.lab1.triton_kernels import *  # noqa: F403

__all__ = [name for name in globals() if name.startswith("check_")]
