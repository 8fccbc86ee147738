"""The checks of arguments: what they accept, and the sentences in which they refuse."""

import numpy as np
import pytest
import torch

import utils
from utils.validation import floating_dtype, whole_number, whole_numbers


def test_a_whole_number_is_returned():
    assert whole_number("warmup", 0, 0) == 0 and whole_number("repeats", 7) == 7
    assert type(whole_number("a size of a NumPy array", np.int64(7))) is int


@pytest.mark.parametrize("value", [0, -1, 2.0, "3", None, True, np.float64(2), np.True_])
def test_anything_else_is_an_error_with_its_name_and_value(value):
    with pytest.raises(KeyError, match=r"repeats is .*; it must be a whole number, 1 or more"):
        whole_number("repeats", value, error=KeyError)
    with pytest.raises(ValueError, match="tokens is "):
        whole_numbers(batch=1, tokens=value)


@pytest.mark.parametrize("name", ["measure", "compare", "benchmark_latency", "benchmark_memory", "profile"])
def test_a_result_in_place_of_a_function_is_an_error(name):
    message = rf"{name}\(\) takes a function.*got Tensor.*{name}\(fn, x\), not {name}\(fn\(x\)\)"
    with pytest.raises(TypeError, match=message):
        getattr(utils, name)(*[len] * (name == "compare"), torch.ones(2))


@pytest.mark.parametrize("name", ["measure", "compare", "benchmark_latency", "benchmark_memory"])
def test_an_iterator_that_the_first_call_would_use_up_is_an_error(name):
    with pytest.raises(TypeError, match="list_iterator, which the first call uses up"):
        getattr(utils, name)(*[sum] * (1 + (name == "compare")), iter([1]))


@pytest.mark.parametrize("dtype", [torch.int64, torch.float8_e4m3fn, torch.bool, "float32", int, 1, float("nan")])
def test_a_dtype_that_has_no_ordinary_numbers_is_refused(dtype):
    with pytest.raises(ValueError, match=r"^dtype is .*; it must be one of torch\.bfloat16, torch\.float16"):
        floating_dtype(dtype)


def test_a_floating_dtype_is_returned():
    assert floating_dtype(torch.bfloat16) == torch.bfloat16 and floating_dtype(None) == torch.get_default_dtype()
