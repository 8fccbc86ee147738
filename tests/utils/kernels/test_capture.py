"""Copies from the host while a stream is captured."""

import ctypes
import types

import pytest
import torch

from utils.kernels import capture


def test_without_a_capture_it_is_a_plain_copy():
    copied = capture.tensor_on(torch.device("cpu"), [[1, 2], [3, 4]])
    assert copied.dtype == torch.int32 and copied.tolist() == [[1, 2], [3, 4]]


@pytest.mark.parametrize("fails", [False, True])
def test_the_thread_gets_its_capture_mode_back(monkeypatch, fails):
    modes = [0]

    def exchange(pointer):
        given = pointer._obj.value
        pointer._obj.value = modes[-1]
        modes.append(given)

    driver = types.SimpleNamespace(cuThreadExchangeStreamCaptureMode=exchange)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    if fails:
        with pytest.raises(KeyError), capture._relaxed():
            raise KeyError
    else:
        with capture._relaxed():
            assert modes[-1] == 2
    assert modes == [0, 2, 0]
