"""Prepared calls on a CPU: right under mask and modifier, compiled once, guarded, refused in a sentence.

Compiling takes seconds, so many tests use the same compiled call.
"""

import dataclasses
import functools
import re
import sys
import types
import warnings

import pytest
import torch

from tests.utils.attention.errors import relative_error
from utils.attention import AttentionUnsupported, Recompiled, Refused, find_backend, make_problem, prepare
from utils.attention import reference as reference_with_lse
from utils.attention.backends.flex import fewer_stages, first_that_fits, needed_kernel_options
from utils.attention.choosing import rank_backends
from utils.attention.masks import both, causal, document_ids, documents, negate, prefix_lm, score_mods, sliding_window
from utils.attention.problem import NO_OPTIONS, Options
from utils.machine.device import Support, compile_support

needs_compiler = pytest.mark.skipif(not compile_support(), reason=compile_support().reason)
FP32_ERROR = 1e-5
IDS = document_ids([40, 70, 50])
MASK = both(causal, documents(IDS))


def tensors(heads=2, kv_heads=2, sq=160, sk=160, head_dim=16, dtype=torch.float32, seed=0):
    made = torch.Generator().manual_seed(seed)
    return tuple(
        torch.randn(2, number, length, head_dim, generator=made).to(dtype)
        for number, length in ((heads, sq), (kv_heads, sk), (kv_heads, sk))
    )


def reference(q, k, v, mask_mod=None, score_mod=None, **arguments):
    return reference_with_lse(q, k, v, mask_mod=mask_mod, score_mod=score_mod, **arguments)[0]


@pytest.fixture(scope="module")
def compiled():
    """Compile one call with many features: grouped heads, captured document numbers, a captured table, an unusual block size."""
    if not (here := compile_support()):
        pytest.skip(here.reason)
    table = torch.randn(4, 9, generator=torch.Generator().manual_seed(3))
    modifier = score_mods.compose(score_mods.soft_cap(3.0), score_mods.relative_bias(table))
    return prepare(*tensors(heads=4), mask_mod=MASK, score_mod=modifier, block_size=32, backend="flex"), modifier


@pytest.mark.slow
def test_the_compiled_path_is_right_and_says_what_was_in_force(compiled):
    call, modifier = compiled
    expected = reference(*call.inputs, MASK, modifier)
    assert relative_error(call(), expected) < FP32_ERROR
    settings = call.settings
    assert settings["backend"] == "flex" and settings["block_size"] == (32, 32) and settings["mode"] == "default"
    assert settings["mask"] == "both(causal, documents(ids))"
    assert settings["score_mod"] == "compose(soft_cap(3), relative_bias((4, 9)))"
    assert (settings["heads"], settings["kv_heads"], settings["sq"]) == (4, 2, 160)
    assert call.seconds["compile"] > 0 and call.seconds["block_mask"] > 0 and "compiled" in settings["implementation"]
    assert call.block_mask.BLOCK_SIZE == (32, 32)


@pytest.mark.slow
def test_other_tensors_of_the_same_shape_are_computed_and_others_refused(compiled):
    call, modifier = compiled
    others = tensors(heads=4, seed=7)
    assert relative_error(call(*others), reference(*others, MASK, modifier)) < FP32_ERROR
    call.check()
    with pytest.raises(TypeError, match="give q, k and v, or none"):
        call(others[0])
    for wrong in (
        tensors(heads=4, sq=96, sk=96),
        tensors(heads=4, dtype=torch.bfloat16),
        tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in others),
    ):
        with pytest.raises(ValueError, match=r"was prepared for q \(2, 4, 160, 16\) float32 .* was given q"):
            call(*wrong)
    call.check()


@pytest.mark.slow
def test_the_generated_code_holds_the_score_modifier(compiled):
    code = compiled[0].generated_code()
    assert "tanh" in code and "cpp_fused" in code
    with pytest.raises(AttentionUnsupported, match="generates no code"):
        prepare(*tensors(), mask_mod=causal, backend="naive").generated_code()


@pytest.mark.slow
@needs_compiler
def test_a_prepared_call_survives_eight_others_and_a_reset_is_an_error():
    """torch.compile keeps at most eight versions of a code object; each prepared call has a code object of its own."""
    calls = []
    for length in range(16, 16 + 9):
        q, k, v = tensors(sq=length, sk=length)
        calls.append(prepare(q, k, v, backend="naive_compiled"))
    assert all(relative_error(call(), reference(*call.inputs)) < FP32_ERROR for call in calls)
    for call in calls:
        call.check()
    torch._dynamo.reset()
    with pytest.raises(Recompiled, match="'naive_compiled' was compiled again by this call"):
        calls[0]()
    with pytest.raises(Recompiled, match=r"0 compiled versions .* ran as eager Python"):
        calls[1].check()


@pytest.mark.slow
@needs_compiler
def test_the_compiled_baseline_is_not_replaced_by_sdpa():
    """Inductor would replace the three operators of naive attention by SDPA: another algorithm, and no baseline."""
    call = prepare(*tensors(sq=48, sk=48), backend="naive_compiled")
    assert "scaled_dot_product" not in call.generated_code()


@needs_compiler
@pytest.mark.slow
def test_a_graph_break_and_a_second_version_are_errors():
    def breaks(b, h, q, k):
        print(end="")
        return q >= k

    q, k, v = tensors(sq=32, sk=32)
    with pytest.raises(Exception, match=r"(?i)graph break|fullgraph"):
        prepare(q, k, v, mask_mod=breaks, backend="flex")
    call = prepare(q, k, v, backend="naive_compiled")
    with torch.no_grad():
        call.fn(q[:, :, :16], k, v)  # around the guard
    with pytest.raises(Recompiled, match="2 compiled versions and one is right: a guard failed"):
        call.check()


def test_eager_and_stored_scores_are_right_without_a_warning():
    q, k, v = tensors(heads=4)
    late = both(MASK, lambda b, h, q, k: q > 2)  # the first three queries see nothing
    modifier = score_mods.alibi(4)
    for mask, score_mod, name, options in (
        (late, modifier, "flex_eager", {"block_size": 64}),
        (late, modifier, "naive", {}),
        (MASK, None, "sdpa", {}),
        (sliding_window(9), None, "flex_eager", {}),
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            call = prepare(q, k, v, mask_mod=mask, score_mod=score_mod, backend=name, **options)
        assert relative_error(call(), reference(q, k, v, mask, score_mod)) < FP32_ERROR, name


@pytest.mark.parametrize("name", ["naive", "flex_eager"])
def test_a_mask_that_reads_something_else_than_when_it_was_prepared_is_an_error(name):
    q, k, v = tensors(heads=4)
    last = torch.tensor(3)
    call = prepare(q, k, v, mask_mod=lambda b, h, q, k: k <= last, backend=name)
    call()
    last += 200
    with pytest.raises(Recompiled, match="something else"):
        call()


def refused(name, *qkv, **options):
    with pytest.raises(AttentionUnsupported) as caught:
        prepare(*qkv, backend=name, **options)
    assert "\n" not in str(caught.value) and f"{name!r}: {caught.value.reason.rstrip('.')}" in str(caught.value)
    assert caught.value.backend == name and name not in caught.value.alternatives and caught.value.alternatives
    return caught.value.reason


def test_a_refusal_is_one_sentence_that_names_the_backends_that_can():
    q, k, v = tensors()
    gradient, doubles = q.clone().requires_grad_(), tensors(dtype=torch.float64)
    cases = [(name, "GPU", (q, k, v), {"mask_mod": causal}) for name in ("flex_flash", "cute", "gluon")]
    cases += [("sdpa", "modifier", (q, k, v), {"score_mod": score_mods.soft_cap(2.0)})]
    cases += [("flex_eager", "backward", (gradient, k, v), {"mask_mod": causal})]
    cases += [("flex_eager", "float64", doubles, {"mask_mod": causal})]
    if compile_support():
        cases += [("flex", "backward", (gradient, k, v), {"mask_mod": causal}), ("flex", "float64", doubles, {})]
        cases += [("flex", "head dimension", tensors(head_dim=4), {})]
        cases += [("flex", "CUDA graphs", (q, k, v), {"mode": "reduce-overhead"})]
    for name, word, qkv, options in cases:
        assert word in refused(name, *qkv, **options)
    with torch.no_grad():  # a call that asks for no gradient
        out = prepare(gradient, k, v, mask_mod=causal, backend="naive")()
    assert relative_error(out, reference(q, k, v, causal)) < FP32_ERROR


def test_an_option_that_a_backend_does_not_take_is_refused():
    q, k, v = tensors()
    for name, options in (
        ("naive", {"block_size": 64}),
        ("flex_eager", {"mode": "default"}),
        ("sdpa", {"mode": "default"}),
    ):
        with pytest.raises(AttentionUnsupported, match=f"it takes no {next(iter(options))}"):
            prepare(q, k, v, mask_mod=causal, backend=name, **options)


@pytest.mark.parametrize(
    ("head_dim", "block", "reason"),
    [
        (256, 128, "with a block mask its head dimension ends at 128 .* 256 was given"),
        (64, 64, "takes blocks of 128 keys and a multiple of 64 queries, and the block size is 64 x 64"),
        (64, (96, 128), "the block size is 96 x 128"),
        (60, 128, "multiple of 8 up to 256, and 60"),
    ],
)
def test_limits_of_flash_attention_4_are_said_without_a_gpu(head_dim, block, reason):
    """The checks alone, of problems that claim to be on a GPU."""

    def on_gpu(mask, *shape, **options):
        problem = make_problem(*tensors(*shape, **options), mask_mod=mask)
        return dataclasses.replace(problem, device=torch.device("cuda"))

    options = Options(block_size=(block, block) if isinstance(block, int) else block)
    cute, flash, gluon = (
        dataclasses.replace(find_backend(name), machine=lambda: Support(True)).support
        for name in ("cute", "flex_flash", "gluon")
    )
    problem = on_gpu(documents(32), head_dim=head_dim, dtype=torch.bfloat16)
    for support in (cute, flash):
        assert re.search(reason, support(problem, options).reason)
    assert cute(on_gpu(causal, head_dim=64, dtype=torch.bfloat16))
    assert "float16 and bfloat16, not float32" in cute(on_gpu(causal)).reason
    assert "causal, documents(span)" in gluon(on_gpu(prefix_lm(7), dtype=torch.bfloat16)).reason


def test_bad_arguments_are_named():
    for arguments, word in (
        (dict(mode="fast"), "mode"),
        (dict(block_size=0), "block_size"),
        (dict(scale="x"), "scale"),
    ):
        with pytest.raises(ValueError, match=word):
            prepare(*tensors(), **{"mask_mod": causal, "backend": "flex_eager", **arguments})


@pytest.mark.parametrize(
    ("block", "lengths", "options"),
    [
        ((128, 128), (128, 384), {}),
        ((256, 128), (512, 1024), {}),
        ((64, 64), (0, 0), {"BLOCK_M": 64, "BLOCK_N": 64}),  # inductor's own tile, 128, does not divide the blocks
        ((192, 32), (384, 384), {"BLOCK_M": 64, "BLOCK_N": 32}),
        ((192, 192), (512, 512), {"BLOCK_M": 64, "BLOCK_N": 64, "IS_DIVISIBLE": False}),  # 128 divides the lengths
        ((128, 256), (512, 640), {"IS_DIVISIBLE": False}),
    ],
)
def test_the_tile_follows_the_block_size_and_a_block_behind_the_last_key_is_checked(block, lengths, options):
    assert needed_kernel_options(block, lengths) == options


class OutOfResource(RuntimeError):
    pass


@pytest.mark.parametrize(
    ("fits", "options", "given", "stages"),
    [(3, {}, {}, None), (2, {}, {}, 2), (1, {"BLOCK_M": 64}, {"BLOCK_M": 64}, 1), (1, {"num_stages": 2}, {}, 1)],
)
def test_a_kernel_that_needs_too_much_shared_memory_gets_fewer_stages(fits, options, given, stages):
    def use(options):
        if options.get("num_stages", 3) > fits:
            raise OutOfResource("No valid triton configs. OutOfMemoryError: out of resource: Required: 246784")
        return options

    fitting = first_that_fits(fewer_stages(options, given), use)
    assert fitting == options | ({"num_stages": stages} if stages else {})


def test_stages_that_were_given_and_other_errors_are_left_alone():
    def use(options, words="out of resource"):
        tried.append(options.get("num_stages"))
        raise OutOfResource(words)

    for words, given, attempts in (
        ("out of resource", {"num_stages": 3}, [3]),
        ("another error", {}, [None]),
        ("out of resource", {}, [None, 2, 1]),
    ):
        tried = []
        with pytest.raises(OutOfResource, match=words):
            first_that_fits(fewer_stages(given, given), functools.partial(use, words=words))
        assert tried == attempts


def test_auto_ranks_what_does_a_mask_by_itself_first_and_says_why():
    q, k, v = tensors()
    wide = make_problem(*tensors(head_dim=128), mask_mod=causal)
    assert list(rank_backends(wide, NO_OPTIONS))[:4] == ["gluon", "cute", "flex_flash", "flex"]
    narrow = rank_backends(make_problem(q, k, v, mask_mod=causal), NO_OPTIONS)
    assert list(narrow)[:2] == ["cute", "gluon"] and "by itself" in narrow["cute"]
    assert next(iter(rank_backends(make_problem(q, k, v, mask_mod=documents(16)), NO_OPTIONS))) == "gluon"
    assert list(rank_backends(make_problem(q, k, v), NO_OPTIONS))[:3] == ["gluon", "fa3", "cute"]
    assert "flex" in rank_backends(make_problem(q, k, v), Options(block_size=(64, 64)))


@pytest.mark.slow
def test_auto_takes_a_fused_backend_or_says_what_it_takes(monkeypatch):
    q, k, v = tensors()
    if compile_support():
        attend = prepare(q, k, v, mask_mod=causal)
        assert attend.backend == "flex" and "inductor" in attend.settings["picked_because"]
        assert [name for name, _ in attend.settings["passed_over"]] == ["cute", "gluon", "flex_flash"]
    doubles = tensors(dtype=torch.float64)
    attend = prepare(*doubles, mask_mod=negate(negate(causal)))
    assert attend.backend == "sdpa" and attend.settings["picked_because"] == "no fused backend does this here"

    def refuses(problem, options):
        raise Refused("it was refused by its library.")

    refusing = dataclasses.replace(find_backend("sdpa"), bind=refuses)
    monkeypatch.setattr(
        "utils.attention.call.find_backend", lambda name: refusing if name == "sdpa" else find_backend(name)
    )
    attend = prepare(*doubles, mask_mod=causal)
    assert attend.settings["passed_over"][-1] == ("sdpa", "it was refused by its library.")
    assert attend.backend.startswith("naive") and relative_error(attend(), reference(*doubles, causal)) < 1e-12


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"causal": True, "window": 9}, {"causal": True, "window_size": (8, 0)}),
        ({"window": 9}, {"causal": False, "window_size": (8, 8)}),
        ({"mask_mod": causal}, {"causal": True, "window_size": (None, None)}),
        ({"mask_mod": sliding_window(7)}, {"window_size": (6, 0)}),
    ],
)
def test_what_flash_attention_4_is_asked(monkeypatch, arguments, expected):
    asked = {}

    def flash_attn_func(q, k, v, **options):
        asked.update(options)
        return q, None

    monkeypatch.setitem(sys.modules, "flash_attn", types.SimpleNamespace())
    monkeypatch.setitem(sys.modules, "flash_attn.cute", types.SimpleNamespace(flash_attn_func=flash_attn_func))
    q, k, v = tensors(sq=256, sk=256)
    bound = find_backend("cute").bind_problem(make_problem(q, k, v, **arguments))
    assert torch.equal(bound.call(q, k, v), q) and asked["softmax_scale"] == 0.25
    assert expected.items() <= asked.items()


def test_eager_modifiers_that_differ_in_a_number_alone():
    for cap, length in ((10.0, 16), (20.0, 32), (30.0, 48)):  # torch sees a number change, and a size
        q, k, v = tensors(sq=length, sk=length)
        call = prepare(q, k, v, score_mod=score_mods.soft_cap(cap), backend="flex_eager")
        assert relative_error(call(), reference(q, k, v, None, score_mods.soft_cap(cap))) < FP32_ERROR
