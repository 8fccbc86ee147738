"""The backward ladder without a GPU: every step against float64 in the simulator, and the operator's shapes."""

import random

import pytest
import torch

from tests.marks import slow_but_first
from utils.attention.reference import reference, reference_gradients
from utils.machine.device import offline_compile_support

pytestmark = pytest.mark.skipif(not offline_compile_support(), reason=offline_compile_support().reason)

LIMITS = {torch.bfloat16: 8e-3, torch.float16: 1e-3}  # relative error: 2^-9 and 2^-12 a rounding, a few of them


def relative_error(x, expected):
    norm = expected.norm()
    return ((x.double() - expected).norm() / norm).item() if norm > 1e-12 else x.double().abs().max().item()


def tensors(batch, heads, kv_heads, sq, sk, head_dim, dtype, seed=0):
    torch.manual_seed(seed)
    q, dout = (torch.randn(batch, heads, sq, head_dim, dtype=dtype) for _ in range(2))
    k, v = (torch.randn(batch, kv_heads, sk, head_dim, dtype=dtype) for _ in range(2))
    return q, k, v, dout


def simulated(q, k, v, dout, seed=None, step=4, deterministic=False, plan=None, **problem):
    """Run a backward in the simulator: its gradients, and those of float64."""
    from utils import gluon_cpu
    from utils.attention.gluon.backward.launch import backward

    out, lse = reference(q, k, v, **problem)
    with gluon_cpu.simulate(seed=seed) as run:
        gradients = backward(
            *(dout, q, k, v, out.to(q.dtype), lse.float()), step=step, deterministic=deterministic, plan=plan, **problem
        )
    assert run.ok
    return gradients, reference_gradients(q, k, v, dout, **problem)[1]


def check(gradients, expected, dtype, names=("dq", "dk", "dv")):
    for name, x, y in zip(names, gradients, expected, strict=True):
        assert x.dtype == dtype
        assert relative_error(x, y) < LIMITS[dtype], name


QUICK = {(1, 64), (2, 64), (3, 128), (4, 64), (4, 256), (5, 64), (5, 128), (6, 64), (6, 128)}
LADDER = [
    pytest.param(step, head_dim, marks=[] if (step, head_dim) in QUICK else pytest.mark.slow)
    for step in (1, 2, 3, 4, 5, 6)
    for head_dim in (64, 128, 256)
    if (step, head_dim) not in ((5, 256), (6, 256))  # the kernel of step 4
]


@pytest.mark.parametrize(("step", "head_dim"), LADDER)
def test_each_step_matches_float64(step, head_dim):
    q, k, v, dout = tensors(1, 2, 1, 200, 150, head_dim, torch.bfloat16)
    check(*simulated(q, k, v, dout, step=step, causal=True), torch.bfloat16)


@pytest.mark.parametrize("head_dim", slow_but_first([256, 64, 128]))
def test_the_deterministic_mode_matches_float64(head_dim):
    q, k, v, dout = tensors(1, 2, 1, 270, 150, head_dim, torch.float16)
    check(*simulated(q, k, v, dout, causal=True, deterministic=True), torch.float16)


PROBLEMS = [
    {"causal": True, "window": 40},
    {"window": 30},
    {"scale": -0.3},  # a negative factor turns the order of the scores around
    {"scale": 0.0},
    {},
]


@pytest.mark.parametrize("problem", slow_but_first(PROBLEMS), ids=str)
@pytest.mark.parametrize("deterministic", slow_but_first([False, True]))
def test_masks_and_scales(problem, deterministic):
    q, k, v, dout = tensors(1, 1, 1, 200, 150, 64, torch.bfloat16)
    check(*simulated(q, k, v, dout, deterministic=deterministic, **problem), torch.bfloat16)


@pytest.mark.parametrize(
    "problem", slow_but_first([{"causal": True}, {"window": 60}, {"causal": True, "window": 50}]), ids=str
)
@pytest.mark.parametrize("keys", [300, 128])  # with a tail and without
def test_masked_tiles_in_loops_of_their_own(problem, keys):
    q, k, v, dout = tensors(1, 2, 1, 400, keys, 64, torch.bfloat16)
    check(*simulated(q, k, v, dout, step=5, **problem), torch.bfloat16)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_random_shapes(seed):
    """Tails, grouped heads, head dimensions between the tile's widths, in any order of the roles."""
    rng = random.Random(seed)
    head_dim = rng.choice((40, 64, 96, 128, 160, 256))
    kv_heads, group = rng.choice(((1, 1), (2, 1), (1, 3)))
    sq, sk = rng.choice((1, 63, 130, 257)), rng.choice((1, 65, 128, 300))
    dtype = rng.choice((torch.bfloat16, torch.float16))
    q, k, v, dout = tensors(rng.choice((1, 2)), kv_heads * group, kv_heads, sq, sk, head_dim, dtype, seed)
    problem = {"causal": rng.random() < 0.5, "window": rng.choice((None, None, 50))}
    options = {"step": rng.choice((3, 4, 5, 6)), "deterministic": rng.random() < 0.3, "seed": seed}
    check(*simulated(q, k, v, dout, **options, **problem), dtype)


def test_strided_tensors():
    q, k, v, _ = tensors(1, 2, 2, 70, 90, 64, torch.bfloat16)
    rows_first = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    spread = torch.randn(1, 2, 70, 1, dtype=torch.bfloat16).expand(-1, -1, -1, 64)  # the gradient of a sum
    check(*simulated(*rows_first, spread, causal=True), torch.bfloat16)


@pytest.mark.parametrize("deterministic", [False, True])
def test_an_output_and_statistics_of_another_layout(deterministic):
    """The sum of dO * O reads rows: an output whose columns are apart, and a log-sum-exp in fp64, gave other gradients."""
    from utils import gluon_cpu
    from utils.attention.gluon.backward.launch import backward

    q, k, v, dout = tensors(1, 1, 1, 70, 90, 64, torch.bfloat16)
    out, lse = reference(q, k, v)
    out = out.to(q.dtype).transpose(2, 3).contiguous().transpose(2, 3)
    with gluon_cpu.simulate():
        gradients = backward(dout, q, k, v, out, lse.double(), deterministic=deterministic, step=4)
    check(gradients, reference_gradients(q, k, v, dout)[1], torch.bfloat16)


def test_a_gradient_of_the_log_sum_exp_is_added():
    from utils import gluon_cpu
    from utils.attention.gluon.backward.launch import backward

    q, k, v, dout = tensors(1, 1, 1, 90, 70, 64, torch.float16)
    dlse = torch.randn(1, 1, 90)
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    scores = wide[0] @ wide[1].transpose(-1, -2) / 8
    out, lse = torch.softmax(scores, -1) @ wide[2], torch.logsumexp(scores, -1)
    expected = torch.autograd.grad((out, lse), wide, (dout.double(), dlse.double()))
    with gluon_cpu.simulate():
        gradients = backward(dout, q, k, v, out.detach().half(), lse.detach().float(), dlse=dlse)
    check(gradients, expected, torch.float16)


def test_steps_that_add_in_any_order_refuse_to_be_deterministic():
    q, k, v, dout = tensors(1, 1, 1, 64, 64, 64, torch.bfloat16)
    with pytest.raises(ValueError, match="needs step 3 or a later one"):
        simulated(q, k, v, dout, step=1, deterministic=True)


@pytest.mark.parametrize("trained", [False, True])
def test_few_queries_go_to_the_kernel_that_has_gradients(monkeypatch, trained):
    from utils.attention.backends import gluon
    from utils.attention.gluon import launch
    from utils.attention.gluon.decode import launch as decode_launch
    from utils.attention.problem import make_problem

    monkeypatch.setattr(launch, "forward", lambda *tensors, **problem: "forward")
    monkeypatch.setattr(decode_launch, "decode", lambda *tensors, **problem: "decode")
    q, k, v, _ = tensors(1, 2, 1, 3, 200, 64, torch.bfloat16)
    v.requires_grad_(trained)
    assert gluon._run(q, k, v, make_problem(q, k, v)) == ("forward" if trained else "decode")
    with torch.no_grad():
        assert gluon._run(q, k, v, make_problem(q, k, v)) == "decode"


def test_no_queries_are_nothing_to_decode(monkeypatch):
    """The decode kernel's plan divides by the number of queries."""
    from utils.attention.backends import gluon
    from utils.attention.gluon import launch
    from utils.attention.problem import make_problem

    q, k, v, _ = tensors(1, 2, 1, 0, 200, 64, torch.bfloat16)
    monkeypatch.setattr(launch, "forward", lambda *tensors, **problem: "forward")
    assert gluon._run(q, k, v, make_problem(q, k, v)) == "forward"
    monkeypatch.undo()
    out, lse = launch._run(q, k, v, True, 0.125, 0, True, 5)
    assert out.shape == q.shape and lse.shape == (1, 2, 0)


def test_no_queries_give_zeros():
    from utils.attention.gluon.backward.launch import backward

    q, k, v, dout = tensors(1, 2, 2, 0, 70, 64, torch.bfloat16)
    k = k.transpose(1, 2).contiguous().transpose(1, 2)
    dq, dk, dv = backward(dout, q, k, v, q, torch.empty(1, 2, 0))
    assert dq.shape == q.shape and not dk.any() and not dv.any()
    assert dk.is_contiguous(), "as the operator tells torch.compile"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("head_dim", "step", "changes"),
    [
        (64, 3, {"ds_slots": 1}),
        (64, 5, {"ds_slots": 1, "by_tma": True}),
        (128, 5, {"by_tma": False, "producer_first": True}),
        (128, 5, {"v_left": False}),
        (64, 5, {"v_left": True}),
        (64, 6, {"by_tma": False, "producer_first": True, "named": True}),
        (64, 6, {"named": False, "storer_fences": False, "queue": False, "by_polynomial": 0}),
        (64, 6, {"by_polynomial": 1, "divided": True}),
        (128, 6, {"named": True, "storer_fences": True, "v_left": False}),
        (128, 3, {"ds_slots": 1}),
        (256, 4, {"by_tma": True, "do_slots": 1}),
        (256, 4, {"q_slots": 1, "do_slots": 1}),
    ],
)
def test_other_plans(head_dim, step, changes):
    from dataclasses import replace

    from utils.attention.gluon.backward.plan import plan_for

    q, k, v, dout = tensors(1, 2, 1, 400, 200, head_dim, torch.bfloat16)
    plan = replace(plan_for(step, head_dim), **changes)
    check(*simulated(q, k, v, dout, step=step, plan=plan, causal=True), torch.bfloat16)


@pytest.mark.parametrize(
    ("head_dim", "changes", "problem"),
    [
        (128, {}, {}),
        (64, {}, {}),
        (64, {}, {"causal": True}),
        (64, {"queue": True, "even": True, "split": False}, {"causal": True}),
        (128, {"queue": True, "even": True, "split": False}, {}),
        (128, {"queue": True}, {"causal": True}),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (128, {"queue": False}, {}),
                (128, {"named": True, "storer_fences": True}, {}),
                (64, {"queue": True, "even": True, "split": False}, {}),
                (64, {"queue": True, "even": True, "split": False}, {"window": 60}),
                (128, {"queue": True, "even": True, "split": False}, {"causal": True, "window": 70}),
                (64, {"queue": True, "split": True}, {"causal": True}),
                (64, {"queue": True, "named": True}, {"window": 60}),
                (64, {"queue": True, "by_tma": False, "producer_first": True}, {"causal": True}),
            )
        ),
    ],
)
@pytest.mark.parametrize("deterministic", slow_but_first([False, True]))
def test_a_program_takes_several_blocks_and_split_ones(monkeypatch, head_dim, changes, problem, deterministic):
    """Five SMs and twelve blocks of keys: a program takes two or more, and blocks are split at the end or where shares end."""
    from dataclasses import replace

    from utils.attention.gluon.backward import arguments, step6_one_consumer
    from utils.attention.gluon.backward.plan import plan_for

    for module in (arguments, step6_one_consumer):
        monkeypatch.setattr(module, "processors", lambda device: 5)
    q, k, v, dout = tensors(1, 4, 2, 300, 700, head_dim, torch.bfloat16)
    plan = replace(plan_for(6, head_dim, problem.get("causal", False)), **changes)
    check(*simulated(q, k, v, dout, step=6, plan=plan, deterministic=deterministic, **problem), torch.bfloat16)


@pytest.mark.parametrize("case", slow_but_first([(64, True), (64, False), (128, True), (128, False)]), ids=str)
def test_scores_that_are_far_below_the_greatest(case):
    """Their probabilities are 2^-200 and less, also where an exponential is a polynomial."""
    head_dim, causal = case
    q, k, v, dout = tensors(1, 2, 1, 200, 150, head_dim, torch.bfloat16)
    gradients, expected = simulated(q * 10, k, v, dout, step=6, causal=causal)
    check(gradients[2:], expected[2:], torch.bfloat16, ("dv",))
    assert all(x.isfinite().all() for x in gradients)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_equal_shares_of_odd_shapes(monkeypatch, seed):
    """Blocks that no query sees, programs inside of one block, groups, tails: each tile is somebody's, and once."""
    from dataclasses import replace

    from utils.attention.gluon.backward import arguments, step6_one_consumer
    from utils.attention.gluon.backward.plan import plan_for

    rng = random.Random(seed)
    sms = rng.choice((1, 2, 3, 7, 20))
    for module in (arguments, step6_one_consumer):
        monkeypatch.setattr(module, "processors", lambda device: sms)
    head_dim, kv_heads, group = rng.choice((64, 128)), rng.choice((1, 2)), rng.choice((1, 2, 3))
    sq, sk = rng.choice((1, 63, 130, 257, 520)), rng.choice((1, 65, 128, 300, 700))
    problem = {"causal": rng.random() < 0.6, "window": rng.choice((None, None, 50))}
    q, k, v, dout = tensors(rng.choice((1, 2)), kv_heads * group, kv_heads, sq, sk, head_dim, torch.bfloat16, seed)
    plan = replace(plan_for(6, head_dim, problem["causal"]), queue=True, even=True, split=False)
    check(*simulated(q, k, v, dout, seed=seed, step=6, plan=plan, **problem), torch.bfloat16)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_blocks_that_start_at_different_tiles(head_dim):
    from dataclasses import replace

    from utils.attention.gluon.backward.plan import plan_for

    q, k, v, dout = tensors(1, 2, 1, 200, 384, head_dim, torch.bfloat16)
    plan = plan_for(5, head_dim)
    assert plan.stagger == (head_dim == 64)
    check(*simulated(q, k, v, dout, step=5, plan=replace(plan, stagger=True)), torch.bfloat16)


def test_fields_of_a_plan_that_exclude_each_other_are_refused():
    from dataclasses import replace

    from utils.attention.gluon.backward.plan import plan_for

    with pytest.raises(ValueError, match="exclude each other"):
        replace(plan_for(5, 128), producer_first=True)


@pytest.mark.parametrize(("step", "head_dim"), [(3, 64), (4, 256)])
def test_a_kernel_refuses_fields_that_it_does_not_know(step, head_dim):
    from dataclasses import replace

    from utils.attention.gluon.backward.plan import plan_for

    q, k, v, dout = tensors(1, 1, 1, 64, 64, head_dim, torch.bfloat16)
    plan = replace(plan_for(step, head_dim), stagger=True)
    with pytest.raises(ValueError, match=f"know stagger; got step {step} with tiles of width {head_dim}"):
        simulated(q, k, v, dout, step=step, plan=plan)


@pytest.mark.slow
def test_torch_differentiates_the_operator_with_shapes_alone():
    from torch._subclasses.fake_tensor import FakeTensorMode

    from utils.attention.gluon.launch import attention_gluon

    with FakeTensorMode():
        q = torch.empty(2, 4, 100, 64, dtype=torch.bfloat16, requires_grad=True)
        k, v = (torch.empty(2, 2, 70, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
        out, lse = attention_gluon(q, k, v, True, 0.125, 0, True, 5)
        gradients = torch.autograd.grad((out, lse), (q, k, v), (torch.empty_like(out), torch.empty_like(lse)))
    assert [x.shape for x in gradients] == [q.shape, k.shape, v.shape]


# Step, head dimension, causal, whether dQ is summed there.
COMPILED = [
    (3, 128, False, True),
    (5, 128, True, True),
    (6, 128, False, True),
    (6, 128, True, True),
    (6, 64, True, True),
    (6, 64, False, True),
    (4, 256, False, False),
]


@pytest.mark.slow
def test_the_assembly_adds_by_tma_and_keeps_its_products_in_flight():
    """A process of its own: Triton's interpreter, which other tests use, excludes compiling."""
    import json
    import subprocess
    import sys

    from utils.attention.gluon.backward.plan import plan_for

    code = (
        "import json; from utils.attention.gluon.backward.offline import compile_backward\n"
        f"for case in {COMPILED!r}:\n"
        "    a = compile_backward(case[0], case[1], causal=case[2], dq=case[3])\n"
        "    print(json.dumps([a.count('UTMAREDG'), a.count('REDG.E.ADD'), a.count('HGMMA'), a.shared_bytes, a.warnings, a.unused_barriers, [x.count('MUFU.EX2') for x in a.sass.split('WARPGROUP.DEPBAR')]]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == len(COMPILED), done.stderr[-2000:]
    for (step, head_dim, causal, dq), row in zip(COMPILED, rows, strict=True):
        by_tma, by_threads, products, shared, warnings, unused, exponentials = row
        assert products and shared <= 227 * 1024
        assert warnings == []  # ptxas warns where it has to serialize wgmma
        assert bool(by_tma) == (dq and step > 3) and bool(by_threads) == (dq and step == 3)
        assert unused == []  # such a barrier would lie on a tile
        if step == 6:
            # Of 64 or 32 exponentials of a thread a quarter are polynomials, in the loop with a mask and in the one without.
            assert sum(exponentials) == (48 if head_dim == 64 else 24) * (1 + causal)
            # Most of a masked tile's stand between the waits for S^T and for dP^T; without `divided` there are 30.
            assert (max(exponentials) >= 40) == plan_for(step, head_dim, causal).divided


@pytest.mark.parametrize(
    ("head_dim", "case", "step"),
    [
        (64, {"causal": True}, 6),
        (64, {}, 6),
        (128, {"causal": True}, 6),
        (128, {"causal": True, "window": True}, 5),
        (128, {"deterministic": True}, 5),
    ],
)
def test_the_step_that_was_measured_fastest_is_taken(head_dim, case, step):
    """Entries 40 to 42 of docs/backward-log.md; windows and the deterministic mode were not measured with step 6."""
    from utils.attention.gluon.backward.plan import fastest_step, plan_for

    assert fastest_step(head_dim, **case) == step
    causal = case.get("causal", False)
    assert plan_for(6, head_dim, causal).storer_fences == (head_dim == 64 or causal)
