"""Train a Gemma-3-shaped model through `attention`: loss curves of each backend (`curves`), and what a step costs (`step`).

    python -m tools.record.training curves --out assets/results/h200/training_curves.json
    python -m tools.record.training step --out assets/results/h200/training_step.json
    python -m tools.record.training join --read seed0.json seed1.json --out assets/results/h200/training_curves.json
    python -m tools.record.training plot --read assets/results/h200/training_curves.json --out training.svg

Backends that cannot run here are skipped, and the file says why. The models are transformers' Gemma-3 with random weights
and learn bytes of a text that `make_text` writes: who has how many of what, and sums to complete. Weights, gradients and
AdamW's state are fp32, and on a GPU the products run in bf16 (autocast). Without a GPU the models are tiny.

**Curves.** For each seed, all backends start from the same weights and see the same batches. Two right backends still round
differently, and training amplifies that. How much is measured: the first backend runs once more ("moved") from weights that
differ by less than bf16's rounding, and once more ("again") from the same weights, where only the order of its additions in
memory can differ (not on a CPU). A backend learns the same if it is no further from the first one than "moved" is. Gradients
are clipped to a norm of 1: without that, one run of fifteen had a spike of the loss and did not recover in its 300 steps.

**Windows.** Gemma-3's layers slide but for one in six. cuDNN takes no window, so `--full` trains with full attention in all
layers, where it can be compared.

**Step.** Forward, backward and optimizer of a model of the size of Gemma-3-270m, by three builds: "unfused" (GELU as nine
operations), "eager" (torch's fused GELU) and "compiled" (each layer through torch.compile). The timer takes the backends of
a build in turns. FLOPs are those of the model: three times the forward's, without what a backward recomputes.
"""

from __future__ import annotations

import argparse
import copy
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from tools.record.common import Record, arguments_parser, machine_name, numbers, read_record, save_picture, to_text
from utils.attention import AttentionUnsupported, attention, find_backend, last_run, proof
from utils.benchmark.measuring import measure_together
from utils.benchmark.roofs import machine_roofs
from utils.files import write_whole
from utils.machine.device import default_device
from utils.model.costs import decoder_layer

GPU_BACKENDS, CPU_BACKENDS = "cudnn,gluon,cute,fa3", "math,naive"
BUILDS = ("unfused", "eager", "compiled")
MOVED, AGAIN = "moved", "again"
CLIP = 1.0  # largest norm of the gradients of a step
HEAD_ROWS = 2048  # rows of logits that are computed at a time: at 262,144 words, all of them would take gigabytes
ATTENTION_NAME = "recorded_attention"  # in transformers


@dataclass(frozen=True)
class Run:
    """Sizes of a model and of its batches. `gemma`: the sizes of Gemma-3-270m in place of those given here."""

    batch: int
    tokens: int
    width: int = 0
    layers: int = 0
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    window: int = 0
    gemma: bool = False
    full: bool = False  # no layer has a sliding window

    def config(self):
        """Return transformers' configuration."""
        from utils.config import GEMMA_CONFIG

        config = copy.deepcopy(GEMMA_CONFIG)
        config._attn_implementation = ATTENTION_NAME
        if self.full:
            config.layer_types = ["full_attention"] * config.num_hidden_layers
        if self.gemma:
            return config
        last = self.layers - 1
        config.vocab_size, config.hidden_size, config.intermediate_size = 256, self.width, 4 * self.width
        config.num_hidden_layers, config.sliding_window = self.layers, self.window
        config.num_attention_heads, config.num_key_value_heads, config.head_dim = (
            self.heads,
            self.kv_heads,
            self.head_dim,
        )
        config.query_pre_attn_scalar = self.head_dim
        kinds = ("full_attention", "full_attention" if self.full else "sliding_attention")
        config.layer_types = [kinds[n < last] for n in range(self.layers)]
        return config


CURVES = Run(16, 1024, width=256, layers=6, heads=4, kv_heads=2, head_dim=64, window=256)
STEP = Run(4, 4096, gemma=True)
TINY = Run(4, 64, width=32, layers=2, heads=2, kv_heads=1, head_dim=16, window=16)


# ---- text ------------------------------------------------------------------------------------------------------


def make_text(count: int, seed: int) -> torch.Tensor:
    """Write `count` bytes of text, the same for the same seed: numbers to remember, and sums to complete."""
    draw = random.Random(seed)
    names, things = ("Ada", "Ben", "Cem", "Dua", "Eli", "Fay"), ("apples", "books", "coins", "drums", "eggs")
    parts: list[str] = []
    length = 0
    while length < count:
        owned = {name: (draw.randrange(2, 100), draw.choice(things)) for name in draw.sample(names, 3)}
        lines = [f"{name} has {number} {thing}." for name, (number, thing) in owned.items()]
        a, b = draw.randrange(50), draw.randrange(50)
        lines.append(f"{a} plus {b} is {a + b}.")
        asked = draw.choice(list(owned))
        lines.append(f"How many {owned[asked][1]} has {asked}? {owned[asked][0]}.\n")
        parts.append(" ".join(lines))
        length += len(parts[-1])
    return torch.tensor(list("".join(parts).encode()[:count]), dtype=torch.uint8)


def batches(run: Run, steps: int, seed: int, device: torch.device) -> Iterator[torch.Tensor]:
    """Yield batches (B, S + 1) of the text, cut at places drawn by the seed."""
    text = make_text(1 << 20 if device.type == "cuda" else 1 << 14, seed)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        starts = torch.randint(len(text) - run.tokens - 1, (run.batch, 1), generator=generator)
        yield text[starts + torch.arange(run.tokens + 1)].to(device, torch.int64)


# ---- the model -------------------------------------------------------------------------------------------------


class Model:
    """transformers' Gemma-3 with attention through `utils.attention`, its loss, and its optimizer."""

    def __init__(self, run: Run, seed: int, device: torch.device, rate: float = 1e-3, move: float = 0.0) -> None:
        """Draw the weights; move: relative size of a random change of each weight."""
        from transformers import AttentionInterface
        from transformers.models.gemma3.modeling_gemma3 import Gemma3TextModel

        AttentionInterface.register(ATTENTION_NAME, self._attend)
        self.run, self.backend, self.device = run, "", device
        self.config = run.config()
        with torch.device(device):
            self.body = Gemma3TextModel(self.config)
        generator = torch.Generator(device=device).manual_seed(seed)
        mover = torch.Generator(device=device).manual_seed(seed + 1)
        with torch.no_grad():
            for name, weight in self.body.named_parameters():
                # Gemma's RMSNorm multiplies by 1 + weight, so zero is its neutral weight.
                weight.normal_(0, 0.0 if name.endswith("norm.weight") else 0.02, generator=generator)
                weight.mul_(1 + move * torch.randn(weight.shape, generator=mover, device=device))
        fused = {"fused": True} if device.type == "cuda" else {}
        self.optimizer = torch.optim.AdamW(self.body.parameters(), lr=rate, weight_decay=0.1, **fused)
        self.rate = rate

    @torch.compiler.disable
    def _attend(self, module, query, key, value, attention_mask, *, scaling, sliding_window=None, **options):
        """Attention in the form in which transformers calls it; outside of compiled graphs, as `attention` is anyway."""
        # Under autocast the norms and the rotary embedding leave Q and K in fp32 and the product leaves V in bf16.
        query, key = query.to(value.dtype), key.to(value.dtype)
        out = attention(query, key, value, causal=True, scale=scaling, window=sliding_window, backend=self.backend)
        return out.transpose(1, 2), None

    def _loss_of_rows(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = torch.nn.functional.linear(hidden, self.body.embed_tokens.weight)
        return torch.nn.functional.cross_entropy(logits.float(), labels, reduction="sum")

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of predicting each token of a batch (B, S + 1) from those before it."""
        no_masks = dict.fromkeys(set(self.config.layer_types))  # `attention` is told the mask in words
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            states = self.body(input_ids=batch[:, :-1], attention_mask=no_masks, use_cache=False).last_hidden_state
            labels = batch[:, 1:].reshape(-1)
            pieces = zip(states.flatten(0, 1).split(HEAD_ROWS), labels.split(HEAD_ROWS), strict=True)
            # The logits of a piece are computed again in the backward pass, not kept.
            parts = [checkpoint(self._loss_of_rows, *piece, use_reentrant=False) for piece in pieces]
        return torch.stack(parts).sum() / labels.numel()

    def step(self, batch: torch.Tensor, backend: str, number: int = 10**6, warmup: int = 20) -> torch.Tensor:
        """Train on one batch; return its loss, without waiting for it."""
        self.backend = backend
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate * min(1.0, (number + 1) / warmup)
        loss = self.loss(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.body.parameters(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def set_build(self, build: str) -> None:
        """Choose how the parts around attention run: one of BUILDS."""
        from utils.kernels.gelu import gelu_torch, gelu_unfused

        activation = gelu_unfused if build == "unfused" else gelu_torch
        torch._dynamo.reset()
        for layer in self.body.layers:
            if "act_fn" in layer.mlp._modules:
                del layer.mlp.act_fn  # a module's name takes no plain function
            layer.mlp.act_fn = activation
            layer._compiled_call_impl = None
            if build == "compiled":
                layer.compile(dynamic=False)


def able(backends: list[str], run: Run, device: torch.device) -> tuple[list[str], dict[str, str]]:
    """Return the backends that compute attention and its gradients at these sizes, and why the others do not."""
    config = run.config()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    shapes = [
        (1, heads, run.tokens, config.head_dim) for heads in (config.num_attention_heads, config.num_key_value_heads)
    ]
    q = torch.randn(shapes[0], device=device, dtype=dtype, requires_grad=True)
    k, v = (torch.randn(shapes[1], device=device, dtype=dtype, requires_grad=True) for _ in range(2))
    found, skipped = [], {}
    for name in backends:
        problem = {"causal": True, "window": None if run.full else config.sliding_window}
        try:
            if not (support := find_backend(name).machine()):
                raise RuntimeError(support.reason)
            torch.autograd.grad(attention(q, k, v, backend=name, **problem).sum(), (q, k, v))
            if device.type == "cuda" and not proof(name, q, k, v, **problem):
                raise RuntimeError("none of its kernels was launched")
            found.append(name)
        except (AttentionUnsupported, RuntimeError, ImportError, TypeError, AssertionError) as error:
            skipped[name] = " ".join(str(error).split())[:300]
    return found, skipped


# ---- loss curves -----------------------------------------------------------------------------------------------


def train(run: Run, backend: str, seed: int, steps: int, device: torch.device, move: float = 0.0) -> list[float]:
    """Train from the weights and on the batches of a seed; return the loss of each step."""
    model = Model(run, seed, device, move=move)
    losses = [model.step(batch, backend, i) for i, batch in enumerate(batches(run, steps, seed, device))]
    assert (done := last_run()) is not None and done.backend == backend
    return torch.stack(losses).tolist()


def curve_row(run: Run, first: str, name: str, seed: int, steps: int, device: torch.device) -> dict:
    """Train with one backend, or with the first one: from moved weights, or once more from the same."""
    move = 2.0**-10 if name == MOVED else 0.0  # bf16 rounds by up to 2**-9
    losses = train(run, first if name in (MOVED, AGAIN) else name, seed, steps, device, move)
    return {"backend": name, "seed": seed, "losses": [round(loss, 5) for loss in losses]}


def judge_curves(rows: list[dict], first: str) -> dict[str, dict]:
    """Compare each backend's curves with the first one's, over the second half of the steps.

    Returns:
        For each backend: "final", the mean loss of the last tenth over all seeds; "distance", the root of the mean square
        of its difference from the first backend's curve of the same seed; "noise", the distance of "moved", None without it.
    """
    curves = {(row["backend"], row["seed"]): row["losses"] for row in rows}
    seeds = sorted({row["seed"] for row in rows if row["backend"] == first})

    def distance(name: str) -> float:
        squares = [
            (a - b) ** 2
            for seed in seeds
            if (name, seed) in curves
            for a, b in list(zip(curves[name, seed], curves[first, seed], strict=True))[len(curves[first, seed]) // 2 :]
        ]
        return math.sqrt(statistics.fmean(squares))

    names = list(dict.fromkeys(row["backend"] for row in rows))
    noise = distance(MOVED) if MOVED in names else None
    judged: dict[str, dict] = {}
    for name in names:
        own = [curves[name, seed] for seed in seeds if (name, seed) in curves]
        final = statistics.fmean(loss for curve in own for loss in curve[-max(1, len(curve) // 10) :])
        judged[name] = {"final": final, "distance": distance(name), "noise": noise}
    return judged


# ---- the cost of a step ----------------------------------------------------------------------------------------


def model_flops(run: Run, config) -> float:
    """Return the FLOPs of a training step by the model's own products: forward, and twice as many backward."""
    rows = run.batch * run.tokens
    total = 2.0 * rows * config.hidden_size * config.vocab_size
    for kind in config.layer_types:
        parts = decoder_layer(config, run.batch, run.tokens, layer_type=kind, cached=False)
        total += sum(cost.flops for name, cost in parts.items() if name.endswith("_proj") or name == "attention")
    return 3.0 * total


def peak_memory_gb(call: Callable[[], Any]) -> float | None:
    """Return the most memory that torch held on the GPU during a call, in GB (1e9); None without a GPU."""
    if not torch.cuda.is_available():
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() / 1e9


def step_rows(model: Model, build: str, backends: list[str], samples: int) -> list[dict]:
    """Time a training step with each backend, in turns, on the same weights."""
    run = model.run
    words = torch.randint(model.config.vocab_size, (run.batch, run.tokens + 1), device=model.device)
    model.set_build(build)
    calls: dict[str, Callable[[], Any]] = {name: lambda name=name: model.step(words, name) for name in backends}
    memory, failed = {}, {}
    for name in list(calls):
        began = time.monotonic()
        try:
            calls[name]()
            memory[name] = peak_memory_gb(calls[name])
            # A run that its time limit kills has no rows of this build yet: this line says what it waited for.
            print(f"{build} {name}: first two steps, with compiling, {time.monotonic() - began:.1f} s", flush=True)
        except RuntimeError as error:  # out of memory, too
            failed[name] = " ".join(str(error).split())[:300]
            del calls[name]
            model.optimizer.zero_grad(set_to_none=True)
    rows: list[dict] = [{"build": build, "backend": name, "failed": reason} for name, reason in failed.items()]
    if not calls:
        return rows
    results = measure_together(
        list(calls.values()),
        labels=list(calls),
        warmup=1,
        iterations=samples,
        device=model.device.type,
        queue_ahead=False,
    )
    flops, tokens = model_flops(run, model.config), run.batch * run.tokens
    peak = machine_roofs().tflops.get("bf16" if model.device.type == "cuda" else "fp32")
    for name, result in zip(calls, results, strict=True):
        rate = flops / result.median_ms / 1e9
        row = {"build": build, "backend": name, "ms": result.median_ms, "tokens_per_s": 1e3 * tokens / result.median_ms}
        rows.append(row | {"memory_gb": memory[name], "tflops": rate, "mfu": rate / peak if peak else None})
    return rows


# ---- output ----------------------------------------------------------------------------------------------------


def show_curve(row: dict) -> str:
    """Return the line that is printed for a curve."""
    losses = row["losses"]
    return f"{row['backend']:<10} seed {row['seed']}: loss {losses[0]:.3f} to {statistics.fmean(losses[-10:]):.3f}"


def show_step(row: dict) -> str:
    """Return the line that is printed for a step."""
    start = f"{row['build']:<9} {row['backend']:<8}"
    if "failed" in row:
        return f"{start} failed: {row['failed']}"
    memory = "" if row["memory_gb"] is None else f", {row['memory_gb']:.1f} GB"
    share = "" if row["mfu"] is None else f", {row['mfu']:.1%} of the roof"
    return f"{start} {row['ms']:.1f} ms, {row['tokens_per_s']:.0f} tokens/s{memory}{share}"


def plot(path: Path, out: Path) -> None:
    """Draw the recorded loss curves, and each backend's distance from the first one beside the noise."""
    import matplotlib.pyplot as plt

    from utils.visualization.style import series

    record = read_record(path)
    rows, judged = record["rows"], record["judged"]
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    for number, name in enumerate(judged):
        for row in (row for row in rows if row["backend"] == name):
            label = name if row["seed"] == record["seeds"][0] else None
            left.plot(row["losses"], color=series(number).color, linewidth=0.8, alpha=0.7, label=label)
    left.set(xlabel="step", ylabel="loss (nats a byte)", title=f"{len(record['seeds'])} seeds")
    left.legend()
    others = [name for name in judged if name not in (record["first"], MOVED)]
    right.bar(others, [judged[name]["distance"] for name in others], color="0.6")
    noise = judged[record["first"]]["noise"]
    if noise is not None:
        right.axhline(noise, color=series(2).color, label=f"noise: {record['first']} from weights moved by 2^-10")
        right.margins(y=0.2)  # room for the legend
        right.legend(loc="upper left")
    right.set(ylabel="nats a byte", title=f"Distance from {record['first']}, second half of the steps")
    figure.suptitle(f"Training through attention(...). {machine_name(record)}, torch {record['environment']['torch']}.")
    save_picture(figure, out)


def record_curves(options: argparse.Namespace, run: Run, device: torch.device) -> None:
    """Train with each backend and seed, judge the curves, and record them."""
    backends, skipped = able(options.backends, run, device)
    if not backends:
        raise SystemExit(f"error: none of the backends can train here: {skipped}")
    first = backends[0]
    method = {"run": vars(run), "steps": options.steps, "seeds": options.seeds, "first": first, "skipped": skipped}
    again = (AGAIN,) if device.type == "cuda" else ()
    record = Record(options.out, "loss curves", device, options.seconds, **method)
    points = ((name, seed) for seed in options.seeds for name in (*backends, MOVED, *again))
    complete = record.fill(points, lambda p: curve_row(run, first, *p, options.steps, device), show_curve)
    record.contents["judged"] = judge_curves(record.contents["rows"], first)
    for name, judged in record.contents["judged"].items():
        print(f"{name:<10} final loss {judged['final']:.4f}, {judged['distance']:.5f} from {first}")
    for name, reason in skipped.items():
        print(f"skipped {name}: {reason}")
    record.finish() if complete else record.save()


def join_curves(paths: list[Path], out: Path) -> None:
    """Put curves of different seeds, recorded in files of their own, into one file and judge them together."""
    records = [read_record(path) for path in paths]
    first = records[0]
    for key in ("run", "steps", "first", "skipped"):
        if any(record[key] != first[key] for record in records):
            raise SystemExit(f"error: the files differ in {key!r}; join only curves that were recorded in the same way")
    seeds = [seed for record in records for seed in record["seeds"]]
    if len(set(seeds)) < len(seeds):
        raise SystemExit("error: the files have a seed in common; join files of different seeds")
    rows = [row for record in records for row in record["rows"]]
    complete = all(record["complete"] for record in records)
    joined = first | {"seeds": seeds, "complete": complete}
    write_whole(out, to_text(joined | {"rows": rows, "judged": judge_curves(rows, first["first"])}))


def record_steps(options: argparse.Namespace, run: Run, device: torch.device) -> None:
    """Time a step by each build and backend, and record the table."""
    backends, skipped = able(options.backends, run, device)
    model = Model(run, 0, device, rate=1e-5)
    count = sum(weight.numel() for weight in model.body.parameters())
    method = {"run": vars(run), "parameters": count, "samples": options.pairs, "skipped": skipped}
    record = Record(options.out, "training step", device, options.seconds, **method)
    record.save()  # a run that is killed before its first row leaves what it skipped
    rows = (row for build in options.builds for row in step_rows(model, build, backends, options.pairs))
    complete = record.fill(rows, lambda row: row, show_step)
    for name, reason in skipped.items():
        print(f"skipped {name}: {reason}")
    record.finish() if complete else record.save()


def main(arguments: list[str] | None = None) -> None:
    """Record curves or steps, or draw recorded curves."""
    parser = arguments_parser(__doc__, pairs=9)
    parser.add_argument("table", choices=("curves", "step", "join", "plot"))
    parser.add_argument("--read", type=Path, nargs="+", help="plot: the recorded curves; join: files of a seed each")
    parser.add_argument(
        "--backends", help=f"the first is compared with; by default {GPU_BACKENDS}, CPU: {CPU_BACKENDS}"
    )
    parser.add_argument("--steps", type=int, help="curves: steps of each run (300; CPU: 60)")
    parser.add_argument("--seeds", type=numbers, default="0,1,2")
    parser.add_argument("--builds", type=lambda text: text.split(","), default=BUILDS)
    parser.add_argument("--full", action="store_true", help="full attention in all layers, as cuDNN needs it")
    options = parser.parse_args(arguments)
    if options.out is None:
        parser.error("--out names the file to write")
    if unknown := set(options.builds) - set(BUILDS):
        parser.error(f"--builds names {', '.join(sorted(unknown))}; allowed: {', '.join(BUILDS)}")
    if options.table in ("plot", "join"):
        if options.read is None:
            parser.error("--read names the recorded curves")
        if options.table == "join":
            join_curves(options.read, options.out)
        else:
            plot(options.read[0], options.out)
        return
    device = default_device()
    on_gpu = device.type == "cuda"
    options.backends = (options.backends or (GPU_BACKENDS if on_gpu else CPU_BACKENDS)).split(",")
    options.steps = options.steps or (300 if on_gpu else 60)
    if options.table == "curves":
        record_curves(options, replace(CURVES if on_gpu else TINY, full=options.full), device)
    else:
        record_steps(options, replace(STEP if on_gpu else TINY, full=options.full), device)


if __name__ == "__main__":
    main()
