"""Shortcuts with right values are refused by the rules that a check declares."""

import functools
import importlib

import nbformat
import pytest

from instructor.build import build_lab
from instructor.points import lab_path
from tests.instructor import lab_cases

# Cells as `answers_in_text` reads them: answer cell, what it does, and behind a dash a word of the refusal.
SHORTCUTS = {
    "lab1": r"""
# %% q1_1: weighted bags of embeddings are a product - embedding_bag
def gemm_naive(a, b):
    rows = torch.arange(b.shape[0], device=a.device).expand(a.shape[0], -1)
    return F.embedding_bag(rows, b, per_sample_weights=a.contiguous(), mode="sum")

# %% q1_1: a row at a time - at once
def gemm_naive(a, b):
    return torch.stack([(row[:, None] * b).sum(0) for row in a])

# %% q1_2: distances hold the product - cdist
def gemm_tiled(a, b, tile_m=64, tile_n=64, tile_k=64):
    return ((a * a).sum(1)[:, None] + (b * b).sum(0)[None] - torch.cdist(a, b.T) ** 2) / 2

# %% q4_2: the library's GELU, compiled - gelu
_compiled = torch.compile(F.gelu, backend="eager")
def gelu_by_hand(x):
    return _compiled(x, approximate="tanh")

# %% q4_2: the tanh is a derivative of log cosh - autograd
def gelu_by_hand(x):
    u = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    return 0.5 * x * (1 + torch.func.grad(lambda y: torch.logaddexp(y, -y).sum())(u))

# %% q5_1: SDPA by a name in two parts - scaled_dot_product_attention
def standard_attention(q, k, v):
    return getattr(F, "scaled_dot_" + "product_attention")(q, k, v)

# %% q5_1: FlexAttention - flex_attention
def standard_attention(q, k, v):
    from torch.nn.attention.flex_attention import flex_attention
    return flex_attention(q, k, v)

# %% q5_3: all blocks are kept - one block at a time
def online_softmax_stats(blocks):
    kept = [block.clone() for block in blocks]
    m = functools.reduce(torch.maximum, [block.amax(1) for block in kept])
    return m, sum(torch.exp(block - m[:, None]).sum(1) for block in kept)
""",
    "lab2_flexattention": r"""
# %% q1_1: SDPA's own formula - scaled_dot_product
def masked_attention(q, k, v, mask):
    return torch.ops.aten._scaled_dot_product_attention_math(q, k, v, mask)[0].nan_to_num(0.0)

# %% q2_1: a mask as a table - a tensor of
_TABLE = torch.ones(64, 64, dtype=torch.bool).tril()
def causal(b, h, q, k):
    return _TABLE[q, k]

# %% q3_1: the library counts the blocks
def count_blocks(mask, block):
    tables = create_block_mask(lambda b, h, q, k: mask[q, k], None, None, *mask.shape, device="cpu", BLOCK_SIZE=block)
    partial, full = int(tables.kv_num_blocks.sum()), int(tables.full_kv_num_blocks.sum())
    return full, partial, -(-mask.shape[0] // block) * -(-mask.shape[1] // block) - full - partial

# %% q3_3: dense attention for a sparse mask - tables
def block_sparse_attention(q, k, v, block_mask):
    i, j = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])[None]
    zero = torch.zeros((), dtype=torch.long)
    scores = (q.float() @ k.float().mT / math.sqrt(q.shape[-1])).masked_fill(~block_mask.mask_mod(zero, zero, i, j), -math.inf)
    return (torch.softmax(scores, -1).nan_to_num(0.0) @ v.float()).to(q.dtype)
""",
    "lab4_sdpa": r"""
# %% q1_3: math is allowed as well
def pinned_sdpa(backend, q, k, v, **options):
    try:
        with sdpa_kernel([BACKENDS[backend], SDPBackend.MATH], set_priority=True):
            return F.scaled_dot_product_attention(q, k, v, **options)
    except RuntimeError:
        raise BackendRefused("; ".join(why_not(backend, q, k, v, **options))) from None

# %% bonus_2_4: torch's own derivative - autograd
def attention_backward(q, k, v, out, lse, dout):
    attend = lambda q, k, v: torch.exp(q @ k.mT / math.sqrt(q.shape[-1]) - lse[..., None]) @ v
    return torch.func.vjp(attend, q, k, v)[1](dout)

# %% q3_2: flash gives the lse - scaled_dot_product
def attend_part(q, k, v):
    k, v = (x.float().repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q.float(), k, v)

# %% q3_2: one call for all splits - scaled_dot_product
def split_kv_attention(q, k, v, splits):
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

# %% q4_3: always a copy - copy
def ready_for_flash(x):
    return x.contiguous()
""",
}
ROWS = [(lab, *row) for lab, text in SHORTCUTS.items() for row in lab_cases.answers_in_text(text)]


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


@pytest.mark.parametrize(("lab", "shortcut", "cell", "code"), ROWS, ids=[f"{row[2]}: {row[1]}" for row in ROWS])
@pytest.mark.filterwarnings("ignore")
def test_a_shortcut_is_refused(lab, shortcut, cell, code):
    refused, word = _refusals(lab, cell, code), shortcut.partition(" - ")[2]
    assert refused and any(word in text for text in refused), refused


def test_the_rules_of_a_lab_are_sentences():
    checks = vars(lab_cases.checks_of("lab1")).values()
    rules = {check.question: check.rule.describe() for check in checks if getattr(check, "rule", None)}
    assert set(rules) >= {"1.1", "1.2", "4.2", "5.1", "5.3"}
    assert all(text.startswith("What runs counts: no ") for text in rules.values())
