"""The variants of the decode kernel that are measured: each has a tile that fits, and none is measured twice."""

import pytest

from tools.record.decode import CACHES, NEW_TOKENS
from tools.record.decode_variants import plan_of, variants
from utils.attention.gluon.decode.plan import SHARED_BYTES


@pytest.mark.parametrize("cache", CACHES, ids=str)
def test_variants_differ_and_fit(cache):
    for new_tokens in NEW_TOKENS:
        point = (*cache, new_tokens)
        found = variants(point)
        assert {"keys", "rows"} <= set(found)
        for choices in found.values():
            plan = plan_of(point, choices)
            assert plan.shared_bytes + 700 < SHARED_BYTES
            assert plan.slots >= 4
            if plan.consumers:
                # All query rows of a head of keys in one tile: otherwise the cache would be read once for each tile.
                assert plan.columns >= cache[1] // cache[2] * new_tokens
        kinds = [(plan_of(point, c), c.get("programs"), c.get("aligned"), c.get("merge")) for c in found.values()]
        assert len(set(kinds)) == len(kinds)
