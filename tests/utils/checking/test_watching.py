"""What a watch sees of a student's code, however the code spells it."""

import contextlib
import json
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from utils.checking import authors, check
from utils.checking.answers import Answer
from utils.checking.watching import DERIVATIVES, MATMUL, OperationWatch, Rule

PRODUCT = Rule((MATMUL,))

M, K, N = 3, 4, 5


@pytest.fixture
def operands():
    return torch.randn(M, K), torch.randn(K, N)


def watched(function, *args):
    with torch.no_grad(), OperationWatch() as watch:
        function(*args)
    return watch


PRODUCTS = {
    "@": lambda a, b: a @ b,
    "einsum": lambda a, b: torch.einsum("mk,kn->mn", a, b),
    "conv1d": lambda a, b: F.conv1d(a.T[None], b.T[:, :, None]),
    "attention": lambda a, b: F.scaled_dot_product_attention(a[None, None], a[None, None], a[None, None]),
    "solve": lambda a, b: torch.linalg.solve(torch.eye(K), b),
    # The lower right block of [[1, B], [-A, C]] becomes C + A B in a decomposition, and an exponential holds A B / 2.
    "lu": lambda a, b: torch.linalg.lu_factor(torch.cat([torch.eye(K), -a / (2 * a.abs().max())])),
    "fft": lambda a, b: torch.fft.irfft(torch.fft.rfft(a, n=2 * K)[:, None] * torch.fft.rfft(b.T, n=2 * K)[None]),
    "vmap": lambda a, b: torch.vmap(torch.dot)(a, a),
    "compiled": lambda a, b: torch.compile(lambda x, y: x @ y, backend="eager")(a, b),
    "without modes": lambda a, b: _without_modes(a, b),
    "autograd.Function": lambda a, b: Product.apply(a, b),
}


def _without_modes(a, b):
    with torch.utils._python_dispatch._disable_current_modes():
        return a @ b


def _labelled(a, b):
    with torch.profiler.record_function("mine"):
        return (a[:, :, None] * b[None]).sum(1)


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b):
        return a @ b


ALLOWED = {
    "broadcast and sum": lambda a, b: (a[:, :, None] * b[None]).sum(1),
    "outer products": lambda a, b: sum(torch.outer(a[:, k], b[k]) for k in range(K)),
    "element by element": lambda a, b: [[sum(a[i, k] * b[k, j] for k in range(K)) for j in range(N)] for i in range(M)],
    "slices": lambda a, b: torch.zeros(M, N).add_(a[:, :1] * b[:1]),
    "a label for the profiler": lambda a, b: _labelled(a, b),
    "vecdot": lambda a, b: torch.linalg.vecdot(a[:, None], b.T[None]),  # torch multiplies and sums
    "norms": lambda a, b: (
        torch.linalg.norm(a, dim=1) + torch.linalg.vector_norm(b[:, 0]) + a.norm() + a.T.diagonal().sum()
    ),
    "everyday": lambda a, b: torch.cat([a.T.contiguous(), b.flip(0)], 1).softmax(-1).to(torch.float16).max(),
}


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.filterwarnings("ignore")
def test_every_spelling_of_a_product_is_caught(name, operands):
    watch = watched(PRODUCTS[name], *operands)
    with pytest.raises(AssertionError, match="your code may not use"):
        PRODUCT.expect(watch)


def test_every_operator_of_torch_that_is_named_after_a_product_is_in_the_family():
    family = re.compile("|".join(f"(?:{name})" for name in MATMUL.names.split()))
    named = re.compile(
        r"(?:^|_)(?:b|s|add|addb|badd|ha?s)?mm(?:_|$)|matmul|conv(?!ert)|linear|lstm|gru|gemm|(?:^|_)v?dot(?:_|$)"
    )
    interpolation = re.compile(r"_*upsample_\w*linear\w*")  # it mixes neighbours, by weights that are given
    schemas = (s.name.removeprefix("aten::") for s in torch._C._jit_get_all_schemas() if s.name.startswith("aten::"))
    missing = {n for n in schemas if named.search(n) and not family.fullmatch(n.rstrip("_"))}
    assert not {n for n in missing if not interpolation.fullmatch(n)}


@pytest.mark.parametrize("name", ALLOWED)
def test_sums_of_products_are_allowed(name, operands):
    watch = watched(ALLOWED[name], *operands)
    PRODUCT.expect(watch)
    assert watch.operations and not watch.custom


@pytest.mark.parametrize("name", ["@", "einsum", "conv1d", "attention"])
def test_products_are_caught_under_inference_mode(name, operands):
    """There composite operators arrive whole, by their own names."""
    with torch.inference_mode(), OperationWatch() as watch:
        PRODUCTS[name](*operands)
    with pytest.raises(AssertionError):
        PRODUCT.expect(watch)


def test_message_names_the_call_the_operator_the_hint_and_the_line(operands):
    def helper(a, b):
        return torch.einsum("mk,kn->mn", a, b)

    watch = watched(lambda a, b: helper(a, b), *operands)
    with pytest.raises(AssertionError) as caught:
        Rule((MATMUL,), hint="write the loops").expect(watch)
    text = str(caught.value)
    assert "torch's einsum (it ran aten.bmm)" in text and "Write the loops." in text
    assert "in helper, line" in text and 'return torch.einsum("mk,kn->mn", a, b)' in text


EXITS = {
    ".numpy()": lambda t: t.numpy() * 2,
    "numpy.asarray": np.asarray,
    "base class": lambda t: torch._C.TensorBase.numpy(t),
    "tolist": lambda t: t.tolist(),
    "from_dlpack": np.from_dlpack,
    "data_ptr": lambda t: t.data_ptr(),
    "storage": lambda t: t.untyped_storage(),
}


@pytest.mark.parametrize("name", EXITS)
@pytest.mark.filterwarnings("ignore")
def test_every_way_out_of_torch_is_seen(name):
    watch = watched(EXITS[name], torch.randn(4, 4))
    with pytest.raises(AssertionError, match="out of torch"):
        PRODUCT.expect(watch)


def test_single_numbers_places_and_truth_values_may_leave():
    watch = watched(lambda t: (t[0, 0].item(), float(t[0, 1]), 1 if t[0, 2] > 0 else 2), torch.randn(4, 4))
    PRODUCT.expect(watch)
    watch = watched(lambda t: (t.argmax(1).tolist(), (t > 0).numpy()), torch.randn(4, 4))
    PRODUCT.expect(watch)
    assert "argmax" in watch.operations


def test_everything_is_put_back_when_the_code_raises(operands):
    places = [(torch.autograd, "_engine_run_backward"), (torch.autograd.forward_ad, "make_dual")]
    before = [getattr(*place) for place in places]
    with pytest.raises(ZeroDivisionError), OperationWatch() as watch:
        assert getattr(*places[-1]) is not before[-1]
        raise ZeroDivisionError
    assert [getattr(*place) for place in places] == before
    operands[0] @ operands[1]
    assert not watch.operations and not watch.calls


def test_custom_operators_hide_their_inside_and_are_reported(operands):
    @torch.library.custom_op("labs_test::product", mutates_args=())
    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a @ b

    watch = watched(product, *operands)
    assert watch.custom == {"labs_test::product": 1}
    with pytest.raises(AssertionError, match=r"custom operator labs_test::product"):
        PRODUCT.expect(watch)


def test_libraries_of_the_host_are_no_students_code(tmp_path, monkeypatch):
    """A .pth file may add a folder of the host's, as `make env` does on a machine with its own torch."""
    host = tmp_path / "lib" / "python3.12" / "dist-packages"
    monkeypatch.setattr(
        authors, "_LIBRARIES", authors._library_folders([str(host), str(tmp_path), "", "site-packages"])
    )
    library, own = (compile("1", str(folder / "a.py"), "exec") for folder in (host / "torch", tmp_path))
    assert not authors.is_students(library) and not authors.is_students(json.dumps.__code__)
    assert authors.is_students(own)


# ---- whose formula it is, derivatives, and what computes ---------------------------------------------------------


def test_a_formula_of_a_library_is_told_from_the_students_own():
    from torch.nn.attention.flex_attention import create_block_mask

    from utils.attention import reference
    from utils.attention.masks import causal, dense_mask, documents

    x = torch.randn(2, 3)
    q = torch.randn(1, 1, 4, 8)
    assert not watched(lambda: F.gelu(torch.softmax(x, -1)) + torch.vmap(torch.sin)(x)).borrowed
    assert not watched(lambda: dense_mask(documents(2), 4, 4)).borrowed  # the course hands these out
    blocks = watched(lambda: create_block_mask(causal, None, None, 128, 128, device="cpu"))
    assert any(name.startswith("torch/nn/attention/flex_attention.py") for name in blocks.borrowed)
    borrowed = watched(lambda: reference(q, q, q))
    assert any(name.startswith("utils/attention/reference.py") for name in borrowed.borrowed)
    with pytest.raises(AssertionError, match="a formula of a library"):
        Rule().expect(borrowed)


@pytest.mark.parametrize(
    "derive",
    [
        lambda x: torch.autograd.grad(x.sin().sum(), x),
        lambda x: x.sin().sum().backward(),
        lambda x: torch.func.grad(lambda y: y.sin().sum())(x),
        lambda x: torch.func.jvp(torch.sin, (x,), (x,)),
    ],
    ids=["grad", "backward", "func.grad", "jvp"],
)
def test_derivatives_have_one_name(derive):
    with OperationWatch() as watch:
        derive(torch.ones(3, requires_grad=True))
    with pytest.raises(AssertionError, match="may not use torch's autograd"):
        Rule((DERIVATIVES,)).expect(watch)
    assert "autograd" not in watched(lambda: torch.ones(3).sin()).calls


def test_an_operator_computes_unless_it_is_known_to_move_values():
    x = torch.rand(6, 4)
    with OperationWatch() as sizes:
        torch.cat([x, x]).T.contiguous()[2:].repeat(2, 1)
    assert sizes.largest_above(1) is None and sizes.largest_above(47, sizes.largest) == ("cat", 48)
    for compute in (torch.special.i0, lambda y: y.sort().values, lambda y: torch._foreach_exp([y, y])[0], torch.erf):
        with OperationWatch() as sizes:
            compute(x)
        assert sizes.largest_above(23) and not sizes.largest_above(24)


def test_products_are_measured():
    x, y = torch.rand(2, 6, 4), torch.rand(2, 4, 5)
    with OperationWatch() as sizes:
        x @ y
        x[0, 0].dot(x[0, 1])
        torch.mm(x[0], y[0], out=torch.empty(6, 5))
    assert sizes.products == [(2, 6, 4, 5), (1, 1, 4, 1), (1, 6, 4, 5)] and sizes.macs == 364


def test_a_higher_order_operator_hides_its_inside(operands):
    kind = torch._ops.HigherOrderOperator
    product = type("Product", (kind,), {"__call__": lambda *args: kind.__call__(*args)})("product_of_mine")
    product.py_impl(torch._C.DispatchKey.CompositeExplicitAutograd)(torch.mm)
    with torch._C._AutoDispatchBelowAutograd():
        watch = watched(product, *operands)
    assert watch.operations == watch.custom == {"product_of_mine": 1}
    with pytest.raises(AssertionError, match="product_of_mine, whose inside cannot be watched"):
        PRODUCT.expect(watch)


# ---- rules -------------------------------------------------------------------------------------------------------


def test_every_call_in_a_check_keeps_to_its_rule(operands):
    @check("1.1", "Naive GEMM", forbids=MATMUL, largest=1, hint="write the loops")
    def naive(gemm):
        assert len(gemm(*operands)) == M

    verdict = naive(lambda a, b: [[sum(a[i, k] * b[k, j] for k in range(K)) for j in range(N)] for i in range(M)])
    assert verdict.passed, verdict
    for wrong, word in (
        (lambda a, b: a @ b, "Write the loops."),
        (lambda a, b: (a[:, :, None] * b[None]).sum(1), "60 elements at once"),
        (lambda a, b: a.numpy() @ b.numpy(), "out of torch"),
    ):
        verdict = naive(wrong)
        assert not verdict.passed and word in verdict.message and "line" in verdict.message


def test_a_limit_in_words_gets_its_number_from_the_check():
    tiled = Answer(lambda x: x.sin(), Rule((), "one tile"))
    tiled(torch.ones(9))
    tiled.with_limit(9)(torch.ones(9))
    with pytest.raises(AssertionError, match="one tile has 8"):
        tiled.with_limit(8)(torch.ones(9))
    assert tiled.watch.operations["sin"] == 1 and tiled.watch.largest["sin"] == 9


DEBUG = False


def _with_habits(a, b):
    assert a.shape[1] == b.shape[0], "the inner sizes differ"
    if a.is_cuda:
        torch.cuda.synchronize()
    c = torch.zeros(M, N)
    scale = np.sqrt(4.0) / 2
    for i in range(M):
        for j in range(N):
            c[i, j] = sum(float(a[i, k]) * float(b[k, j]) for k in range(K)) * scale
    if DEBUG:
        print(torch.allclose(c, a @ b))
    assert not torch.isnan(c[0, 0])
    return c


def test_ordinary_habits_keep_to_the_rule(operands):
    """Only what runs counts: np.sqrt of a number, assert, is_cuda, a comparison with the library under `if DEBUG`."""
    got = Answer(_with_habits, Rule((MATMUL,), 1))(*operands)
    assert torch.allclose(got, operands[0] @ operands[1], atol=1e-5)


def test_uncompiled_flex_attention_works_under_a_watch_and_after_it():
    from torch.nn.attention.flex_attention import flex_attention

    q = torch.randn(1, 1, 128, 16)
    expected = torch.softmax(q @ q.mT / 4, -1) @ q
    for watch in (OperationWatch(), OperationWatch(), contextlib.nullcontext()):
        with watch:
            assert torch.allclose(flex_attention(q, q, q), expected, atol=1e-5)
