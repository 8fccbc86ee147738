"""Numbers of an answer's own by which it goes another way are found in its text; what right answers compare is not among them."""

import ast

import pytest

from instructor.grading.submission.limits import devices_named, named_numbers, own_limits, program_branches

LIMITS = {
    "if q.shape[2] > 512: pass": "q.shape[2] > 512",
    "LIMIT = 2**10\ndef f(q):\n    return q.numel() > LIMIT": "q.numel() > LIMIT",
    "def f(q, most=4096):\n    while q.shape[0] * q.shape[1] >= most: pass": "q.shape[0] * q.shape[1] >= most",
    "class Own:\n    most = 77\nOwn.most < n": "Own.most < n",
    "n // 4096": "n // 4096",
    "m >> 12": "m >> 12",
    "min(n, 512)": "min(n, 512)",
    "torch.gt(n, 900)": "torch.gt(n, 900)",
    "n + 1000 > m": "n + 1000 > m",
    "1 << 20 > n": "1 << 20 > n",
    "n == 8": "",
    "q.dim() == 4": "",
    "scores < -1e9": "",
    "text[:200]": "",
    "width = 64 * 4": "",
    "range(0, n, 64)": "",
    "splits > k.shape[2]": "",
}


@pytest.mark.parametrize("code", LIMITS)
def test_a_number_that_stands_in_the_text_is_found(code):
    tree = ast.parse(code)
    assert own_limits(tree, named_numbers([tree]), 9) == ([LIMITS[code]] if LIMITS[code] else [])


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("row = gl.program_id(0) * 64\nif row > 0:\n    pass", ["row > 0"]),
        ("gl.program_id(1) == 2", ["gl.program_id(1) == 2"]),
        ("row = gl.program_id(0) * 64\nrows = row + gl.arange(0, 64)\nmask = (rows >= 0) & (rows < m)", []),
        ("row = gl.program_id(0) * 64\nif row + 64 > sk:\n    pass", []),
    ],
)
def test_a_program_that_is_compared_with_a_number_is_found(code, found):
    assert program_branches(ast.parse(code)) == found


def test_a_device_that_is_compared_is_found():
    assert devices_named(ast.parse("if q.device.type == 'cuda': pass")) == ["cuda"]
    assert not devices_named(ast.parse("torch.zeros(3, device='cuda')"))
