"""What a student reads in each lab stays within limits, which are lowered when they are beaten."""

from dataclasses import astuple

import pytest

from tools.reading import ROOT, Reading, read

# words before the first answer; of a question: median, longest; sentences with a rule; share of tests; lines of code; pictures
LIMITS = {
    "lab1": Reading(240, 85, 120, 6, 0.08, 745, 3.6),
    "lab2_flexattention": Reading(231, 90, 119, 3, 0.09, 540, 3.8),
    "lab3_gluon": Reading(274, 90, 120, 6, 0.03, 764, 5.2),
    "lab4_sdpa": Reading(181, 90, 120, 7, 0.06, 601, 5.2),
}


@pytest.mark.parametrize("lab", LIMITS)
def test_a_lab_reads_within_its_limits(lab):
    *counts, pictures = astuple(read(ROOT / f"{lab}.ipynb"))
    *most, least = astuple(LIMITS[lab])
    assert all(count <= limit for count, limit in zip(counts, most, strict=True)) and pictures >= least, (counts, most)
