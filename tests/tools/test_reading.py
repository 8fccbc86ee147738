"""What a student reads in each lab stays within limits, which are lowered when they are beaten."""

from dataclasses import astuple

import pytest

from tools.reading import ROOT, Reading, read

# words before the first answer; of a question: median, longest; sentences with a rule; share of tests; lines of code; pictures
LIMITS = {
    "lab1": Reading(237, 85, 120, 6, 0.04, 684, 3.8),
    "lab2_flexattention": Reading(225, 90, 119, 3, 0.05, 503, 4.0),
    "lab3_gluon": Reading(274, 90, 120, 6, 0.02, 730, 5.3),
    "lab4_sdpa": Reading(169, 90, 120, 7, 0.03, 557, 5.4),
}


@pytest.mark.parametrize("lab", LIMITS)
def test_a_lab_reads_within_its_limits(lab):
    *counts, pictures = astuple(read(ROOT / f"{lab}.ipynb"))
    *most, least = astuple(LIMITS[lab])
    assert all(count <= limit for count, limit in zip(counts, most, strict=True)) and pictures >= least, (counts, most)
