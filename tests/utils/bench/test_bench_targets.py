import pytest
import torch

from utils.bench.errors import BenchError, WrongRun
from utils.bench.targets import TARGETS, backends, describe_targets, plan, read_name
from utils.bench.targets.attention import MATRIX
from utils.bench.targets.base import Built
from utils.benchmark.profiling import Launched

CPU = torch.device("cpu")
FLEX, CUTE = "labs/flexattention:flex_attention", "labs/flexattention:flex_attention_cute"
GLUON = "labs/flashattention_gluon:flashattention_gluon"
SUITES = ("sdpa", "flash_attn", "gluon", "fa3", "cute", "flex", "flex_flash", "triton")
SDPA = "labs/cudnn_sdpa_bench:flash_sdp"


def one_case(target, extra="", environ=None, device=CPU):
    (found,) = plan([target], [f"{target}={extra}"] if extra else [], device, environ or {})
    return found.cases[0]


def test_documented_names():
    named = {FLEX, CUTE, SDPA, GLUON, "labs/gemm:gemm", "labs/gelu:gelu"}
    assert set(TARGETS) >= named | {f"attention_suite:{one}" for one in SUITES}
    ((target, sides),) = read_name("labs/flashattention_gluon:baseline_flashattention_gluon")
    assert (target.workload, sides) == ("flashattention_gluon", ("baseline",))
    assert [target.name for target, _ in read_name("labs/flexattention")] == [FLEX, CUTE]


def test_arguments_for_a_target_that_is_not_run():
    with pytest.raises(BenchError, match="not among the targets"):
        plan([FLEX], [f"{SDPA}=--backend flash"], CPU, {})
    with pytest.raises(BenchError, match="flex_attention_cute, which is not among"):
        plan([FLEX], ["labs/flexattention=--block-size 64"], CPU, {})


def test_environment_is_read_at_run_time_by_flexattention_alone():
    environ = {"BLOCK_SIZE": "64", "DOC_SPAN": "128", "TORCH_COMPILE_MODE": "max-autotune-no-cudagraphs"}
    case = one_case(FLEX, environ=environ)
    assert (case.value("block_size"), case.workload.doc_span) == ("64", 128)
    assert case.value("compile_mode") == "max-autotune-no-cudagraphs"
    assert one_case(FLEX).workload.doc_span == 256
    reading = {name: [knob.env for knob in target.knobs if knob.env] for name, target in TARGETS.items()}
    assert {name: found for name, found in reading.items() if found} == {
        FLEX: ["DOC_SPAN", "BLOCK_SIZE", "TORCH_COMPILE_MODE"],
        CUTE: ["DOC_SPAN"],
    }
    assert one_case(SDPA, environ={"BACKEND": "math", **environ}).value("backend") == "auto"


def test_knobs_that_do_not_go_together():
    for flags, environ, words in (
        ("--heads 4 --kv-heads 3", None, "must be a multiple of those of k and v"),
        ("--seq-len 48 --seq-len-kv 20 --causal", None, "at least --seq-len"),
        ("--pass sideways", None, "forward, backward, both"),
        ("--mask causal --doc-span 64", {}, "--doc-span is 64, --mask is causal "),
        ("--mask full", {"DOC_SPAN": "64"}, "DOC_SPAN"),
        ("--mask full --block-size 64", {}, "no block mask"),
        ("", {"DOC_SPAN": "100000"}, r"DOC_SPAN is 100000, .* the text has"),
        ("--seq-len 64 --doc-span 65", {}, r"--doc-span is 65, .* 64 tokens"),
    ):
        with pytest.raises(BenchError, match=words):
            one_case(SDPA if environ is None else FLEX, flags, environ)
    assert one_case(FLEX, "--seq-len 64").workload.doc_span == 64  # the default is cut
    assert one_case(FLEX, "--mask causal").workload.doc_span is None


def test_the_suite_is_the_documented_matrix():
    (found,) = plan(["attention_suite:sdpa"], [], CPU, {})
    assert [case.workload.shape for case in found.cases] == [*MATRIX, *MATRIX]
    assert [case.workload.dtype for case in found.cases] == ["fp32"] * 4 + ["bf16"] * 4, "a CPU can do both"
    on_gpu = TARGETS["attention_suite:sdpa"].cases(found.cases[0].settings, torch.device("cuda"))
    assert [case.workload.dtype for case in on_gpu] == ["fp16"] * 4 + ["bf16"] * 4
    assert MATRIX == ((1, 1, 128, 64), (8, 4, 128, 64), (32, 8, 128, 64), (32, 8, 256, 64))
    (found,) = plan(["attention_suite:sdpa"], ["attention_suite:sdpa=--seq-len 64 --dtype bf16"], CPU, {})
    assert [case.workload.shape for case in found.cases] == [(1, 1, 64, 64), (8, 4, 64, 64), (32, 8, 64, 64)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU cannot run")
def test_refusals_give_a_reason():
    rows = {row["target"]: row for row in describe_targets()}
    assert rows[FLEX]["runs"] or rows[FLEX]["reason"]
    assert rows[CUTE]["runs"] and rows[SDPA]["runs"] and rows["attention_suite:sdpa"]["runs"]
    for name in ("attention_suite:flash_attn", "attention_suite:gluon", GLUON):
        assert not rows[name]["runs"] and "NVIDIA GPU" in rows[name]["reason"]
    case = one_case(SDPA, "--backend cudnn")
    assert not TARGETS[SDPA].support(case, "optimized") and TARGETS[SDPA].support(case, "baseline")


CUDNN_KERNEL = "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1"
FLASH_KERNEL = "void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<128, 128, 64, 4>>(Params)"
CUTLASS_KERNEL = "fmha_cutlassF_bf16_aligned_64x128_rf_sm80(Params)"


@pytest.mark.parametrize("name, kernel", dict(cudnn=CUDNN_KERNEL, flash=FLASH_KERNEL, efficient=CUTLASS_KERNEL).items())
def test_on_a_gpu_operator_and_kernel_must_both_be_the_backends(name, kernel):
    operator = f"aten::_scaled_dot_product_{name}_attention"
    backends.prove(name, Launched((operator,), (kernel,), 1))
    for other in {"cudnn", "flash", "math", "efficient"} - {name}:
        with pytest.raises(WrongRun, match=f"{other} was asked for and {name} ran"):
            backends.prove(other, Launched((operator,), (kernel,), 1))
    with pytest.raises(WrongRun, match="none of what was launched"):
        backends.prove(name, Launched((operator,), ("vectorized_elementwise_kernel",), 1))


def test_compiled_flexattention_is_proved_by_its_kernel():
    target, fused = TARGETS[FLEX], Launched((), ("triton_tem_fused_flex_attention_0",), 1)
    stored = Launched((), ("nvjet_tst_128x256", "cunn_SoftMaxForward", "elementwise_kernel"), 3)
    case = one_case(FLEX)
    for asked, right, other in (("compiled", fused, stored), ("eager", stored, fused)):
        assert target.prove(case, "optimized", Built(None, asked), right) == asked
        with pytest.raises(WrongRun, match=f"{asked} was asked for"):
            target.prove(case, "optimized", Built(None, asked), other)
