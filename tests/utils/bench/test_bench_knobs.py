import pytest

from utils.bench.errors import BenchError
from utils.bench.knobs import Knob, parse_flags, settle, split_extra_args

BLOCK = Knob("block-size", "tokens", 128, 64, env="BLOCK_SIZE")
MODE = Knob("mode", "how", "slow", "slow", choices=("slow", "fast"))
CAUSAL = Knob("causal", "mask", False, False)
KNOBS = (BLOCK, MODE, CAUSAL)


def test_flags_in_both_spellings():
    assert parse_flags(KNOBS, "--block-size 32 --mode=fast --causal", "T") == {
        "block_size": 32,
        "mode": "fast",
        "causal": True,
    }
    assert parse_flags(KNOBS, "--no-causal", "T") == {"causal": False}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("--blok-size 3", "Did you mean --block-size"),
        ("--mode fsat", "Did you mean fast"),
        ("--block-size many", "whole number"),
        ("--block-size 0", "1 or more"),
        ("--block-size", "expected one argument"),
        ("--block-size --causal", "expected one argument"),
        ("--mode fast --mode slow", "given twice"),
        ("--causal=yes", "explicit argument"),
        ("fast", "no flag 'fast'"),
        ("--mode 'fast", "cannot be split"),
    ],
)
def test_wrong_flags_name_the_right_one(text, message):
    with pytest.raises(BenchError, match=message):
        parse_flags(KNOBS, text, "T")


def test_flag_before_environment_before_default():
    def block(given, environ, device="cpu"):
        setting = settle(KNOBS, given, device, environ)["block_size"]
        return setting.value, setting.origin

    assert block({}, {}) == (128, "default")
    assert block({}, {}, "cuda") == (64, "default")
    assert block({}, {"BLOCK_SIZE": "32"}) == (32, "environment BLOCK_SIZE")
    assert block({"block_size": 16}, {"BLOCK_SIZE": "32"}) == (16, "flag")
    with pytest.raises(BenchError, match="environment variable BLOCK_SIZE is 'x'"):
        block({}, {"BLOCK_SIZE": "x"})


def test_extra_args():
    assert split_extra_args(["T=--a 1", "U=--b=2", "T=--c"]) == {"T": "--a 1 --c", "U": "--b=2"}
    assert split_extra_args(["T='--a 1'"]) == {"T": "--a 1"}
    for wrong in ("T", "=--a 1", "T="):
        with pytest.raises(BenchError, match="TARGET=--flag value"):
            split_extra_args([wrong])
