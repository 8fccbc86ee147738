"""Time the first few configurations of a product once, and keep the fastest: `gemm_warp_specialized(a, b, tune=True)`.

Of about 2000 configurations a product gets the one that a model of the time ranks first (`gemm_choose.py`). That one takes 2%
longer than the best in the mean, and more than a tenth longer than the fastest of the first four, of different tiles, at one shape in
sixteen; that one is within 1% of the best (docs/gemm-log.md, entries 46 and 47). So a caller who needs a product often lets these four be timed:

    what is timed        each of the four on random operands with the strides of the caller's, in turns, with a full queue and
                         the L2 as they leave it (`measure_together`); one whose product is not torch.matmul's is left out
    how long that takes  about a second for each kernel that Triton has not compiled before, and half a second
    what is kept         the fastest, for sizes, strides and dtype: in this process, and in a file of the user's cache for the
                         next ones. Another GPU, Triton or torch, or a change to these kernels, has a file of its own.

The environment variable LABS_COMPILE_CACHE=off keeps no file.
"""

from __future__ import annotations

import functools
import hashlib
import json
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import torch

from utils.files import cache_folder, write_whole
from utils.kernels.gemm_config import Config
from utils.newest import Newest

CANDIDATES = 4  # of three the fastest takes 0.4% longer in the mean (docs/gemm-log.md, entry 44)
ROUNDS = 9
MOST_SECONDS = 0.5  # of timing, without compiling
# Most that C may differ from torch.matmul's, relative to it. One rounding of both gives a tenth of that, and torch may add up
# parts of a sum in their own dtype; 16 terms that are missing of 16,384 give twice that in bf16.
MOST_DIFFERENCE = {torch.float16: 2.0**-9, torch.bfloat16: 2.0**-6}

# Times in us by name of configuration, the fastest first.
Times = dict[str, float]
_kept: Newest[tuple[int, str], Times] = Newest(1024)  # by device and product


def tuned(a: torch.Tensor, b: torch.Tensor) -> Config:
    """Return the configuration that was the fastest for A (M, K) and B (K, N), neither of them empty; time it if nobody has."""
    configs = {config.name: config for config in candidates_of(a, b)}
    return next(configs[name] for name in times_of(a, b) if name in configs)


def times_of(a: torch.Tensor, b: torch.Tensor) -> Times:
    """Return the times of the candidates for A (M, K) and B (K, N), the fastest first; measure them if nobody has.

    Raises:
        RuntimeError: The stream is being captured, and no earlier call has timed such a product.
    """
    product, device = product_name(a, b), a.device.index or 0
    configs = candidates_of(a, b)
    times = _kept.get((device, product)) or _read(device).get(product) or {}
    if not {config.name for config in configs} & times.keys():
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"gemm_warp_specialized(tune=True) has to time {product} once, and a stream that is being captured into a "
                "CUDA graph cannot be waited for. Call it once with operands like these before the capture, or leave tune out."
            )
        times = fastest_first(a, b, configs)
        _keep(device, product, times)
    _kept[device, product] = times
    return times


def candidates_of(a: torch.Tensor, b: torch.Tensor) -> list[Config]:
    """Return the configurations that are timed for A (M, K) and B (K, N)."""
    from utils.kernels import gemm_choose, gemm_launch

    by_tma = b.shape[1] % 8 == 0  # C is contiguous
    return gemm_choose.first_choices(*gemm_launch.problem(a, b, by_tma), CANDIDATES)


def product_name(a: torch.Tensor, b: torch.Tensor) -> str:
    """Name what the time of a product depends on: sizes, strides and dtype."""
    (m, k), n = a.shape, b.shape[1]
    dtype = str(a.dtype).removeprefix("torch.")
    return f"{m} x {n} x {k} {dtype}, strides {a.stride()} and {b.stride()}"


def fastest_first(
    a: torch.Tensor, b: torch.Tensor, configs: Sequence[Config], timer: Callable[..., list] | None = None
) -> Times:
    """Time configurations on random operands like A (M, K) and B (K, N): us by name, the fastest first.

    Args:
        a: gives shape, strides, dtype and device; so that nothing depends on what is in it, it is not read.
        b: the same.
        configs: what is timed.
        timer: takes functions and their labels, and returns their measurements; None for `measure_together`.

    Raises:
        RuntimeError: No configuration gives torch.matmul's product.
    """
    from utils.benchmark.measuring import measure_together
    from utils.kernels import gemm_launch

    draw = torch.Generator(a.device).manual_seed(0)  # the caller's random numbers stay as they are
    a, b = (torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) for x in (a, b))
    a.normal_(generator=draw)
    b.normal_(generator=draw)
    expected = a @ b
    calls: dict[str, Callable[[], torch.Tensor]] = {}
    for config in configs:
        c, launch = gemm_launch.gemm_and_launch(a, b, config)
        difference = ((c.float() - expected.float()).norm() / expected.float().norm()).item()
        if launch is None or not difference <= MOST_DIFFERENCE[a.dtype]:
            warnings.warn(
                f"gemm_warp_specialized leaves out {config.name}: it differs from torch.matmul by {difference:.2g}, "
                f"relatively, for {product_name(a, b)}. This is a mistake of the kernel; please report it.",
                stacklevel=2,
            )
        else:
            calls[config.name] = functools.partial(launch, a, b)
    if not calls:
        raise RuntimeError(f"No configuration gives torch.matmul's product for {product_name(a, b)}.")
    timer = timer or functools.partial(
        measure_together, warmup=2, iterations=ROUNDS, device=a.device, max_seconds=MOST_SECONDS
    )
    measured = timer([*calls.values()], labels=[*calls])
    times = {name: 1e3 * each.median_ms for name, each in zip(calls, measured, strict=True)}
    return dict(sorted(times.items(), key=lambda entry: entry[1]))


@functools.cache
def _file(device: int) -> Path | None:
    """Return the file for a device; None if the user's cache is off.

    Its name has the GPU, the versions, and a hash of the files that a time depends on: those of the kernels, and of the
    table and the model that say which configurations are timed.
    """
    folder = cache_folder("gemm")
    if folder is None:
        return None
    import triton

    here = Path(__file__)
    sources = b"".join(path.read_bytes() for path in sorted(here.parent.glob("gemm*.*")) if "fp8" not in path.name)
    gpu = torch.cuda.get_device_name(device).replace(" ", "-").replace("/", "-")
    versions = f"triton-{triton.__version__}_torch-{torch.__version__}"
    return folder / f"{gpu}_{versions}_{hashlib.sha256(sources).hexdigest()[:16]}.json"


def _read(device: int) -> dict[str, Times]:
    """Return the times in a device's file by product; none if there is no such file, or none that can be read."""
    path = _file(device)
    with suppress(OSError, ValueError):
        return json.loads(path.read_text(encoding="utf-8")) if path else {}
    return {}


def _keep(device: int, product: str, times: Times) -> None:
    """Write a product's times to the device's file; a cache that cannot be written is none.

    Of two processes that write at the same time one loses its entry, and times it again in its next run.
    """
    path = _file(device)
    if path is not None:
        with suppress(OSError):
            write_whole(path, json.dumps(_read(device) | {product: times}, indent=1))
