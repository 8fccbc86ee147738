"""Measure decode: the Gluon kernel against cuDNN and FlashAttention 2, 3, 4 (`points`), pages, the layer.

    python -m tools.record.decode points --fa3 fa3/_C.so --out assets/results/h200/decode.json
    python -m tools.record.decode pages --fa3 fa3/_C.so --out assets/results/h200/decode_pages.json
    python -m tools.record.decode layer --out assets/results/h200/decode_layer.json

The functions of a row are timed in one process, interleaved, with a cold L2 cache and a queue that is kept full: device
time alone. Bytes are those of the cache. cuDNN and FlashAttention 2 (of torch) cannot align a causal mask at the last key
without storing it, so they compute without a mask; the others are causal. A library that cannot run is left out, and the
record says why ("left_out").
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from tools.record.common import Record, arguments_parser, relative_difference
from utils.attention import attention, attention_decode, decode_reference, proof
from utils.benchmark.intervals import speedup
from utils.benchmark.measuring import measure, measure_together

SIZES = ("batch", "heads", "kv_heads", "keys", "head_dim", "new_tokens")
# From one long sequence to many short ones.
CACHES = (
    (1, 32, 8, 2048, 128),
    (1, 32, 8, 8192, 128),
    (1, 32, 8, 32768, 128),
    (1, 32, 8, 131072, 128),
    (8, 32, 8, 8192, 128),
    (16, 64, 8, 8192, 128),
    (64, 32, 8, 4096, 128),
    (64, 16, 16, 2048, 64),
    (1, 4, 1, 32768, 256),
    (128, 64, 8, 1024, 128),
)
NEW_TOKENS = (1, 8, 16)
PAGED_CACHES = ((8, 32, 8, 8192, 128), (64, 32, 8, 4096, 128), (1, 32, 8, 32768, 128))
PAGES = (16, 64, 256)
ITERATIONS = 21


def draw(batch: int, heads: int, kv_heads: int, keys: int, head_dim: int, new_tokens: int) -> tuple[torch.Tensor, ...]:
    """Draw q, k and v in bf16, random normal."""
    shapes = (batch, heads, new_tokens, head_dim), *2 * [(batch, kv_heads, keys, head_dim)]
    return tuple(torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes)


def others(q, k, v, fa3: bool, fa4: bool) -> tuple[dict[str, Callable], dict[str, str]]:
    """Return the other libraries' calls that run here, and why the others do not."""
    grouped = q.shape[1] != k.shape[1]

    def pinned(backend: SDPBackend) -> torch.Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, enable_gqa=grouped)

    # How to make each call: to make it may already fail, where a library is missing or compiles its kernels here.
    makers: dict[str, Callable[[], Callable]] = {
        "cudnn": lambda: partial(pinned, SDPBackend.CUDNN_ATTENTION),
        "fa2": lambda: partial(pinned, SDPBackend.FLASH_ATTENTION),
    }
    tokens_first = [x.transpose(1, 2) for x in (q, k, v)]
    if fa3:
        used = torch.full((len(q),), k.shape[2], dtype=torch.int32, device=q.device)
        forward = torch.ops.flash_attn_3.fwd
        options = {"is_causal": q.shape[2] > 1, "num_splits": 0}  # 0: its own choice
        makers["fa3"] = lambda: partial(forward, *tokens_first, **options)
        makers["fa3_lengths"] = lambda: partial(forward, *tokens_first, seqused_k=used, **options)
    if fa4:

        def flash_attention_4() -> Callable:
            from flash_attn.cute import flash_attn_func

            return partial(flash_attn_func, *tokens_first, causal=q.shape[2] > 1)

        makers["fa4"] = flash_attention_4
    calls, left_out = dict[str, Callable](), dict[str, str]()
    for name, make in makers.items():
        try:
            calls[name] = make()
            calls[name]()
            torch.cuda.synchronize()
        except Exception as error:  # a library that is not here, or cannot do this shape
            calls.pop(name, None)
            left_out[name] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:100]}"
            print(f"  {name}: {left_out[name]}")
    return calls, left_out


def time_together(calls: dict[str, Callable], bytes_: int) -> tuple[dict[str, tuple], dict[str, float]]:
    """Time the calls, interleaved: milliseconds of each sample, and the median in microseconds."""
    method = {"warmup": 4, "iterations": ITERATIONS, "device": "cuda", "bytes": bytes_, "l2": "cold"}
    timed = dict(zip(calls, measure_together(list(calls.values()), labels=list(calls), **method), strict=True))
    samples = {name: result.samples_ms for name, result in timed.items()}
    return samples, {name: round(1e3 * statistics.median(times), 2) for name, times in samples.items()}


def measure_point(point: tuple, fa3: bool, fa4: bool) -> dict:
    """Measure one row of the table: a cache and a number of new tokens."""
    q, k, v = draw(*point)
    kernels = proof("gluon", q, k, v, causal=True)
    if not kernels:
        raise RuntimeError(f"the decode kernel did not run for {point}")
    out = attention(q[:1], k[:1], v[:1], causal=True, backend="gluon")
    calls, left_out = others(q, k, v, fa3, fa4)
    size = 2 * k.numel() * k.element_size()
    samples, us = time_together({"gluon": partial(attention_decode, q, k, v, backend="gluon")} | calls, size)
    best = min((name for name in us if name != "gluon"), key=us.__getitem__)
    return dict(zip(SIZES, point, strict=True)) | {
        "bytes": size,
        "us": us,
        "best_other": best,
        "ratio": round(speedup(samples[best], samples["gluon"]), 3),
        "tb_s": round(size / us["gluon"] / 1e6, 3),
        "error": float(f"{relative_difference(out, decode_reference(q[:1], k[:1], v[:1])):.2e}"),
        "kernels": kernels,
        "left_out": left_out,
    }


def show_point(row: dict) -> str:
    """Return a row as a line."""
    shape = "{batch:>3} x {heads:>2}/{kv_heads:<2} {keys:>6} d{head_dim:<3} q{new_tokens:<2}".format(**row)
    times = " ".join(f"{name} {us:.1f}" for name, us in row["us"].items())
    return f"{shape} {times} | x{row['ratio']:.2f} {row['tb_s']:.2f} TB/s error {row['error']:.1e}"


def in_pages(cache: torch.Tensor, page: int, table: torch.Tensor) -> torch.Tensor:
    """Copy a cache (B, Hkv, S, D) to pages (P, Hkv, page, D) in the order of a block table."""
    batch, kv_heads, keys, head_dim = cache.shape
    pieces = cache.view(batch, kv_heads, keys // page, page, head_dim).transpose(1, 2).flatten(0, 1)
    pages = torch.empty_like(pieces)
    pages[table.flatten().long()] = pieces
    return pages


def measure_pages(cache: tuple, fa3: bool) -> dict:
    """Measure one cache in one piece, with lengths, and in pages of random order, at one new token."""
    q, k, v = draw(*cache, 1)
    used = torch.full((len(q),), cache[3], dtype=torch.int32, device="cuda")
    calls: dict[str, Callable] = {
        "one piece": partial(attention_decode, q, k, v, backend="gluon"),
        "lengths": partial(attention_decode, q, k, v, seqlens=used, backend="gluon"),
    }
    expected = calls["one piece"]()
    errors = {}
    for page in PAGES:
        table = torch.randperm(cache[0] * cache[3] // page, device="cuda").int().view(cache[0], -1)
        pages = [in_pages(x, page, table) for x in (k, v)]
        call = partial(attention_decode, q, *pages, seqlens=used, block_table=table, backend="gluon")
        calls[f"pages of {page}"] = call
        errors[page] = float(f"{relative_difference(call(), expected):.2e}")
        if fa3:
            tokens_first = [x.transpose(1, 2) for x in (q, *pages)]
            options = {"seqused_k": used, "page_table": table, "num_splits": 0}
            calls[f"FA3, pages of {page}"] = partial(torch.ops.flash_attn_3.fwd, *tokens_first, **options)
    size = 2 * k.numel() * k.element_size()
    _, us = time_together(calls, size)
    return {**dict(zip(SIZES, cache, strict=False)), "bytes": size, "us": us, "difference_from_one_piece": errors}


def measure_layer(point: tuple[int, int, int]) -> dict:
    """Measure one decode step of a Gemma-3 layer with its own attention and with the decode kernel's.

    `host_us` is wall time of a call whose launches the GPU keeps up with; `graph_us` is a replayed CUDA graph's.
    """
    from utils.model import (
        build_decoder_layer,
        create_decode_inputs_with_cache,
        create_prefill_inputs,
        decode_forward,
        get_position_embeddings,
        initialize_kv_cache,
        prefill_forward,
    )

    layer_idx, batch, tokens = point
    layer, rotary = build_decoder_layer(layer_idx=layer_idx, device="cuda")
    cache = initialize_kv_cache(layer.config, tokens + 8)
    kind, hidden = layer.self_attn.layer_type, layer.config.hidden_size
    states, ids = create_prefill_inputs(batch, tokens, hidden, torch.bfloat16, "cuda")
    prefill_forward(layer, states, ids, get_position_embeddings(states, ids, rotary, kind), cache)
    token, ids, positions = create_decode_inputs_with_cache(batch, tokens, hidden, torch.bfloat16, "cuda")
    embeddings = get_position_embeddings(token, ids, rotary, kind)
    row: dict = {"layer": layer_idx, "type": kind, "batch": batch, "tokens": tokens}
    outputs = []
    for name, attend in (("own", None), ("decode kernel", partial(attention_decode, backend="gluon"))):
        step = partial(decode_forward, layer, token, ids, embeddings, True, cache, positions, attend=attend)
        outputs.append(step())
        timed = {"warmup": 5, "iterations": ITERATIONS, "device": "cuda"}
        row[name] = {
            "gpu_us": round(1e3 * measure(step, **timed).median_ms, 2),
            "graph_us": round(1e3 * measure(step, **timed, graph=True).median_ms, 2),
            "host_us": round(host_us(step), 1),
        }
    row["difference"] = float(f"{relative_difference(*reversed(outputs)):.2e}")
    return row


def host_us(call: Callable) -> float:
    """Return the host's microseconds for one call: the best of five series of a hundred."""
    best = float("inf")
    for _ in range(5):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(100):
            call()
        best = min(best, (time.perf_counter() - began) / 100)
    torch.cuda.synchronize()
    return 1e6 * best


def copy_tb_s() -> float:
    """Return the bandwidth of a copy of 1 GiB, bytes read and written."""
    x = torch.randn(2**29, device="cuda", dtype=torch.bfloat16)
    y = torch.empty_like(x)
    return round(4 * x.numel() / measure(y.copy_, x, warmup=3, iterations=11, device="cuda").median_ms / 1e9, 3)


def main() -> None:
    """Run what the command line names."""
    parser = arguments_parser(__doc__)
    parser.add_argument("table", choices=("points", "pages", "layer"))
    parser.add_argument("--fa3", type=Path, help="the built library of FlashAttention 3")
    parser.add_argument("--fa4", action="store_true", help="time flash-attn-4 too; it compiles for seconds")
    options = parser.parse_args()
    if options.fa3:
        torch.ops.load_library(str(options.fa3.expanduser()))
    fa3 = options.fa3 is not None
    record = Record(options, f"decode: {options.table}", "cuda")
    if options.table != "layer":
        record.contents |= {"l2": "cold", "iterations": ITERATIONS, "copy_tb_s": copy_tb_s()}
    tables: dict[str, tuple] = {
        "points": (
            [(*cache, new) for cache in CACHES for new in NEW_TOKENS],
            partial(measure_point, fa3=fa3, fa4=options.fa4),
            show_point,
        ),
        "pages": (PAGED_CACHES, partial(measure_pages, fa3=fa3), str),
        "layer": ([(i, b, s) for i in (0, 5) for b, s in ((1, 2048), (1, 32768), (64, 4096))], measure_layer, str),
    }
    record.fill(*tables[options.table])
    record.finish()


if __name__ == "__main__":
    main()
