"""The hint to the L2: which instructions of the PTX get it, and what a kernel without such instructions is told."""

from types import SimpleNamespace

import pytest

from utils.kernels.l2_hint import hint_copies, with_l2_hint

COPY = "cp.async.bulk.tensor.{}d.shared::{}.global.mbarrier::complete_tx::bytes"
PTX = f"""
    @%p12 {COPY.format(5, "cluster")} [%r1], [%rd14, {{%r2, %r3, %r4, %r5, %r6}}], [%r7];
    @%p14 {COPY.format(4, "cluster")} [%r1], [%rd15, {{%r2, %r3, %r4, %r5}}], [%r7];
    {COPY.format(4, "cta")} [%r1], [%rd15, {{%r2, %r3, %r4, %r5}}], [%r7];
    mbarrier.init.shared::cta.b64 [%r7], 1;
"""


def test_copies_of_keys_and_values_get_the_hint_and_those_of_queries_do_not():
    ptx, copies = hint_copies(PTX)
    assert copies == 2 and ptx.count(".L2::cache_hint") == 2
    queries, keys, values, barrier = ptx.strip().splitlines()
    assert "cache_hint" not in queries + barrier
    assert "@%p14 cp.async" in keys and "@" not in values
    for line in (keys, values):
        assert line.strip().endswith("[%r7], policy; }") and "mov.b64 policy, 0x12F0000000000000;" in line


def test_hints_are_not_given_twice():
    assert hint_copies(hint_copies(PTX)[0])[1] == 0


def test_a_kernel_without_such_copies_is_named():
    with pytest.raises(ValueError, match="plain has no TMA copy"):
        with_l2_hint(SimpleNamespace(name="plain", asm={"ptx": "ret;"}))
