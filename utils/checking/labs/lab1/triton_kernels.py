"""Questions 1.5 and bonus 5.6: the student's Triton kernels, in the simulator."""

from __future__ import annotations

from importlib.util import find_spec

import torch
import torch.nn.functional as F

from utils.checking import expect_close, visible
from utils.checking.kernel_exercises import LIMITS
from utils.checking.mistakes import flash_mistake, name_mistakes
from utils.checking.verdicts import raises_not_implemented
from utils.gluon_cpu.compiling import import_file, write_source
from utils.gluon_cpu.simulation import simulate


def run_cases(
    source: str, file: str, function: str, cases: dict[str, tuple], most: int = 1 << 20
) -> dict[str, tuple[torch.Tensor, list[int]]]:
    """Run a function of a file of kernels in the simulator; return its output, and how often each program calls tl.dot.

    Args:
        source: the text of the file.
        file: the name of the file.
        function: the name of the function that launches a kernel and returns its output.
        cases: {name: arguments of the function}.
        most: the length of the longest tl.arange that a program may make.
    """
    results, place = {}, ""
    try:
        module = import_file(write_source(source, file))
        if (launcher := getattr(module, function, None)) is None:
            raise NameError(f"{file} defines no {function}: keep its name and arguments")
        for name, arguments in cases.items():
            place = f" on {name}"
            with simulate(timeline=1 << 20, **LIMITS) as run:
                output = launcher(*arguments)
            if run.longest > most:
                raise ValueError(f"a block of {run.longest}, and the largest here has {most}: work block by block")
            results[name] = output, [sum(event.kind == "dot" for event in events) for events in run.programs()]
    except (Exception, SystemExit) as error:
        report = getattr(error, "report", None)  # only errors of the simulator have a report
        words = str(report).replace("gl.", "tl.") if report else f"{type(error).__name__}: {error}"
        raise AssertionError(f"the kernel failed{place}: {words}") from None
    return results


def expect_dots(made: list[int], steps: int, name: str) -> None:
    """Assert that each program makes each product of its blocks once, by tl.dot."""
    assert {*made} == {steps}, (
        f"the kernel failed on {name}: a program makes {min({*made} - {steps}, default=0)} products of tiles by tl.dot, and its "
        f"blocks take {steps}: each block once."
    )


def _launch(source: str, launcher: str, cases: dict[str, tuple], steps: dict[str, int]) -> dict[str, torch.Tensor]:
    """Return the output of the student's own launcher; each program has to make `steps[case]` products."""
    if raises_not_implemented(source):
        gaps = f"{source.count('raise NotImplementedError')} of 2 gaps in {launcher}_triton.py"
        raise AssertionError(f"not answered yet: {gaps} still say raise NotImplementedError().")
    assert find_spec("triton"), "Triton is not installed here (it exists for Linux), so the kernel waits for grading"
    results = run_cases(source, f"{launcher}_triton.py", launcher, cases)
    for name, (_, made) in results.items():
        expect_dots(made, steps[name], name)
    return {name: output for name, (output, _) in results.items()}


@visible("1.5", "GEMM in Triton")
def check_gemm_triton(source: str):
    """Check whole blocks, edges, and matrices that are not contiguous."""
    cases = {}
    for name, (m, n, k) in (
        ("whole blocks", (64, 64, 64)),
        ("edges everywhere", (50, 70, 40)),
        ("transposed, so not contiguous", (50, 70, 40)),
    ):
        tensors = torch.randn(m, k), torch.randn(k, n)
        case = tuple(x.T.contiguous().T for x in tensors) if "transposed" in name else tensors
        cases[f"({m}, {k}) @ ({k}, {n}), {name}"] = case
    # Here the launcher's C is every second column of a wider matrix: without its strides a kernel writes wrong columns.
    given = "torch.empty(a.shape[0], b.shape[1], dtype=a.dtype, device=a.device)"
    source = source.replace(given, given.replace("b.", "2 * b.") + "[:, ::2]")
    steps = {name: -(-a.shape[1] // 32) for name, (a, _) in cases.items()}
    for name, got in _launch(source, "gemm", cases, steps).items():
        a, b = cases[name]
        last = (a.shape[1] - 1) // 32 * 32
        known = {
            "Only the last step along K is in C: is the product added to the accumulator?": a[:, last:] @ b[last:],
            "C is 0: is the result of tl.dot kept?": torch.zeros(a.shape[0], b.shape[1]),
        }
        otherwise = "Look at the masks, other= in the loads, and what is added up. Each of A, B and C has two strides."
        hint = name_mistakes(got, a @ b, known, otherwise)
        expect_close(got, a @ b, rtol=1e-3, atol=1e-3, what=f"gemm of {name},", hint=hint)


def flash_inputs(draw, queries: int, keys: int, d: int, size: float, dtype: torch.dtype) -> list[torch.Tensor]:
    """Draw q, k and v of three heads by `draw`, with scores times `size`. Scores rise or fall with the keys.

    With a negative size all scores are far below 0, so a missing key, with score 0, changes the result.
    """
    q, k, v = (draw(3, tokens, d) for tokens in (queries, keys, keys))
    if size < 0:
        q, k = q.abs(), k.abs()
    return [x.to(dtype) for x in (q * size, k + torch.arange(keys)[:, None] / keys, v + 1.0)]


@visible("Bonus 5.6", "Flash attention in Triton")
def check_flash_triton(source: str):
    """Check whole and broken blocks, large scores, fp16, and another layout; no two sides of a tile are equal."""
    cases: dict[str, tuple] = {}
    for queries, keys, size, kind, words in (
        (32, 48, 1.0, torch.float32, "whole blocks"),
        (21, 3, -60.0, torch.float32, "one block, of three keys, all scores far below 0"),
        (21, 33, 3.0, torch.float32, "the last block has one key"),
        (21, 45, 60.0, torch.float32, "scores in the hundreds"),
        (19, 35, 1.0, torch.float16, "in fp16"),
        (17, 40, 2.0, torch.float32, "dimensions lie the other way round in memory"),
    ):
        tensors = flash_inputs(torch.randn, queries, keys, 64, size, kind)
        if "other way" in words:
            tensors = [t.permute(2, 1, 0).contiguous().permute(2, 1, 0) for t in tensors]
        name = f"flash of 3 heads, {queries} queries and {keys} keys, in blocks of 32 and 16, {words}"
        cases[name] = (*tensors, 32, 16)
    steps = {name: 2 * -(-case[1].shape[1] // 16) for name, case in cases.items()}
    for name, got in _launch(source, "flash", cases, steps).items():
        q, k, v = cases[name][:3]
        right = F.scaled_dot_product_attention(q.double(), k.double(), v.double()).to(q.dtype)
        hint = flash_mistake(got, q, k, v, 16) if isinstance(got, torch.Tensor) and got.shape == q.shape else ""
        rtol = 1e-3 if q.dtype == torch.float32 else 1e-2
        expect_close(got, right, rtol=rtol, atol=rtol, what=f"{name},", hint=hint)
