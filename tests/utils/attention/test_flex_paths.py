"""The paths of FlexAttention on a CPU: right under mask and modifier, compiled once, guarded, refused in a sentence.

Compiling costs seconds: what can be asked of one compiled call is asked of one.
"""

import functools
import re
import warnings

import pytest
import torch

from utils.attention import flex_paths, flex_support, score_mods
from utils.attention.flex_dense import flex_reference, stored_scores
from utils.attention.flex_options import pick
from utils.attention.flex_paths import FlexUnsupported, Recompiled, able_paths, flex, needed_kernel_options, path_case
from utils.attention.masks import both, causal, document_ids, documents, negate, sliding_window
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


def error(out, expected):
    return float((out.double() - expected).norm() / expected.norm())


@pytest.fixture(scope="module")
def compiled():
    """One compiled call with all there is: grouped heads, captured document numbers, a captured table, an odd block."""
    if not (here := compile_support()):
        pytest.skip(here.reason)
    table = torch.randn(4, 9, generator=torch.Generator().manual_seed(3))
    modifier = score_mods.compose(score_mods.soft_cap(3.0), score_mods.relative_bias(table))
    return flex(*tensors(heads=4), mask_mod=MASK, score_mod=modifier, block_size=32, path="compiled"), modifier


@pytest.mark.slow
def test_the_compiled_path_is_right_and_says_what_was_in_force(compiled):
    call, modifier = compiled
    expected = flex_reference(*call.inputs, MASK, modifier)
    assert error(call(), expected) < FP32_ERROR
    settings = call.settings
    assert settings["path"] == "compiled" and settings["block_size"] == (32, 32) and settings["mode"] == "default"
    assert settings["mask"] == "both(causal, documents(ids))"
    assert settings["score_mod"] == "compose(soft_cap(3), relative_bias((4, 9)))"
    assert (settings["heads"], settings["kv_heads"], settings["sq"]) == (4, 2, 160)
    assert call.seconds["compile"] > 0 and call.seconds["block_mask"] > 0 and "compiled" in settings["implementation"]
    assert call.block_mask.BLOCK_SIZE == (32, 32)


@pytest.mark.slow
def test_the_tolerance_is_one_that_wrong_answers_cannot_pass(compiled):
    """Zeros, an ignored mask, swapped heads, a missing modifier: each is far outside."""
    call, modifier = compiled
    q, k, v = call.inputs
    expected = flex_reference(q, k, v, MASK, modifier)
    for wrong in (
        torch.zeros_like(q),
        flex_reference(q, k, v, None, modifier),
        expected.flip(1),
        flex_reference(q, k, v, MASK),
        flex_reference(q, k, v, documents(IDS), modifier),
    ):
        assert error(wrong, expected) > 1000 * FP32_ERROR


@pytest.mark.slow
def test_other_tensors_of_the_same_shape_are_computed_and_others_refused(compiled):
    call, modifier = compiled
    others = tensors(heads=4, seed=7)
    assert error(call(*others), flex_reference(*others, MASK, modifier)) < FP32_ERROR
    call.check()
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
    with pytest.raises(FlexUnsupported, match="generates no code"):
        flex(*tensors(), mask_mod=causal, path="dense").generated_code()


@needs_compiler
def test_a_prepared_call_survives_eight_others_and_a_reset_is_an_error():
    """torch.compile's limit of eight versions counts by code object: each prepared call has its own."""
    calls = []
    for length in range(16, 16 + 9):
        q, k, v = tensors(sq=length, sk=length)
        calls.append(flex(q, k, v, path="dense_compiled"))
    assert all(error(call(), flex_reference(*call.inputs)) < FP32_ERROR for call in calls)
    for call in calls:
        call.check()
    torch._dynamo.reset()
    with pytest.raises(Recompiled, match="'dense_compiled' was compiled again by this call"):
        calls[0]()
    with pytest.raises(Recompiled, match=r"0 compiled versions .* ran as eager Python"):
        calls[1].check()


@needs_compiler
def test_a_graph_break_and_a_second_version_are_errors():
    def breaks(b, h, q, k):
        print(end="")
        return q >= k

    q, k, v = tensors(sq=32, sk=32)
    with pytest.raises(Exception, match=r"(?i)graph break|fullgraph"):
        flex(q, k, v, mask_mod=breaks, path="compiled")
    call = flex(q, k, v, path="dense_compiled")
    with torch.no_grad():
        call.fn(q[:, :, :16], k, v)  # around the guard
    with pytest.raises(Recompiled, match="2 compiled versions and one is right: a guard failed"):
        call.check()


@pytest.mark.parametrize("mask", [None, causal, MASK, sliding_window(9)], ids=["none", "causal", "ids", "window"])
def test_eager_and_stored_scores_are_right(mask):
    for modifier in (None, score_mods.alibi(4)):
        q, k, v = tensors(heads=4)
        expected = flex_reference(q, k, v, mask, modifier)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            prepared = [
                flex(q, k, v, mask_mod=mask, score_mod=modifier, path=path, block_size=64)
                for path in ("eager", "dense") + ("sdpa",) * (modifier is None)
            ]
        for call in prepared:
            assert error(call(), expected) < FP32_ERROR, call.path


def test_more_keys_than_queries_and_queries_without_keys():
    q, k, v = tensors(sq=24, sk=96)
    last = both(causal, lambda b, h, q, k: q > 2)  # the first three queries see nothing
    expected = flex_reference(q, k, v, last)
    assert not expected[:, :, :3].any() and torch.isfinite(expected).all()
    assert error(flex(q, k, v, mask_mod=last, path="eager", block_size=32)(), expected) < FP32_ERROR
    per_head = flex_reference(q, k, v, lambda b, h, q, k: k <= q + h)
    assert error(per_head[:, 1:], flex_reference(q, k, v, lambda b, h, q, k: k <= q + 1)[:, 1:]) == 0


def test_the_reference_is_attention_written_out():
    q, k, v = tensors(sq=12, sk=12)
    allowed = torch.ones(12, 12, dtype=torch.bool).tril()
    plain = torch.softmax((q.double() @ k.double().mT * 0.25).masked_fill(~allowed, float("-inf")), -1) @ v.double()
    assert torch.allclose(flex_reference(q, k, v, causal), plain, atol=1e-12)
    assert torch.allclose(stored_scores(q, k, v, allowed, None, 0.25).double(), plain, atol=1e-6)
    assert torch.allclose(flex_reference(q, k, v, causal, scale=0.5), flex_reference(2 * q, k, v, causal), atol=1e-12)


def refused(path, *qkv, **options):
    with pytest.raises(FlexUnsupported) as caught:
        flex(*qkv, path=path, **options)
    text = str(caught.value)
    assert text.count("\n") == 0 and f"path={caught.value.alternatives[0]!r} can." in text
    assert caught.value.path == path
    return text


def test_what_a_path_cannot_do_is_refused_in_one_sentence_that_names_one_that_can():
    q, k, v = tensors()
    needs_gpu = "needs a Hopper or newer NVIDIA GPU, and the tensors are on a CPU; path="
    assert needs_gpu in refused("cute", q, k, v, mask_mod=causal)
    assert needs_gpu in refused("cute_direct", q, k, v, mask_mod=causal)
    assert "needs a Hopper GPU" in refused("gluon", q, k, v, mask_mod=causal)
    assert "takes no score modifier, and soft_cap(2) was given" in refused(
        "sdpa", q, k, v, score_mod=score_mods.soft_cap(2.0)
    )
    gradient = q.clone().requires_grad_()
    assert "no backward pass on a CPU" in refused("eager", gradient, k, v, mask_mod=causal)
    doubles = tensors(dtype=torch.float64)
    assert "does not take float64" in refused("eager", *doubles, mask_mod=causal)
    if compile_support():
        assert "no backward pass on a CPU, and an input requires a gradient" in refused(
            "compiled", gradient, k, v, mask_mod=causal
        )
        assert "does not take float64" in refused("compiled", *doubles)
        assert "uses CUDA graphs" in refused("compiled", q, k, v, mode="reduce-overhead")
        assert "takes head dimensions 8 to 256" in refused("compiled", *tensors(head_dim=4))
    with torch.no_grad():  # then no gradient is asked for
        assert (
            error(flex(gradient, k, v, mask_mod=causal, path="dense")(), flex_reference(q, k, v, causal)) < FP32_ERROR
        )


@pytest.mark.parametrize(
    ("head_dim", "block", "reason"),
    [
        (256, 128, "with a block mask takes head dimensions up to 128 .* not 256"),
        (64, 64, "takes blocks of 128 keys and a multiple of 64 queries, and the block size is 64 x 64"),
        (64, (96, 128), "the block size is 96 x 128"),
        (60, 128, "multiples of 8 up to 256, not 60"),
    ],
)
def test_limits_of_the_cute_path_are_told_without_a_gpu(monkeypatch, head_dim, block, reason):
    """The checks alone, with tensors that claim to be on a GPU."""
    yes = Support(True)
    monkeypatch.setattr(flex_support, "cuda_support", lambda: yes)
    monkeypatch.setattr(flex_support, "flash_attn_support", lambda version: yes)
    monkeypatch.setattr(flex_support.Case, "device", property(lambda self: torch.device("cuda")))
    q, k, v = tensors(head_dim=head_dim, dtype=torch.bfloat16)
    case = path_case(q, k, v, documents(32), block_size=block)
    for path in ("cute", "cute_direct"):
        assert re.search(reason, flex_paths.support(path, case).reason)
    plain = path_case(*tensors(head_dim=64, dtype=torch.bfloat16), causal)
    assert flex_paths.support("cute_direct", plain) and flex_paths.support("cute", plain)
    assert "float16 and bfloat16, not float32" in flex_paths.support("cute", path_case(*tensors(), causal)).reason


@pytest.mark.parametrize(
    ("arguments", "error_type", "message"),
    [
        (dict(path="triton"), ValueError, "path is 'triton'; it must be auto or one of eager"),
        (dict(mode="fast"), ValueError, "mode is 'fast'; it must be None or one of default"),
        (dict(block_size=0), ValueError, "block_size is 0"),
        (dict(scale="x"), ValueError, "could not convert"),
    ],
)
def test_bad_arguments_are_told(arguments, error_type, message):
    with pytest.raises(error_type, match=message):
        flex(*tensors(), mask_mod=causal, **{"path": "eager", **arguments})


def test_the_tile_follows_the_block_size():
    """Inductor's own tile of 128 does not divide a block of 64: compiling would fail without these options."""
    assert needed_kernel_options((128, 128)) == {} and needed_kernel_options((256, 128)) == {}
    assert needed_kernel_options((64, 64)) == {"BLOCK_M": 64, "BLOCK_N": 64}
    assert needed_kernel_options((192, 32)) == {"BLOCK_M": 64, "BLOCK_N": 32}
    assert needed_kernel_options((64, 128)) == {"BLOCK_M": 64, "BLOCK_N": 128}


def test_a_block_that_reaches_behind_the_last_key_is_checked():
    """Multiples of 128 are what inductor looks at; a block of 192 or 256 may overhang all the same."""
    for block, lengths in (((192, 192), (512, 512)), ((256, 128), (384, 384)), ((128, 256), (512, 640))):
        assert needed_kernel_options(block, lengths)["IS_DIVISIBLE"] is False
    for block, lengths in (((192, 192), (384, 384)), ((256, 256), (512, 1024)), ((128, 128), (128, 384))):
        assert "IS_DIVISIBLE" not in needed_kernel_options(block, lengths)


class OutOfResource(RuntimeError):
    pass


@pytest.mark.parametrize(
    ("fits", "options", "given", "stages"),
    [(3, {}, {}, None), (2, {}, {}, 2), (1, {"BLOCK_M": 64}, {"BLOCK_M": 64}, 1), (1, {"num_stages": 2}, {}, 1)],
)
def test_a_kernel_that_needs_too_much_shared_memory_gets_fewer_stages(fits, options, given, stages):
    def prepare(options):
        if options.get("num_stages", 3) > fits:
            raise OutOfResource("No valid triton configs. OutOfMemoryError: out of resource: Required: 246784")
        return options

    assert flex_paths._in_shared_memory(prepare, options, given) == options | ({"num_stages": stages} if stages else {})


def test_stages_that_were_given_and_other_errors_are_left_alone():
    def prepare(options, words="out of resource"):
        tried.append(options.get("num_stages"))
        raise OutOfResource(words)

    for words, given, attempts in (
        ("out of resource", {"num_stages": 3}, [3]),
        ("another error", {}, [None]),
        ("out of resource", {}, [None, 2, 1]),
    ):
        tried = []
        with pytest.raises(OutOfResource, match=words):
            flex_paths._in_shared_memory(functools.partial(prepare, words=words), given, given)
        assert tried == attempts


def test_auto_takes_a_fused_path_or_says_what_it_takes(monkeypatch):
    q, k, v = tensors()
    assert able_paths(path_case(q, k, v, causal))[-1] == "dense"
    if compile_support():
        assert pick(q, k, v, causal).path == "compiled"
        assert pick(q, k, v, causal, without=("compiled",)).path in ("eager", "sdpa")
    doubles = tensors(dtype=torch.float64)
    call = flex(*doubles, mask_mod=negate(causal))
    assert call.settings["path"] == "sdpa" and call.settings["picked_because"] == "no fused path does this here"

    def refuses(case):
        raise FlexUnsupported("sdpa", "was refused by its library", ())

    monkeypatch.setitem(flex_paths._BUILDERS, "sdpa", refuses)
    call = flex(*doubles, mask_mod=causal, score_mod=None)
    assert call.settings["passed_over"] == [("sdpa", "was refused by its library")]
    assert call.settings["path"].startswith("dense") and error(call(), flex_reference(*doubles, causal)) < 1e-12
