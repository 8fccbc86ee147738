"""The plot of attention ratios: every point of the table is on it, or named in its corner."""

import json

import matplotlib.pyplot as plt
import pytest

from utils.files import ROOT
from utils.visualization.ratios import plot_attention_ratios

RECORD = ROOT / "assets" / "results" / "h200" / "attention_ratios.json"


@pytest.fixture(autouse=True)
def _close_figures():
    yield
    plt.close("all")


def _row(head_dim=64, length=1024, causal=False, against="cudnn", ratio=1.1):
    return {
        "head_dim": head_dim,
        "length": length,
        "causal": causal,
        "against": against,
        "ratio": ratio,
        "interval": [ratio - 0.01, ratio + 0.02],
    }


def test_points_stand_in_their_panel():
    rows = [_row(length=n, ratio=1 + n / 1e4) for n in (1024, 2048)] + [_row(128, causal=True)]
    _, axes = plot_attention_ratios(rows)
    titles = [ax.get_title(loc="left") for ax in axes]
    assert titles == ["head dim 64, full", "head dim 128, full", "head dim 64, causal", "head dim 128, causal"]
    line = axes[0].containers[0].lines[0]
    assert list(line.get_xdata()) == [1024, 2048]
    assert list(line.get_ydata()) == pytest.approx([1.1024, 1.2048])
    assert not axes[1].containers and len(axes[3].containers) == 1


def test_what_is_off_the_axis_or_refused_is_named():
    rows = [
        _row(),
        _row(against="flash", ratio=1.9),
        {"head_dim": 64, "length": 1024, "causal": False, "against": "flex_flash", "refused": "no"},
    ]
    rows.append(_row(head_dim=128, against="flex_flash"))
    _, axes = plot_attention_ratios(rows)
    said = "\n".join(text.get_text() for text in axes[0].texts)
    assert "torch flash (FA2): 1.90 to 1.90" in said and "Flex (FLASH): refuses" in said


def test_a_table_without_ratios_is_refused():
    with pytest.raises(ValueError, match="no row with a ratio"):
        plot_attention_ratios([{"head_dim": 64, "refused": "no"}])


def test_the_recorded_table_is_drawn_whole():
    record = json.loads(RECORD.read_text())
    figure, axes = plot_attention_ratios(record["rows"])
    figure.canvas.draw()
    drawn = sum(len(bars.lines[0].get_xdata()) for ax in axes for bars in ax.containers)
    beyond = {(r["head_dim"], r["causal"], r["against"]) for r in record["rows"] if r.get("ratio", 0) > 1.5}
    measured = [r for r in record["rows"] if "ratio" in r]
    hidden = [r for r in measured if (r["head_dim"], r["causal"], r["against"]) in beyond]
    assert drawn == len(measured) - len(hidden) > 60
