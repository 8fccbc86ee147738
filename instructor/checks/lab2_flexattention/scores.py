"""Part 4: score modifiers."""

from __future__ import annotations

import torch

from instructor.checks.common import Draw
from instructor.checks.lab2_flexattention.common import expect_scores, indices
from utils.checking import check
from utils.checking.masks import expect_program


@check("4.1", "Score modifiers")
def score_mods(soft_cap, alibi, in_turn, seed=None):
    """Check soft-cap, ALiBi for each head, and modifiers one after the other."""
    draw = Draw(seed)
    sq, sk = draw.sizes(2, 6, 14)
    q, k = indices(sq, sk)
    scores = 6 * draw.normal(sq, sk)
    cap = draw.real(1.5, 5.0)
    capped = cap * torch.tanh(scores / cap)
    expect_scores(
        soft_cap(cap),
        capped,
        scores,
        f"soft_cap({cap:.3g})",
        {
            "Multiply by the cap again after the tanh.": torch.tanh(scores / cap),
            "Divide by the cap before the tanh.": cap * torch.tanh(scores),
            "That cuts scores off; a soft-cap bends them.": scores.clamp(-cap, cap),
            "The score is unchanged.": scores,
        },
    )
    heads = draw.size(3, 5)
    slopes = draw.normal(heads).abs() + 0.1
    for h in range(1, heads):
        b = 2 if h == 1 else 0
        expected = scores - slopes[h] * (q - k)
        expect_scores(
            alibi(slopes),
            expected,
            scores,
            f"alibi of {heads} slopes, head {h},",
            {
                "The sign is wrong: keys that lie further back lose.": scores + slopes[h] * (q - k),
                "Every head has a slope of its own: slopes[h].": scores - slopes[0] * (q - k),
                "Index the slopes with h: b is the sequence.": scores - slopes[b] * (q - k),
                "The distance is q - k, and negative for keys after the query.": scores - slopes[h] * (q - k).abs(),
                "The score itself is lost.": -slopes[h] * (q - k).expand(sq, sk),
                "The score is unchanged.": scores,
            },
            b=b,
            h=h,
        )
    add, double = lambda s, b, h, q, k: s + 3 * h + b, lambda s, b, h, q, k: 2 * s

    def halve_far(s, b, h, q, k):
        return torch.where(q - k > 2, s / 2, s)

    far = q - k > 2
    expected = 2 * torch.where(far, (scores + 5) / 2, scores + 5)
    expect_scores(
        in_turn(add, halve_far, double),
        expected,
        scores,
        "in_turn of three modifiers",
        {
            "They run from the last to the first here.": torch.where(far, scores, 2 * scores) + 5,
            "Each modifier gets what the one before it returned.": 2 * scores,
            "Only the first modifier runs.": scores + 5,
        },
        b=2,
        h=1,
    )
    expect_scores(in_turn(double), 2 * scores, scores, "in_turn of one modifier")
    for mod, what in ((soft_cap(cap), "soft_cap"), (alibi(slopes), "alibi")):
        one = draw.normal(1)[0]
        expect_program(lambda b, h, q, k, mod=mod, one=one: mod(one, b, h, q, k), max(16, heads), what)


@check("4.2", "A learned bias")
def relative_bias(relative_bias, seed=None):
    """Check table[h, R + (q - k)], with the distance clamped to the ends of the table."""
    draw = Draw(seed)
    heads, reach = draw.size(2, 4), draw.size(3, 5)
    sq, sk = draw.sizes(2, 10, 18)
    q, k = indices(sq, sk)
    for dtype in (torch.float32, torch.bfloat16):
        table = 3 * draw.normal(heads, 2 * reach + 1, dtype=torch.float32)
        scores = draw.normal(sq, sk).to(dtype)
        for h in range(heads):
            column = reach + (q - k).clamp(-reach, reach)
            other = reach - (q - k).clamp(-reach, reach)
            exact = table[h, column].to(dtype)
            what = (
                f"relative_bias of a ({heads}, {2 * reach + 1}) table, head {h}, {str(dtype).removeprefix('torch.')},"
            )
            mistakes = {
                "The distance is q - k: it has the wrong sign.": scores + table[h, other].to(dtype),
                "Distances beyond the table wrap around; they take the column at that end.": scores
                + table[h, (reach + q - k).remainder(2 * reach + 1)].to(dtype),
                "Column R is distance 0.": scores + table[h, (q - k).abs().clamp(max=2 * reach)].to(dtype),
                "Every head has a row of its own.": scores + table[0, column].to(dtype),
                "The score itself is lost.": exact,
                "The bias is missing.": scores,
            }
            expect_scores(relative_bias(table), scores + exact, scores, what, mistakes, h=h)
    wide = draw.normal(2, 301)
    expect_program(
        lambda b, h, q, k: relative_bias(wide)(torch.tensor(1.0), b, h, q, k),
        wide.numel(),
        "relative_bias of 301 distances",
    )
