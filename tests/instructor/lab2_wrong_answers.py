"""Typical mistakes in lab 2, each with the question that it loses and words of the message.

`code` runs after the model answer in the same cell, and so replaces one of its functions.
"""

from tests.instructor.lab_cases import WrongAnswer

_MASKED = """
def masked_attention(q, k, v, mask):
    scores = q @ k.mT / {scale}
    {weights}
    return weights @ v
"""
_ROOT = "math.sqrt(q.shape[-1])"
_WALK = """
def block_sparse_attention(q, k, v, block_mask):
    size_q, size_k = block_mask.BLOCK_SIZE
    zero = torch.zeros((), dtype=torch.int64)
    out = torch.zeros_like(q)
    for i in range(q.shape[2] // size_q):
        part = block_mask.kv_indices[0, 0, i, :{count}].tolist()
        full = block_mask.full_kv_indices[0, 0, i, :int(block_mask.full_kv_num_blocks[0, 0, i])].tolist()
        queries = torch.arange(i * size_q, (i + 1) * size_q)
        tiles, values = [], []
        for j in {visit}:
            keys = torch.arange(j * size_k, (j + 1) * size_k)
            tile = q[:, :, queries].float() @ k[:, :, keys].float().mT / {scale}
            if {ask}:
                seen = block_mask.mask_mod(zero, zero, queries[:, None], keys[None, :])
                tile = tile.masked_fill(~seen, {hidden})
            tiles.append(tile)
            values.append(v[:, :, keys].float())
        if tiles:
            weights = torch.softmax(torch.cat(tiles, -1), -1){after}
            out[:, :, queries] = (weights @ torch.cat(values, 2)).to(q.dtype)
    return out
"""
_GOOD_WALK = {
    "count": "int(block_mask.kv_num_blocks[0, 0, i])",
    "visit": "part + full",
    "scale": _ROOT,
    "ask": "j in part",
    "hidden": "-math.inf",
    "after": ".nan_to_num(0.0)",
}
_LAYOUT = """
def lay_out(conversation, position, window):
    order = {order}
    owner, place = conversation[order], position[order]
    def mask_mod(b, h, q, k):
        {mask}
    return order, mask_mod
"""
_SORTED = "torch.argsort(conversation * 10_000 + position)"
_LAYOUT_MASK = """near = (place[k] <= place[q]) & ((place[q] - place[k] < window) | (owner[q] == 0))
        return ((owner[q] == owner[k]) & near) | ((owner[q] > 0) & (owner[k] == 0))"""
_BUCKET = """
def bucketed_attention(attend, q, k, v, buckets):
    tokens = q.shape[2]
    {find}
    pad = (0, 0, 0, bucket - tokens)
    end = {end}
    mask_mod = lambda b, h, q, k: {mask}
    return attend(F.pad(q, pad), F.pad(k, pad), F.pad(v, pad), mask_mod){after}
"""
_GOOD_BUCKET = {
    "find": """bucket = min((b for b in buckets if b >= tokens), default=None)
    if bucket is None:
        raise ValueError("too long")""",
    "end": "torch.tensor(tokens)",
    "mask": "k < end",
    "after": "[:, :, :tokens]",
}


def _masked(weights: str, scale: str = _ROOT) -> str:
    return _MASKED.format(scale=scale, weights=weights)


def _walk(**changed: str) -> str:
    return _WALK.format(**{**_GOOD_WALK, **changed})


def _bucket(**changed: str) -> str:
    return _BUCKET.format(**{**_GOOD_BUCKET, **changed})


def _mod(name: str, arguments: str, expression: str) -> str:
    """A function that returns a mask_mod of one expression."""
    return f"def {name}({arguments}):\n    return lambda b, h, q, k: {expression}\n"


def _score(name: str, arguments: str, expression: str) -> str:
    return f"def {name}({arguments}):\n    return lambda score, b, h, q, k: {expression}\n"


_SOFTMAX = "weights = torch.softmax(scores.masked_fill(~mask, -math.inf), -1)"

WRONG_ANSWERS = [
    # ---- 1.1
    WrongAnswer(
        "SDPA",
        "q1_1",
        "def masked_attention(q, k, v, mask):\n    return F.scaled_dot_product_attention(q, k, v, mask)\n",
        "may not use",
    ),
    WrongAnswer("not scaled", "q1_1", _masked(f"{_SOFTMAX}.nan_to_num(0.0)", "1"), "Divide the scores"),
    WrongAnswer("no NaN guard", "q1_1", _masked(_SOFTMAX), "sees no key"),
    WrongAnswer(
        "mask upside down",
        "q1_1",
        _masked("weights = torch.softmax(scores.masked_fill(mask, -math.inf), -1).nan_to_num(0.0)"),
        "upside down",
    ),
    WrongAnswer(
        "masked after the softmax", "q1_1", _masked("weights = torch.softmax(scores, -1) * mask"), "add up to 1"
    ),
    WrongAnswer("masked scores are 0", "q1_1", _masked("weights = torch.softmax(scores * mask, -1)"), "-inf, not 0"),
    WrongAnswer("mask ignored", "q1_1", _masked("weights = torch.softmax(scores, -1)"), "mask is ignored"),
    WrongAnswer(
        "zeros",
        "q1_1",
        "def masked_attention(q, k, v, mask):\n    return torch.zeros_like(q)\n",
        "Every element is zero",
    ),
    WrongAnswer(
        "heads swapped",
        "q1_1",
        _masked(f"{_SOFTMAX}.nan_to_num(0.0)").replace("weights @ v", "(weights @ v).flip(1)"),
        "heads are in another order",
    ),
    # ---- 1.2
    WrongAnswer(
        "heads forgotten",
        "q1_2",
        """
def mask_costs(mask, batch, heads, head_dim, dtype):
    seen = int(mask.sum())
    return seen / mask.numel(), 4 * head_dim * (mask.numel() - seen), mask.numel() * dtype.itemsize
""",
        "Each head of each sequence",
    ),
    WrongAnswer(
        "a byte a pair",
        "q1_2",
        """
def mask_costs(mask, batch, heads, head_dim, dtype):
    seen, n = int(mask.sum()), batch * heads
    return seen / mask.numel(), 4 * head_dim * n * (mask.numel() - seen), n * mask.numel()
""",
        "one byte",
    ),
    # ---- 2.1
    WrongAnswer("own key hidden", "q2_1", "def causal(b, h, q, k):\n    return k < q\n", "own key"),
    WrongAnswer(
        "causal the wrong way round", "q2_1", "def causal(b, h, q, k):\n    return q <= k\n", "wrong way round"
    ),
    WrongAnswer(
        "Python's and", "q2_1", _mod("sliding_window", "window", "(k <= q) and (q - k < window)"), "True or False"
    ),
    WrongAnswer("chained comparison", "q2_1", _mod("sliding_window", "window", "0 <= q - k < window"), "True or False"),
    WrongAnswer(
        "an if",
        "q2_1",
        """
def prefix_lm(prefix):
    def mask_mod(b, h, q, k):
        if k < prefix:
            return k >= 0
        return k <= q
    return mask_mod
""",
        "True or False",
    ),
    WrongAnswer(
        "window one too wide",
        "q2_1",
        _mod("sliding_window", "window", "(k <= q) & (q - k <= window)"),
        "own key is one",
    ),
    WrongAnswer(
        "window not causal",
        "q2_1",
        _mod("sliding_window", "window", "(q - k).abs() < window"),
        "causal too",
        seen="it is causal",
    ),
    WrongAnswer(
        "prefix and causal",
        "q2_1",
        _mod("prefix_lm", "prefix", "(k < prefix) & (k <= q)"),
        "with |",
        seen="which of & and |",
    ),
    WrongAnswer(
        "a number for a truth value",
        "q2_1",
        "def causal(b, h, q, k):\n    return (q - k).clamp(-1, 0) + 1\n",
        "bool tensor",
    ),
    WrongAnswer(
        "mask read from a stored tensor",
        "q2_1",
        """
_stored = torch.ones(512, 512, dtype=torch.bool).tril()
def causal(b, h, q, k):
    return _stored[q, k]
""",
        "no tensor of pairs",
    ),
    WrongAnswer(
        "mask built inside",
        "q2_1",
        """
def causal(b, h, q, k):
    i = torch.arange(256)
    return (i[:, None] >= i[None, :])[q, k]
""",
        "no tensor of pairs",
    ),
    WrongAnswer(
        "builder returns nothing",
        "q2_1",
        "def prefix_lm(prefix):\n    def mask_mod(b, h, q, k):\n        return k <= q\n",
        "is a return missing",
    ),
    # ---- 2.2
    WrongAnswer(
        "padding sees padding",
        "q2_2",
        _mod("packed_documents", "numbers", "(numbers[b, q] == numbers[b, k]) & (k <= q)"),
        "-1 equals -1",
    ),
    WrongAnswer(
        "sequence 0 for all",
        "q2_2",
        _mod("packed_documents", "numbers", "(numbers[0, q] == numbers[0, k]) & (numbers[0, q] >= 0) & (k <= q)"),
        "sequence 0 only",
    ),
    WrongAnswer(
        "documents not causal",
        "q2_2",
        _mod("packed_documents", "numbers", "(numbers[b, q] == numbers[b, k]) & (numbers[b, q] >= 0)"),
        "causal",
    ),
    WrongAnswer(
        "all pairs of numbers compared",
        "q2_2",
        """
def packed_documents(numbers):
    same = numbers[:, :, None] == numbers[:, None, :]
    return lambda b, h, q, k: same[b, q, k] & (numbers[b, q] >= 0) & (k <= q)
""",
        "no tensor of pairs",
    ),
    WrongAnswer(
        "padding gets a number",
        "q2_2",
        """
def document_numbers(lengths, size, device):
    if sum(lengths) > size:
        raise ValueError
    rest = size - sum(lengths)
    return torch.repeat_interleave(torch.arange(len(lengths) + 1), torch.tensor([*lengths, rest])).to(device)
""",
        "padding: -1",
    ),
    WrongAnswer(
        "numbers on the CPU",
        "q2_2",
        """
def document_numbers(lengths, size, device):
    if sum(lengths) > size:
        raise ValueError("too long")
    return torch.tensor([i for i, n in enumerate(lengths) for _ in range(n)] + [-1] * (size - sum(lengths)))
""",
        "on the device",
    ),
    WrongAnswer(
        "too long goes through",
        "q2_2",
        """
def document_numbers(lengths, size, device):
    ids = [i for i, n in enumerate(lengths) for _ in range(n)][:size]
    return torch.tensor(ids + [-1] * (size - len(ids)), device=device)
""",
        "raise a ValueError",
    ),
    # ---- 2.3
    WrongAnswer(
        "two masks only",
        "q2_3",
        "def both(first, second=lambda b, h, q, k: k >= 0, *more):\n"
        "    return lambda b, h, q, k: first(b, h, q, k) & second(b, h, q, k)\n",
        "first two",
    ),
    WrongAnswer(
        "exclusive or",
        "q2_3",
        """
def either(*mods):
    return lambda b, h, q, k: functools.reduce(lambda x, y: x ^ y, (mod(b, h, q, k) for mod in mods))
""",
        ("exclusive", "hides"),
    ),
    WrongAnswer(
        "b and h lost",
        "q2_3",
        """
def both(*mods):
    return lambda b, h, q, k: functools.reduce(lambda x, y: x & y, (mod(0, 0, q, k) for mod in mods))
""",
        "Pass b and h on",
    ),
    WrongAnswer(
        "arguments of a mask not named",
        "q2_3",
        """
def both(*mods):
    return lambda *where: functools.reduce(lambda x, y: x & y, (mod(*where) for mod in mods))
""",
        "exactly four",
    ),
    WrongAnswer(
        "window of head 0",
        "q2_3",
        _mod("window_per_head", "windows", "(k <= q) & (q - k < windows[0])"),
        "head 0",
        loses=("q2_3_heads_tests",),
    ),
    WrongAnswer(
        "windows by sequence",
        "q2_3",
        _mod("window_per_head", "windows", "(k <= q) & (q - k < windows[b])"),
        "b is the sequence",
        loses=("q2_3_heads_tests",),
    ),
    WrongAnswer(
        "a window taken out with item",
        "q2_3",
        _mod("window_per_head", "windows", "(k <= q) & (q - k < windows[int(h)])"),
        "takes a value out",
        loses=("q2_3_heads_tests",),
    ),
    WrongAnswer(
        "sinks not causal",
        "q2_3",
        _mod("sinks_and_window", "sinks, window", "((k <= q) & (q - k < window)) | (k < sinks)"),
        "Sinks are causal",
        loses=("q2_3_heads_tests",),
    ),
    # ---- 3.1
    WrongAnswer(
        "edges left out",
        "q3_1",
        """
def count_blocks(mask, block):
    tiles = mask[: mask.shape[0] // block * block, : mask.shape[1] // block * block]
    seen = tiles.unfold(0, block, block).unfold(1, block, block).sum((2, 3))
    full, empty = int((seen == block * block).sum()), int((seen == 0).sum())
    return full, seen.numel() - full - empty, empty
""",
        "left out",
    ),
    WrongAnswer(
        "edges full",
        "q3_1",
        """
def count_blocks(mask, block):
    tiles = [t for band in mask.split(block) for t in band.split(block, 1)]
    full, empty = sum(bool(t.all()) for t in tiles), sum(not t.any() for t in tiles)
    return full, len(tiles) - full - empty, empty
""",
        "sticks out",
    ),
    WrongAnswer(
        "order of the three",
        "q3_1",
        """
_right = count_blocks
def count_blocks(mask, block):
    return _right(mask, block)[::-1]
""",
        "The order is",
    ),
    # ---- 3.2
    WrongAnswer(
        "partial blocks half",
        "q3_2",
        """
def block_flops(counts, block, batch, heads, head_dim):
    return int(4 * head_dim * batch * heads * (counts[0] + counts[1] / 2) * block**2)
""",
        "whole, not half",
    ),
    WrongAnswer(
        "density for speed-up",
        "q3_2",
        "def promised_speedup(counts):\n    return (counts[0] + counts[1]) / sum(counts)\n",
        "inverse",
    ),
    WrongAnswer(
        "short documents share a block",
        "q3_2",
        "def document_blocks(length, span, block):\n    return length * span / block**2\n",
        ("shorter than a block", "document_blocks"),
    ),
    # ---- 3.3
    WrongAnswer(
        "dense",
        "q3_3",
        """
def block_sparse_attention(q, k, v, block_mask):
    zero = torch.zeros((), dtype=torch.int64)
    i, j = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])[None, :]
    mask = block_mask.mask_mod(zero, zero, i, j)
    scores = (q.float() @ k.float().mT / math.sqrt(q.shape[-1])).masked_fill(~mask, -math.inf)
    return (torch.softmax(scores, -1).nan_to_num(0.0) @ v.float()).to(q.dtype)
""",
        "Visit those in the tables",
    ),
    WrongAnswer(
        "scores of all rows kept",
        "q3_3",
        """
def block_sparse_attention(q, k, v, block_mask):
    rows, columns = block_mask.BLOCK_SIZE
    scores = torch.full((*q.shape[:3], k.shape[2]), -torch.inf)
    for i in range(q.shape[2] // rows):
        here = slice(i * rows, (i + 1) * rows)
        for full in (False, True):
            count = (block_mask.full_kv_num_blocks if full else block_mask.kv_num_blocks)[0, 0, i]
            table = block_mask.full_kv_indices if full else block_mask.kv_indices
            for j in table[0, 0, i, :count].tolist():
                there = slice(j * columns, (j + 1) * columns)
                s = q[:, :, here].float() @ k[:, :, there].float().mT / math.sqrt(q.shape[-1])
                if not full:
                    at, to = torch.arange(here.start, here.stop), torch.arange(there.start, there.stop)
                    s = s.masked_fill(~block_mask.mask_mod(torch.tensor(0), torch.tensor(0), at[:, None], to), -torch.inf)
                scores[:, :, here, there] = s
    weights = torch.softmax(scores, -1).nan_to_num(0.0)
    out = torch.zeros(q.shape)
    for i in range(q.shape[2] // rows):
        here = slice(i * rows, (i + 1) * rows)
        for num, table in ((block_mask.kv_num_blocks, block_mask.kv_indices),
                           (block_mask.full_kv_num_blocks, block_mask.full_kv_indices)):
            for j in table[0, 0, i, : num[0, 0, i]].tolist():
                there = slice(j * columns, (j + 1) * columns)
                out[:, :, here] += weights[:, :, here, there] @ v[:, :, there].float()
    return out.to(q.dtype)
""",
        "one row of blocks at a time",
    ),
    WrongAnswer("mask not applied", "q3_3", _walk(ask="False"), "not applied"),
    WrongAnswer("mask asked in full blocks", "q3_3", _walk(ask="True"), "In full blocks"),
    WrongAnswer("full blocks missing", "q3_3", _walk(visit="part"), "Full blocks are missing"),
    WrongAnswer(
        "filler visited", "q3_3", _walk(count="", visit="dict.fromkeys(part + full)"), ("Visit those", "Full blocks")
    ),
    WrongAnswer("filler and full blocks", "q3_3", _walk(count=""), ("filler", "Visit those")),
    WrongAnswer(
        "key indices from the block",
        "q3_3",
        _walk().replace("queries[:, None], keys[None, :]", "queries[:, None], torch.arange(size_k)[None, :]"),
        "start of the text",
    ),
    WrongAnswer(
        "softmax block by block",
        "q3_3",
        _walk()
        .replace("tiles.append(tile)", "tiles.append(torch.softmax(tile, -1).nan_to_num(0.0))")
        .replace("torch.softmax(torch.cat(tiles, -1), -1).nan_to_num(0.0)", "torch.cat(tiles, -1)"),
        "block by block",
    ),
    WrongAnswer(
        "b and h for the first mask alone",
        "q2_3",
        """
def both(*mods):
    def mask_mod(b, h, q, k):
        answer = mods[0](b, h, q, k)
        for mod in mods[1:]:
            answer = answer & mod(0 * b, 0 * h, q, k)
        return answer
    return mask_mod
""",
        "every mask",
    ),
    WrongAnswer(
        "keys moved as well",
        "bonus_8_1",
        """
def at_positions(mask_mod, positions):
    return lambda b, h, q, k: mask_mod(b, h, q + positions[b], k + positions[b])
""",
        ("keys are moved as well", "Only the queries move"),
    ),
    WrongAnswer(
        "one look-up of sequence 0",
        "q2_2",
        """
def packed_documents(numbers):
    return lambda b, h, q, k: (numbers[0, q] == numbers[b, k]) & (numbers[0, q] >= 0) & (q >= k)
""",
        "two look-ups",
    ),
    WrongAnswer("NaN where nothing is seen", "q3_3", _walk(after=""), "NaN"),
    WrongAnswer(
        "zeros instead of blocks",
        "q3_3",
        "def block_sparse_attention(q, k, v, block_mask):\n    return torch.zeros_like(q)\n",
        "Every element is zero",
    ),
    WrongAnswer(
        "heads swapped in blocks",
        "q3_3",
        _walk().replace("return out", "return out.flip(1)"),
        "heads are in another order",
    ),
    WrongAnswer("blocks not scaled", "q3_3", _walk(scale="1.0"), "sqrt(D)"),
    # ---- 4.1, 4.2
    WrongAnswer("clamped", "q4_1", _score("soft_cap", "cap", "score.clamp(-cap, cap)"), "bends"),
    WrongAnswer(
        "cap not multiplied back", "q4_1", _score("soft_cap", "cap", "torch.tanh(score / cap)"), "Multiply by the cap"
    ),
    WrongAnswer("ALiBi rewards distance", "q4_1", _score("alibi", "slopes", "score + slopes[h] * (q - k)"), "sign"),
    WrongAnswer(
        "one slope for all", "q4_1", _score("alibi", "slopes", "score - slopes[0] * (q - k)"), "slope of its own"
    ),
    WrongAnswer("score modifier missing", "q4_1", _score("soft_cap", "cap", "score"), "unchanged"),
    WrongAnswer(
        "last one first",
        "q4_1",
        """
def in_turn(*mods):
    def score_mod(score, b, h, q, k):
        for mod in reversed(mods):
            score = mod(score, b, h, q, k)
        return score
    return score_mod
""",
        "last to the first",
    ),
    WrongAnswer(
        "distance turned round",
        "q4_2",
        """
def relative_bias(table):
    r = table.shape[1] // 2
    return lambda score, b, h, q, k: score + table[h, r + (k - q).clamp(-r, r)].to(score.dtype)
""",
        "wrong sign",
    ),
    WrongAnswer(
        "bias widens the dtype",
        "q4_2",
        """
def relative_bias(table):
    r = table.shape[1] // 2
    return lambda score, b, h, q, k: score.float() + table[h, r + (q - k).clamp(-r, r)]
""",
        "dtype",
    ),
    # ---- 5.1
    WrongAnswer(
        "block mask at every call",
        "q5_1",
        """
def prepare_flex(attention, mask_mod, score_mod, length, device, block_size=128):
    def make():
        if mask_mod is not None:
            return create_block_mask(mask_mod, None, None, length, length, device=device, BLOCK_SIZE=block_size)
    make()
    return lambda q, k, v: attention(q, k, v, score_mod=score_mod, block_mask=make(), enable_gqa=True)
""",
        "Build it once",
    ),
    WrongAnswer(
        "block mask built again and thrown away",
        "q5_1",
        """
def prepare_flex(attention, mask_mod, score_mod, length, device, block_size=128):
    def make():
        if mask_mod is not None:
            return create_block_mask(mask_mod, None, None, length, length, device=device, BLOCK_SIZE=block_size)
    first = make()
    def attend(q, k, v):
        make()
        return attention(q, k, v, score_mod=score_mod, block_mask=first, enable_gqa=True)
    return attend
""",
        "calls the mask_mod again",
    ),
    WrongAnswer(
        "block mask built lazily",
        "q5_1",
        """
def prepare_flex(attention, mask_mod, score_mod, length, device, block_size=128):
    def attend(q, k, v):
        block_mask = mask_mod and create_block_mask(mask_mod, None, None, length, length, device=device, BLOCK_SIZE=block_size)
        return attention(q, k, v, score_mod=score_mod, block_mask=block_mask, enable_gqa=True)
    return attend
""",
        "before the first call",
    ),
    *(
        WrongAnswer(
            mistake,
            "q5_1",
            f"""
def prepare_flex(attention, mask_mod, score_mod, length, device, block_size=128):
    block_mask = None
    if mask_mod is not None:
        block_mask = create_block_mask(mask_mod, {shared}, length, length, device=device{blocks})
    return lambda q, k, v: attention(q, k, v, {arguments})
""",
            phrase,
        )
        for mistake, shared, blocks, arguments, phrase in (
            (
                "tables for every head",
                "2, 4",
                ", BLOCK_SIZE=block_size",
                "score_mod, block_mask, enable_gqa=True",
                "B=None, H=None",
            ),
            ("block size not passed", "None, None", "", "score_mod, block_mask, enable_gqa=True", "block_size is 16"),
            (
                "block mask not passed",
                "None, None",
                ", BLOCK_SIZE=block_size",
                "score_mod, enable_gqa=True",
                "without a block_mask",
            ),
            (
                "modifier not passed",
                "None, None",
                ", BLOCK_SIZE=block_size",
                "block_mask=block_mask, enable_gqa=True",
                "without the score_mod",
            ),
            ("no GQA", "None, None", ", BLOCK_SIZE=block_size", "score_mod, block_mask", "pass enable_gqa"),
        )
    ),
    # ---- 6.1
    WrongAnswer("the length as a Python number", "q6_1", _bucket(end="tokens"), "Capture a tensor"),
    WrongAnswer("padding seen", "q6_1", _bucket(mask="k >= 0"), "Padded keys"),
    WrongAnswer("result still padded", "q6_1", _bucket(after=""), "shape"),
    WrongAnswer(
        "largest bucket",
        "q6_1",
        _bucket(
            find="""bucket = max(buckets)
    if bucket < tokens:
        raise ValueError("too long")"""
        ),
        "smallest",
    ),
    WrongAnswer(
        "first bucket in the list",
        "q6_1",
        _bucket(
            find="""bucket = next((b for b in buckets if b >= tokens), None)
    if bucket is None:
        raise ValueError("too long")"""
        ),
        "smallest",
    ),
    # ---- 7.1
    WrongAnswer(
        "order of arrival",
        "q7_1",
        _LAYOUT.format(order="torch.arange(len(conversation))", mask=f"\n        {_LAYOUT_MASK}"),
        "neighbours",
        loses=("q7_1_blocks_tests",),
    ),
    WrongAnswer(
        "sorted by position",
        "q7_1",
        _LAYOUT.format(order="torch.argsort(position)", mask=f"\n        {_LAYOUT_MASK}"),
        ("neighbours", "good start"),
        loses=("q7_1_blocks_tests",),
    ),
    WrongAnswer(
        "order turned round",
        "q7_1",
        f"""
def lay_out(conversation, position, window):
    order = {_SORTED}
    owner, place = conversation[order], position[order]
    def mask_mod(b, h, q, k):
        {_LAYOUT_MASK}
    return torch.argsort(order), mask_mod
""",
        ("pairs it should not", "neighbours"),
        loses=("q7_1_tests", "q7_1_blocks_tests"),
        seen=("mixed up", "neighbours"),
    ),
    WrongAnswer(
        "instructions with a window",
        "q7_1",
        _LAYOUT.format(
            order=_SORTED,
            mask="""
        near = (place[k] <= place[q]) & (place[q] - place[k] < window)
        return ((owner[q] == owner[k]) & near) | ((owner[q] > 0) & (owner[k] == 0))""",
        ),
        "Instructions have no window",
        loses=("q7_1_tests",),
    ),
    WrongAnswer(
        "mask of the old order",
        "q7_1",
        f"""
def lay_out(conversation, position, window):
    owner, place = conversation, position
    def mask_mod(b, h, q, k):
        {_LAYOUT_MASK}
    return {_SORTED}, mask_mod
""",
        ("as they arrived", "is there"),
        loses=("q7_1_tests",),
    ),
    WrongAnswer(
        "the window looks ahead",
        "q7_1",
        _LAYOUT.format(
            order=_SORTED,
            mask="""
        near = (place[k] <= place[q]) & ((place[k] - place[q] < window) | (owner[q] == 0))
        return ((owner[q] == owner[k]) & near) | ((owner[q] > 0) & (owner[k] == 0))""",
        ),
        "There is a window",
        loses=("q7_1_tests",),
    ),
    # ---- bonus
    WrongAnswer(
        "all sequences at one position",
        "bonus_8_1",
        "def at_positions(mask_mod, positions):\n    return lambda b, h, q, k: mask_mod(b, h, q + positions[0], k)\n",
        "position of its own",
    ),
    WrongAnswer(
        "keys moved",
        "bonus_8_1",
        "def at_positions(mask_mod, positions):\n    return lambda b, h, q, k: mask_mod(b, h, q, k + positions[b])\n",
        "queries move",
    ),
    *(
        WrongAnswer(
            mistake,
            "bonus_8_2",
            f"""
def paged_mask(mask_mod, owner, number, page_size):
    def mod(b, h, q, k):
        page = k // page_size
        return {expression}
    return mod
""",
            phrase,
        )
        for mistake, expression, phrase in (
            (
                "owner not asked",
                "mask_mod(b, h, q, number[page] * page_size + k % page_size)",
                "Pages of other sequences",
            ),
            ("place for position", "(owner[page] == b) & mask_mod(b, h, q, k)", "not its place in the pool"),
            (
                "pages not multiplied",
                "(owner[page] == b) & mask_mod(b, h, q, number[page] + k % page_size)",
                "multiply",
            ),
        )
    ),
    # ---- more of 1
    WrongAnswer("divided by D", "q1_1", _masked(f"{_SOFTMAX}.nan_to_num(0.0)", "q.shape[-1]"), "not by D"),
    WrongAnswer(
        "True added as 1",
        "q1_1",
        _masked("weights = torch.softmax(scores + mask.float(), -1)"),
        ("added to the scores", "should be -inf"),
    ),
    WrongAnswer(
        "a query without keys looks at all",
        "q1_1",
        _masked("weights = torch.softmax(scores.masked_fill(~mask, -1e9), -1)"),
        ("gets zeros", "zeros"),
    ),
    WrongAnswer(
        "the sequences forgotten",
        "q1_2",
        """
def mask_costs(mask, batch, heads, head_dim, dtype):
    seen, n = int(mask.sum()), heads
    return seen / mask.numel(), 4 * head_dim * n * (mask.numel() - seen), n * mask.numel() * dtype.itemsize
""",
        ("Each sequence", "sequence computes"),
    ),
    WrongAnswer(
        "two FLOPs a pair and dimension",
        "q1_2",
        """
def mask_costs(mask, batch, heads, head_dim, dtype):
    seen, n = int(mask.sum()), batch * heads
    return seen / mask.numel(), 2 * head_dim * n * (mask.numel() - seen), n * mask.numel() * dtype.itemsize
""",
        ("oth products count",),
    ),
    WrongAnswer(
        "the masked share",
        "q1_2",
        """
def mask_costs(mask, batch, heads, head_dim, dtype):
    lost, n = mask.numel() - int(mask.sum()), batch * heads
    return lost / mask.numel(), 4 * head_dim * n * lost, n * mask.numel() * dtype.itemsize
""",
        ("masked share", "that are masked"),
    ),
    WrongAnswer(
        "all FLOPs called wasted",
        "q1_2",
        """
def mask_costs(mask, batch, heads, head_dim, dtype):
    n = batch * heads
    return int(mask.sum()) / mask.numel(), 4 * head_dim * n * mask.numel(), n * mask.numel() * dtype.itemsize
""",
        ("all FLOPs", "FLOPs of all pairs"),
    ),
    # ---- more of 2
    WrongAnswer(
        "prefix one too long", "q2_1", _mod("prefix_lm", "prefix", "(k <= prefix) | (k <= q)"), "one key too many"
    ),
    WrongAnswer(
        "queries of the prefix see all",
        "q2_1",
        _mod("prefix_lm", "prefix", "(q < prefix) | (k <= q)"),
        ("keys in the prefix", "one key too many"),
    ),
    WrongAnswer(
        "window one too narrow",
        "q2_1",
        _mod("sliding_window", "window", "(k <= q) & (q - k < window - 1)"),
        ("too narrow", "too few"),
    ),
    WrongAnswer(
        "window from key 0", "q2_1", _mod("sliding_window", "window", "(k <= q) & (k < window)"), "from the query"
    ),
    WrongAnswer("prefix alone causal", "q2_1", _mod("prefix_lm", "prefix", "k <= q"), ("later keys", "as well")),
    WrongAnswer(
        "documents see each other",
        "q2_2",
        _mod("packed_documents", "numbers", "(numbers[b, q] >= 0) & (numbers[b, k] >= 0) & (k <= q)"),
        ("Documents are ignored", "own document only"),
    ),
    WrongAnswer(
        "documents upside down",
        "q2_2",
        _mod("packed_documents", "numbers", "(numbers[b, q] == numbers[b, k]) & (numbers[b, q] >= 0) & (k >= q)"),
        ("upside down", "causal"),
    ),
    WrongAnswer(
        "documents by head",
        "q2_2",
        _mod("packed_documents", "numbers", "(numbers[h, q] == numbers[h, k]) & (numbers[h, q] >= 0) & (k <= q)"),
        "sequence 0 only",
    ),
    WrongAnswer(
        "numbers from 1",
        "q2_2",
        """
def document_numbers(lengths, size, device):
    if sum(lengths) > size:
        raise ValueError("too long")
    ids = [i + 1 for i, n in enumerate(lengths) for _ in range(n)]
    return torch.tensor(ids + [-1] * (size - len(ids)), device=device)
""",
        "expected [",
    ),
    WrongAnswer(
        "and called or",
        "q2_3",
        """
def either(*mods):
    return lambda b, h, q, k: functools.reduce(lambda x, y: x & y, (mod(b, h, q, k) for mod in mods))
""",
        ("what the other", "other of the two"),
    ),
    WrongAnswer(
        "windows without causality",
        "q2_3",
        _mod("window_per_head", "windows", "q - k < windows[h]"),
        "causal too",
        loses=("q2_3_heads_tests",),
    ),
    WrongAnswer(
        "windows one too wide",
        "q2_3",
        _mod("window_per_head", "windows", "(k <= q) & (q - k <= windows[h])"),
        ("own key is one", "window"),
        loses=("q2_3_heads_tests",),
    ),
    WrongAnswer(
        "one sink too many",
        "q2_3",
        _mod("sinks_and_window", "sinks, window", "(k <= q) & ((q - k < window) | (k <= sinks))"),
        "one sink too many",
        loses=("q2_3_heads_tests",),
    ),
    WrongAnswer(
        "sinks and window exchanged",
        "q2_3",
        _mod("sinks_and_window", "sinks, window", "(k <= q) & ((q - k < sinks) | (k < window))"),
        "wrong way round",
        loses=("q2_3_heads_tests",),
    ),
    WrongAnswer(
        "sinks forgotten",
        "q2_3",
        _mod("sinks_and_window", "sinks, window", "(k <= q) & (q - k < window)"),
        "sinks are missing",
        loses=("q2_3_heads_tests",),
    ),
    WrongAnswer(
        "only sinks in the window",
        "q2_3",
        _mod("sinks_and_window", "sinks, window", "(k <= q) & (q - k < window) & (k < sinks)"),
        ("not in both", "window", "sinks"),
        loses=("q2_3_heads_tests",),
    ),
    # ---- more of 3
    WrongAnswer(
        "always (3, 3, 3)", "q3_1", "def count_blocks(mask, block):\n    return 3, 3, 3\n", "count_blocks of a"
    ),
    WrongAnswer(
        "partial includes full",
        "q3_1",
        """
_counted = count_blocks
def count_blocks(mask, block):
    full, partial, empty = _counted(mask, block)
    return full, partial + full, empty
""",
        "neither full nor empty",
    ),
    WrongAnswer(
        "partial called full",
        "q3_1",
        """
_counted = count_blocks
def count_blocks(mask, block):
    full, partial, empty = _counted(mask, block)
    return full + partial, partial, empty
""",
        ("counts as full", "expected"),
    ),
    WrongAnswer(
        "FLOPs of one head",
        "q3_2",
        """
def block_flops(counts, block, batch, heads, head_dim):
    return 4 * head_dim * (counts[0] + counts[1]) * block**2
""",
        "one head of one sequence",
    ),
    WrongAnswer(
        "FLOPs of full blocks",
        "q3_2",
        """
def block_flops(counts, block, batch, heads, head_dim):
    return 4 * head_dim * batch * heads * counts[0] * block**2
""",
        "Partial blocks are computed as well",
    ),
    WrongAnswer(
        "a block of one side",
        "q3_2",
        """
def block_flops(counts, block, batch, heads, head_dim):
    return 4 * head_dim * batch * heads * (counts[0] + counts[1]) * block
""",
        "block x block",
    ),
    WrongAnswer(
        "speed-up from full blocks",
        "q3_2",
        "def promised_speedup(counts):\n    return sum(counts) / max(counts[0], 1)\n",
        ("Partial blocks are computed as well", "promised_speedup"),
    ),
    WrongAnswer(
        "blocks of a diagonal",
        "q3_2",
        "def document_blocks(length, span, block):\n    return max(length // block, length // span)\n",
        ("n x n", "shorter"),
    ),
    WrongAnswer(
        "document blocks causal",
        "q3_2",
        """
def document_blocks(length, span, block):
    n = max(1, span // block)
    return length // max(span, block) * n * (n + 1) // 2
""",
        "both halves",
    ),
    WrongAnswer(
        "SDPA with the mask",
        "q3_3",
        """
def block_sparse_attention(q, k, v, block_mask):
    zero = torch.zeros((), dtype=torch.int64)
    i, j = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])[None, :]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=block_mask.mask_mod(zero, zero, i, j)).nan_to_num(0.0)
""",
        "may not use",
    ),
    WrongAnswer("partial blocks missing", "q3_3", _walk(visit="full"), ("Partial blocks are missing", "NaN")),
    WrongAnswer("result in fp32", "q3_3", _walk().replace("return out", "return out.float()"), "dtype"),
    # ---- more of 4 to 8
    WrongAnswer(
        "tanh of the bare score", "q4_1", _score("soft_cap", "cap", "cap * torch.tanh(score)"), "before the tanh"
    ),
    WrongAnswer(
        "slope by sequence", "q4_1", _score("alibi", "slopes", "score - slopes[b] * (q - k)"), "b is the sequence"
    ),
    WrongAnswer(
        "ALiBi of the absolute distance",
        "q4_1",
        _score("alibi", "slopes", "score - slopes[h] * (q - k).abs()"),
        "negative for keys after",
    ),
    WrongAnswer(
        "the score lost", "q4_1", _score("alibi", "slopes", "-slopes[h] * (q - k)"), ("itself is lost", "is lost")
    ),
    WrongAnswer(
        "only the first modifier",
        "q4_1",
        "def in_turn(*mods):\n    return lambda score, b, h, q, k: mods[0](score, b, h, q, k)\n",
        "first modifier",
    ),
    WrongAnswer(
        "modifiers of the bare score",
        "q4_1",
        """
def in_turn(*mods):
    def score_mod(score, b, h, q, k):
        for mod in mods:
            out = mod(score, b, h, q, k)
        return out
    return score_mod
""",
        "one before it returned",
    ),
    WrongAnswer(
        "no clamp",
        "q4_2",
        """
def relative_bias(table):
    r = table.shape[1] // 2
    return lambda score, b, h, q, k: score + table[h, (r + q - k) % table.shape[1]].to(score.dtype)
""",
        ("wrap", "wraps"),
    ),
    WrongAnswer(
        "bias times the score",
        "q4_2",
        """
def relative_bias(table):
    r = table.shape[1] // 2
    return lambda score, b, h, q, k: score * table[h, r + (q - k).clamp(-r, r)].to(score.dtype)
""",
        ("Add the bias", "relative_bias"),
    ),
    WrongAnswer(
        "head 0's bias for all",
        "q4_2",
        """
def relative_bias(table):
    r = table.shape[1] // 2
    return lambda score, b, h, q, k: score + table[0, r + (q - k).clamp(-r, r)].to(score.dtype)
""",
        "row of its own",
    ),
    WrongAnswer(
        "distance without its sign",
        "q4_2",
        """
def relative_bias(table):
    r = table.shape[1] // 2
    return lambda score, b, h, q, k: score + table[h, r + (q - k).abs().clamp(max=r)].to(score.dtype)
""",
        ("relative_bias", "distance"),
    ),
    WrongAnswer(
        "a block mask for no mask",
        "q5_1",
        """
def prepare_flex(attention, mask_mod, score_mod, length, device, block_size=128):
    block_mask = create_block_mask(mask_mod, None, None, length, length, device=device, BLOCK_SIZE=block_size)
    return lambda q, k, v: attention(q, k, v, score_mod=score_mod, block_mask=block_mask, enable_gqa=True)
""",
        "raised TypeError",
        seen="no block mask to build",
    ),
    WrongAnswer("causal buckets", "q6_1", _bucket(mask="(k < end) & (k <= q)"), "not causal"),
    WrongAnswer(
        "too long goes into the largest bucket",
        "q6_1",
        _bucket(find="bucket = min([b for b in buckets if b >= tokens], default=tokens)"),
        "ValueError",
    ),
    WrongAnswer(
        "instructions see everybody",
        "q7_1",
        _LAYOUT.format(
            order=_SORTED,
            mask="""
        near = (place[k] <= place[q]) & ((place[q] - place[k] < window) | (owner[q] == 0))
        return ((owner[q] == owner[k]) & near) | (owner[k] == 0)""",
        ),
        ("order of their positions", "no later ones"),
        loses=("q7_1_tests",),
    ),
    WrongAnswer(
        "instructions forgotten",
        "q7_1",
        _LAYOUT.format(
            order=_SORTED,
            mask="""
        near = (place[k] <= place[q]) & ((place[q] - place[k] < window) | (owner[q] == 0))
        return (owner[q] == owner[k]) & near""",
        ),
        ("instructions are missing", "sees all instructions"),
        loses=("q7_1_tests",),
    ),
    WrongAnswer(
        "later positions seen",
        "q7_1",
        _LAYOUT.format(
            order=_SORTED,
            mask="""
        near = (place[q] - place[k] < window) | (owner[q] == 0)
        return ((owner[q] == owner[k]) & near) | ((owner[q] > 0) & (owner[k] == 0))""",
        ),
        "later positions",
        loses=("q7_1_tests",),
    ),
    WrongAnswer(
        "by conversation, sorted inside of windows only",
        "q7_1",
        _LAYOUT.format(
            order="torch.argsort(conversation * 10_000 + position % window)", mask=f"\n        {_LAYOUT_MASK}"
        ),
        ("neighbours", "good start", "order of their positions"),
        loses=("q7_1_blocks_tests",),
    ),
    WrongAnswer(
        "b and h of a decode mask lost",
        "bonus_8_1",
        "def at_positions(mask_mod, positions):\n    return lambda b, h, q, k: mask_mod(0, 0, q + positions[b], k)\n",
        "Pass b and h",
    ),
    WrongAnswer(
        "queries not moved",
        "bonus_8_1",
        "def at_positions(mask_mod, positions):\n    return mask_mod\n",
        ("not moved",),
    ),
    *(
        WrongAnswer(
            mistake,
            "bonus_8_2",
            f"""
def paged_mask(mask_mod, owner, number, page_size):
    def mod(b, h, q, k):
        page = k // page_size
        return {expression}
    return mod
""",
            phrase,
        )
        for mistake, expression, phrase in (
            (
                "place inside of a page forgotten",
                "(owner[page] == b) & mask_mod(b, h, q, number[page] * page_size)",
                "inside of the page",
            ),
            ("page mask missing", "(owner[page] == b) & (q >= 0)", "mask itself is missing"),
            (
                "b and h of a paged mask lost",
                "(owner[page] == b) & mask_mod(0, 0, q, number[page] * page_size + k % page_size)",
                "Pass b and h",
            ),
        )
    ),
]
