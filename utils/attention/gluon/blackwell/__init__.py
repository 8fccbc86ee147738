"""FlashAttention for Blackwell: compiled for sm_100a and run in the simulator, and never timed, since no such GPU was there."""

from utils.machine import versions

versions.adopt_newest_gluon_names()  # before the kernel's own imports of Gluon's names
