"""FlashAttention for Blackwell: compiled for sm_100a and run in the simulator, and never timed, since no such GPU was there."""
