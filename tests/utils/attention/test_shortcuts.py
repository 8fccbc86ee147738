"""A call like an earlier one goes straight to its backend: what is remembered, and what must not be."""

import dataclasses
import sys
import threading
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import utils
from utils.attention import Refused, attention, call, find_backend, last_run, make_problem
from utils.attention.gluon.arguments import Arguments
from utils.attention.masks import causal as causal_mask
from utils.attention.masks import score_mods
from utils.attention.problem import Problem
from utils.machine.device import Support
from utils.newest import Newest


@pytest.fixture(autouse=True)
def empty(monkeypatch):
    monkeypatch.setattr(call, "CALLS", Newest(4096))


def tensors(heads=2, length=16, head_dim=8, **options):
    made = torch.Generator().manual_seed(length)
    return [torch.randn(1, heads, length, head_dim, generator=made, **options) for _ in range(3)]


def test_a_second_call_decides_nothing(monkeypatch):
    q, k, v = tensors()
    first = attention(q, k, v, causal=True)
    run = last_run()
    monkeypatch.setattr(call, "make_problem", None)  # a second decision would need it
    assert torch.equal(attention(q, k, v, causal=True), first) and last_run() is run
    q2, k2, v2 = (2 * x for x in (q, k, v))
    assert not torch.equal(attention(q2, k2, v2, causal=True), first)


@pytest.mark.parametrize(
    "change",
    [
        {"causal": False},
        {"scale": 0.5},
        {"window": 3},
        {"backend": "math"},
        {"mask_mod": causal_mask, "causal": False, "backend": "naive"},
        {"score_mod": lambda score, b, h, q, k: score + 1, "backend": "naive"},
    ],
)
def test_what_differs_is_decided_anew(monkeypatch, change):
    q, k, v = tensors()
    attention(q, k, v, causal=True)
    decided = []
    real = call.make_problem
    monkeypatch.setattr(call, "make_problem", lambda *a, **o: decided.append(o) or real(*a, **o))
    attention(q, k, v, **({"causal": True} | change))
    attention(*(x.to(torch.bfloat16) for x in (q, k, v)), causal=True)
    attention(q.transpose(1, 2).contiguous().transpose(1, 2), k, v, causal=True)
    assert len(decided) == 3


def test_values_that_are_equal_to_legal_ones_are_still_refused():
    q, k, v = tensors()
    attention(q, k, v, causal=True, window=1)
    with pytest.raises(TypeError, match="causal must be True or False"):
        attention(q, k, v, causal=1, window=1)
    with pytest.raises(ValueError, match="it must be a whole number"):
        attention(q, k, v, causal=True, window=True)
    with pytest.raises(TypeError, match="k must be a tensor"):
        attention(q, [1], v, causal=True, window=1)


def test_a_gradient_is_part_of_the_decision():
    q, k, v = tensors()
    attention(q, k, v, backend="math")
    q.requires_grad_()
    out = attention(q, k, v, backend="math")
    assert last_run().problem.needs_autograd
    out.sum().backward()
    again = attention(q, k, v, backend="math")  # by the shortcut, and still differentiable
    before, q.grad = q.grad, None
    again.sum().backward()
    assert torch.equal(q.grad, before)
    with torch.no_grad():
        assert not attention(q, k, v, backend="math").requires_grad
        assert not last_run().problem.needs_autograd
    for table in (torch.zeros(2, 9), torch.zeros(2, 9, requires_grad=True)):
        attention(*tensors(), score_mod=score_mods.relative_bias(table), backend="naive")
        assert last_run().problem.needs_autograd == table.requires_grad


def test_an_error_in_a_remembered_call_goes_the_long_way(monkeypatch):
    q, k, v = tensors()
    expected = attention(q, k, v, backend="flash")
    ((key, (_, *rest)),) = call.CALLS.items()

    def refuse(q, k, v):
        raise RuntimeError("not today")

    call.CALLS[key] = (refuse, *rest)
    assert torch.equal(attention(q, k, v, backend="flash"), expected)
    assert call.CALLS[key][0] is not refuse


def test_a_stored_mask_is_not_kept():
    q, k, v = tensors()
    attention(q, k, v, window=3, backend="math")
    attention(q, k, v, window=3, backend="naive")
    assert not call.CALLS


def test_the_pin_holds_and_is_undone():
    q, k, v = tensors()
    switches = [torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()]
    torch.backends.cuda.enable_flash_sdp(False)
    try:
        for _ in range(2):
            attention(q, k, v, backend="flash")
            assert not torch.backends.cuda.flash_sdp_enabled() and torch.backends.cuda.math_sdp_enabled()
        many = [threading.Thread(target=lambda: [attention(q, k, v, backend="math") for _ in range(300)]) for _ in "ab"]
        for act in (threading.Thread.start, threading.Thread.join):
            list(map(act, many))
        with pytest.raises((RuntimeError, Refused)):
            next(iter(call.CALLS.values()))[0](q.to(torch.int32), k, v)
        assert not torch.backends.cuda.flash_sdp_enabled() and torch.backends.cuda.math_sdp_enabled()
    finally:
        torch.backends.cuda.enable_flash_sdp(switches[0])
    assert [torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()] == switches


def test_torch_compile_vmap_and_flop_counter_see_the_call():
    q, k, v = tensors()
    expected = attention(q, k, v, causal=True, backend="math")

    def twice(q, k, v):
        return attention(q, k, v, causal=True, backend="math") * 2

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # tracing the decision warned of every cache in it
        compiled = torch.compile(twice, backend="eager")
        torch.testing.assert_close(compiled(q, k, v), expected * 2)
        torch.testing.assert_close(compiled(q, k, v), expected * 2)
    many = torch.vmap(lambda *x: attention(*x, causal=True, backend="math"))(*(torch.stack([x, x]) for x in (q, k, v)))
    torch.testing.assert_close(many[1], expected)
    many, _ = torch.vmap(lambda *x: attention(*x, mask_mod=causal_mask, return_lse=True))(
        *(torch.stack([x, x]) for x in (q, k, v))
    )
    torch.testing.assert_close(many[1], expected)
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        attention(q, k, v, causal=True, backend="math")
    assert counter.get_total_flops() > 0


def test_kept_are_functions_that_are_kept_anyway_and_compiled_ones_below_their_limit_of_versions(monkeypatch):
    stored = call.Bound(lambda q, k, v: q)
    assert not call._may_be_kept(stored)
    monkeypatch.setattr(call, "_compiled", {("cute", None): stored})
    assert call._may_be_kept(stored)
    bound = call.Bound(lambda q, k, v: q, source=lambda q, k, v: q)
    monkeypatch.setattr(call, "compiled_versions", lambda source: 7)
    assert call._may_be_kept(bound)
    monkeypatch.setattr(call, "compiled_versions", lambda source: 8)
    assert not call._may_be_kept(bound)


class Launched(Exception):
    """Raised where a kernel would be launched, which ends the call."""


def launch_instead(*tensors, **options):
    raise Launched


def hops(call):
    """Return the functions of `utils`, after the first one, that get a call's tensors or what is made of them.

    Look-ups by a name, a device or a few numbers are not counted; a function that is entered twice counts once.
    """
    entered, home = {}, str(Path(utils.__file__).parent)

    def asked(x):
        parts = x.values() if isinstance(x, dict) else x if isinstance(x, (tuple, list)) else ()
        return isinstance(x, (torch.Tensor, Problem, Arguments)) or any(map(asked, parts))

    def listen(frame, event, _):
        code = frame.f_code
        ours = event == "call" and code.co_filename.startswith(home) and code.co_name[0] != "<"
        if ours and any(map(asked, frame.f_locals.values())):
            entered.setdefault(code.co_qualname)

    sys.setprofile(listen)
    try:
        with pytest.raises(Launched):
            call()
    finally:
        sys.setprofile(None)
    return list(entered)[1:]


def test_the_way_to_a_launch_is_short(monkeypatch):
    """A reader who follows a first call to the Gluon kernel's launch, or to SDPA on a CPU, meets few functions."""
    backend = dataclasses.replace(find_backend("gluon"), machine=lambda: Support(True))
    monkeypatch.setattr(call, "find_backend", lambda name: backend if name == "gluon" else find_backend(name))
    on_gpu = lambda *x, **more: dataclasses.replace(make_problem(*x, **more), device=torch.device("cuda"))  # noqa: E731
    q, k, v = tensors(dtype=torch.bfloat16)
    with monkeypatch.context() as gpu:
        gpu.setattr(call, "make_problem", on_gpu)
        gpu.setattr(torch.Tensor, "is_cuda", True, raising=False)
        gpu.setattr("utils.attention.gluon.launch.step_module", lambda step: SimpleNamespace(launch=launch_instead))
        gluon = [*hops(lambda: attention(q, k, v, causal=True)), "launch"]
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", launch_instead)
    sdpa = hops(lambda: attention(q, k, v, causal=True, backend="sdpa"))
    assert {"make_problem", "Backend.support", "forward", "run_step", "plan_of"} < set(gluon) and len(gluon) <= 20
    assert sdpa[-1] == "positive_scale" and len(sdpa) <= 20
