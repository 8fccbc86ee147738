"""Which of the GEMM's configurations a product gets: the first by the model of the time, corrected by measured neighbours.

The model (`gemm_model.py`) ranks about 2000 configurations. Its first few, of different tiles, are ranked anew by what it was off
by at products and configurations like these (`gemm_neighbours.py`); the first of them is the choice, and with `tune=True` the first
four are timed (`gemm_tune.py`). Last, a launch is told what the L2 needs to know where the operands nearly fill it (`for_l2`).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from utils.kernels import gemm_neighbours
from utils.kernels.gemm_candidates import Traits, table
from utils.kernels.gemm_config import Config
from utils.kernels.gemm_model import estimates
from utils.kernels.gemm_plan import clusters_at_once, items_of

RANKED_ANEW = 6  # configurations of different tiles
# MB of A and B where half of the larger operand should be the first to leave the L2 of 50 MB: with less all stays, and with more
# little does anyway. And rows or columns of C up to which memory is the limit then.
STREAMED_MB, THIN = (32, 75), 640
# The same where a launch should wait for the one before it, and the share of the SMs that its blocks take then at most.
WAITING_MB, WAITING_SHARE = (28, 45), 0.62


def choose(m: int, n: int, k: int, sms: int, late: tuple[int, int] = (0, 0), by_tma: bool = True) -> Config:
    """Return the configuration with the shortest expected time; the arguments are those of `gemm_candidates.candidates`."""
    return first_choices(m, n, k, sms, late, by_tma, 1)[0]


def first_choices(m: int, n: int, k: int, sms: int, late: tuple[int, int], by_tma: bool, count: int) -> list[Config]:
    """Return the first few configurations by expected time, of different tiles; what `choose` returns is the first.

    The number of parts and of slots makes no other tile. The other arguments are those of `choose`.
    """
    found, times = first_by_model(m, n, k, sms, late, by_tma, max(count, RANKED_ANEW))
    if gemm_neighbours.known(sms):
        times = times * np.exp(gemm_neighbours.corrections(m, n, k, Traits.of_all(found), sms, late))
    return [for_l2(found[i], m, n, k, sms) for i in np.argsort(times, kind="stable")[:count]]


def first_by_model(
    m: int, n: int, k: int, sms: int, late: tuple[int, int], by_tma: bool, count: int
) -> tuple[list[Config], np.ndarray]:
    """Return the first few configurations of different tiles by the model alone, and its times in microseconds."""
    entries = table().possible(m, n, k, sms, late, by_tma)
    times = estimates(m, n, k, table().traits.take(entries), sms, late)
    found: dict[tuple, tuple[Config, float]] = {}
    for i in np.argsort(times, kind="stable"):
        config = table().config(int(entries[i]))
        found.setdefault(config.tile, (config, float(times[i])))
        if len(found) == count:
            break
    return [config for config, _ in found.values()], np.array([us for _, us in found.values()])


def for_l2(config: Config, m: int, n: int, k: int, sms: int) -> Config:
    """Return a configuration as it is launched where A and B are about as large as the L2, so that it keeps what it can.

    **Streams.** A product that reads more than the L2 holds, from first to last, finds nothing there when it is repeated: each
    line has put out the one that is needed next. If half of the lines of the larger operand are the first to go, the other half
    stays. That is for products whose tiles are all computed at once: what is read again in a later round should stay.

    **Waiting.** A launch that begins early takes SMs that the one before it leaves idle, so with few blocks the same tile runs on
    other SMs from launch to launch. Each half of the SMs has its own half of the L2, and what both halves have read is in both:
    36 MB become up to 72. A launch that waits starts 1.3 us later, and finds all SMs free: its tiles stay where they were.
    """
    size = 2e-6 * k * (m + n)
    if config.short:
        return config
    items = items_of(*((n, m) if config.transposed else (m, n)), config, sms)
    if items > clusters_at_once(config.cluster, sms):
        return config
    if min(m, n) <= THIN and STREAMED_MB[0] < size < STREAMED_MB[1]:
        config = replace(config, stream="A" if (m > n) != config.transposed else "B")
    few = config.cluster >= 4 and config.split == 1 and items * config.cluster <= WAITING_SHARE * sms
    return replace(config, early=False) if few and WAITING_MB[0] < size < WAITING_MB[1] else config
