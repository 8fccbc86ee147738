"""The attention kernel for Blackwell: right in the simulator, compiled for sm_100a; no such GPU has run it."""

import importlib.util
import math
import random
import sys
from pathlib import Path

import pytest
import torch

from utils import gluon_cpu
from utils.machine.versions import installed_version

if (installed_version("triton") or (0,)) < (3, 7):
    pytest.skip("the kernel is written for Triton 3.7 and later", allow_module_level=True)

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from utils.attention.gluon.blackwell import attention as kernels

ELEMENT = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}


def described(x: torch.Tensor):
    block = [1, 1, kernels.BLOCK, x.shape[3]]
    layout = gl.NVMMASharedLayout.get_default_for(block, ELEMENT[x.dtype])
    return TensorDescriptor(x, list(x.shape), list(x.stride()), block, layout)


def errors(module, batch, heads, kv_heads, sq, sk, head_dim, causal, dtype=torch.float16, stages=2, seed=None):
    """The errors of the output, relative, and of the log-sum-exp, against float64."""
    torch.manual_seed(1)
    q = torch.randn(batch, heads, sq, head_dim).to(dtype)
    k, v = (torch.randn(batch, kv_heads, sk, head_dim).to(dtype) for _ in "kv")
    out, lse = torch.full_like(q, math.nan), torch.full((batch, heads, sq), math.nan)
    c = math.log2(math.e) / math.sqrt(head_dim)
    with gluon_cpu.simulate(seed=seed):
        module.attention_blackwell[(-(-sq // 256), batch * heads)](
            *map(described, (q, k, v, out)), lse, sq, sk, heads, heads // kv_heads, c,
            BLOCK_D=head_dim, STAGES=stages, CAUSAL=causal, LSE=True, num_warps=4,
        )  # fmt: skip
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
    stages = 2 if head_dim == 128 else draw.choice((2, 3))  # three slots of 128 columns do not fit into shared memory
    off, lse = errors(
        kernels, 1, kv_heads * draw.choice((1, 2)), kv_heads, sq, sq + draw.randint(0, 400), head_dim,
        number % 2 == 0, draw.choice((torch.float16, torch.bfloat16)), stages, draw.choice((None, 1, 2, 3)),
    )  # fmt: skip
    assert off < 4e-3 and lse < 1e-4


BUGS = {
    "P is announced before it is stored": (
        "        p_view.store(gl.convert_layout(p.to(dtype), narrow))\n        mbarrier.arrive(bars.p_full.index(TILE), count=1)\n",
        "        mbarrier.arrive(bars.p_full.index(TILE), count=1)\n        p_view.store(gl.convert_layout(p.to(dtype), narrow))\n",
    ),
    "O is used while it is rescaled": ("            mbarrier.wait(bars.o_ready.index(tile), i & 1)\n", ""),
    "O is rescaled while it is added to": ("                mbarrier.wait(bars.o_done.index(tile), (i - 1) & 1)\n", ""),
    "the scores are read while they are computed": ("        mbarrier.wait(bars.s_full.index(TILE), i & 1)\n", ""),
    "V's slot is free when its product is issued": (
        "        tcgen05_commit(bars.v_empty.index(slot))\n",
        "        mbarrier.arrive(bars.v_empty.index(slot), count=1)\n",
    ),
    "V's slot is never free": ("        tcgen05_commit(bars.v_empty.index(slot))\n", ""),
    "no fence before the output leaves": (
        "        fence_async_shared()  # stored by threads, read by the store partition's TMA: without it TMA may read Q\n", "",
    ),
}  # fmt: skip


@pytest.mark.parametrize("bug", BUGS)
def test_a_broken_hand_off_is_reported(bug, tmp_path):
    text, (old, new) = Path(kernels.__file__).read_text(), BUGS[bug]
    assert text.count(old) == 1, "the kernel has other lines now"
    path = tmp_path / f"{bug.replace(' ', '_').replace(chr(39), '')}.py"
    path.write_text(text.replace(old, new))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for seed in (None, 1):
        with pytest.raises(gluon_cpu.SimulationError):
            errors(module, 1, 1, 1, 256, 1024, 64, False, seed=seed)


@pytest.mark.slow
@pytest.mark.parametrize(("head_dim", "spills"), [(64, 0), (128, 80)])
def test_it_compiles_for_blackwell(head_dim, spills):
    """At head dimension 128 a few values from before the partitions are spilled."""
    from utils.kernels.offline import BLACKWELL, compile_gluon, read_assembly

    layout = gl.NVMMASharedLayout.get_default_for([1, 1, 128, head_dim], gl.bfloat16)
    tile = f"tensordesc<bf16[1, 1, 128, {head_dim}],{layout!r}>"
    signature = dict.fromkeys(("q_desc", "k_desc", "v_desc", "o_desc"), tile) | {"lse_ptr": "*fp32", "c": "fp32"}
    signature |= dict.fromkeys(("sq", "sk", "heads", "group"), "i32")
    constants = {"BLOCK_D": head_dim, "STAGES": 2, "CAUSAL": False, "LSE": True}
    compiled = compile_gluon(kernels.attention_blackwell, signature, constants, ("lse_ptr",), capability=BLACKWELL)
    assembly = read_assembly(compiled, "attention_blackwell")
    assert assembly.spill_bytes <= spills and compiled.metadata.tmem_size == 512
    for instruction in ("UTCHMMA", "LDTM", "STTM", "UTMALDG", "UTMASTG"):
        assert assembly.count(instruction) > 0, instruction
