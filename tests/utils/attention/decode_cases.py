"""Random caches for decode, with garbage behind each sequence's end; without pytest, for scripts on a GPU machine."""

import torch


def random_cache(batch, kv_heads, slots, head_dim, dtype=torch.float32, seed=0, page=None, fill=float("nan")):
    """Draw k, v, lengths and a block table (None without a page); after a sequence's end there is `fill`."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, slots + 1, (batch,), generator=generator, dtype=torch.int32)
    lengths[0] = slots
    keep = (torch.arange(slots) < lengths[:, None])[:, None, :, None]
    shape = batch, kv_heads, slots, head_dim
    k, v = (torch.where(keep, torch.randn(shape, generator=generator), fill).to(dtype) for _ in range(2))
    if page is None:
        return k, v, lengths, None
    each = -(-slots // page)
    order = torch.randperm(batch * each + 3, generator=generator)[: batch * each]

    def in_pages(x):
        x = torch.nn.functional.pad(x, (0, 0, 0, each * page - slots), value=fill)
        pages = torch.full((batch * each + 3, kv_heads, page, head_dim), fill, dtype=dtype)
        pages[order] = x.view(batch, kv_heads, each, page, head_dim).transpose(1, 2).flatten(0, 1)
        return pages

    table = order.view(batch, each).int()
    behind = torch.arange(each) * page >= lengths[:, None]
    table[behind] = torch.tensor([-7, 10**6], dtype=torch.int32).repeat(behind.sum())[: behind.sum()]
    return in_pages(k), in_pages(v), lengths, table


def other_table(pages, filled, page, like):
    """Draw a block table shaped like `like`, for lengths `filled`; after a sequence's last page no entry is a page."""
    table = torch.randperm(pages)[: like.numel()].int().view(like.shape)
    for own, length in zip(table, filled, strict=True):
        own[-(-length // page) :] = 10**6
    return table
