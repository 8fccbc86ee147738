"""Right answers to lab 2 that differ from the model answers; `answers_in_text` explains the form."""

from tests.instructor.lab_cases import answers_in_text

RIGHT_ANSWERS = answers_in_text(r"""
# %% q1_1: exponentials by hand, sums guarded
def masked_attention(q, k, v, mask):
    scores = torch.einsum("bhsd,bhld->bhsl", q, k) * q.shape[-1] ** -0.5
    scores = torch.where(mask, scores, torch.finfo(scores.dtype).min)
    p = torch.exp(scores - scores.amax(-1, keepdim=True)) * mask
    return p @ v / p.sum(-1, keepdim=True).clamp(min=1e-30)

# %% q2_1: causal by subtraction, window by logical_and, prefix by where
def causal(b, h, q, k):
    return torch.ge(q - k, 0)

def sliding_window(window):
    def mod(b, h, query, key):
        distance = query - key
        return torch.logical_and(distance >= 0, distance < window)
    return mod

def prefix_lm(prefix):
    return lambda b, h, q, k: torch.where(k < prefix, True, q >= k)

# %% q2_2: numbers by cumulative sums, padding by where
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

# %% q2_2: numbers by repeat_interleave
def document_numbers(lengths, size, device):
    rest = size - sum(lengths)
    if rest < 0:
        raise ValueError("too long")
    numbers = torch.tensor([*range(len(lengths)), -1], device=device)
    return torch.repeat_interleave(numbers, torch.tensor([*lengths, rest], device=device))

# %% q2_3: masks composed by a loop and by De Morgan, sinks in one expression
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

# %% q3_3: online softmax, block by block
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

# %% q4_1: tanh by sigmoid, slopes by index_select, recursion
def soft_cap(cap):
    return lambda score, b, h, q, k: cap * (2 * torch.sigmoid(2 * score / cap) - 1)

def alibi(slopes):
    negative = -slopes
    return lambda score, b, h, q, k: torch.add(score, negative[h] * q - negative[h] * k)

def in_turn(first, *rest):
    if not rest:
        return first
    return lambda score, b, h, q, k: in_turn(*rest)(first(score, b, h, q, k), b, h, q, k)

# %% q4_2: bias from a flat table, minimum and maximum
def relative_bias(table):
    width = table.shape[1]
    flat = table.reshape(-1)
    def mod(score, b, h, q, k):
        column = torch.clamp(q - k + (width - 1) // 2, min=0, max=width - 1)
        return (score + flat[h * width + column]).to(score.dtype)
    return mod

# %% q5_1: positional arguments, a partial instead of a closure
def _attend(attention, score_mod, block_mask, q, k, v):
    return attention(q, k, v, score_mod, block_mask, None, True)

def prepare_flex(attention, mask_mod, score_mod, length, device, block_size=128):
    if mask_mod is None:
        return functools.partial(_attend, attention, score_mod, None)
    blocks = create_block_mask(mask_mod, 1, 1, length, length, device, block_size)
    return functools.partial(_attend, attention, score_mod, blocks)

# %% q6_1: padding sees padding
-        return k < end
+        return (k < end) == (q < end)

# %% q6_1: padding by new tensors, the mask by token numbers
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

# %% q7_1: instructions last, inverse lookups, sorted twice
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

# %% bonus_8_1: the position looked up first
def at_positions(mask_mod, positions):
    def mod(b, h, q, k):
        start = positions[b]
        return mask_mod(b, h, start + q, k)
    return mod

# %% bonus_8_2: a table of positions, one number a place
def paged_mask(mask_mod, owner, number, page_size):
    inside = torch.arange(page_size, device=owner.device)
    position = (number[:, None] * page_size + inside).flatten()
    sequence = owner.repeat_interleave(page_size)
    return lambda b, h, q, k: mask_mod(b, h, q, position[k]) & (sequence[k] == b)

# %% q1_1: float mask added to the scores
def masked_attention(q, k, v, mask):
    bias = torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill(~mask, float("-inf"))
    weights = F.softmax(q.matmul(k.transpose(2, 3)) / q.size(-1) ** 0.5 + bias, dim=3)
    return torch.nan_to_num(weights) @ v

# %% q1_1: softmax in float32 and back, as Hugging Face writes it
def masked_attention(q, k, v, mask):
    scaling = q.shape[-1] ** -0.5
    attn_weights = torch.matmul(q, k.transpose(-2, -1)) * scaling
    attn_weights = attn_weights + torch.where(mask, 0.0, torch.finfo(torch.float32).min)
    attn_weights = F.softmax(attn_weights, dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.matmul(attn_weights, v) * mask.any(-1, keepdim=True)

# %% q1_1: baddbmm on flattened heads, as Megatron does
def masked_attention(q, k, v, mask):
    b, h, s, d = q.shape
    scores = torch.baddbmm(torch.empty(b * h, s, k.shape[2], dtype=q.dtype), q.reshape(b * h, s, d),
                           k.reshape(b * h, -1, d).transpose(1, 2), beta=0.0, alpha=1.0 / math.sqrt(d))
    scores = scores.view(b, h, s, -1).masked_fill_(~mask, -10000.0)
    p = torch.softmax(scores, -1).masked_fill(~mask, 0.0)
    return torch.bmm(p.view(b * h, s, -1), v.reshape(b * h, -1, v.shape[-1])).view(b, h, s, -1)

# %% q2_1: masks as classes
class sliding_window:
    def __init__(self, window):
        self.window = window
    def __call__(self, b, h, q, k):
        return (k <= q) & (k + self.window > q)

class prefix_lm:
    def __init__(self, prefix):
        self.prefix = prefix
    def __call__(self, b, h, q, k):
        return ~((k >= self.prefix) & (k > q))

# %% q2_2: numbers by bucketize, the mask by one product
def document_numbers(lengths, size, device):
    ends = torch.tensor(lengths, device=device).cumsum(0)
    if len(lengths) and int(ends[-1]) > size if device.type != "meta" else sum(lengths) > size:
        raise ValueError(f"{lengths} do not fit into {size}")
    ids = torch.bucketize(torch.arange(size, device=device), ends, right=True)
    return ids.masked_fill(ids == len(lengths), -1)

def packed_documents(numbers):
    def mask_mod(b, h, q, k):
        same = numbers[b][q] == numbers[b][k]
        return same & (numbers[b][k] != -1) & (k <= q)
    return mask_mod

# %% q2_2: numbers as a Python list
def document_numbers(lengths, size, device):
    ids = []
    for i, n in enumerate(lengths):
        ids += [i] * n
    if len(ids) > size:
        raise ValueError("the documents do not fit")
    ids.extend([-1] * (size - len(ids)))
    return torch.tensor(ids, dtype=torch.int32, device=device)

# %% q2_3: torch's own and_masks and or_masks
from torch.nn.attention.flex_attention import and_masks, or_masks

def both(*mods):
    return and_masks(*mods)

def either(*mods):
    return or_masks(*mods)

def sinks_and_window(sinks, window):
    first = lambda b, h, q, k: k < sinks
    return both(causal, either(first, sliding_window(window)))

# %% q2_3: stacked and reduced
def both(*mods):
    def mod(b, h, q, k):
        return torch.stack([m(b, h, q, k) for m in mods]).all(0)
    return mod

def either(*mods):
    def mod(b, h, q, k):
        return torch.stack([m(b, h, q, k) for m in mods]).any(0)
    return mod

def window_per_head(windows):
    def mod(b, h, q, k):
        d = q - k
        return torch.where(d >= 0, d < windows[h.long()], False)
    return mod

# %% q3_1: counts by average pooling
def count_blocks(mask, block):
    s, l = mask.shape
    m = F.pad(mask.float()[None, None], (0, -l % block, 0, -s % block))
    share = F.avg_pool2d(m, block)[0, 0] * block * block
    full, empty = int((share > block * block - 0.5).sum()), int((share < 0.5).sum())
    return full, share.numel() - full - empty, empty

# %% q3_1: counts by splitting, edges by size, as a list
def count_blocks(mask, block):
    counts = [0, 0, 0]
    for band in torch.split(mask, block, dim=0):
        for tile in torch.split(band, block, dim=1):
            if not tile.any():
                counts[2] += 1
            elif tile.all() and tile.shape == (block, block):
                counts[0] += 1
            else:
                counts[1] += 1
    return counts

# %% q3_2: promises in floats, documents by the larger side
def block_flops(counts, block, batch, heads, head_dim):
    full, partial, empty = counts
    pairs = (full + partial) * block * block
    return 2.0 * 2.0 * pairs * head_dim * heads * batch

def promised_speedup(counts):
    full, partial, empty = counts
    return 1 / (1 - empty / (full + partial + empty))

def document_blocks(length, span, block):
    side = max(span, block)
    return (length // side) * (side // block) ** 2

# %% q3_3: all visited keys gathered, one softmax a row
def block_sparse_attention(q, k, v, block_mask):
    bq, bk = block_mask.BLOCK_SIZE
    wide = torch.float32 if q.dtype in (torch.float16, torch.bfloat16) else q.dtype
    out = []
    for i in range(q.shape[2] // bq):
        np_, nf = int(block_mask.kv_num_blocks[0, 0, i]), int(block_mask.full_kv_num_blocks[0, 0, i])
        ids = torch.cat([block_mask.kv_indices[0, 0, i, :np_], block_mask.full_kv_indices[0, 0, i, :nf]]).long()
        if len(ids) == 0:
            out.append(torch.zeros_like(q[:, :, :bq]))
            continue
        keys = (ids[:, None] * bk + torch.arange(bk)).flatten()
        rows = torch.arange(i * bq, (i + 1) * bq)
        seen = torch.ones(bq, len(keys), dtype=torch.bool)
        if np_:
            seen[:, : np_ * bk] = block_mask.mask_mod(torch.tensor(0), torch.tensor(0), rows[:, None], keys[None, : np_ * bk])
        s = torch.einsum("bhqd,bhkd->bhqk", q[:, :, rows].to(wide), k[:, :, keys].to(wide)) * q.shape[-1] ** -0.5
        p = torch.softmax(s.masked_fill(~seen, float("-inf")), -1)
        p = torch.where(seen, p, 0.0).nan_to_num()
        out.append(torch.einsum("bhqk,bhkd->bhqd", p, v[:, :, keys].to(wide)).to(q.dtype))
    return torch.cat(out, dim=2)

# %% q4_1: modifiers as classes and a reduce
class soft_cap:
    def __init__(self, cap):
        self.cap = cap
    def __call__(self, score, b, h, q, k):
        return (score / self.cap).tanh() * self.cap

def alibi(slopes):
    def mod(score, b, h, q_idx, kv_idx):
        return score + (kv_idx - q_idx) * slopes[h]
    return mod

def in_turn(*mods):
    return lambda score, b, h, q, k: functools.reduce(lambda s, mod: mod(s, b, h, q, k), mods, score)

# %% q4_2: bias by where, padded table
def relative_bias(table):
    r = (table.shape[1] - 1) // 2
    def mod(score, b, h, q, k):
        d = q - k
        d = torch.where(d > r, r, torch.where(d < -r, -r, d))
        return score + table[h][d + r].to(score)
    return mod

# %% q5_1: a class with __call__, keyword arguments
class prepare_flex:
    def __init__(self, attention, mask_mod, score_mod, length, device, block_size=128):
        self.attention, self.score_mod = attention, score_mod
        self.block_mask = mask_mod and create_block_mask(
            mask_mod=mask_mod, B=None, H=None, Q_LEN=length, KV_LEN=length, device=device, BLOCK_SIZE=(block_size, block_size))
    def __call__(self, q, k, v):
        return self.attention(query=q, key=k, value=v, score_mod=self.score_mod, block_mask=self.block_mask,
                              enable_gqa=k.size(1) < q.size(1))

# %% q7_1: a sort key of floats, lookup tables
def lay_out(conversation, position, window):
    key = conversation.double() + position.double() / (position.max().item() + 1)
    order = key.argsort()
    table = torch.stack([conversation[order], position[order]])
    def mask_mod(b, h, q, k):
        cq, ck, pq, pk = table[0][q], table[0][k], table[1][q], table[1][k]
        instruction = (ck == 0) & ((cq != 0) | (pk <= pq))
        own = (cq == ck) & (ck != 0) & (pk <= pq) & (pq - pk < window)
        return instruction | own
    return order, mask_mod

# %% bonus_8_2: pages by divmod of tensors
def paged_mask(mask_mod, owner, number, page_size):
    def mod(b, h, q, k):
        page = torch.div(k, page_size, rounding_mode="floor")
        inside = torch.remainder(k, page_size)
        return mask_mod(b, h, q, number[page] * page_size + inside) & torch.eq(owner[page], b)
    return mod

# %% q2_2: first and last key of each query
def document_numbers(lengths, size, device):
    if size < sum(lengths):
        raise ValueError("too many tokens")
    numbers = [n for n, length in enumerate(lengths) for _ in range(length)]
    return torch.tensor(numbers + [-1] * (size - len(numbers)), dtype=torch.long, device=device)

def packed_documents(numbers):
    changes = numbers[:, 1:] != numbers[:, :-1]
    begins = torch.cat((torch.ones_like(numbers[:, :1], dtype=torch.bool), changes), dim=1)
    places = torch.arange(numbers.shape[1], device=numbers.device).expand_as(numbers)
    first = torch.where(begins, places, 0).cummax(dim=1).values
    return lambda b, h, q, k: (first[b, q] <= k) & (k <= q) & (numbers[b, q] != -1)
""")
