"""Copies of compiled kernels that are assembled from another PTX."""

from types import SimpleNamespace

from utils.kernels.assembling import not_loaded


def test_a_copy_is_loaded_by_itself():
    """What was loaded before was told to the driver with the shared memory that Triton knows of."""
    compiled = SimpleNamespace(module=1, function=2, _run=3, metadata="its own")
    twin = not_loaded(compiled)
    assert (twin.module, twin.function, twin._run, twin.metadata) == (None, None, None, "its own")
    assert (compiled.module, compiled.function, compiled._run) == (1, 2, 3)
