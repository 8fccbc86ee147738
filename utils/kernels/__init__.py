"""GPU kernels of the labs: each operator's versions side by side, from the reference to the fused one."""
