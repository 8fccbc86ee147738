import pytest
import torch
import torch.nn.functional as F

from utils.attention import attention as attend
from utils.bench.errors import VerificationError
from utils.bench.verify import verify
from utils.bench.workload import DTYPES, Workload, make_inputs, reference

CPU = torch.device("cpu")
MASKED = Workload(2, 3, 64, 32, "fp32", "causal_document", 24)


@pytest.fixture(scope="module")
def masked():
    inputs = make_inputs(MASKED, CPU, 1)
    return inputs, reference(MASKED, *inputs)["output"]


def test_the_reference_knows_documents(masked):
    (q, k, v), expected = masked
    for begin, end in ((0, 24), (24, 48), (48, 64)):  # the last document is shorter
        part = [tensor[:, :, begin:end].double() for tensor in (q, k, v)]
        torch.testing.assert_close(expected[:, :, begin:end], F.scaled_dot_product_attention(*part, is_causal=True))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("score_mod", ["none", "relative_bias", "soft_cap"])
def test_right_outputs_pass(dtype, score_mod):
    workload = Workload(1, 4, 96, 64, dtype, "causal", score_mod=score_mod)
    inputs = make_inputs(workload, CPU, 3)
    out = attend(*inputs, backend="naive", **workload.attention_arguments)
    found = verify(out, reference(workload, *inputs)["output"], dtype, dtype=DTYPES[dtype])
    assert 0 < found.whole <= found.whole_bound


def wrong_outputs():
    def change_one_row(q, k, v, expected):
        out = expected.clone()
        out[1, 2, 33] = out[1, 2, 34]
        return out

    def one_nan(q, k, v, expected):
        out = expected.clone()
        out[0, 0, 5, 7] = float("nan")
        return out

    def full(q, k, v, expected):
        return F.scaled_dot_product_attention(q, k, v).double()

    return {
        "zeros": lambda q, k, v, e: torch.zeros_like(e),
        "one NaN": one_nan,
        "permuted heads": lambda q, k, v, e: e[:, [1, 0, 2]],
        "no mask": full,
        "causal alone": lambda q, k, v, e: F.scaled_dot_product_attention(q, k, v, is_causal=True).double(),
        "one row": change_one_row,
        "wrong scale": lambda q, k, v, e: e * 1.02,
    }


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("name", wrong_outputs())
def test_wrong_outputs_fail(name, dtype, masked):
    inputs, expected = masked
    output = wrong_outputs()[name](*inputs, expected).to(DTYPES[dtype])
    verify(expected.to(DTYPES[dtype]), expected, dtype, dtype=DTYPES[dtype])  # the right one passes
    with pytest.raises(VerificationError):
        verify(output, expected, dtype, dtype=DTYPES[dtype])


def test_one_wrong_row_among_many_fails():
    generator = torch.Generator().manual_seed(0)
    expected = torch.randn(1, 8, 4096, 16, generator=generator, dtype=torch.float64)
    output = expected.bfloat16()
    assert verify(output, expected, "bf16", dtype=torch.bfloat16).whole < 2.0**-8
    output[0, 5, 4000] = output[0, 5, 3999]  # too little to see in the whole: 1 row of 32768
    with pytest.raises(VerificationError, match="head 5, query 4000"):
        verify(output, expected, "bf16", dtype=torch.bfloat16)


def test_shape_dtype_and_type_are_checked(masked):
    _, expected = masked
    for output, said in ((expected[:1], "shape"), (expected.half(), "float16"), (None, "NoneType")):
        with pytest.raises(VerificationError, match=said):
            verify(output, expected, "fp32", dtype=torch.float32)
