"""Which tile and in how many parts: the FP8 GEMM's configurations and the choice between them. Nothing here needs Triton."""

from __future__ import annotations

from dataclasses import dataclass, replace

from utils.kernels import gemm_model
from utils.kernels.gemm_config import Config
from utils.kernels.gemm_plan import CONFIGS, WIDTHS, by_parity, in_parts, with_neighbours


@dataclass(frozen=True)
class Fp8Config(Config):
    """Tile and pipeline of the FP8 kernel; `gemm_config.Config` says what the other fields are."""

    block_k: int = 128  # terms of a step: 128 bytes, as in the 16-bit kernel
    promote: bool = False  # add the sums of each step to fp32 registers; else the tensor cores add all of K
    both_halves: bool = False  # promote: start the second product of a step before the first one's sums are added

    @property
    def element_bytes(self) -> int:
        """Bytes of an element of A and B."""
        return 1

    @property
    def columns(self) -> tuple[int, int]:
        """Columns of the tile as powers of two, at most 128 where a step's sums need registers of their own."""
        first, second = super().columns
        return (128, self.block_n - 128) if self.promote and first > 128 else (first, second)

    @property
    def can_join(self) -> bool:
        """Whether the columns are two parts whose products can be one instruction; promoted sums are of one part at a time."""
        return super().can_join and not self.promote

    @property
    def name(self) -> str:
        """Name in the records, such as "128x256/4 promoted": tile and parts."""
        ways = (
            ("pairs", self.pairs),
            ("promoted", self.promote),
            ("halves", self.both_halves),
            ("waiting", not self.early),
            ("plain", not self.prefetch),
            (f"both {self.multicast}", self.multicast != ""),
        )
        return " ".join([f"{self.block_m}x{self.block_n}/{self.split}", *(way for way, taken in ways if taken)])


# The same bytes a step as in the 16-bit kernel, so the same tiles, but for the one of 96 columns, which is not timed.
FAST_CONFIGS = tuple(
    Fp8Config(config.block_m, config.block_n, config.consumers, stages=config.stages, pieces=config.pieces)
    for config in CONFIGS
    if config.block_n != 96
)
FAST_WIDTHS = tuple(
    Fp8Config(
        config.block_m,
        config.block_n,
        config.consumers,
        stages=config.stages,
        pieces=config.pieces,
        buffers=config.buffers,
    )
    for config in WIDTHS
    if config.block_m > 64
)
PROMOTED_CONFIGS = (
    Fp8Config(128, 256, promote=True, pieces=2),
    Fp8Config(128, 192, stages=5, promote=True, both_halves=True),
    Fp8Config(128, 128, stages=6, pieces=2, promote=True),
    Fp8Config(192, 128, consumers=3, stages=5, promote=True),
    Fp8Config(64, 256, consumers=1, stages=5, pieces=2, promote=True),
    Fp8Config(64, 128, consumers=1, stages=8, pieces=2, promote=True),
    Fp8Config(128, 64, stages=8, pieces=2, promote=True),
    Fp8Config(64, 64, consumers=1, stages=8, pieces=2, promote=True),
)


def candidates(m: int, n: int, k: int, sms: int, fast: bool, late: tuple[int, int] = (0, 0)) -> list[Fp8Config]:
    """Return the configurations that can do a product, as `gemm_plan.candidates` does."""
    tiles = [*FAST_CONFIGS, *FAST_WIDTHS] if fast else [*PROMOTED_CONFIGS]
    found = in_parts(with_neighbours(tiles, m, n) if any(late) else tiles, m, n, k, sms)
    if late[0] and m % 2 == 0 and n % 8 == 0:
        found += by_parity(found, m, n, sms)
    return found


# The constants that chose what is recorded in gemm_fp8.json; those of 16 bits have been fitted anew since, with more terms.
COST = gemm_model.Cost(
    product=0.694,
    bytes=0.0135,
    port=0.0071,
    late=1.5,
    late_across=1.581,
    late_n=1.0,
    hot=0.0,
    shared=0.296,
    shared_more=1.0,
    far=0.0,
    wait=0.696,
    wait_shared=2.09,
    wait_both=1.0,
    slots=1.0,
    few=1.0,
    edge=1.0,
    tile=0.318,
    store=0.0246,
    narrow=0.0,
    part=1.4,
    add=0.0197,
    traffic=0.36,
    launch=4.02,
    launch_cluster=0.0,
)

# A step of two products of which the second waits for the first takes longer than its share of multiplications: 128 x 256
# promoted was slower than the model at 8192 cubed, where other promoted tiles were not (docs/gemm-log.md, entry 19).
ONE_AFTER_THE_OTHER = 1.03


def estimate(
    m: int,
    n: int,
    k: int,
    config: Fp8Config,
    sms: int,
    late: tuple[int, int] = (0, 0),
    cost: gemm_model.Cost | None = None,
) -> float:
    """Estimate the time of a product in microseconds, by the model of the 16-bit kernel.

    A step of 128 terms of one byte takes as many bytes, and the tensor cores as long, as one of 64 terms of two bytes: so
    a product takes about as long as one of 16-bit matrices with half of K. The arguments are those of `gemm_model.estimate`.
    """
    cost = cost or COST
    if config.promote and config.columns[1] and not config.both_halves:
        cost = replace(cost, product=cost.product * ONE_AFTER_THE_OTHER)
    steps = -(-k // config.block_k)
    return gemm_model.estimate(m, n, 64 * steps, replace(config, block_k=64), sms, late, cost)


def choose(m: int, n: int, k: int, sms: int, fast: bool, late: tuple[int, int] = (0, 0)) -> Fp8Config:
    """Return the configuration with the shortest estimated time."""
    return min(candidates(m, n, k, sms, fast, late), key=lambda config: estimate(m, n, k, config, sms, late))
