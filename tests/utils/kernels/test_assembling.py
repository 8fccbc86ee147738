"""Copies of kernels, assembled from another PTX: when they are loaded, what gets the L2 policy, which products become narrow."""

from types import SimpleNamespace

import pytest

from utils.kernels import assembling
from utils.kernels.assembling import narrow_products, policy_copies, reassemble

COPY = "cp.async.bulk.tensor.{}d.shared::{}.global.mbarrier::complete_tx::bytes"
PTX = f"""
    .param .u64 kernel_param_0, .param .f32 kernel_param_1,
    .param .u64 kernel_param_2, .param .u64 kernel_param_3)
    @%p12 {COPY.format(5, "cluster")} [%r1], [%rd14, {{%r2, %r3, %r4, %r5, %r6}}], [%r7];
    @%p14 {COPY.format(4, "cluster")} [%r1], [%rd15, {{%r2, %r3, %r4, %r5}}], [%r7];
    {COPY.format(4, "cta")} [%r1], [%rd15, {{%r2, %r3, %r4, %r5}}], [%r7];
    mbarrier.init.shared::cta.b64 [%r7], 1;
"""


def test_a_copy_is_loaded_by_itself(monkeypatch):
    """A copy must not be taken for loaded: the original was loaded with the shared memory that Triton knows of."""
    monkeypatch.setattr(assembling, "assemble", lambda ptx: b"cubin")
    compiled = SimpleNamespace(module=1, function=2, _run=3, metadata="its own", asm={"ptx": PTX})
    twin = reassemble(compiled, policy_copies)
    assert (twin.module, twin.function, twin._run, twin.metadata) == (None, None, None, "its own")
    assert (compiled.module, compiled.asm, twin.asm["cubin"]) == (1, {"ptx": PTX}, b"cubin")


def test_copies_of_four_dimensions_get_the_policy_of_the_argument():
    ptx = policy_copies(PTX)
    assert ptx.count(".L2::cache_hint") == 2
    with pytest.raises(ValueError, match="no TMA copy"):  # no copy gets a policy twice
        policy_copies(ptx)
    *_, others, keys, values, barrier = ptx.strip().splitlines()
    assert "cache_hint" not in others + barrier
    assert "@%p14 cp.async" in keys and "@" not in values
    for line in (keys, values):
        assert line.strip().endswith("[%r7], policy; }") and "ld.param.b64 policy, [kernel_param_2];" in line


def test_a_kernel_without_such_copies_or_without_the_argument_is_named():
    with pytest.raises(ValueError, match="no TMA copy"):
        reassemble(SimpleNamespace(asm={"ptx": PTX.split("@%p12")[0]}), policy_copies)
    with pytest.raises(ValueError, match="argument"):
        policy_copies(PTX.replace(".f32", ".u32"))


def test_products_of_128_columns_from_registers_lose_some_and_what_scaled_them():
    sums = [f"%r{i}" for i in range(64)]
    product = "wgmma.mma_async.sync.aligned.m64n{}k16.f32.bf16.bf16 {{{}}}, {}, %rd2, %p1, 1, 1, 1;"
    scores = product.format(128, ",".join(sums), "%rd1")
    scaled = " ".join(f"mul.f32 {x}, {x}, %r99;" for x in sums)
    output, narrow, few = (product.format(n, ",".join(sums[: n // 2]), "{%r70,%r71,%r72,%r73}") for n in (128, 80, 64))
    lines = narrow_products("\n".join((scores, scaled, output, few, held := output[:-2] + "0;")), 80).splitlines()
    assert (lines[0], *lines[2:]) == (scores, narrow, few, held) and lines[1].split() == scaled.split()[: 4 * 40]
