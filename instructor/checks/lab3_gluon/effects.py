"""Whether a kernel's result is made of what its question asks for.

A count of copies, products or conversions says that they ran. Here the simulator multiplies what they give by a factor, and the
outputs have to follow: an operation that runs for show, beside others that make the result, changes nothing.
"""

from __future__ import annotations

from typing import Any

import torch

from instructor.checks.common import let_wait
from utils.checking.gluon_launches import attention_launch, causal_launch
from utils.checking.kernel_exercises import Launch, simulate_launch

LOOSE = {"rtol": 2e-2, "atol": 2e-2}  # a result that does not follow is as far from the expected one as it is large


def expect_follows(
    source: str, launch: Launch, scaled: dict[str, float], expected: dict[str, torch.Tensor], words: str
) -> None:
    """Assert that the outputs are `expected` where the simulator multiplies what operations give.

    Args:
        source: what the student wrote, as text.
        launch: which kernel runs, on which arguments.
        scaled: {kind of operation: factor}, of `utils.gluon_cpu.simulate`.
        expected: the outputs that follow the factors, by name.
        words: what is wrong if they do not.
    """
    outputs, _ = simulate_launch(source, launch, scaled=scaled)
    for name, right in expected.items():
        if not torch.allclose(outputs[name].double(), right.double(), **LOOSE):
            raise AssertionError(words)


def expect_from_copies(source: str, launch: Launch, expected: dict[str, torch.Tensor], power: int) -> None:
    """Assert that outputs which grow with the inputs to a power are made of what the copies bring."""
    expect_follows(
        source,
        launch,
        {"copy": 2.0},
        {name: 2.0**power * right for name, right in expected.items()},
        "the result is not made of what the copies bring into the slots: each tile should come through its slot of the ring.",
    )


def expect_from_products(source: str, launch: Launch, doubled: dict[str, torch.Tensor]) -> None:
    """Assert that all products are made by wgmma: `doubled` are the outputs if each product is twice as large."""
    words = "the result is not made of the products by wgmma: something else multiplies, and they run beside it."
    expect_follows(source, launch, {"product": 2.0}, doubled, words)


def expect_attention_from_products(source: str, launch: Launch, expected) -> None:
    """Assert that the scores and P V of attention come from wgmma.

    Args:
        source: what the student wrote, as text.
        launch: the kernel on q, k, v; twice their scores have to be within the dtype.
        expected: {name: output} of attention whose queries are twice as large.
    """
    expect_from_products(source, launch, {name: 2.0 * right for name, right in expected.items()})


def expect_causal_from_products(source: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Assert it of causal attention on q, k, v (heads, S, D)."""
    expect_attention_from_products(source, causal_launch(q, k, v)[0], causal_launch(2.0 * q, k, v)[1])


def expect_sum_in_accumulator(source: str, launch: Launch) -> None:
    """Assert that the products of C = A B^T add to the accumulator themselves: where it counts nothing, the last one is left."""
    args: dict[str, Any] = launch.args
    a, b = (args[name].tensor.double() for name in ("a_desc", "b_desc"))
    step = args["a_desc"].block[1]
    last = (a.shape[1] - 1) // step * step
    expect_follows(
        source,
        launch,
        {"accumulator": 0.0},
        {"c_desc": a[:, last:] @ b[:, last:].T},
        "the sum over the steps along K is made beside the tensor cores: each step's warpgroup_mma should add to the accumulator "
        "that it is given.",
    )


def expect_divided_once(source: str, q: torch.Tensor, k: torch.Tensor) -> None:
    """Assert that the output of 5.1 goes through one division, whatever number of blocks there are.

    Where all values of V are 1, all outputs are: what else is divided, scores or maxima, changes nothing. If each quotient is
    twice as large, the outputs are 2 after one division, and more where each block's output is divided.

    Args:
        source: what the student wrote, as text.
        q: queries (heads, Sq, D).
        k: keys (heads, Sk, D).
    """
    ones = torch.ones_like(k)
    launch, _ = attention_launch("lab3_softmax.py", 64, q, k, ones, torch.ones_like(q))
    outputs, _ = simulate_launch(source, launch, scaled={"division": 2.0})
    got = outputs["o_desc"].double()
    if torch.allclose(got, torch.ones_like(got), **LOOSE):
        let_wait("divides by other operators than a division, and the question asks for the division, once, at the end")
    elif not torch.allclose(got, torch.full_like(got, 2.0), **LOOSE):
        raise AssertionError(
            "the output goes through more divisions than one: the division comes once, at the end, and not in every block."
        )


def expect_turned_by_conversion(source: str, launch: Launch, expected: dict[str, torch.Tensor]) -> None:
    """Assert that every element of the output went through gl.convert_layout, all of them as often."""
    outputs, _ = simulate_launch(source, launch, scaled={"conversion": 2.0})
    for name, right in expected.items():
        times = next((n for n in range(1, 5) if torch.equal(outputs[name], 2.0**n * right)), 0)
        if not times:
            raise AssertionError(
                "what is stored did not go through gl.convert_layout: the tile that is loaded should be converted to the layout "
                "that writes, whatever the size of X."
            )
        if times > 1:
            let_wait(f"converts its tile {times} times, and one conversion between two layouts turns it")
