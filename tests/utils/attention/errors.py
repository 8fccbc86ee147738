"""How far a result is from float64; without pytest, for scripts on a GPU machine."""


def relative_error(x, expected):
    """Return the norm of the difference, divided by the norm of the expected tensor; if that is zero, the largest element of x."""
    norm = expected.norm()
    return ((x.double() - expected).norm() / norm).item() if norm > 1e-12 else x.double().abs().max().item()
