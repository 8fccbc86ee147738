"""A text that may go another way for inputs that no check draws is found; what right answers compare is not among it."""

import ast
import time

import pytest

from instructor.grading.submission.limits import (
    BY_DEVICE,
    BY_NUMBER,
    BY_PROGRAM,
    LARGE_IN_KERNEL,
    UNREAD,
    other_ways,
    tiles_of,
)


def _found(code: str, **options) -> dict[str, list[str]]:
    found = other_ways([ast.parse(code)], **options)
    return {said: places for said, places in found.items() if places}


# Text: the places in it that are found, whatever meets the number.
NUMBERS = {
    "if q.shape[2] > 512: pass": ["q.shape[2] > 512"],
    "LIMIT = 2**10\ndef f(q):\n    return q.numel() > LIMIT": ["q.numel() > LIMIT"],
    "A = 77\nB = A\nn < B": ["n < B"],
    "def f(q, most=4096):\n    while q.shape[0] * q.shape[1] >= most: pass": ["q.shape[0] * q.shape[1] >= most"],
    "def f(n, most): return n > most\ndef g(q): return f(len(q), 900)": ["n > most"],
    "def f(n, most): return n > most\ndef g(q): return f(len(q), most=900)": ["n > most"],
    "class Own:\n    most = 77\nOwn.most < n": ["Own.most < n"],
    "most = -1e30\nmost = 512\nn < most": ["n < most"],
    "n // 4096": ["n // 4096"],
    "4096 // n": ["4096 // n"],
    "n //= 4096": ["n //= 4096"],
    "m >> 12": ["m >> 12"],
    "min(n, 512)": ["min(n, 512)"],
    "x.clamp(max=512)": ["x.clamp(max=512)"],
    "torch.gt(n, 900)": ["torch.gt(n, 900)"],
    "n + 1000 > m": ["n + 1000 > m"],
    "n > (1000 if far else 2000)": ["n > (1000 if far else 2000)"],
    "-n < -512": ["-n < -512"],
    "1 << 20 > n": ["1 << 20 > n"],
    "n > 2**8": ["n > 2 ** 8"],
    "n > 2**160": ["n > 2 ** 160"],
    "n > 999.5": ["n > 999.5"],
    "2.5 * 2**4000 > n": ["2.5 * 2 ** 4000 > n"],
    "match n:\n    case 512: pass": ["n"],
    "n == 8": [],
    "q.dim() == 4": [],
    "scores < -1e9": [],
    "m = -1e30\nm = torch.maximum(m, x)": [],
    "text[:200]": [],
    "n > places[200]": [],
    "width = 64 * 4": [],
    "i = 0\nwhile i < n:\n    i += 64": [],
    "i = 0\nwhile i < n:\n    i = i + 64": [],
    "range(0, n, 64)": [],
    "splits > k.shape[2]": [],
}


@pytest.mark.parametrize("code", NUMBERS)
def test_a_large_number_of_the_texts_own_is_found(code):
    assert _found(code).get(BY_NUMBER, []) == NUMBERS[code]


# The same where only sizes count.
SIZES = {
    "def f(a):\n    if a.shape[0] > 100:\n        return 0": ["a.shape[0] > 100"],
    "def f(a):\n    n = len(a)\n    m = 2 * n\n    return 1 if 10**3 <= m else 0": ["10 ** 3 <= m"],
    "def f(a):\n    return [0, 1][min(a.numel() // 4096, 1)]": ["min(a.numel() // 4096, 1)", "a.numel() // 4096"],
    "def f(a):\n    for n in a.shape:\n        if n > 99: return": ["n > 99"],
    "MANY = 500\ndef f(a):\n    return len(a) > MANY": ["len(a) > MANY"],
    "def f(n): return n > 99\ndef g(a): return f(len(a))": ["n > 99"],
    "class Own:\n    def __init__(self, a):\n        self.rows = len(a)\n    def f(self):\n        return self.rows > 99": [
        "self.rows > 99"
    ],
    "def f(a):\n    return -a.shape[0] < -100": ["-a.shape[0] < -100"],
    "def f(a, tile=64):\n    return tile > 100": ["tile > 100"],
    "def f(a, own=64):\n    return len(a) > own": ["len(a) > own"],
    "def f(a, tile=64):\n    return a.shape[0] > tile and min(a.shape[0], tile)": [],
    "def f(a, b):\n    assert a.shape[1] == b.shape[0] and a.dim() < 16": [],
    "def f(a, tile):\n    return -(-a.shape[0] // tile) if tile > 100 else 1": ["tile > 100"],
    "def f(a):\n    return a.shape[0] > 1 and a.shape[1] % 8 == 0": [],
    "def f(a):\n    s = a.shape[0]\n    return (a > -1e30) & (s >= 2)": [],
    "def f(x):\n    return x.clamp(-12, 12) if x.max() > 80 else x": [],
}


@pytest.mark.parametrize("code", SIZES)
def test_where_only_sizes_count_values_and_positions_may_be_compared(code):
    assert _found(code, only_sizes=True, tiles={"tile"}).get(BY_NUMBER, []) == SIZES[code]


def test_tiles_are_arguments_that_have_a_large_default_in_the_labs_own_answer():
    assert tiles_of([ast.parse("def f(a, tile=64, *, block=2**7, causal=False, eps=1e-6, steps=4): pass")]) == {
        "tile",
        "block",
    }


def test_smaller_numbers_are_large_in_a_kernel():
    assert _found("STAGES == 7", large=LARGE_IN_KERNEL) == {BY_NUMBER: ["STAGES == 7"]}
    assert not _found("STAGES == 7") and not _found("STAGES > 4", large=LARGE_IN_KERNEL)


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
    assert _found(code).get(BY_PROGRAM, []) == found


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("if q.device.type == 'cuda': pass", ["q.device.type == 'cuda'"]),
        ("q.device == torch.device('cpu')", ["q.device == torch.device('cpu')"]),
        ("str(q.device).startswith('cuda')", ["str(q.device).startswith('cuda')"]),
        ("if q.is_cuda: pass", ["q.is_cuda"]),
        ("q.device.index is None", ["q.device.index"]),
        ("if torch.cuda.is_available(): pass", ["torch.cuda.is_available"]),
        ("match q.device.type:\n    case 'cuda': pass", ["'cuda'"]),
        ("torch.zeros(3, device='cuda')", []),
        ("q.device.type != 'meta'", []),  # a tensor without values, which nobody grades
    ],
)
def test_a_question_about_the_device_is_found(code, found):
    assert _found(code).get(BY_DEVICE, []) == found


def test_a_text_that_is_nested_too_deeply_waits():
    assert _found("n // (" + "1 + " * 2_000 + "1)") == {UNREAD: ["too many parts to be read"]}


def test_long_chains_are_read_in_time():
    """Each part of a chain is looked at once: a thousand times as long takes a thousand times as long."""
    began = time.process_time()
    assert _found("\n".join(["x = n" + " // 9" * 150] * 200))[BY_NUMBER]
    assert time.process_time() - began < 5
