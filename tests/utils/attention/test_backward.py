"""The backward ladder without a GPU: every step against float64 in the simulator, and the operator's shapes."""

import random
from dataclasses import replace

import pytest
import torch

from tests.marks import slow_but_first
from tests.utils.attention.errors import relative_error
from utils.attention.reference import reference, reference_gradients
from utils.machine.device import offline_compile_support

pytestmark = pytest.mark.skipif(not offline_compile_support(), reason=offline_compile_support().reason)

LIMITS = {torch.bfloat16: 8e-3, torch.float16: 1e-3}  # relative error: a few roundings of 2^-9 or 2^-12 each


def tensors(batch, heads, kv_heads, sq, sk, head_dim, dtype, seed=0):
    torch.manual_seed(seed)
    q, dout = (torch.randn(batch, heads, sq, head_dim, dtype=dtype) for _ in range(2))
    k, v = (torch.randn(batch, kv_heads, sk, head_dim, dtype=dtype) for _ in range(2))
    return q, k, v, dout


def run_backward(*given, seed=None, **options):
    """Run a backward in the simulator."""
    from utils import gluon_cpu
    from utils.attention.gluon.backward.launch import backward

    with gluon_cpu.simulate(seed=seed) as run:
        gradients = backward(*given, **options)
    assert run.ok
    return gradients


def simulated(q, k, v, dout, seed=None, step=6, deterministic=False, **problem):
    """Run a backward in the simulator; return its gradients, and those of float64."""
    out, lse = reference(q, k, v, **problem)
    options = {"seed": seed, "step": step, "deterministic": deterministic}
    gradients = run_backward(dout, q, k, v, out.to(q.dtype), lse.float(), **options, **problem)
    return gradients, reference_gradients(q, k, v, dout, **problem)[1]


def check(gradients, expected, dtype, names=("dq", "dk", "dv")):
    for name, x, y in zip(names, gradients, expected, strict=True):
        assert x.dtype == dtype
        assert relative_error(x, y) < LIMITS[dtype], name


LADDER = [
    pytest.param(step, head_dim, marks=[pytest.mark.slow] if (step, head_dim) in {(1, 128), (3, 64), (6, 96)} else [])
    for step, head_dim in ((1, 64), (1, 128), (3, 64), (3, 128), (6, 64), (6, 72), (6, 96), (6, 128), (6, 256))
]


@pytest.mark.parametrize(("step", "head_dim"), LADDER)
def test_each_step_matches_float64(step, head_dim):
    q, k, v, dout = tensors(1, 2, 1, 200, 150, head_dim, torch.bfloat16)
    check(*simulated(q, k, v, dout, step=step, causal=True), torch.bfloat16)


@pytest.mark.parametrize("head_dim", slow_but_first([256, 64, 128]))
def test_the_deterministic_mode_matches_float64(head_dim):
    q, k, v, dout = tensors(1, 2, 1, 270, 150, head_dim, torch.float16)
    check(*simulated(q, k, v, dout, causal=True, deterministic=True), torch.float16)


# A negative scale reverses the order of the scores.
PROBLEMS = [{"causal": True, "window": 40}, {"window": 30}, {"scale": -0.3}, {"scale": 0.0}, {}]


@pytest.mark.parametrize("problem", slow_but_first(PROBLEMS), ids=str)
@pytest.mark.parametrize("deterministic", slow_but_first([False, True]))
def test_masks_and_scales(problem, deterministic):
    q, k, v, dout = tensors(1, 1, 1, 200, 150, 64, torch.bfloat16)
    check(*simulated(q, k, v, dout, deterministic=deterministic, **problem), torch.bfloat16)


@pytest.mark.parametrize(
    "problem", slow_but_first([{"causal": True}, {"window": 60}, {"causal": True, "window": 50}]), ids=str
)
@pytest.mark.parametrize("keys", [300, 128])  # with a tail and without
@pytest.mark.parametrize("head_dim", slow_but_first([64, 128]))
def test_masked_tiles_beside_others(problem, keys, head_dim):
    q, k, v, dout = tensors(1, 2, 1, 400, keys, head_dim, torch.bfloat16)
    check(*simulated(q, k, v, dout, **problem), torch.bfloat16)


@pytest.fixture
def few_processors(monkeypatch):
    """Return a function that gives the GPU few SMs and cuts all blocks but the first few into pieces."""
    from utils.attention.gluon.backward import arguments, launch
    from utils.attention.gluon.backward.order import Order, blocks_of

    def pretend(sms, whole, pieces):
        def cut(blocks):
            first = min(whole, blocks.count)
            return Order(blocks.heads, first, pieces, (blocks.count - first) * pieces)

        for module in (arguments, launch):
            monkeypatch.setattr(module, "processors", lambda device: sms)
        monkeypatch.setattr(launch, "best_order", cut)
        monkeypatch.setattr(launch, "blocks_of", lambda *a: replace(blocks_of(*a), dq_pieces=1 if a[-1] else pieces))

    return pretend


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_random_shapes(few_processors, seed):
    """Tails, blocks that no query sees, groups, head dimensions between the tile's widths, in any order of the roles."""
    rng = random.Random(seed)
    head_dim = rng.choice((40, 64, 64, 80, 96, 128, 128, 160, 256))
    # Every tile must be computed exactly once, whoever does it.
    few_processors(rng.choice((1, 2, 3, 7, 20)), rng.randrange(4), rng.choice((1, 2, 3, 5, 8)))
    kv_heads, group = rng.choice(((1, 1), (2, 1), (1, 3)))
    sq, sk = rng.choice((1, 63, 130, 257, 520)), rng.choice((1, 65, 128, 300, 700))
    dtype = rng.choice((torch.bfloat16, torch.float16))
    q, k, v, dout = tensors(rng.choice((1, 2)), kv_heads * group, kv_heads, sq, sk, head_dim, dtype, seed)
    problem = {"causal": rng.random() < 0.5, "window": rng.choice((None, None, 50))}
    step = rng.choice((3, 6)) if head_dim <= 128 else 6
    options = {"step": step, "deterministic": step == 6 and rng.random() < 0.3, "seed": seed}
    check(*simulated(q, k, v, dout, **options, **problem), dtype)


@pytest.mark.parametrize("step", [6, 1])
def test_strided_tensors(step):
    q, k, v, _ = tensors(1, 2, 2, 70, 90, 64, torch.bfloat16)
    rows_first = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    spread = torch.randn(1, 2, 70, 1, dtype=torch.bfloat16).expand(-1, -1, -1, 64)  # the gradient of a sum
    check(*simulated(*rows_first, spread, step=step, causal=True), torch.bfloat16)


@pytest.mark.parametrize("deterministic", [False, True])
def test_an_output_and_statistics_of_another_layout(deterministic):
    """The sum of dO * O needs contiguous rows: an output with distant columns, or an fp64 log-sum-exp, gave wrong gradients."""
    q, k, v, dout = tensors(1, 1, 1, 70, 90, 64, torch.bfloat16)
    out, lse = reference(q, k, v)
    out = out.to(q.dtype).transpose(2, 3).contiguous().transpose(2, 3)
    gradients = run_backward(dout, q, k, v, out, lse.double(), deterministic=deterministic)
    check(gradients, reference_gradients(q, k, v, dout)[1], torch.bfloat16)


def test_a_gradient_of_the_log_sum_exp_is_added():
    q, k, v, dout = tensors(1, 1, 1, 90, 70, 64, torch.float16)
    dlse = torch.randn(1, 1, 90)
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    scores = wide[0] @ wide[1].transpose(-1, -2) / 8
    out, lse = torch.softmax(scores, -1) @ wide[2], torch.logsumexp(scores, -1)
    expected = torch.autograd.grad((out, lse), wide, (dout.double(), dlse.double()))
    check(run_backward(dout, q, k, v, out.detach().half(), lse.detach().float(), dlse=dlse), expected, torch.float16)


@pytest.mark.parametrize(
    ("head_dim", "options", "words"),
    [
        (64, {"step": 1, "deterministic": True}, "deterministic"),
        (64, {"step": 2}, "steps 1, 3, 6"),
        (256, {"step": 3}, "up to 128"),
        (36, {}, "multiple of 8"),
    ],
)
def test_what_no_kernel_can_do_is_refused(head_dim, options, words):
    with pytest.raises(ValueError, match=words):
        simulated(*tensors(1, 1, 1, 64, 64, head_dim, torch.bfloat16), **options)


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
    out, lse = launch.run_step(q, k, v, True, 0.125, 0, True, 5)
    assert out.shape == q.shape and lse.shape == (1, 2, 0)


def test_no_queries_give_zeros():
    q, k, v, dout = tensors(1, 2, 2, 0, 70, 64, torch.bfloat16)
    k = k.transpose(1, 2).contiguous().transpose(1, 2)
    dq, dk, dv = run_backward(dout, q, k, v, q, torch.empty(1, 2, 0))
    assert dq.shape == q.shape and not dk.any() and not dv.any()
    assert dk.is_contiguous(), "as the operator tells torch.compile"


SHARED = [
    (head_dim, problem, cut)
    for problem, cut in (({"causal": True}, (0, 3)), ({}, (20, 5)), ({}, (0, 4)), ({"window": 60}, (1, 2)))
    for head_dim in (64, 128, 256)
]


@pytest.mark.parametrize(
    "case", [x if i % 4 == 0 else pytest.param(x, marks=pytest.mark.slow) for i, x in enumerate(SHARED)], ids=str
)
@pytest.mark.parametrize("deterministic", slow_but_first([False, True]))
def test_programs_share_blocks(few_processors, case, deterministic):
    """Five SMs and 24 blocks of keys: a program begins and ends in the middle of blocks, and computes others completely."""
    head_dim, problem, cut = case
    few_processors(5, *cut)
    q, k, v, dout = tensors(1, 4, 2 if head_dim == 256 else 4, 300, 700, head_dim, torch.bfloat16)
    check(*simulated(q, k, v, dout, deterministic=deterministic, **problem), torch.bfloat16)


def draw_shape(rng):
    head_dim, kv_heads, group = rng.choice((64, 80, 96, 128, 256)), rng.choice((1, 2, 8, 16)), rng.choice((1, 2, 4, 8))
    sq = rng.choice((rng.randrange(1, 600), rng.randrange(600, 9000), 4096))
    sk = rng.choice((sq, sq, rng.randrange(1, 9000)))
    return (
        (rng.choice((1, 2, 3, 7)), kv_heads * group, kv_heads, sq, sk, head_dim),
        rng.random() < 0.5,
        rng.random() < 0.3,
    )


def test_a_hundred_shapes_compile_at_most_twelve_kernels():
    """Kernels are compiled for their constants, types and boxes; everything else is a run-time argument."""
    from utils.attention.gluon.backward.arguments import Gradients, kernel_of, launches
    from utils.attention.gluon.backward.order import best_order, blocks_of
    from utils.attention.gluon.backward.plan import plan_for, span

    rng, compiled = random.Random(0), set()
    for _ in range(100):
        (batch, heads, kv_heads, sq, sk, head_dim), causal, windowed = draw_shape(rng)
        window = rng.randrange(1, 2000) if windowed else 0
        q, k = (torch.empty(batch, h, s, head_dim, device="meta") for h, s in ((heads, sq), (kv_heads, sk)))
        lse = torch.empty(batch, heads, sq, device="meta")
        plan = plan_for(6, head_dim)
        order = best_order(blocks_of(plan, q, k, 132, span(causal, window)))
        g = Gradients(q, q, k, k, q, lse, None, plan, order)
        for launch in launches(6, g, order, causal, window, 0.1):
            kernel = kernel_of(launch.kernel)
            names = [p.name for p in kernel.params if p.do_not_specialize or p.is_constexpr]
            numbers = kernel.arg_names[len(launch.tensors) :]
            assert set(numbers) - set(names) <= {"c", "scale"}, launch.kernel  # fp32 is never specialized
            assert len(numbers) == len(launch.numbers) + len(launch.constants)
            compiled.add((launch.kernel, *launch.constants.items(), *launch.boxes, launch.warps))
    assert 4 <= len(compiled) <= 12


@pytest.mark.parametrize("step", [6, 1])
def test_what_lies_between_launches_has_places_that_do_not_overlap(step):
    from utils.attention.gluon.backward.arguments import GIVEN, Gradients
    from utils.attention.gluon.backward.order import Order
    from utils.attention.gluon.backward.plan import plan_for

    q, k, v, dout = tensors(1, 4, 2, 130, 300, 64, torch.bfloat16)
    g = Gradients(dout, q, k, v, q, torch.empty(1, 4, 130), None, plan_for(step, 64), Order(2, 0, 3, 9))
    assert [g.place(name) for name in GIVEN] == [(i, 0) for i in range(len(GIVEN))]
    end = 0
    for name in ("lse2", "delta", "sums", "parts", "counter"):
        assert g.place(name) == (len(GIVEN), end) and end % 16 == 0
        end += 4 * getattr(g, name).numel()
    assert end == 4 * g.between.numel()


def test_a_pass_is_launched_again_on_the_tensors_of_the_call(monkeypatch):
    """Launches are kept by the layout of the tensors; for a tensor that TMA cannot address, by the layout of its copy."""
    from utils.attention.gluon.backward import launch

    q, k, v, dout = tensors(1, 4, 2, 130, 300, 64, torch.bfloat16)
    lse, prepared, started = torch.rand(1, 4, 130), [], []

    def prepare(*given):
        prepared.append(given)
        return ("handle",), [torch.empty_like(x) for x in (q, k, v)] + [torch.empty(9)]

    monkeypatch.setattr(launch, "CALLS", {})
    monkeypatch.setattr(launch, "_prepare", prepare)
    monkeypatch.setattr(launch, "empty", lambda forms, index: [torch.empty_strided(*x[:2], dtype=x[2]) for x in forms])
    monkeypatch.setattr(launch, "start", lambda handles, addresses: started.append(addresses))
    for given in (dout, torch.rand_like(dout)):
        found = launch.backward(given, q, k, v, q, lse)
        wanted = [x.data_ptr() for x in (given, q, k, v, q, lse, lse, *found)]
        assert list(started[-1][:10]) == wanted and len(started[-1]) == 11 and len(prepared) == 1
        assert [x.shape for x in found] == [x.shape for x in (q, k, v)]
    shifted = torch.empty(dout.numel() + 1, dtype=dout.dtype)[1:].view(dout.shape)
    for given in (shifted, dout[..., :1].expand(dout.shape), shifted):
        launch.backward(given, q, k, v, q, lse)
        assert started[-1][0] != given.data_ptr() and len(prepared) == 1 and started[-1][0] % 16 == 0
    launch.backward(dout, q, k, v, q, lse, dlse=torch.rand_like(lse))
    launch.backward(dout, q, k, v, q, lse, causal=True)
    assert len(prepared) == 3 and prepared[1][6] is not None and prepared[0][6] is None


def test_autograd_goes_through_a_bare_launch_and_gives_the_same():
    from utils import gluon_cpu
    from utils.attention.gluon.backward.operator import Attention

    q, k, v, dout = tensors(1, 2, 1, 90, 70, 64, torch.bfloat16)
    out, lse = reference(q, k, v, causal=True)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    with gluon_cpu.simulate():
        problem = True, 0.125, 0, True, 5, ()
        found, _ = Attention.apply(lambda *given: (out.to(q.dtype), lse.float()), *leaves, problem)
        gradients = torch.autograd.grad(found, leaves, dout)
    check(gradients, reference_gradients(*(x.detach() for x in leaves), dout, causal=True)[1], torch.bfloat16)


def test_gradients_of_gradients_are_refused():
    from torch._subclasses.fake_tensor import FakeTensorMode

    from utils.attention.gluon.backward.operator import Attention

    with FakeTensorMode():
        q, k, v, dout = (x.requires_grad_() for x in tensors(1, 1, 1, 8, 8, 64, torch.bfloat16))
        problem = False, 0.125, 0, True, 5, ()
        out, _ = Attention.apply(lambda q, *given: (q + 0, torch.zeros(1, 1, 8)), q, k, v, problem)
        (dq,) = torch.autograd.grad(out, q, dout, create_graph=True)
        with pytest.raises(RuntimeError, match="autograd formula"):
            torch.autograd.grad(dq.sum(), q)


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


COMPILED = [(3, 128, False), (6, 64, False), (6, 80, False), (6, 128, False), (6, 256, False), (6, 128, True)]


@pytest.mark.slow
def test_the_assembly_adds_by_tma_and_keeps_its_products_in_flight():
    """Run in another process, since a wrong kernel can end it."""
    import json
    import subprocess
    import sys

    code = (
        "import json; from utils.attention.gluon.backward.offline import compile_backward\n"
        "from tests.utils.barrier_places import covered_barriers; from utils.kernels.handle import parameters\n"
        f"for step, head_dim, deterministic in {COMPILED!r}:\n"
        "    a = compile_backward(step, head_dim, deterministic=deterministic)\n"
        "    print(json.dumps([a.count('UTMAREDG'), a.count('REDG.E.ADD'), a.count('HGMMA'), a.shared_bytes, a.warnings, covered_barriers(a.ttgir), a.count('MUFU.EX2'), a.count('HGMMA.64x80x16')]))\n"
        "for mask, number, most in ('ends', 0, 0), ('ends', -1, 0), ('packed', -2, 128), ('packed', -1, 0):\n"  # bytes around its loops
        "    a = compile_backward(6, mask=mask, number=number)\n"
        "    sizes = [size for _, size in parameters(a.ptx)]  # what a kept launch packs: descriptors, and two pointers of Triton's last\n"
        "    assert a.spill_bytes <= most and sizes.count(128) == 9 * (number == -2) and sizes[-2:] == [8, 8]"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == len(COMPILED) and not done.returncode, done.stderr[-2000:]
    assert rows[2][2] < 0.82 * rows[3][2]  # with 80 columns, S^T and dP^T need 5 of 8 products
    for (step, head_dim, deterministic), row in zip(COMPILED, rows, strict=True):
        by_tma, by_threads, products, shared, warnings, covered, exponentials, narrow = row
        assert products and shared <= 227 * 1024
        assert narrow == (8 if head_dim == 80 else 0)  # four products of dV and four of dK
        assert warnings == []  # ptxas warns where it has to serialize wgmma
        adds = head_dim < 256 and not deterministic
        assert (bool(by_tma), bool(by_threads)) == (adds and step == 6, adds)  # threads add dQ, or dK and dV of pieces
        assert covered == []
        if step == 6 and head_dim < 256:
            # A thread has 64 or 32 exponentials; a quarter of them are polynomials.
            assert exponentials == (48 if head_dim == 64 else 24)
