"""The script that repeats decode's clusters beside other processes: its order of cases, and what it writes down of a wrong result."""

import itertools

import pytest
import torch

from tools.record import decode_shared


def test_processes_begin_with_different_kernels_and_take_all_cases():
    orders = [decode_shared.order(seed) for seed in range(16)]
    assert len({(str(order[0][0]), order[0][2]) for order in orders}) == 16
    assert all(len({str(case) for case in order}) == len(order) == 48 for order in orders)
    taken = [*itertools.islice(decode_shared.turns(5), 64)]
    assert taken.count(decode_shared.SUSPECT) == 16 + 1  # once among all cases, and behind each kernel's


@pytest.mark.parametrize("spoilt", [0, 3, None])
def test_a_wrong_call_is_written_down_with_its_place(monkeypatch, spoilt):
    """Call number `spoilt` of each case, the first one is 0, has nan in one place."""

    def prepare(choices, filled, page):
        numbers = itertools.count()
        right = torch.arange(24.0).view(2, 3, 4).bfloat16()

        def call():
            out = right.clone()
            if next(numbers) == spoilt:
                out[1, 2, 3] = torch.nan
            return out

        return call, right.double()

    monkeypatch.setattr(decode_shared, "prepare", prepare)
    found = decode_shared.repeat((0, 0.05))
    assert found["calls"] > 40 and not found["failed"]
    if spoilt is None:
        assert not found["wrong"] and found["cases"] > 0
    elif spoilt == 0:
        assert found["wrong"][0] == {
            "case": found["wrong"][0]["case"],
            "first": True,
            "error": pytest.approx(torch.nan, nan_ok=True),
            "nan": 1,
        }
    else:
        place = found["wrong"][0]["places"][0]
        assert (
            found["wrong"][0]["numbers"] == found["wrong"][0]["nan"] == 1 and place[:3] == [1, 2, 3] and place[4] == 23
        )


def test_an_exception_is_written_down_with_its_text(monkeypatch):
    def prepare(*case):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(decode_shared, "prepare", prepare)
    found = decode_shared.repeat((0, 10.0))
    assert found["calls"] == 0 and "illegal memory access" in next(iter(found["failed"]))


def test_a_case_is_right_in_the_simulator(monkeypatch):
    """The script's own drawing of the case that failed once, with the merge that the simulator can run."""
    pytest.importorskip("triton", reason="the simulator needs Triton for the language; there are wheels for Linux only")
    from utils import gluon_cpu

    monkeypatch.setattr(torch.Tensor, "cuda", lambda x: x)
    randn = torch.randn
    monkeypatch.setattr(torch, "randn", lambda *sizes, device=None, **options: randn(*sizes, **options))
    choices, filled, page = decode_shared.SUSPECT
    call, expected = decode_shared.prepare({**choices, "merge": "last"}, filled, page)
    with gluon_cpu.simulate(seed=1):
        assert decode_shared.error_of(call(), expected) < decode_shared.WRONG
