"""Triton's keys of compiled kernels, as other processes compute them."""

import os
import subprocess
import sys

ENVIRONMENT = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}


def keys_in_two_processes(kernels: str) -> tuple[str, str]:
    """Return what two processes print of the keys of the kernels that these lines of Python put into `kernels`.

    Triton's key of a kernel has its global constants in it; one whose text has an address in it differs each time.
    """
    command = [sys.executable, "-c", f"{kernels}\nprint([kernel.cache_key for kernel in kernels])"]
    first, second = (
        subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, check=True).stdout for _ in range(2)
    )
    return first, second
