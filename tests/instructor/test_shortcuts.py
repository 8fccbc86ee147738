"""Shortcuts with right values are refused by the rules that a check declares."""

import functools
import importlib

import nbformat
import pytest

from instructor.build import build_lab
from instructor.checks.common import rules_of
from instructor.points import lab_path
from tests.instructor import lab_cases

# (lab, answer cell, what it does, code that replaces the model answer, a word of the refusal)
SHORTCUTS = [
    (
        "lab1",
        "q1_1",
        "weighted bags of embeddings are a product",
        """
def gemm_naive(a, b):
    rows = torch.arange(b.shape[0], device=a.device).expand(a.shape[0], -1)
    return F.embedding_bag(rows, b, per_sample_weights=a.contiguous(), mode="sum")
""",
        "embedding_bag",
    ),
    (
        "lab1",
        "q1_1",
        "a row at a time",
        """
def gemm_naive(a, b):
    return torch.stack([(row[:, None] * b).sum(0) for row in a])
""",
        "at once",
    ),
    (
        "lab1",
        "q1_2",
        "bags of embeddings for tiles",
        """
def gemm_tiled(a, b, tile_m=64, tile_n=64, tile_k=64):
    rows = torch.arange(b.shape[0], device=a.device).expand(a.shape[0], -1)
    return F.embedding_bag(rows, b, per_sample_weights=a.contiguous(), mode="sum")
""",
        "embedding_bag",
    ),
    (
        "lab1",
        "q1_2",
        "distances hold the product",
        """
def gemm_tiled(a, b, tile_m=64, tile_n=64, tile_k=64):
    return ((a * a).sum(1)[:, None] + (b * b).sum(0)[None] - torch.cdist(a, b.T) ** 2) / 2
""",
        "cdist",
    ),
    (
        "lab1",
        "q4_2",
        "the library's GELU, compiled",
        """
_compiled = torch.compile(F.gelu, backend="eager")
def gelu_by_hand(x):
    return _compiled(x, approximate="tanh")
""",
        "gelu",
    ),
    (
        "lab1",
        "q4_2",
        "the tanh is a derivative of log cosh",
        """
def gelu_by_hand(x):
    u = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    return 0.5 * x * (1 + torch.func.grad(lambda y: torch.logaddexp(y, -y).sum())(u))
""",
        "autograd",
    ),
    (
        "lab1",
        "q5_1",
        "SDPA by a name in two parts",
        """
def standard_attention(q, k, v):
    return getattr(F, "scaled_dot_" + "product_attention")(q, k, v)
""",
        "scaled_dot_product_attention",
    ),
    (
        "lab1",
        "q5_1",
        "FlexAttention",
        """
def standard_attention(q, k, v):
    from torch.nn.attention.flex_attention import flex_attention
    return flex_attention(q, k, v)
""",
        "flex_attention",
    ),
    (
        "lab1",
        "q5_2",
        "SDPA for show beside an attention of one's own",
        """
def attention_bshd(q, k, v):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    F.scaled_dot_product_attention(q, k, v, is_causal=True)
    mask = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).tril()
    scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(~mask, -math.inf)
    return (torch.softmax(scores, -1) @ v).transpose(1, 2)
""",
        "beside",
    ),
    (
        "lab1",
        "q5_3",
        "a softmax that a distribution computes",
        """
def flash_attention_tiled(q, k, v, tile_q=64, tile_k=64):
    scores = q.float() @ k.float().mT / math.sqrt(q.shape[-1])
    return (torch.distributions.Categorical(logits=scores).probs @ v.float()).to(q.dtype)
""",
        "",
    ),
    (
        "lab1",
        "q5_3",
        "all blocks are kept",
        """
def online_softmax_stats(blocks):
    kept = [block.clone() for block in blocks]
    m = functools.reduce(torch.maximum, [block.amax(1) for block in kept])
    return m, sum(torch.exp(block - m[:, None]).sum(1) for block in kept)
""",
        "one block at a time",
    ),
    (
        "lab2_flexattention",
        "q1_1",
        "SDPA's own formula",
        """
def masked_attention(q, k, v, mask):
    return torch.ops.aten._scaled_dot_product_attention_math(q, k, v, mask)[0].nan_to_num(0.0)
""",
        "scaled_dot_product",
    ),
    (
        "lab2_flexattention",
        "q2_1",
        "a mask as a table",
        """
_TABLE = torch.ones(64, 64, dtype=torch.bool).tril()
def causal(b, h, q, k):
    return _TABLE[q, k]
""",
        "a tensor of",
    ),
    (
        "lab2_flexattention",
        "q3_1",
        "the library counts the blocks",
        """
def count_blocks(mask, block):
    tables = create_block_mask(lambda b, h, q, k: mask[q, k], None, None, *mask.shape, device="cpu", BLOCK_SIZE=block)
    partial, full = int(tables.kv_num_blocks.sum()), int(tables.full_kv_num_blocks.sum())
    return full, partial, -(-mask.shape[0] // block) * -(-mask.shape[1] // block) - full - partial
""",
        "",
    ),
    (
        "lab2_flexattention",
        "q3_3",
        "dense attention for a sparse mask",
        """
def block_sparse_attention(q, k, v, block_mask):
    i, j = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])[None]
    zero = torch.zeros((), dtype=torch.long)
    scores = (q.float() @ k.float().mT / math.sqrt(q.shape[-1])).masked_fill(~block_mask.mask_mod(zero, zero, i, j), -math.inf)
    return (torch.softmax(scores, -1).nan_to_num(0.0) @ v.float()).to(q.dtype)
""",
        "tables",
    ),
    (
        "lab4_sdpa",
        "q1_3",
        "math is allowed as well",
        """
def pinned_sdpa(backend, q, k, v, **options):
    try:
        with sdpa_kernel([BACKENDS[backend], SDPBackend.MATH], set_priority=True):
            return F.scaled_dot_product_attention(q, k, v, **options)
    except RuntimeError:
        raise BackendRefused("; ".join(why_not(backend, q, k, v, **options))) from None
""",
        "",
    ),
    (
        "lab4_sdpa",
        "bonus_2_4",
        "torch's own derivative",
        """
def attention_backward(q, k, v, out, lse, dout):
    attend = lambda q, k, v: torch.exp(q @ k.mT / math.sqrt(q.shape[-1]) - lse[..., None]) @ v
    return torch.func.vjp(attend, q, k, v)[1](dout)
""",
        "autograd",
    ),
    (
        "lab4_sdpa",
        "q3_2",
        "flash gives the lse",
        """
def attend_part(q, k, v):
    k, v = (x.float().repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q.float(), k, v)
""",
        "scaled_dot_product",
    ),
    (
        "lab4_sdpa",
        "q3_2",
        "one call for all splits",
        """
def split_kv_attention(q, k, v, splits):
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
""",
        "scaled_dot_product",
    ),
    (
        "lab4_sdpa",
        "q4_3",
        "always a copy",
        """
def ready_for_flash(x):
    return x.contiguous()
""",
        "copy",
    ),
]


@functools.cache
def _lab(name: str):
    """Return the model answers, the hidden calls, the setup and the checks of a lab."""
    cells = nbformat.reads(build_lab(lab_path(name)).instructor, as_version=4).cells
    setup = importlib.import_module(f"tests.instructor.test_{name.partition('_')[0]}").SETUP
    return lab_cases.answers_in(cells), lab_cases.hidden_calls(cells), setup, lab_cases.checks_of(name)


def _refusals(lab: str, cell: str, code: str) -> list[str]:
    answers, calls, setup, checks = _lab(lab)
    names: dict = {}
    exec(setup, names)
    lab_cases.run_answers(answers, names)
    exec(compile(code, cell, "exec"), names)
    return lab_cases.refusals(lab_cases.verdicts_on(lab_cases.calls_of(cell, calls), names, checks))


@pytest.mark.parametrize("case", SHORTCUTS, ids=lambda case: f"{case[1]}: {case[2]}")
@pytest.mark.filterwarnings("ignore")
def test_a_shortcut_is_refused(case):
    lab, cell, _, code, word = case
    refused = _refusals(lab, cell, code)
    assert refused and any(word in text for text in refused), refused


def test_the_rules_of_a_lab_are_sentences():
    rules = rules_of(lab_cases.checks_of("lab1"))
    assert set(rules) >= {"1.1", "1.2", "4.2", "5.1", "5.3"}
    assert all(text.startswith("What runs counts: no ") for texts in rules.values() for text in texts)
