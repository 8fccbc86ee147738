import pytest

from utils.bench.errors import BenchError
from utils.bench.knobs import Knob, Sweep, settle, split_extra_arg

BLOCK = Knob("block-size", "tokens", 128, 64, env="BLOCK_SIZE")
MODE = Knob("mode", "how", "slow", "slow", choices=("slow", "fast"))
CAUSAL = Knob("causal", "mask", False, False)
KNOBS = (BLOCK, MODE, CAUSAL)


def values(text, environ=None, device="cpu"):
    return {key: setting.value for key, setting in settle(KNOBS, text, "T", device, environ or {}).items()}


def test_flags_in_both_spellings():
    assert values("--block-size 32 --mode=fast --causal") == {"block_size": 32, "mode": "fast", "causal": True}
    assert values("--no-causal")["causal"] is False


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("--blok-size 3", "Did you mean .--block-size"),
        ("--mode fsat", "Did you mean fast"),
        ("--block-size many", "whole number"),
        ("--block-size 0", "1 or more"),
        ("--block-size", "requires an argument"),
        ("--mode fast --mode slow", "given twice"),
        ("--mode 'fast", "cannot be split"),
    ],
)
def test_wrong_flags_name_the_right_one(text, message):
    with pytest.raises(BenchError, match=message):
        values(text)


def test_flag_before_environment_before_default():
    def block(text, environ, device="cpu"):
        setting = settle(KNOBS, text, "T", device, environ)["block_size"]
        return setting.value, setting.origin

    assert block("", {}) == (128, "default")
    assert block("", {}, "cuda") == (64, "default")
    assert block("", {"BLOCK_SIZE": "32"}) == (32, "environment BLOCK_SIZE")
    assert block("--block-size 16", {"BLOCK_SIZE": "32"}) == (16, "flag")
    with pytest.raises(BenchError, match="environment variable BLOCK_SIZE is 'x'"):
        block("", {"BLOCK_SIZE": "x"})


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("seq_len=1k:8k:x2", ("1024", "2048", "4096", "8192")),
        ("--seq-len=256:1000:+256", ("256", "512", "768")),
        ("backend=flash, math", ("flash", "math")),
    ],
)
def test_sweeps(text, values):
    assert Sweep.read(text).values == values and Sweep.read(text).name in ("seq_len", "backend")


@pytest.mark.parametrize("text", ["n", "n=", "n=1:2", "n=8:4:x2", "n=1:4:x1", "n=0:4:+1", "=1,2"])
def test_sweeps_that_are_none(text):
    with pytest.raises(BenchError, match="--sweep is"):
        Sweep.read(text)


def test_extra_args():
    assert split_extra_arg("T=--a 1 --b=2") == ("T", "--a 1 --b=2")
    assert split_extra_arg("T='--a 1'") == ("T", "--a 1")
    for wrong in ("T", "=--a 1", "T="):
        with pytest.raises(BenchError, match="TARGET=--flag value"):
            split_extra_arg(wrong)
