"""GPU kernels of the labs: each operator's versions side by side, the reference beside the fused."""
