"""The Gemma-3 decoder layer, its KV cache, and attention in tiles."""

from __future__ import annotations

from tools.figures.drawing import BLUE, BROWN, GREEN, GREY, HAIR, INK, ORANGE, PAPER, PURPLE, SOFT, TINT, Card

# The parts of Gemma-3-270m's configuration that the drawing names.
GEMMA = {
    "hidden_size": 640,
    "intermediate_size": 2048,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "sliding_window": 512,
}


def decoder_layer() -> Card:
    """One Gemma-3 decoder layer with the shape of every tensor."""
    d, ff, heads, kv, hd = (
        GEMMA[k] for k in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    )
    card = Card(
        820,
        985,
        "A Gemma-3 decoder layer (270m)",
        (
            "Hidden states (B, S, 640) pass an input norm, attention with four query heads and one key-value head and a "
            "post-attention norm, are added to the residual, then pass a pre-feedforward norm, a gated GELU MLP and a "
            "post-feedforward norm, and are added again."
        ),
    )
    mid, spine = 430, 84
    q, k, v = 220, 430, 640

    def norm(y: float, name: str, x: float = mid, w: float = 264) -> None:
        card.box(x - w / 2, y, w, 28, f"RMSNorm  {name}", fill=TINT[GREY], edge=SOFT)

    def linear(x: float, y: float, name: str, shape: str, w: float = 150) -> None:
        card.box(x - w / 2, y, w, 40, f"{name}\n{shape}", fill=TINT[BLUE], edge=BLUE, size=8.6)

    def shape(x: float, y: float, text: str) -> None:
        card.text(x, y, text, size=8, color=SOFT, ha="left")

    def join(y: float, sign: str) -> None:
        card.dot(mid, y, 16, fill=PAPER, edge=INK, zorder=4)
        card.text(mid, y, sign, size=12)

    # attention
    card.box(mid - 125, 50, 250, 28, "hidden states")
    shape(mid + 134, 64, f"(B, S, {d})")
    card.arrow(mid, 78, mid, 106)
    card.route((mid, 92), (spine, 92), (spine, 556), (mid - 12, 556))
    card.text(spine - 13, 324, "residual", rotation=90, size=8.5, color=SOFT)
    norm(106, "input_layernorm")
    card.path((mid, 134), (mid, 150))
    card.path((q, 150), (v, 150))
    for x, name, out in ((q, "q_proj", heads * hd), (k, "k_proj", kv * hd), (v, "v_proj", kv * hd)):
        card.arrow(x, 150, x, 168)
        linear(x, 168, name, f"{d} → {out}")
        shape(x + 8, 223, f"(B, {heads if x == q else kv}, S, {hd})")
    for x, name in ((q, "q_norm"), (k, "k_norm")):
        card.arrow(x, 208, x, 240)
        norm(240, f"{name}, over {hd}", x, 198)
        card.arrow(x, 268, x, 286)
        card.box(x - 92, 286, 184, 28, "RoPE: rotate by position", fill=TINT[PURPLE], edge=PURPLE)
    card.arrow(k, 314, k, 338)
    card.arrow(v, 208, v, 338)
    card.box(k - 92, 338, v - k + 184, 28, "KV cache: write the new, read all", fill=TINT[ORANGE], edge=ORANGE)
    for x, y in ((q, 314), (k, 366), (v, 366)):
        card.arrow(x, y, x, 386)
    card.box(
        128,
        386,
        604,
        48,
        f"softmax(Q Kᵀ / √{hd} + mask) V\n{heads} query heads share {kv} key-value head (GQA); "
        f"5 of 6 layers see only the last {GEMMA['sliding_window']} tokens",
        fill=TINT[GREEN],
        edge=GREEN,
        size=9,
    )
    card.arrow(mid, 434, mid, 458)
    shape(mid + 8, 445, f"(B, S, {heads * hd})")
    card.box(mid - 125, 458, 250, 28, f"o_proj   {heads * hd} → {d}", fill=TINT[BLUE], edge=BLUE, size=8.8)
    card.arrow(mid, 486, mid, 502)
    norm(502, "post_attention_layernorm")
    card.arrow(mid, 530, mid, 544)
    join(556, "+")
    # gated MLP
    card.arrow(mid, 568, mid, 602)
    shape(mid + 22, 575, f"(B, S, {d})")
    card.route((mid, 588), (spine, 588), (spine, 900), (mid - 12, 900))
    card.text(spine - 13, 744, "residual", rotation=90, size=8.5, color=SOFT)
    norm(602, "pre_feedforward_layernorm")
    card.path((mid, 630), (mid, 644))
    gate, up = 290, 570
    card.path((gate, 644), (up, 644))
    for x, name in ((gate, "gate_proj"), (up, "up_proj")):
        card.arrow(x, 644, x, 660)
        linear(x, 660, name, f"{d} → {ff}")
        shape(x + 8, 714, f"(B, S, {ff})")
    card.arrow(gate, 700, gate, 728)
    card.box(gate - 75, 728, 150, 28, "GELU (tanh)", fill=TINT[PURPLE], edge=PURPLE)
    card.route((gate, 756), (gate, 778), (mid - 12, 778))
    card.route((up, 700), (up, 778), (mid + 12, 778))
    join(778, "×")
    card.arrow(mid, 790, mid, 808)
    card.box(mid - 125, 808, 250, 28, f"down_proj   {ff} → {d}", fill=TINT[BLUE], edge=BLUE, size=8.8)
    card.arrow(mid, 836, mid, 850)
    norm(850, "post_feedforward_layernorm")
    card.arrow(mid, 878, mid, 888)
    join(900, "+")
    card.arrow(mid, 912, mid, 932)
    card.box(mid - 125, 932, 250, 28, "hidden states")
    shape(mid + 134, 946, f"(B, S, {d})")
    return card


def kv_cache() -> Card:
    """Prefill fills the static cache with the prompt; each decode step writes one slot and reads all written ones."""
    card = Card(
        940,
        560,
        "Prefill and decode with a static KV cache",
        (
            "Prefill: all prompt tokens at once, a triangle of scores, their keys and values written to the first slots. "
            "Decode: one token, one row of scores over the cache, one more slot written. A sliding window bounds the reach."
        ),
    )
    cell, prompt, slots, window = 20, 7, 12, 4

    def stage(x: float, title: str, first: int, queries: int, notes: tuple[str, str]) -> None:
        """The cache, and the scores of `queries` tokens from `first` on: in full, and in a sliding window."""
        left = x + 132
        card.text(x, 60, title, size=10.5, weight="bold", ha="left")
        card.text(x, 98, "K and V cache", ha="left", size=9)
        card.text(x, 118, f"{slots} slots, made once", ha="left", size=8, color=SOFT)
        now = range(first, first + queries) if first == 0 else range(first, first + 1)
        card.grid(
            left,
            88,
            1,
            slots,
            cell,
            lambda _, col: ORANGE if col in now else TINT[ORANGE] if col < first else PAPER,
            line=0.8,
        )
        for col in range(slots):
            card.text(left + cell * (col + 0.5), 79, str(col), size=7, color=SOFT)
        spans = [
            (now.start, now.stop, "written now" if len(now) > 1 else "now", BROWN),
            (0, first, "written before", SOFT),
            (now.stop, slots, "empty, masked" if first == 0 else "empty", SOFT),
        ]
        for begin, end, words, color in spans:
            if end > begin:
                card.text(left + cell * (begin + end) / 2, 118, words, size=8, color=color)
        for y, reach, name, note in (
            (164, slots, "full attention", notes[0]),
            (366, window, f"sliding\nwindow of {window}", notes[1]),
        ):
            card.text(x, y - 2, name, ha="left", size=9, va="top")
            card.grid(
                left,
                y,
                queries,
                slots,
                cell,
                lambda row, col, reach=reach: BLUE if first + row - reach < col <= first + row else PAPER,
                line=0.8,
            )
            for row in range(queries):
                words = f"token {first + row}"
                card.text(left - 5, y + cell * (row + 0.5), words, size=7, color=SOFT, ha="right")
            card.text(left, y + cell * queries + 9, note, ha="left", va="top", size=9)

    stage(
        36,
        f"Prefill: the prompt, S = {prompt} tokens at once",
        0,
        prompt,
        ("S²/2 scores: work grows with the square of S", f"a band: at most {window} scores a token"),
    )
    stage(
        500,
        "Decode: one new token a step",
        prompt,
        4,
        (
            "one row a step; it reads every key and value\nwritten so far for a few FLOPs each:\nmemory-bound, and slower "
            "with every token",
            f"each step reads the last {window} only:\nits cost no longer grows",
        ),
    )
    card.path((470, 52), (470, 538), color="#dddddd", line=1)
    return card


def flash_attention() -> Card:
    """The score matrix in tiles: what is visited, what stays on chip, what is kept between tiles."""
    card = Card(
        940,
        520,
        "FlashAttention: the score matrix in tiles, never stored",
        (
            "A tile of queries stays on chip while tiles of keys and values stream past. A running maximum, a running sum "
            "and an output accumulator replace the stored score matrix. Causal tiles above the diagonal are skipped."
        ),
    )
    tiles, size, x, y, row, step = 6, 48, 96, 132, 3, 2
    for i in range(tiles):
        for j in range(tiles):
            skipped, now = j > i, (i, j) == (row, step)
            done = i < row or (i == row and j < step)
            fill = GREEN if now else TINT[GREEN] if done else PAPER
            card.rect(
                x + j * size,
                y + i * size,
                size,
                size,
                fill=TINT[GREY] if skipped else fill,
                edge=HAIR,
                hatch="////" if skipped else "",
                line=0.8,
            )
        card.rect(x - 40, y + i * size, 30, size, fill=BLUE if i == row else TINT[BLUE], edge=PAPER)
        for k, top in enumerate((y - 62, y - 36)):
            current = i == step
            card.rect(x + i * size, top, size, 22, fill=ORANGE if current else TINT[ORANGE], edge=PAPER)
            if i == 0:
                card.text(x - 10, top + 11, "KV"[k], weight="bold", ha="right", color=BROWN)
    card.text(x - 25, y + row * size + size / 2, "Qᵢ", color=PAPER, weight="bold")
    card.text(x + step * size + size / 2, y + row * size + size / 2, "Sᵢⱼ", color=PAPER, weight="bold")
    card.text(x - 25, y + tiles * size + 14, "Q", weight="bold", color="#00507d")
    card.arrow(x + 4, y + row * size + size / 2, x + step * size - 3, y + row * size + size / 2, color=GREEN, line=1.6)
    legend = y + tiles * size + 16
    for dx, fill, hatch, words in (
        (0, GREEN, "", "now"),
        (60, TINT[GREEN], "", "done"),
        (125, TINT[GREY], "////", "skipped, if causal"),
    ):
        card.rect(x + dx, legend + 12, 13, 13, fill=fill, edge=HAIR, hatch=hatch, line=0.7)
        card.text(x + dx + 19, legend + 19, words, ha="left", size=8.5)
    card.text(x + tiles * size / 2, legend - 4, "scores S = Q Kᵀ, tile by tile, left to right", size=9)
    # on chip
    card.box(440, 62, 470, 290, fill="#fafafa", edge=SOFT, round=8)
    card.text(456, 82, "On chip, for one tile of queries", weight="bold", ha="left", size=10)
    for k, (name, what, fill, edge) in enumerate(
        (
            ("Qᵢ", "tile_q × D", TINT[BLUE], BLUE),
            ("Kⱼ, Vⱼ", "tile_k × D", TINT[ORANGE], ORANGE),
            ("S, P", "tile_q × tile_k", TINT[GREEN], GREEN),
            ("O", "tile_q × D", TINT[PURPLE], PURPLE),
            ("m, l", "tile_q each", TINT[PURPLE], PURPLE),
        )
    ):
        card.box(456 + k * 89, 100, 81, 42, f"{name}\n{what}", fill=fill, edge=edge, size=7.6)
    card.text(456, 166, "for each tile j of keys and values:", ha="left", size=9.5)
    lines = (
        (r"$S = Q_i K_j^T / \sqrt{D}$", "scores of this tile"),
        (r"$m' = \max(m,\ \mathrm{rowmax}\ S)$", "running maximum"),
        (r"$P = \exp(S - m')$", "weights, not yet divided"),
        (r"$l \leftarrow e^{m - m'} l + \mathrm{rowsum}\ P$", "running sum"),
        (r"$O \leftarrow e^{m - m'} O + P V_j$", "old output rescaled, new added"),
        (r"$m \leftarrow m'$", "for the next tile"),
    )
    for i, (formula, words) in enumerate(lines):
        card.text(472, 188 + 23 * i, formula, ha="left", size=10.5)
        card.text(690, 188 + 23 * i, words, ha="left", size=9, color=SOFT)
    card.text(456, 335, r"at the end, once:   $O_i = O / l$", ha="left", size=10.5)
    card.box(440, 400, 470, 96, fill=TINT[ORANGE], edge=ORANGE, round=8)
    card.text(456, 420, "Memory (HBM)", weight="bold", ha="left", size=10)
    card.text(
        456,
        459,
        "read: Q once; K and V once for each tile of queries.  written: O once.\n"
        "L × L scores: never. Memory grows with L, not with its square.",
        ha="left",
        size=9,
    )
    card.arrow(560, 399, 560, 354, color="#9a6200", line=1.6)
    card.arrow(790, 353, 790, 398, color=PURPLE, line=1.6)
    card.text(570, 376, "Q, K, V tiles in", ha="left", size=9)
    card.text(780, 376, "O out", ha="right", size=9)
    return card
