"""Tell by a name what a kernel or operator does. This module does not import torch.

    >>> classify("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT")
    'gemm'

There are four kinds of names, each with its own rule: libraries (cuBLAS, cuDNN, CUTLASS, flash-attn); torch's own
kernels (`at::native::...`, whose template arguments say more than the name); inductor's Triton kernels
(`triton_poi_fused_` followed by the operators that were fused); and torch's operators (`aten::...`), the only names in
a CPU trace. Kernels that students write are classified by the words in their names.
"""

from __future__ import annotations

import functools
import re

GEMM, ATTENTION, SOFTMAX, LAYERNORM = "gemm", "attention", "softmax", "layernorm"
ELEMENTWISE, REDUCTION, MEMORY, OTHER = "elementwise", "reduction", "memory", "other"

FAMILIES = (GEMM, ATTENTION, SOFTMAX, LAYERNORM, ELEMENTWISE, REDUCTION, MEMORY, OTHER)

# `count_cuda_kernels` counts attention, which is gemm and softmax together, and reductions as "other".
DOCUMENTED_KEY = {family: family for family in FAMILIES} | {ATTENTION: OTHER, REDUCTION: OTHER}

# Library and hand-written kernels; the first match counts. Attention comes before gemm, because `flash_fwd` kernels name
# gemms in their template arguments.
_WORDS_OF = (
    (ATTENTION, r"flash(?!infer)|fmha|sdpa|attention|attn|flex_decoding|mha_(fwd|bwd|varlen)"),
    (GEMM, r"gemm|gemv|nvjet|matmul|splitk|xmma|cutlass.*(tensorop|wgmma|simt)|_(mm|bmm|addmm)(_|$)|implicit_convolve"),
    (SOFTMAX, r"soft_?max"),
    (LAYERNORM, r"(layer|rms|group|batch)_?norm|rowwisemoments|(^|_)bn_(fw|bw)"),
    (
        MEMORY,
        r"^mem(cpy|set)|copy|fill_?(functor|kernel)|^cat|transpose|gather|scatter|index(_?select|ing|_elementwise"
        r"|_put)|embedding|(^|_)(cast|cat|concat|permute|roll|pad)(_|$)|triu_?tril|arange",
    ),
    (REDUCTION, r"reduce|(^|_)(sum|mean|amax|argmax|norm|cumsum|scan|dot)(_|$|kernel)"),
    (
        ELEMENTWISE,
        r"elementwise|pointwise|(^|_)(gelu|silu|relu|add|mul|div|sub|tanh|sigmoid|exp|pow|rope|rotary|where"
        r"|axpy|scale|swiglu|geglu|activation|dropout)|act_and_mul|fused_dropout|distribution",
    ),
)
_PATTERNS = tuple((family, re.compile(pattern)) for family, pattern in _WORDS_OF)

# Without underscores around the name and without `_backward`: `exp` stands for `aten::exp_`, too.
_OPERATORS = {
    GEMM: (
        "mm bmm addmm baddbmm addbmm mv addmv matmul linear einsum dot vdot inner outer addr bilinear tensordot "
        "chain_matmul linalg_vecdot mkldnn_linear scaled_mm grouped_mm int_mm addmm_activation convolution conv1d "
        "conv2d conv3d mkldnn_convolution"
    ),
    SOFTMAX: "softmax log_softmax safe_softmax masked_softmax",
    LAYERNORM: (
        "layer_norm native_layer_norm rms_norm fused_rms_norm group_norm native_group_norm batch_norm native_batch_norm"
    ),
    MEMORY: (
        "copy clone contiguous to to_copy cat stack concat fill zero zeros ones full zeros_like ones_like full_like "
        "new_zeros new_ones new_full index index_select index_put index_put_impl index_copy index_add gather scatter "
        "scatter_add embedding repeat tile roll flip pad constant_pad_nd tril triu arange range linspace "
        "masked_select take nonzero pack_padded_sequence repeat_interleave unfold_copy lift_fresh_copy"
    ),
    REDUCTION: (
        "sum mean amax amin max min argmax argmin prod norm linalg_vector_norm std var var_mean logsumexp cumsum "
        "cumprod any all topk sort count_nonzero"
    ),
    ELEMENTWISE: (
        "add sub rsub mul div true_divide pow square sqrt rsqrt exp exp2 log log2 neg abs sign sin cos tanh sigmoid "
        "gelu silu relu leaky_relu hardtanh clamp clamp_min clamp_max where maximum minimum eq ne lt le gt ge "
        "logical_and logical_or logical_not bitwise_and bitwise_or bitwise_not and or masked_fill addcmul addcdiv "
        "lerp erf reciprocal floor ceil round remainder fmod isnan isinf dropout native_dropout bernoulli normal "
        "uniform randn rand threshold floor_divide"
    ),
}
_ATEN = {name: family for family, names in _OPERATORS.items() for name in names.split()}

# Operators that launch nothing: they only change shape and stride, reserve memory or answer a question.
_FREE = (
    "view unsafe_view view_as reshape_alias as_strided transpose t permute unsqueeze squeeze expand expand_as select "
    "slice narrow split split_with_sizes chunk unbind unflatten flatten movedim swapaxes diagonal detach alias lift "
    "lift_fresh mT mH numpy_T adjoint real view_as_real view_as_complex unsafe_split unsafe_chunk tensor_split "
    "broadcast_to broadcast_tensors empty empty_like empty_strided empty_permuted new_empty new_empty_strided resize "
    "resize_as set resize_output resolve_conj resolve_neg is_nonzero item local_scalar_dense result_type can_cast "
    "promote_types is_same_size size stride sym_size requires_grad retain_grad has_compatible_shallow_copy_type "
    "assert_async assert_scalar nested_tensor_size is_pinned fused_sdp_choice sym_numel numel record_stream output_nr"
)
FREE_OPERATORS = frozenset(_FREE.split())

# Operators that only call other operators. Their cost is the cost of the operators inside them, if there are any.
_WRAPPERS = (
    "reshape to contiguous type_as dropout feature_dropout flatten cpu cuda matmul linear softmax log_softmax "
    "layer_norm scaled_dot_product_attention clone _to_copy pin_memory"
)
WRAPPER_OPERATORS = frozenset(f"aten::{name}" for name in _WRAPPERS.split())

# Words in the name of an inductor kernel that only moves data.
_COPYING = (
    "clone copy to cat view transpose t permute expand unsqueeze squeeze slice stack split constant pad nd unsafe index "
    "put select embedding zeros zero fill full like arange new lift fresh reshape as strided"
)
_COPYING_WORDS = frozenset(_COPYING.split())
_TRITON = re.compile(r"^(triton|cpp)_(poi|red|per|tem|mix|for|fused)_?(?:fused_)?(.*?)(?:_\d+)?$")


@functools.lru_cache(maxsize=16384)
def classify(name: str) -> str:
    """Return the family of a kernel or operator, one of FAMILIES."""
    text = name.strip()
    if text.startswith("aten::"):
        return _classify_operator(bare_operator(text))
    compiled = _TRITON.match(re.sub(r"^graph_\d+_", "", text))
    if compiled:
        return _classify_fused(compiled.group(2), compiled.group(3))
    if text.startswith("nccl"):
        return OTHER  # communication
    head = re.sub(r"^(void|__global__)\s+", "", text).replace("(anonymous namespace)::", "")
    head = re.split(r"[<(]", head, maxsplit=1)[0]
    if head.startswith("at::native::"):
        return _classify_native(head.removeprefix("at::native::"), text)
    # Wrappers such as `cutlass::device_kernel` and `cutlass::Kernel2` say nothing; their template arguments do.
    family = _first_match(head)
    return family if family != OTHER else _first_match(text)


def _first_match(text: str) -> str:
    lowered = text.lower()
    # `cat` and `copy` count at the start of the name without its namespaces.
    bare = lowered.rsplit("::", 1)[-1]
    for family, pattern in _PATTERNS:
        if pattern.search(lowered) or pattern.search(bare):
            return family
    return OTHER


def _classify_native(head: str, text: str) -> str:
    """Classify a CUDA kernel of torch itself. Copies and fills also run in torch's elementwise kernel."""
    lowered = head.lower()
    if "elementwise" in lowered and not lowered.startswith(("index_elementwise", "_scatter_gather")):
        moves = (
            r"direct_copy|copy_kernel|fillfunctor|fill_kernel|copyfunctor|index_?(kernel|put|fill|copy)|gather|scatter"
        )
        return MEMORY if re.search(moves, text.lower()) else ELEMENTWISE
    if "reduce_kernel" in lowered:
        return REDUCTION
    return _first_match(head)


def bare_operator(name: str) -> str:
    """Shorten "aten::add_.Tensor" to "add": without namespace, overload, and underscores at the ends."""
    return name.removeprefix("aten::").partition(".")[0].strip("_")


def _classify_operator(bare: str) -> str:
    family = _ATEN.get(re.sub(r"_backward(_data)?$", "", bare))
    if family or bare in FREE_OPERATORS:
        return family or MEMORY
    return ATTENTION if re.search(r"attention|flash|sdpa", bare) else OTHER


def _classify_fused(kind: str, fused: str) -> str:
    """Classify a kernel of inductor by its kind (poi, red, per, tem, mix) and the names of the fused operators."""
    words = [word for word in fused.split("_") if word and not word.isdigit()]
    has = set(words).__contains__
    if "attention" in fused or "flex_decoding" in fused:
        return ATTENTION
    if kind == "tem" or any(map(has, ("mm", "bmm", "addmm", "baddbmm", "mv"))):
        return GEMM
    if "softmax" in fused:
        return SOFTMAX
    if "layer_norm" in fused or "rms_norm" in fused or (has("rsqrt") and (has("mean") or "var_mean" in fused)):
        return LAYERNORM
    if kind in ("red", "per", "mix") or (kind == "fused" and any(map(has, ("sum", "mean", "amax", "argmax")))):
        return REDUCTION
    if words and set(words) <= _COPYING_WORDS:
        return MEMORY
    return ELEMENTWISE
