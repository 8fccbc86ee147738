"""Right answers with names of their own: type hints, fields and signs that no list of words can know.

Honest answers of the twelfth and the fourteenth round that waited at first, and their kin.
"""

STUDENTS: dict[str, tuple[str, dict[str, str]]] = {
    "an accumulator with a sign of its own, tiles as objects": (
        "lab1",
        {
            "q1_2": """
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Stretch:
    '''A half-open stretch of one axis, of what is there of it.'''

    start: int
    stop: int

    @classmethod
    def cover(cls, size: int, step: int) -> "Iterator[Stretch]":
        at = 0
        while at < size:
            yield cls(at, min(at + step, size))
            at += step

    def __call__(self, matrix: torch.Tensor, axis: int) -> torch.Tensor:
        return matrix.narrow(axis, self.start, self.stop - self.start)  # a view, nothing is copied


class Accumulator:
    '''One tile of C, as wide as it has to be, until somebody asks for it.'''

    def __init__(self, like: torch.Tensor, height: int, width: int):
        self.wide = torch.promote_types(like.dtype, torch.float32)
        self.final = like.dtype
        self.sum = torch.zeros((height, width), dtype=self.wide, device=like.device)

    def __iadd__(self, pair: tuple[torch.Tensor, torch.Tensor]) -> "Accumulator":
        left, right = (piece.to(self.wide) for piece in pair)  # first widen, then multiply
        cube = left.unsqueeze(-1) * right.unsqueeze(0)  # (tile_m, tile_k, tile_n): one step's worth, no more
        self.sum += cube.sum(dim=1)
        return self

    def rounded(self) -> torch.Tensor:
        return self.sum.to(self.final)


def gemm_tiled(
    a: torch.Tensor, b: torch.Tensor, tile_m: int = 64, tile_n: int = 64, tile_k: int = 64
) -> torch.Tensor:
    '''Multiply (M, K) by (K, N) tile by tile; tiles at the edges may be smaller.'''
    assert a.shape[1] == b.shape[0], f"{tuple(a.shape)} does not fit {tuple(b.shape)}"

    def one_tile(down: Stretch, across: Stretch) -> torch.Tensor:
        tile = Accumulator(a, down.stop - down.start, across.stop - across.start)
        for along in Stretch.cover(a.shape[1], tile_k):
            tile += along(down(a, 0), 1), along(across(b, 1), 0)
        return tile.rounded()

    # I like to see C grow: a list of rows of tiles, each of them a list of tiles, glued together at the very end.
    shelves = [[one_tile(i, j) for j in Stretch.cover(b.shape[1], tile_n)] for i in Stretch.cover(a.shape[0], tile_m)]
    return torch.cat([torch.cat(shelf, dim=1) for shelf in shelves])


_probe = torch.arange(6.0).reshape(2, 3)
assert gemm_tiled(_probe, _probe.T, 1, 2, 2).tolist() == [[5.0, 14.0], [14.0, 50.0]]
"""
        },
    ),
    "tokens sorted as index cards, their table with fields of its own": (
        "lab2_flexattention",
        {
            "q7_1": """
from types import SimpleNamespace


def lay_out(conversation: torch.Tensor, position: torch.Tensor, window: int):
    '''(order, mask_mod): a permutation (S,) of the tokens, and the mask between the rows in that order.'''
    where = conversation.device
    # Like sorting index cards: conversation first (the instructions, number 0, come to lie on top), then position.
    cards = list(zip(conversation.tolist(), position.tolist(), range(len(conversation)), strict=True))
    cards.sort()
    order = torch.tensor([token for _, _, token in cards], dtype=torch.int64, device=where)
    deck = SimpleNamespace(
        talk=torch.tensor([talk for talk, _, _ in cards], dtype=torch.int64, device=where),
        place=torch.tensor([place for _, place, _ in cards], dtype=torch.int64, device=where),
        # the first position that a token may look back to, in its own conversation; instructions look back to the beginning
        horizon=torch.tensor([place - window + 1 if talk else 0 for talk, place, _ in cards], dtype=torch.int64, device=where),
    )

    def may_see(b, h, q, k):
        mine, theirs = deck.talk[q], deck.talk[k]
        at = deck.place[k]
        family = (mine == theirs) & (at <= deck.place[q]) & (at >= deck.horizon[q])
        rules = (theirs == 0) & (mine != 0)
        return family | rules

    return order, may_see
"""
        },
    ),
    "a reference in NumPy with NumPy's type hints": (
        "lab4_sdpa",
        {
            "q2_2": """
import itertools

import numpy as np


def _as_float64_array(tensor: torch.Tensor) -> np.ndarray:
    # NumPy has no bf16, so torch widens first. Widening rounds nothing.
    return tensor.detach().cpu().to(torch.float64).numpy()


def _one_head(queries: np.ndarray, keys: np.ndarray, values: np.ndarray, causal: bool) -> np.ndarray:
    '''Attention of one head, (S, D) each, in float64.'''
    scores = queries @ keys.T
    scores /= np.sqrt(np.float64(queries.shape[-1]))
    if causal:
        future = np.arange(keys.shape[0])[None, :] > np.arange(queries.shape[0])[:, None]
        scores[future] = -np.inf
    scores -= scores.max(axis=1, keepdims=True)
    weights = np.exp(scores)
    return (weights / weights.sum(axis=1, keepdims=True)) @ values


def errors(
    out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False
) -> tuple[float, float]:
    '''(largest absolute error, relative rms error) of an attention output against float64.'''
    q64, k64, v64, out64 = map(_as_float64_array, (q, k, v, out))
    sequences, heads = q64.shape[:2]
    share = heads // k64.shape[1]  # neighbours share a key head
    largest = 0.0
    sum_of_squared_errors = sum_of_squares = 0.0
    for b, h in itertools.product(range(sequences), range(heads)):
        right = _one_head(q64[b, h], k64[b, h // share], v64[b, h // share], causal)
        wrong_by = out64[b, h] - right
        largest = max(largest, float(np.abs(wrong_by).max()))
        sum_of_squared_errors += float(np.square(wrong_by).sum())
        sum_of_squares += float(np.square(right).sum())
    # both means are over the same number of elements, so that number cancels
    return largest, float(np.sqrt(sum_of_squared_errors / sum_of_squares))
"""
        },
    ),
    "NumPy sorts by two keys, a class holds the layout": (
        "lab2_flexattention",
        {
            "q7_1": """
import numpy as np


class Layout:
    '''Who speaks in each row of the new order, and at which position.'''

    def __init__(self, conversation, position, window):
        keys = [np.asarray(x.cpu()) for x in (position, conversation)]  # the last key comes first
        self.order = torch.from_numpy(np.ascontiguousarray(np.lexsort(keys))).to(conversation.device)
        self.speaker, self.place, self.window = conversation[self.order], position[self.order], window

    def visible(self, b, h, q, k):
        mine, theirs = self.speaker[q], self.speaker[k]
        ago = self.place[q] - self.place[k]
        inside = (mine == theirs) & (ago >= 0) & ((ago < self.window) | (mine == 0))
        return inside | ((theirs == 0) & (mine != 0))


def lay_out(conversation, position, window):
    layout = Layout(conversation, position, window)
    return layout.order, layout.visible
"""
        },
    ),
    "a context manager that turns one kind of error into another": (
        "lab4_sdpa",
        {
            "q1_3": """
class Pinned:
    '''Allows one backend, and turns its refusal into BackendRefused.'''

    def __init__(self, backend, explain):
        self.backend, self.explain, self.allowed = backend, explain, sdpa_kernel(BACKENDS[backend])

    def __enter__(self):
        self.allowed.__enter__()

    def __exit__(self, kind, error, traceback):
        self.allowed.__exit__(kind, error, traceback)
        if kind is None or not issubclass(kind, RuntimeError):
            return None
        reasons = self.explain() or [str(error)]
        raise BackendRefused(f"{self.backend}: " + " ".join(reasons)) from error


def pinned_sdpa(backend, q, k, v, **options):
    with Pinned(backend, lambda: why_not(backend, q, k, v, **options)):
        return F.scaled_dot_product_attention(q, k, v, **options)
"""
        },
    ),
}
