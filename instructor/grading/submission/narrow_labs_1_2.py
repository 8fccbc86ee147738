"""What right answers to single questions of labs 1 and 2 are written with, where a question forbids or demands a way.

Python's own words and what makes, looks at or moves tensors are the same for all of them, and generous: a student may write helpers,
classes, lists and checks of their own. What computes with tensors is written out for each question: what its formula needs, in the ways in
which textbooks, blogs and PyTorch's documentation write it. An answer with another word waits for a person, and loses nothing by that.
"""

from __future__ import annotations

from instructor.grading.submission import vocabulary
from utils.checking.sizes import MOVES, words

_COMPUTE = words(" ".join((vocabulary.ELEMENTWISE, vocabulary.REDUCTIONS, vocabulary.PRODUCTS)))
_SELDOM = words("""
    as_strided set_ data_ptr resolve_conj numpy tolist im2col fold complex polar cfloat scatter_add scatter_reduce index_reduce index_add
    int8 uint8 int16 float8_e4m3fn float8_e5m2 complex64 complex128 bits vmap compile jit script script_if_tracing
    RMSNorm LayerNorm avg_pool1d avg_pool2d max_pool2d pooling ReLU Linear
    """)  # beside what computes; a question's own list may hold some of them
_COMMON = (
    vocabulary.PYTHON
    | vocabulary.BUILTINS
    | words(" ".join((vocabulary._MORE_OF_PYTHON, vocabulary._OF_TORCH, vocabulary.SHAPES, vocabulary.CREATION)))
    | words(
        "ceil floor float_ long_ zero_ fill_ copy_ squeeze_ unsqueeze_ transpose_ t_ detach_ requires_grad_ index_fill_ T mT mH H index_copy_ index_put_ / // % **"
    )
) - (_COMPUTE - words("sum min max abs any all round pow divmod sqrt ceil floor mT mH H T"))
_COMMON -= _SELDOM
_MOVES = (MOVES - words("set resize")) | words("""
    promote_types result_type expand_copy view_copy split_copy permute_copy unsafe_split unsafe_chunk _unsafe_index_put _index_put_impl
    _assert_async _is_all_true _is_any_true _conj resolve_conj resolve_neg sym_size sym_stride sym_numel hsplit vsplit meshgrid linspace
    """)


def _list(*texts: str) -> str:
    """The words of a question beside those that all questions share, and each of them in place."""
    own = words(" ".join(texts))
    return " ".join(sorted(_COMMON | own | {f"{word}_" for word in own}))


def _operators(*texts: str) -> frozenset[str]:
    return _MOVES | words(" ".join(texts))


# ---- what computes: words of the text, and beside them operators that torch runs for these words -----------------------------

_SUMS = "add sub subtract rsub neg negative mul multiply sum addcmul"
_EDGES = "where masked_fill lt le gt ge eq ne logical_and logical_or logical_not logical_xor clamp clamp_min clamp_max clip & | any all"
_BITWISE = "bitwise_and bitwise_or bitwise_not"  # of truth values: & | ~
_DIVIDING = "div divide true_divide reciprocal sqrt rsqrt pow square addcdiv"
_LIBRARY = "@ matmul mm bmm baddbmm addmm addbmm einsum tensordot mv dot inner linear vecdot"
_EXPONENTIALS = "exp exp2 expm1 amax max maximum fmax"
_SOFTMAX = "softmax log_softmax softmin logsumexp"
_RAN_SOFTMAX = "_softmax _log_softmax logsumexp _safe_softmax softmax log_softmax"
_GUARDS = "nan_to_num isnan isinf isfinite isneginf isposinf abs minimum amin fmin nansum"
_LOGS = "log log2 log1p logaddexp logaddexp2"
_SORTING = "argsort sort unique unique_consecutive argmax argmin diff bincount searchsorted bucketize cumsum cummax count_nonzero"
_WHOLE = "floor_divide remainder fmod floor ceil trunc sign round div abs minimum maximum amax amin min max prod"
_HOST = "numpy tolist from_numpy lexsort concatenate asarray ascontiguousarray"  # before a mask is asked, values may be wherever they like

_FLASH = (_SUMS, _EDGES, _DIVIDING, _LIBRARY, _EXPONENTIALS, _GUARDS, _LOGS, "tril triu lerp")
_DENSE = (_SUMS, _EDGES, _DIVIDING, _LIBRARY, _EXPONENTIALS, _GUARDS, _SOFTMAX, _LOGS)
_GELU = (
    _SUMS,
    _EDGES,
    _DIVIDING,
    "exp exp2 expm1 tanh sigmoid sinh cosh float_power abs sign copysign maximum minimum lerp log isnan isinf",
)
_MASK = (_SUMS, _EDGES, _WHOLE, "^ bitwise_xor not_equal greater greater_equal less less_equal equal isin mod itself")
_MAKES_MASK = (
    *_MASK,
    _BITWISE,
    _SORTING,
    _HOST,
    "nonzero index_add scatter_add scatter_reduce mean vmap ZeroPad2d ConstantPad2d",
)

LAB1: dict[str, str] = {
    "q1_2_tests": _list(_SUMS, _EDGES, "addr outer ger vecdot minimum linalg"),
    "q3_4_decode_tests": _list("add where cumsum create_decode_inputs_with_cache create_prefill_inputs"),
    "q4_2_tests": _list(*_GELU),
    "q5_1_tests": _list(*_DENSE),
    "q5_2_tests": _list(_EDGES, "tril triu scaled_dot_product_attention sdpa_kernel SDPBackend sqrt"),
    "q5_3_tests": _list(*_DENSE, "sort topk cummax logcumsumexp argmax aminmax values"),
    "q5_3_flash_tests": _list(*_FLASH),
    "bonus_5_6_tests": _list(*_FLASH),
    "bonus_5_7_tests": _list(*_FLASH, "sigmoid logsigmoid softplus"),  # ring attention merges two parts so
}
OPERATORS_LAB1: dict[str, frozenset[str]] = {
    "q1_1_tests": _operators("add sub mul sum addcmul neg prod stack"),
    "q1_2_tests": _operators(_SUMS, _EDGES, "addr linalg_vecdot outer minimum"),
    "q4_2_tests": _operators(*_GELU, _BITWISE),
    "q5_1_tests": _operators(*_DENSE, _BITWISE, _RAN_SOFTMAX),
    "q5_2_tests": _operators(_EDGES, _BITWISE, "tril triu add"),  # the check itself adds to what SDPA returns
    "q5_3_tests": _operators(
        *_DENSE, _BITWISE, _RAN_SOFTMAX, "sort topk cummax logcumsumexp _logcumsumexp aminmax argmax"
    ),
    "q5_3_flash_tests": _operators(*_FLASH, _BITWISE),
    "bonus_5_6_tests": _operators(*_FLASH, _BITWISE),
    "bonus_5_7_tests": _operators(*_FLASH, _BITWISE, "sigmoid log_sigmoid_forward softplus"),
}
_OF_MASKS = _list(*_MAKES_MASK)
_ON_PAPER = " ".join(sorted(vocabulary.PYTHON | vocabulary.BUILTINS | words(vocabulary._MORE_OF_PYTHON))) + " / // % **"
LAB2: dict[str, str] = {
    "q3_2_tests": _ON_PAPER,  # no tensor at all
    "q1_1_tests": _list(*_DENSE, _BITWISE),
    "q3_3_tests": _list(*_DENSE, _BITWISE, "tolist vmap sort argsort unique nonzero index_add scatter_add"),
    **dict.fromkeys(
        ("q2_1_tests", "q2_2_tests", "q2_3_tests", "q2_3_heads_tests", "q7_1_tests", "q7_1_blocks_tests"), _OF_MASKS
    ),
    **dict.fromkeys(("bonus_8_1_tests", "bonus_8_2_tests", "bonus_8_3_tests", "q6_1_tests", "q5_1_tests"), _OF_MASKS),
}
OPERATORS_LAB2: dict[str, frozenset[str]] = {
    "q1_1_tests": _operators(*_DENSE, _BITWISE, _RAN_SOFTMAX),
    "q3_3_tests": _operators(*_DENSE, *_MASK, _BITWISE, _RAN_SOFTMAX, "sort argsort index_add scatter_add"),
}
