"""What right answers need: Python, a few modules of its library, and the part of torch that computes with tensors.

These lists are wide on purpose: a family stands here as a whole if any right answer uses one of it. What a question's model
answer uses beside them is added to them for that question. They forbid nothing: an answer that needs more waits for a person.
"""

from __future__ import annotations

import array
import builtins
import collections
import contextlib
import csv
import dataclasses
import datetime
import fractions
import functools
import gc
import importlib
import io
import itertools
import json
import logging
import math
import operator
import os
import pathlib
import queue
import random
import statistics
import sys
import threading
import time
import types
import typing

import pandas
import torch

from utils.checking.sizes import LINEAR, MOVES, words

_NOT_NEEDED = """
    eval exec compile open input breakpoint globals locals vars dir setattr delattr getattr memoryview help exit quit
    __import__ __build_class__ __loader__ __spec__ copyright credits license get_ipython display
"""
BUILTINS = frozenset(vars(builtins)) - frozenset(_NOT_NEEDED.split())
BUILTINS_ELSEWHERE = frozenset(
    ("getattr", "setattr", "delattr", "open", "dir", "vars", "display", "get_ipython")
)  # where nothing is forbidden
ERRORS = frozenset(
    name for name, value in vars(builtins).items() if isinstance(value, type) and issubclass(value, Exception)
)
_OBJECTS = """
    __init__ __call__ __post_init__ __len__ __iter__ __next__ __getitem__ __repr__ __str__ __eq__ __lt__ __hash__ __add__
    __radd__ __sub__ __mul__ __rmul__ __enter__ __exit__ __name__ __doc__ __slots__ __annotations__ __future__ __main__
    __all__ __version__ __wrapped__ __bool__ __contains__ __and__ __or__ __and__ __truediv__ __neg__ __init_subclass__
    __iadd__ __isub__ __imul__ __itruediv__ __invert__ __set_name__ __class_getitem__ __matmul__ __pow__ __rtruediv__ __rsub__ __gt__ __le__ __ge__ __ne__ __exit__ __del__
"""
DUNDERS = frozenset(_OBJECTS.split())

# Modules of Python that compute, or that help to write a function.
MODULES = words("""
    __future__ abc bisect collections collections.abc contextlib copy dataclasses decimal enum fractions functools heapq
    itertools math numbers operator random re statistics string textwrap time types typing typing_extensions warnings
    torch torch.nn torch.nn.functional
    """)
# The same where a question forbids nothing: whatever computes, keeps or measures something.
LIBRARIES = words("""
    numpy pandas scipy sympy os io sys pathlib tempfile json csv pickle hashlib gc tracemalloc concurrent threading queue
    asyncio array struct datetime logging pprint shutil subprocess traceback unittest uuid zlib base64 platform contextvars
    inspect triton matplotlib IPython psutil weakref secrets numexpr numba
    """)
# What objects of Python's library call things, too.
_LIBRARY = (gc, os, io, json, csv, pathlib, threading, queue, datetime, logging, array, time, random)
_TABLES = (pandas.DataFrame, pandas.Series, pandas.Index)  # which have a to_dict, as classes of the course do
_CLASSES = (value for module in _LIBRARY for value in vars(module).values() if isinstance(value, type))
OF_LIBRARIES = frozenset(
    name for owner in (*_LIBRARY, *_TABLES, *_CLASSES) for name in dir(owner) if not name.startswith("_")
)
# Parts of torch that hold no formula of a question.
OF_TORCH = words("""
    torch.nn.utils torch.nn.utils.rnn torch.nn.init torch.profiler torch.cuda torch.linalg torch.fft torch.special torch.testing
    torch.backends torch.backends.cuda torch.backends.cudnn torch.autograd torch.func torch.compiler torch.version torch.random
    torch.types torch.optim torch.utils.data torch.utils.benchmark
    """)
# Beginnings of attributes that lead to frames, code and the memory of objects.
INSIDE = ("f_", "tb_", "gi_", "cr_", "ag_", "co_", "func_", "cell_contents", "_getframe", "ctypes")
# They name an attribute by a text, which is held against the lists like an attribute.
BY_NAME = ("attrgetter", "methodcaller", "getattr")
_STANDARD = (math, itertools, functools, operator, collections, dataclasses, typing, statistics, fractions, types)
_KINDS = (str, int, float, complex, list, tuple, dict, set, frozenset, range, slice, bytes, collections.Counter)
_OF_TYPES = ("FunctionType", "CodeType", "FrameType", "CellType", "MethodType", "get_original_bases")
PYTHON = frozenset(
    name for owner in (*_STANDARD, *_KINDS) for name in dir(owner) if not name.startswith("_")
) - frozenset(_OF_TYPES)
_MORE_OF_PYTHON = """
    ABC abstractmethod Enum IntEnum auto value name args message catch_warnings simplefilter filterwarnings warn suppress
    nullcontext contextmanager ExitStack perf_counter perf_counter_ns monotonic time sleep Decimal getcontext Number Integral
    Real deepcopy cache_info cache_clear defaultdict Iterable Iterator Sequence Callable Mapping Generator start stop step
    func keywords default_factory sub match fullmatch search findall split group groups finditer IGNORECASE heappush heappop
    bisect_left bisect_right insort calls setdefault ascii_lowercase dedent timing callback enter_context close send
"""

# ---- torch -------------------------------------------------------------------------------------------------------

# Element by element, without the products of `LINEAR`.
ELEMENTWISE = """
    add sub rsub subtract mul multiply div divide true_divide floor_divide fmod remainder neg negative positive abs absolute
    sign sgn signbit square sqrt rsqrt pow float_power exp exp2 expm1 log log2 log10 log1p logaddexp logaddexp2 xlogy sin
    cos tan sinh cosh tanh asinh acosh atanh atan atan2 asin acos erf erfc erfinv sigmoid logit softplus relu
    reciprocal ceil floor round trunc frac maximum minimum fmax fmin clamp clamp_min clamp_max clip lerp addcmul addcdiv
    where masked_fill nan_to_num isnan isinf isfinite isposinf isneginf eq ne gt ge lt le greater greater_equal less
    less_equal equal not_equal logical_and logical_or logical_xor logical_not bitwise_and bitwise_or bitwise_xor
    bitwise_not bitwise_left_shift bitwise_right_shift ldexp frexp hypot copysign nextafter real imag conj threshold
    hardtanh heaviside isin isclose __and__ __or__ __xor__ __lshift__ __rshift__ hypot mod true_div truediv floordiv
"""
REDUCTIONS = """
    sum nansum mean nanmean prod amax amin aminmax max min any all argmax argmin argsort sort topk kthvalue msort cumsum
    cumprod cummax cummin logcumsumexp logsumexp softmax log_softmax _softmax _log_softmax softmin norm vector_norm
    linalg_vector_norm std var var_mean std_mean median nanmedian mode quantile unique unique_consecutive bincount histc
    count_nonzero searchsorted bucketize diff trace dist unique2 unique_dim unique_consecutive _unique2 renorm
"""
PRODUCTS = """
    mm bmm matmul addmm baddbmm addbmm mv addmv dot vdot inner outer addr ger einsum tensordot bilinear linear vecdot
    linalg_vecdot mT mH T H kron cross multi_dot chain_matmul
"""
SHAPES = """
    shape size numel nelement dim ndim ndimension dtype device itemsize element_size nbytes stride layout is_contiguous
    storage_offset is_floating_point is_complex is_cuda is_cpu is_meta requires_grad type type_as view view_as reshape
    reshape_as expand expand_as permute transpose swapaxes swapdims t adjoint movedim moveaxis unsqueeze squeeze select slice
    split split_with_sizes chunk tensor_split hsplit vsplit narrow unbind flatten unflatten ravel cat concat concatenate stack
    vstack hstack dstack row_stack column_stack index index_select index_put index_add index_copy index_fill gather
    scatter scatter_add scatter_reduce index_reduce take take_along_dim masked_select masked_scatter nonzero argwhere
    repeat repeat_interleave tile roll flip fliplr flipud rot90 pad constant_pad_nd tril triu tril_indices triu_indices
    diagonal diag diag_embed diagflat unfold fold im2col contiguous clone copy copy_ detach to _to_copy float double half
    bfloat16 long int short bool byte char cfloat cpu cuda item tolist fill zero zero_ fill_ block_diag meshgrid
    cartesian_prod combinations broadcast_to broadcast_tensors broadcast_shapes atleast_1d atleast_2d atleast_3d
    as_strided set_ resolve_conj lift lift_fresh numpy slice_scatter select_scatter diagonal_scatter new_tensor
    names is_same_size data_ptr memory_format preserve_format contiguous_format channels_last empty_cache
"""
CREATION = """
    empty empty_like empty_strided new_empty zeros zeros_like new_zeros ones ones_like new_ones full full_like new_full
    arange range linspace logspace eye tensor as_tensor scalar_tensor asarray rand randn randint randperm rand_like
    randn_like randint_like normal uniform manual_seed Generator generator complex polar
"""
_OF_TORCH = """
    Tensor dtype device float16 float32 float64 bfloat16 int8 int16 int32 int64 uint8 bool half double complex64 complex128
    float8_e4m3fn float8_e5m2 finfo iinfo inf nan pi e eps tiny smallest_normal promote_types result_type can_cast
    is_tensor Size no_grad inference_mode enable_grad is_grad_enabled set_default_dtype get_default_dtype
    nn functional Module Parameter Linear Sequential ModuleList Identity forward parameters named_parameters weight bias
    children modules eval train register_buffer state_dict load_state_dict in_features out_features backends
    matmul cudnn allow_tf32 set_float32_matmul_precision set_printoptions is_available synchronize current_device
    current_stream cuda Event record elapsed_time index typename vmap set_num_threads get_num_threads
    testing assert_close allclose isclose use_deterministic_algorithms set_grad_enabled linalg ReLU bits
    RMSNorm LayerNorm register_parameter avg_pool1d avg_pool2d max_pool2d pooling deterministic benchmark
    are_deterministic_algorithms_enabled seed get_rng_state set_rng_state fork_rng compile jit script script_if_tracing
"""
_INTERNAL = """
    _local_scalar_dense _unsafe_view _unsafe_index _unsafe_index_put _reshape_alias alias _index_put_impl _assert_async
    _is_all_true _is_any_true is_nonzero view_as_real view_as_complex native_dropout lift_fresh_copy var_mean
    linalg_vecdot logical_not_ masked_fill__ new_empty_strided expand_copy view_copy native_layer_norm floor_divide_
    _softmax_backward_data _conj resolve_neg _neg_view _to_dense prelu bernoulli random sym_size sym_stride sym_numel
    split_copy permute_copy scalar_tensor max_dim min_dim _linalg_check_errors result_type unsafe_split unsafe_chunk
    promote_types avg_pool2d avg_pool1d max_pool2d_with_indices _fused_rms_norm rms_norm pixel_shuffle
"""
_COMPUTING = " ".join((ELEMENTWISE, REDUCTIONS, PRODUCTS, SHAPES, CREATION)).split()
_NO_ATTRIBUTES = frozenset(("as_strided", "set_", "data_ptr", "numpy", "tolist"))  # unless the model answer has them
ATTRIBUTES = (
    (PYTHON | frozenset((*_MORE_OF_PYTHON.split(), *_COMPUTING, *_OF_TORCH.split())))
    | frozenset(f"{name}_" for name in _COMPUTING)
) - _NO_ATTRIBUTES
OPERATORS = frozenset((*_COMPUTING, *_INTERNAL.split())) | MOVES | LINEAR

# Of the kernel languages, beside what the lab's own files of kernels use.
KERNELS = words("""
    jit constexpr aggregate program_id num_programs arange load store make_range expand_dims trans dot join split reshape
    permute broadcast_to broadcast advance make_block_ptr zeros full cdiv multiple_of max_contiguous max_constancy
    static_range static_assert static_print device_print fma exp exp2 log log2 sqrt rsqrt where reduce maximum minimum
    cast bitcast to type dtype shape element_ty is_floating range inline_asm_elementwise convert_layout experimental gluon
    language nvidia hopper ampere mbarrier tma fence wait arrive expect init invalidate
    """)


@functools.cache
def kernel_language_names() -> frozenset[str]:
    """All names of Triton's and Gluon's languages: a class in a file of kernels cannot make them its own."""
    languages = ("triton.language", "triton.experimental.gluon.language")
    with contextlib.suppress(ImportError):
        for language in languages:
            importlib.import_module(language)
    modules = [module for name, module in list(sys.modules.items()) if name.startswith(languages)]
    return frozenset(name for module in modules for name in dir(module))


# Names of parts of torch that lead past the ones above.
INSIDE_TORCH = frozenset(n for n, v in vars(torch).items() if isinstance(v, types.ModuleType)) | {
    "utils",
    "attention",
    "flop_counter",
}
INSIDE_TORCH -= ATTRIBUTES | {name.rpartition(".")[2] for name in OF_TORCH if name != "torch.nn.utils"}
