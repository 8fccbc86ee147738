"""Which words and operators an answer of lab 4 may use, in the questions that forbid or demand a way, before a person looks at it.

Each list holds what right answers to its question are written with: those of the catalogues, and what a textbook or torch's
documentation would write for the same task. The general lists of `vocabulary` hold far more, and past ways around a question
used what no right answer to it does: logarithms in a backward pass, memory that is put under a tensor.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import itertools
import types
import typing

from instructor.grading.submission import vocabulary
from utils.checking.sizes import MOVES

_OWNERS = (
    str,
    list,
    tuple,
    dict,
    set,
    frozenset,
    range,
    slice,
    collections,
    contextlib,
    dataclasses,
    functools,
    itertools,
    typing,
)
_PLAIN = {
    name
    for owner in _OWNERS
    for name in dir(owner)
    if not name.startswith("_") and not isinstance(getattr(owner, name), types.ModuleType)
} - {"sort"}  # of tensors it is a way around a question; `sorted` is not
# How any function is written: Python's texts, lists and loops, types, one's own small classes.
_PYTHON = f"""
    {" ".join(sorted(_PLAIN))}
    range len zip enumerate tuple list dict set frozenset str int float bool min max sum abs round divmod reversed sorted
    isinstance issubclass slice map filter any all iter next print super object property staticmethod classmethod type repr format hasattr
    callable pow NotImplemented name value args start stop step ABC abstractmethod Enum auto __name__ __doc__
    + - * / // % ** & | ^
"""
# Looking at tensors in other shapes, making them, and carrying their numbers from place to place in the same order.
_TENSORS = """
    torch Tensor nn functional shape size dim ndim numel dtype device stride is_contiguous is_floating_point view view_as reshape
    reshape_as expand expand_as permute transpose swapaxes swapdims t T mT movedim moveaxis unsqueeze squeeze select slice
    split split_with_sizes chunk tensor_split narrow unbind flatten unflatten ravel Size contiguous clone detach cat concat
    concatenate stack no_grad inference_mode itemsize element_size type_as type to
"""
_MORE_TENSORS = """
    float double half bfloat16 long int bool float16 float32 float64 int64 int32 repeat repeat_interleave empty empty_like
    new_empty zeros zeros_like new_zeros ones ones_like new_ones full full_like new_full tensor as_tensor new_tensor arange copy_
    fill_ zero_ index_select gather tile broadcast_to broadcast_tensors item requires_grad_ finfo tiny eps promote_types
    is_grad_enabled set_grad_enabled enable_grad pad flip
"""
_ARITHMETIC = """
    math inf pi e sqrt rsqrt log log2 exp exp2 pow square reciprocal ceil floor isinf isnan isfinite add sub mul div multiply
    divide subtract true_divide neg negative sum mean add_ sub_ mul_ div_ exp_ exp2_ neg_ pow_ sqrt_ addcmul addcdiv addcmul_
    matmul mm bmm baddbmm addmm einsum vecdot linalg dot inner outer prod eq ne gt lt ge le isclose allclose operator truediv
"""
_MAXIMA = """
    max min amax amin maximum minimum values indices clamp clamp_min clamp_ fmax where masked_fill masked_fill_ softmax log_softmax
    logsumexp logaddexp log_ log1p expm1 nan_to_num nan_to_num_ any all count_nonzero nonzero
"""
_MASKS = """
    tril triu tril_ triu_ logical_not logical_and logical_or diagonal triu_indices tril_indices abs abs_ norm vector_norm
    mse_loss flatten numpy np astype asarray array isneginf inf finfo lerp std
"""
_SDPA = """
    F scaled_dot_product_attention sdpa_kernel SDPBackend MATH FLASH_ATTENTION EFFICIENT_ATTENTION CUDNN_ATTENTION ERROR
    torch nn functional attention torch.nn.attention Tensor backends cuda enable_math_sdp enable_flash_sdp
    enable_mem_efficient_sdp enable_cudnn_sdp math_sdp_enabled flash_sdp_enabled mem_efficient_sdp_enabled cudnn_sdp_enabled
    _fused_sdp_choice no_grad inference_mode getattr
    warnings catch_warnings simplefilter filterwarnings resetwarnings warn message category filters showwarning UserWarning
    re sub match search fullmatch findall compile group escape DOTALL MULTILINE IGNORECASE S M I enter_context callback traceback format_exception_only with_traceback add_note
    __cause__ __context__ args
"""
WORDS: dict[str, str] = {
    "q1_2": _PYTHON + _SDPA,
    "q1_3": _PYTHON + _SDPA + "shape dtype ndim dim size",
    "q2_2": _PYTHON + _TENSORS + _MORE_TENSORS + _ARITHMETIC + _MAXIMA + _MASKS + _SDPA + "@ cpu tolist",
    "bonus_2_4": _PYTHON + _TENSORS + _MORE_TENSORS + _ARITHMETIC + "@",
    "q3_2": _PYTHON + _TENSORS + _MORE_TENSORS + _ARITHMETIC + _MAXIMA + "@ sigmoid lerp linspace diff cumsum tolist",
    "q4_3": _PYTHON
    + _TENSORS
    + "empty empty_like new_empty empty_strided as_strided storage_offset copy_ data_ptr is_set_to "
    "why_not memory_format contiguous_format preserve_format detach hsplit vsplit" + _SDPA,
}

# Operators that ran. What torch makes of the words above has other names: products become mm and bmm, conversions copies.
_LIGHT = vocabulary.SHAPES.split() + vocabulary.CREATION.split() + vocabulary._INTERNAL.split()
_NEITHER = {
    "set_",
    "as_strided",
    "fold",
    "im2col",
    "rot90",
    "roll",
    "scatter_add",
    "scatter_reduce",
    "index_add",
    "index_reduce",
}
_MOVING = (MOVES | set(_LIGHT)) - _NEITHER
_MULTIPLYING = """
    mm bmm matmul addmm baddbmm addbmm mv addmv dot linalg_vecdot mul div add sub rsub neg sum mean pow sqrt rsqrt square
    reciprocal addcmul addcdiv exp exp2 prod eq ne gt lt ge le isfinite isnan isinf isclose all any _local_scalar_dense outer
    abs bitwise_not bitwise_and bitwise_or logical_not logical_and logical_or
"""
_OF_A_SOFTMAX = """
    _softmax softmax _log_softmax logsumexp logaddexp amax amin max min maximum minimum fmax clamp clamp_min where masked_fill
    log log2 log1p expm1 nan_to_num isneginf isposinf abs
"""
_OF_SDPA = (
    "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_attention_math _safe_softmax _fused_sdp_choice"
)
OPERATORS: dict[str, frozenset[str]] = {
    "q2_2_tests": _MOVING
    | {*_MULTIPLYING.split(), *_OF_A_SOFTMAX.split(), *_OF_SDPA.split(), "linalg_vector_norm", "norm", "std"}
    | {"mse_loss", ".numpy()", "lerp", "numpy.asarray(tensor)", ".tolist()"},
    "bonus_2_4_tests": _MOVING | set(_MULTIPLYING.split()),
    "q3_2_part_tests": _MOVING | {*_MULTIPLYING.split(), *_OF_A_SOFTMAX.split()},
    "q3_2_tests": _MOVING
    | {*_MULTIPLYING.split(), *_OF_A_SOFTMAX.split(), "sigmoid", "lerp", "linspace", "diff", "cumsum"},
}
