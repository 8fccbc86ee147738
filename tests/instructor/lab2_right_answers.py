"""Right answers to lab 2 that differ from the model answers: (difference, answer cell, code)."""

RIGHT_ANSWERS = [
    (
        "exponentials by hand, sums guarded",
        "q1_1",
        """
def masked_attention(q, k, v, mask):
    scores = torch.einsum("bhsd,bhld->bhsl", q, k) * q.shape[-1] ** -0.5
    scores = torch.where(mask, scores, torch.finfo(scores.dtype).min)
    p = torch.exp(scores - scores.amax(-1, keepdim=True)) * mask
    return p @ v / p.sum(-1, keepdim=True).clamp(min=1e-30)
""",
    ),
    (
        "costs from the mean of the mask",
        "q1_2",
        """
def mask_costs(mask, batch, heads, head_dim, dtype):
    hidden = int((~mask).sum())
    many = batch * heads
    return mask.double().mean().item(), many * hidden * 2 * (2 * head_dim), dtype.itemsize * many * mask.nelement()
""",
    ),
    (
        "causal by subtraction, window by logical_and, prefix by where",
        "q2_1",
        """
def causal(b, h, q, k):
    return torch.ge(q - k, 0)

def sliding_window(window):
    def mod(b, h, query, key):
        distance = query - key
        return torch.logical_and(distance >= 0, distance < window)
    return mod

def prefix_lm(prefix):
    return lambda b, h, q, k: torch.where(k < prefix, True, q >= k)
""",
    ),
    (
        "numbers by cumulative sums, padding by where",
        "q2_2",
        """
def document_numbers(lengths, size, device):
    ends = torch.tensor(lengths, device=device).cumsum(0)
    if sum(lengths) > size:
        raise ValueError("too long")
    token = torch.arange(size, device=device)
    numbers = (token[:, None] >= ends).sum(1)
    return torch.where(token < sum(lengths), numbers, -1)

def packed_documents(numbers):
    flat, size = numbers.flatten(), numbers.shape[1]
    def mod(b, h, q, k):
        mine, its = flat[b * size + q], flat[b * size + k]
        return ~((mine != its) | (mine < 0) | (k > q))
    return mod
""",
    ),
    (
        "numbers by repeat_interleave",
        "q2_2",
        """
def document_numbers(lengths, size, device):
    rest = size - sum(lengths)
    if rest < 0:
        raise ValueError("too long")
    numbers = torch.tensor([*range(len(lengths)), -1], device=device)
    return torch.repeat_interleave(numbers, torch.tensor([*lengths, rest], device=device))
""",
    ),
    (
        "masks composed by a loop and by De Morgan, sinks in one expression",
        "q2_3",
        """
def both(*mods):
    def mod(b, h, q, k):
        seen = mods[0](b, h, q, k)
        for other in mods[1:]:
            seen = torch.logical_and(seen, other(b, h, q, k))
        return seen
    return mod

def either(*mods):
    inverted = [lambda b, h, q, k, mod=mod: ~mod(b, h, q, k) for mod in mods]
    return lambda b, h, q, k: ~both(*inverted)(b, h, q, k)

def window_per_head(windows):
    return lambda b, h, q, k: (q >= k) & (k + windows[h] > q)

def sinks_and_window(sinks, window):
    return lambda b, h, q, k: (q >= k) & ((k < sinks) | (q - k < window))
""",
    ),
    (
        "blocks counted one by one",
        "q3_1",
        """
def count_blocks(mask, block):
    full = partial = empty = 0
    for i in range(0, mask.shape[0], block):
        for j in range(0, mask.shape[1], block):
            seen = int(mask[i:i + block, j:j + block].sum())
            full += seen == block * block
            empty += seen == 0
            partial += 0 < seen < block * block
    return full, partial, empty
""",
    ),
    (
        "document blocks by cases",
        "q3_2",
        """
def document_blocks(length, span, block):
    if span < block:
        return length // block
    return (length // span) * (span // block) ** 2
""",
    ),
    (
        "online softmax, block by block",
        "q3_3",
        """
def block_sparse_attention(q, k, v, block_mask):
    rows, columns = block_mask.BLOCK_SIZE
    output = []
    for i in range(q.shape[2] // rows):
        tile_q = q[:, :, i * rows:(i + 1) * rows].double() / math.sqrt(q.shape[-1])
        m = torch.full_like(tile_q[..., :1], -1e30)
        l, acc = torch.zeros_like(m), torch.zeros_like(tile_q)
        for counts, table, ask in ((block_mask.full_kv_num_blocks, block_mask.full_kv_indices, False),
                                   (block_mask.kv_num_blocks, block_mask.kv_indices, True)):
            for n in range(counts[0, 0, i]):
                j = table[0, 0, i, n]
                keys = torch.arange(columns) + j * columns
                s = tile_q @ k[:, :, keys].double().mT
                seen = torch.ones(rows, columns, dtype=torch.bool)
                if ask:
                    zero = torch.tensor(0)
                    seen = block_mask.mask_mod(zero, zero, (torch.arange(rows) + i * rows)[:, None], keys[None, :])
                new = torch.maximum(m, torch.where(seen, s, -1e30).amax(-1, keepdim=True))
                p = torch.where(seen, torch.exp(s - new), 0.0)
                old = torch.exp(m - new)
                m, l, acc = new, l * old + p.sum(-1, keepdim=True), acc * old + p @ v[:, :, keys].double()
        output.append(torch.where(l > 0, acc / l, 0.0).to(q.dtype))
    return torch.cat(output, 2)
""",
    ),
    (
        "tanh by sigmoid, slopes by index_select, recursion",
        "q4_1",
        """
def soft_cap(cap):
    return lambda score, b, h, q, k: cap * (2 * torch.sigmoid(2 * score / cap) - 1)

def alibi(slopes):
    negative = -slopes
    return lambda score, b, h, q, k: torch.add(score, negative[h] * q - negative[h] * k)

def in_turn(first, *rest):
    if not rest:
        return first
    return lambda score, b, h, q, k: in_turn(*rest)(first(score, b, h, q, k), b, h, q, k)
""",
    ),
    (
        "bias from a flat table, minimum and maximum",
        "q4_2",
        """
def relative_bias(table):
    width = table.shape[1]
    flat = table.reshape(-1)
    def mod(score, b, h, q, k):
        column = torch.clamp(q - k + (width - 1) // 2, min=0, max=width - 1)
        return (score + flat[h * width + column]).to(score.dtype)
    return mod
""",
    ),
    (
        "positional arguments, a partial instead of a closure",
        "q5_1",
        """
def _attend(attention, score_mod, block_mask, q, k, v):
    return attention(q, k, v, score_mod, block_mask, None, True)

def prepare_flex(attention, mask_mod, score_mod, length, device, block_size=128):
    if mask_mod is None:
        return functools.partial(_attend, attention, score_mod, None)
    blocks = create_block_mask(mask_mod, 1, 1, length, length, device, block_size)
    return functools.partial(_attend, attention, score_mod, blocks)
""",
    ),
    (
        "padding by new tensors, the mask by token numbers",
        "q6_1",
        """
def bucketed_attention(attend, q, k, v, buckets):
    size = q.shape[2]
    for bucket in sorted(buckets):
        if bucket >= size:
            break
    else:
        raise ValueError(f"{size} tokens do not fit")
    wide = []
    for x in (q, k, v):
        y = x.new_zeros(*x.shape[:2], bucket, x.shape[3])
        y[:, :, :size] = x
        wide.append(y)
    real = torch.arange(bucket, device=q.device) < size
    return attend(*wide, lambda b, h, q, k: real[k])[:, :, :size]
""",
    ),
    (
        "instructions last, inverse lookups, sorted twice",
        "q7_1",
        """
def lay_out(conversation, position, window):
    by_position = torch.argsort(position, stable=True)
    last = torch.where(conversation == 0, 10**6, conversation)
    order = by_position[torch.argsort(last[by_position], stable=True)]
    owner, place = conversation[order], position[order]
    def mod(b, h, q, k):
        gap = place[q] - place[k]
        instructions = owner[k] == 0
        within = torch.where(owner[q] == 0, gap >= 0, (gap >= 0) & (gap < window))
        return torch.where(owner[q] == owner[k], within, instructions)
    return order, mod
""",
    ),
    (
        "the position looked up first",
        "bonus_8_1",
        """
def at_positions(mask_mod, positions):
    def mod(b, h, q, k):
        start = positions[b]
        return mask_mod(b, h, start + q, k)
    return mod
""",
    ),
    (
        "a table of positions, one number a place",
        "bonus_8_2",
        """
def paged_mask(mask_mod, owner, number, page_size):
    inside = torch.arange(page_size, device=owner.device)
    position = (number[:, None] * page_size + inside).flatten()
    sequence = owner.repeat_interleave(page_size)
    return lambda b, h, q, k: mask_mod(b, h, q, position[k]) & (sequence[k] == b)
""",
    ),
    (
        "starts instead of numbers",
        "bonus_8_3",
        """
def ragged_attention(attend, texts):
    sizes = [q.size(1) for q, k, v in texts]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    first = torch.tensor([start for start, size in zip(starts, sizes) for _ in range(size)], device=texts[0][0].device)
    row = [torch.cat([text[i] for text in texts], dim=1).unsqueeze(0) for i in range(3)]
    out = attend(*row, lambda b, h, q, k: (k >= first[q]) & (q >= k))
    return [out[0, :, start:start + size] for start, size in zip(starts, sizes)]
""",
    ),
]
