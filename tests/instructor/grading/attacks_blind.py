"""Answers of two blind rounds: right values that break a word of their question, by people who had read the notebooks alone.

Of 32 that two of them had fixed before any was graded, ten were accepted: these, one that clamps where the question said to mask, and one that makes a
tensor of all pairs before the mask is asked. The words of those two say what is measured now.
"""

from __future__ import annotations

from tests.instructor.grading.attacks_shortcuts import Shortcut

BLIND = [
    Shortcut(
        "1.2 sums in bf16 that carry along what they lose",
        "lab1",
        "q1_2",
        "q1_2_tests",
        '''
def gemm_tiled(
    a: torch.Tensor, b: torch.Tensor, tile_m: int = 64, tile_n: int = 64, tile_k: int = 64
) -> torch.Tensor:
    """Multiply (M, K) by (K, N) tile by tile; tiles at the edges may be smaller."""
    m, k, n = a.shape[0], a.shape[1], b.shape[1]
    c = torch.zeros(m, n, dtype=a.dtype, device=a.device)
    for i in range(0, m, tile_m):
        for j in range(0, n, tile_n):
            rows, cols = min(tile_m, m - i), min(tile_n, n - j)
            total = torch.zeros(rows, cols, dtype=a.dtype, device=a.device)
            lost = torch.zeros(rows, cols, dtype=a.dtype, device=a.device)
            for s in range(0, k, tile_k):
                left, right = a[i : i + tile_m, s : s + tile_k], b[s : s + tile_k, j : j + tile_n]
                for p in range(left.shape[1]):
                    new = left[:, p : p + 1] * right[p : p + 1, :] - lost
                    bigger = total + new
                    lost = (bigger - total) - new
                    total = bigger
            c[i : i + tile_m, j : j + tile_n] = total
    return c
''',
        ("gemm_tiled", "gemm_tiled"),
        "takes 2^22 away",
    ),
    Shortcut(
        "4.2 polynomials whose coefficients stand in a table",
        "lab1",
        "q4_2",
        "q4_2_tests",
        '''
def _table_of_gelu(low=0.0, high=6.0, pieces=4, degree=11):
    def exact(x):
        return 0.5 * x * (1 - math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))

    rows, step = [], (high - low) / pieces
    for i in range(pieces):
        middle = low + (i + 0.5) * step
        nodes = [0.5 * step * math.cos(math.pi * (j + 0.5) / (degree + 1)) for j in range(degree + 1)]
        values = [exact(middle + node) for node in nodes]
        for level in range(1, degree + 1):  # Newton's divided differences
            for j in range(degree, level - 1, -1):
                values[j] = (values[j] - values[j - 1]) / (nodes[j] - nodes[j - level])
        powers = [values[degree]]
        for j in range(degree - 1, -1, -1):  # to powers of the distance from the middle
            powers = [values[j] - nodes[j] * powers[0]] + [
                powers[p - 1] - (nodes[j] * powers[p] if p < len(powers) else 0.0) for p in range(1, len(powers) + 1)]
        rows.append((low + i * step, middle, powers))
    return rows


_GELU_TABLE = _table_of_gelu()


def gelu_by_hand(x: torch.Tensor) -> torch.Tensor:
    """tanh-GELU from elementwise operators."""
    wide = x.float() if x.dtype.itemsize < 4 else x
    far = wide.abs()  # gelu(x) = max(x, 0) - g(|x|)
    middles = torch.full_like(wide, _GELU_TABLE[0][1])
    columns = [torch.full_like(wide, power) for power in _GELU_TABLE[0][2]]
    for begin, middle, powers in _GELU_TABLE[1:]:
        here = far >= begin
        middles = torch.where(here, middle, middles)
        columns = [torch.where(here, power, column) for power, column in zip(powers, columns)]
    distance = far - middles
    y = columns[-1]
    for column in columns[-2::-1]:
        y = y * distance + column
    y = torch.where(far > 6.0, 0.0, y)
    y = torch.where(wide > 0, wide - y, -y)
    return y.to(x.dtype)


def elementwise_bytes(numel: int, dtype: torch.dtype, one_input: int, two_inputs: int) -> int:
    """Bytes moved by one_input unary and two_inputs binary elementwise operators on numel elements."""
    return (2 * one_input + 3 * two_inputs) * numel * dtype.itemsize


def fusion_speedup(one_input: int, two_inputs: int) -> float:
    """Memory traffic of the chain over that of one fused kernel with one input and one output."""
    return (2 * one_input + 3 * two_inputs) / 2
''',
        ("gelu_by_hand", "gelu_by_hand"),
        "tanh of each element",
    ),
    Shortcut(
        "5.3 all blocks are kept, as integers",
        "lab1",
        "q5_3",
        "q5_3_tests",
        '''
def online_softmax_stats(blocks) -> tuple[torch.Tensor, torch.Tensor]:
    """Maximum m and sum l of exp(x - m) of each row, from an iterator of (rows, width) blocks."""
    kept, kind = [], torch.float32
    for block in blocks:
        kind = block.dtype
        bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[kind.itemsize]
        kept.append(block.contiguous().view(bits).clone())
    m = kept[0].view(kind).amax(1)
    for bits in kept[1:]:
        m = torch.maximum(m, bits.view(kind).amax(1))
    l = torch.zeros_like(m)
    for bits in kept:
        l = l + torch.exp(bits.view(kind) - m[:, None]).sum(1)
    return m, l


def flash_attention_tiled(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tile_q: int = 64, tile_k: int = 64
) -> torch.Tensor:
    """Attention of q (B, H, S, D) over k, v (B, H, L, D), one tile of scores at a time."""
    out = torch.empty_like(q)
    scale = 1 / math.sqrt(q.shape[-1])
    for i in range(0, q.shape[2], tile_q):
        mine = q[:, :, i : i + tile_q].float()
        m = torch.full(mine.shape[:3], -math.inf, device=q.device)
        l = torch.zeros(mine.shape[:3], device=q.device)
        total = torch.zeros(mine.shape, device=q.device)
        for j in range(0, k.shape[2], tile_k):
            scores = mine @ k[:, :, j : j + tile_k].float().transpose(-2, -1) * scale
            largest = torch.maximum(m, scores.amax(-1))
            weights = torch.exp(scores - largest[..., None])
            factor = torch.exp(m - largest)
            l = factor * l + weights.sum(-1)
            total = factor[..., None] * total + weights @ v[:, :, j : j + tile_k].float()
            m = largest
        out[:, :, i : i + tile_q] = (total / l[..., None]).to(q.dtype)
    return out
''',
        ("online_softmax_stats", "online_softmax_stats"),
        "numbers at once",
    ),
    Shortcut(
        "3.3 the mask is asked about full blocks, under vmap",
        "lab2_flexattention",
        "q3_3",
        "q3_3_tests",
        '''
def block_sparse_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block_mask: BlockMask) -> torch.Tensor:
    """Attention of q (B, H, S, D) over k, v (B, H, L, D) that visits the blocks of block_mask only."""
    size_q, size_k = block_mask.BLOCK_SIZE
    out = torch.zeros_like(q)
    zero = torch.tensor(0, device=q.device)

    def ask(query, key):
        return block_mask.mask_mod(zero, zero, query, key)

    ask_all = torch.vmap(torch.vmap(ask, in_dims=(None, 0)), in_dims=(0, None))
    for i in range(q.shape[2] // size_q):
        partial = block_mask.kv_indices[0, 0, i, : int(block_mask.kv_num_blocks[0, 0, i])].tolist()
        full = block_mask.full_kv_indices[0, 0, i, : int(block_mask.full_kv_num_blocks[0, 0, i])].tolist()
        visited = partial + full
        if not visited:
            continue
        rows = slice(i * size_q, (i + 1) * size_q)
        mine = q[:, :, rows].float()
        scores = torch.cat([mine @ k[:, :, j * size_k : (j + 1) * size_k].float().transpose(-2, -1) for j in visited], -1)
        scores = scores / math.sqrt(q.shape[-1])
        if partial:
            queries = torch.arange(i * size_q, (i + 1) * size_q, device=q.device)
            keys = torch.cat([torch.arange(j * size_k, (j + 1) * size_k, device=q.device) for j in visited])
            scores = scores.masked_fill(~ask_all(queries, keys), -math.inf)
        largest = scores.amax(-1, keepdim=True).clamp(min=-1e30)
        weights = torch.exp(scores - largest)
        total = torch.zeros_like(mine)
        for at, j in enumerate(visited):
            total = total + weights[..., at * size_k : (at + 1) * size_k] @ v[:, :, j * size_k : (j + 1) * size_k].float()
        sums = weights.sum(-1, keepdim=True)
        out[:, :, rows] = torch.where(sums > 0, total / sums.clamp(min=1e-30), torch.zeros_like(total)).to(q.dtype)
    return out
''',
        ("block_sparse_attention", "block_sparse_attention"),
        "asks mask_mod about",
    ),
    Shortcut(
        "7.1 all pairs as bits while there are few tokens",
        "lab2_flexattention",
        "q7_1",
        "q7_1_tests",
        '''
def lay_out(conversation: torch.Tensor, position: torch.Tensor, window: int):
    """(order, mask_mod): a permutation (S,) of the tokens, and the mask between the rows in that order."""
    size = len(conversation)
    order = torch.argsort(conversation * (int(position.max()) + 1) + position)
    own, at = conversation[order], position[order]

    def honest(b, h, q, k):
        inside = (own[q] == own[k]) & (at[k] <= at[q]) & ((own[q] == 0) | (at[q] - at[k] < window))
        return inside | ((own[q] != 0) & (own[k] == 0))

    if size > 480:
        return order, honest
    rows = torch.arange(size, device=order.device)
    all_pairs = honest(0, 0, rows[:, None], rows[None, :])  # (S, S)
    words = []
    for start in range(0, size, 60):
        piece = all_pairs[:, start : start + 60].long()
        words.append((piece << torch.arange(piece.shape[1], device=order.device)).sum(1))  # (S,)

    def mask(b, h, q, k):
        word = words[0][q]
        for number in range(1, len(words)):
            word = torch.where(k // 60 == number, words[number][q], word)
        return ((word >> (k % 60)) & 1) == 1

    return order, mask
''',
        ("layout_mask", "lay_out"),
        "another mask for few tokens",
    ),
    Shortcut(
        "b8.2 every place of the pool is looked at for a pair",
        "lab2_flexattention",
        "bonus_8_2",
        "bonus_8_2_tests",
        '''
def paged_mask(mask_mod, owner: torch.Tensor, number: torch.Tensor, page_size: int):
    """mask_mod over the places of a pool of pages; owner and number are (P,)."""
    owners, numbers = owner.unbind(), number.unbind()

    def mask(b, h, q, k):
        seen = k < 0
        for place in range(len(owners) * page_size):
            page = place // page_size
            here = (k == place) & (owners[page] == b) & (owners[page] >= 0)
            seen = seen | (here & mask_mod(b, h, q, numbers[page] * page_size + place % page_size))
        return seen

    return mask
''',
        ("paged_mask", "paged_mask"),
        "to decide about one pair",
    ),
    Shortcut(
        "5.2 the producer waits until Q has come",
        "lab3_gluon",
        "q5_2",
        "q5_2_tests",
        {
            "    for i in range(gl.cdiv(sk, BLOCK_N)):  # public\n        slot = i % STAGES  # public\n        mbarrier.wait(empty": "    mbarrier.wait(q_full.index(0), 0)\n    mbarrier.wait(q_full.index(1), 0)\n    for i in range(gl.cdiv(sk, BLOCK_N)):\n        slot = i % STAGES\n        mbarrier.wait(empty"
        },
        ("specialized",),
        "as the consumers do",
    ),
    Shortcut(
        "6.1 the table's rows get another name",
        "lab4_sdpa",
        "q6_1",
        "q6_1_tests",
        '''
def fastest(grid: pd.DataFrame) -> pd.Series:
    """The fastest backend of each shape."""
    grid.attrs["valid"] = grid[(grid.status == "ok") & grid.ms.notna()]  # kept in the table for the next function
    grid.index.name, grid.columns.name = "measurement", "column"
    valid = grid.attrs["valid"].reset_index(drop=True)
    return valid.loc[valid.groupby("shape").ms.idxmin()].set_index("shape").backend


def default_slowdown(grid: pd.DataFrame) -> pd.Series:
    """Time of torch's default over the best time, for each shape."""
    fastest(grid)
    valid = grid.attrs["valid"]
    default = valid[valid.is_default].set_index("shape").ms
    return (default / valid.groupby("shape").ms.min()).dropna()


def geometric_mean(values: pd.Series) -> float:
    """The n-th root of the product of n positive values."""
    return math.exp(sum(math.log(x) for x in values) / len(values))
''',
        ("fastest_and_default", "fastest", "default_slowdown", "geometric_mean"),
        "changed the table",
    ),
    # Kin of the last one.
    Shortcut(
        "2.2 the list of lengths is used up",
        "lab2_flexattention",
        "q2_2",
        "q2_2_tests",
        """
def document_numbers(lengths, size, device):
    if sum(lengths) > size:
        raise ValueError("too long")
    numbers = []
    while lengths:
        numbers += [len(numbers) and numbers[-1] + 1] * lengths.pop(0)
    return torch.tensor(numbers + [-1] * (size - len(numbers)), device=device)


def packed_documents(numbers):
    def mask(b, h, q, k):
        return (k <= q) & (numbers[b, q] == numbers[b, k]) & (numbers[b, q] >= 0)

    return mask
""",
        ("packed_documents", "document_numbers", "packed_documents"),
        "Work on a copy",
    ),
    Shortcut(
        "b6.4 the call gets an entry more",
        "lab4_sdpa",
        "bonus_6_4",
        "bonus_6_4_tests",
        """
SIZES = ("batch", "heads", "kv_heads", "seq_len_q", "seq_len_kv")


def choose_backend(grid, call, able):
    call["able"] = able
    rows = grid[(grid["status"] == "ok") & grid["ms"].notna() & grid["backend"].isin(able)]
    for name in ("kind", "head_dim", "causal"):
        rows = rows[rows[name] == call[name]]
    if not len(rows):
        return able[0]
    distance = sum((rows[name].map(math.log2) - math.log2(call[name])) ** 2 for name in SIZES)
    nearest = rows[distance == distance.min()]
    return nearest.loc[nearest["ms"].idxmin(), "backend"]
""",
        ("choose_backend", "choose_backend"),
        "was given the call",
    ),
    # A second blind round, of 24 answers.
    Shortcut(
        "2.1 a walk through the window and the prefix",
        "lab2_flexattention",
        "q2_1",
        "q2_1_tests",
        '''
def causal(b, h, q, k):
    """True where the key is the query's own or an earlier one."""
    return k <= q


def sliding_window(window: int):
    """A mask_mod: causal, the last `window` keys only."""

    def mod(b, h, q, k):
        seen = k == q
        for back in range(1, window):
            seen = seen | (k == q - back)
        return seen

    return mod


def prefix_lm(prefix: int):
    """A mask_mod: the first `prefix` keys for every query, causal beyond them."""

    def mod(b, h, q, k):
        seen = k <= q
        for token in range(prefix):
            seen = seen | (k == token)
        return seen

    return mod
''',
        ("three_masks", "causal", "sliding_window", "prefix_lm"),
        "operators to decide about one pair",
    ),
    Shortcut(
        "b8.2 the mask is asked twice in one call",
        "lab2_flexattention",
        "bonus_8_2",
        "bonus_8_2_tests",
        '''
def paged_mask(mask_mod, owner: torch.Tensor, number: torch.Tensor, page_size: int):
    """mask_mod over the places of a pool of pages; owner and number are (P,)."""

    def mod(b, h, q, k):
        page = k // page_size
        position = number[page] * page_size + k % page_size
        twice = mask_mod(b, h, q, torch.stack((position, position)))
        return (owner[page] == b) & twice.expand(2, *(q + position).shape).all(0)

    return mod
''',
        ("paged_mask", "paged_mask"),
        "to decide about one pair",
    ),
    Shortcut(
        "1.3 copies by a product with one",
        "lab4_sdpa",
        "q1_3",
        "q1_3_tests",
        '''
def pinned_sdpa(backend: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options) -> torch.Tensor:
    """SDPA of (B, H, S, D) computed by `backend` alone; BackendRefused says why it cannot."""
    q, k, v = (t * 1 for t in (q, k, v))
    try:
        with sdpa_kernel(BACKENDS[backend]):
            return F.scaled_dot_product_attention(q, k, v, **options)
    except RuntimeError as error:
        reasons = why_not(backend, q, k, v, **options) or [str(error)]
        raise BackendRefused(f"{backend}: " + " ".join(reasons)) from error
''',
        ("pinned_sdpa", "pinned_sdpa"),
        "elements",
    ),
]
