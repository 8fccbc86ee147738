"""The attention kernel for Blackwell: right in the simulator, compiled for sm_100a; no such GPU has run it."""

import dataclasses
import math
import random
from pathlib import Path

import pytest
import torch

from tests.utils.barrier_places import covered_barriers
from utils import gluon_cpu
from utils.machine.device import Support
from utils.machine.versions import installed_version

if (installed_version("triton") or (0,)) < (3, 7):
    pytest.skip("the kernel is written for Triton 3.7 and later", allow_module_level=True)

from utils.attention import attention, make_problem
from utils.attention.backends import gluon as backend
from utils.attention.gluon.blackwell import attention as kernels
from utils.attention.gluon.offline import compile_blackwell
from utils.attention.problem import Options, Problem
from utils.gluon_cpu.compiling import import_file, write_source
from utils.kernels.offline import BLACKWELL, BLACKWELL_ULTRA, compile_gluon


def errors(module, batch, heads, kv_heads, sq, sk, head_dim, causal, dtype=torch.float16, seed=None):
    """Return the relative error of the output and the largest error of the log-sum-exp, against float64."""
    torch.manual_seed(1)
    q = torch.randn(batch, heads, sq, head_dim).to(dtype)
    k, v = (torch.randn(batch, kv_heads, sk, head_dim).to(dtype) for _ in "kv")
    out, lse = torch.full_like(q, math.nan), torch.full((batch, heads, sq), math.nan)
    c = math.log2(math.e) / math.sqrt(head_dim)
    with gluon_cpu.simulate(seed=seed):
        module.launch(q, k, v, out, lse, causal, c)
    k, v = (x.double().repeat_interleave(heads // kv_heads, 1) for x in (k, v))
    scores = q.double() @ k.transpose(-1, -2) / math.sqrt(head_dim)
    if causal:
        hidden = torch.arange(sk) > torch.arange(sq)[:, None] + sk - sq
        scores = scores.masked_fill(hidden, -math.inf)
    expected = torch.softmax(scores, -1) @ v
    off = (out.double() - expected).norm() / expected.norm()
    return off.item(), (lse.double() - torch.logsumexp(scores, -1)).abs().max().item()


@pytest.mark.parametrize("number", range(8))
def test_drawn_shapes_are_right(number):
    draw = random.Random(f"blackwell {number}")
    sq, kv_heads, head_dim = draw.randint(1, 400), draw.choice((1, 2)), draw.choice((64, 128))
    off, lse = errors(
        kernels, 1, kv_heads * draw.choice((1, 2)), kv_heads, sq, sq + draw.randint(0, 400), head_dim,
        number % 2 == 0, draw.choice((torch.float16, torch.bfloat16)), draw.choice((None, 1, 2, 3)),
    )  # fmt: skip
    assert off < 4e-3 and lse < 1e-4


BUGS = {
    "P is announced before it is stored": (
        "        p_view.store(gl.convert_layout(p.to(dtype), narrow))\n        mbarrier.arrive(bars.p_full.index(TILE), count=1)\n",
        "        mbarrier.arrive(bars.p_full.index(TILE), count=1)\n        p_view.store(gl.convert_layout(p.to(dtype), narrow))\n",
    ),
    "O is used while it is rescaled": ("            mbarrier.wait(bars.o_ready.index(tile), i & 1)\n", ""),
    "O is rescaled while it is added to": ("mbarrier.wait(bars.o_done.index(tile), (i - 1) & 1)", "pass"),
    "the scores are read while they are computed": ("mbarrier.wait(bars.s_full.index(TILE), i & 1)", "pass"),
    "V's slot is free when its product is issued": (
        "        tcgen05_commit(bars.v_empty.index(slot))\n",
        "        mbarrier.arrive(bars.v_empty.index(slot), count=1)\n",
    ),
    "V's slot is never free": ("        tcgen05_commit(bars.v_empty.index(slot))\n", ""),
    "no fence before the output leaves": ("fence_async_shared()  # threads store the output", "pass  #"),
}  # fmt: skip


@pytest.mark.parametrize("bug", BUGS)
def test_a_broken_hand_off_is_reported(bug):
    text, (old, new) = Path(kernels.__file__).read_text(), BUGS[bug]
    assert text.count(old) == 1, "the kernel has other lines now"
    module = import_file(write_source(text.replace(old, new), "attention.py"))
    for seed in (None, 1):
        with pytest.raises(gluon_cpu.SimulationError):
            errors(module, 1, 1, 1, 256, 1024, 64, False, seed=seed)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("head_dim", "capability", "causal"), [(64, BLACKWELL, True), (128, BLACKWELL_ULTRA, False), (128, BLACKWELL, True)]
)
def test_it_compiles_for_blackwell(head_dim, capability, causal):
    assembly = compile_blackwell(head_dim, capability=capability, causal=causal)
    assert assembly.spill_bytes == 0 and assembly.columns == 512 and covered_barriers(assembly.ttgir) == []
    assert f"sm_{capability}a" in assembly.ptx
    for instruction in ("UTCHMMA", "LDTM", "STTM", "UTMALDG", "UTMASTG"):
        assert assembly.count(instruction) > 0, instruction


def test_another_target_is_refused_by_name():
    with pytest.raises(ValueError, match=r"sm_103a.*120 was asked for"):
        compile_gluon(kernels.attention_blackwell, {}, {}, capability=120)


def test_the_door_takes_it_by_name_only_and_warns():
    q, k, v = (torch.randn(1, 2, 40, 80).half() for _ in "qkv")
    backend._warn_of_blackwell.cache_clear()
    with gluon_cpu.simulate(), pytest.warns(RuntimeWarning, match="no GPU has run it"):
        out = backend.run_on_blackwell(q, k, v, make_problem(q, k, v, causal=True, scale=-0.1))
    expected = attention(q.double(), k.double(), v.double(), causal=True, scale=-0.1, backend="naive")
    assert (out.double() - expected).norm() / expected.norm() < 4e-3
    problem = Problem(1, 2, 2, 40, 40, 80, torch.float16, torch.device("cuda"), True, 0.1, None, False)
    support = dataclasses.replace(backend.ON_BLACKWELL, machine=lambda: Support(True)).support
    assert support(problem) and "window" in support(dataclasses.replace(problem, window=8)).reason
    assert "up to 128" in support(dataclasses.replace(problem, head_dim=136)).reason
    assert "by its name only" in support(problem, Options(tuned=True)).reason
