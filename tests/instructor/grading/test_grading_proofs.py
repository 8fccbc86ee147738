"""Records of calls, run again: right code of any kind computes the same from its record, and forged numbers do not."""

import json

import pytest
import torch

from instructor.grading.sandbox.tampering import Profile
from instructor.grading.submission.evidence import Recorder, replay, run_again, tensors_in
from instructor.grading.wire.channel import WireError

RIGHT = {
    "slices to the end": lambda a, b: torch.cat([a[1:], a[:1]]) @ b,
    "slices from the end": lambda a, b: a[:, :-1] @ b[:-1] + a[:, -1:] @ b[-1:],
    "halves, by recursion": lambda a, b: (
        a[:, : a.shape[1] // 2] @ b[: a.shape[1] // 2] + a[:, a.shape[1] // 2 :] @ b[a.shape[1] // 2 :]
    ),
    "a sum over parts": lambda a, b: sum(a[:, i : i + 1] * b[i] for i in range(len(b))),
    "rows with steps": lambda a, b: (a[::2] @ b).repeat_interleave(2, 0),
    "written in place": lambda a, b: torch.zeros(len(a), b.shape[1]).addmm_(a, b).mul_(2.0),
    "written into a slice": lambda a, b: torch.zeros(len(a), b.shape[1]).index_copy_(0, torch.arange(len(a)), a @ b),
    "with a mask": lambda a, b: torch.where(torch.arange(b.shape[1]) > 1, a @ b, -torch.inf),
    "in another dtype": lambda a, b: (a.double() @ b.double()).to(a.dtype),
    "with views": lambda a, b: (
        (a.T.contiguous().view(-1).view(a.shape[1], -1).T @ b).unflatten(0, (2, -1)).flatten(0, 1)
    ),
    "einsum": lambda a, b: torch.einsum("ik,kj->ij", a, b),
    "two results": lambda a, b: (a @ b, (a @ b).max(1).values),
}


def _record(function, *given):
    """The record of a call, as it travels, and its result."""
    with Recorder(dict(enumerate(given))) as recorder:
        value = function(*given)
    made = recorder.made(value)
    assert made is not None
    return {"records": json.loads(json.dumps(recorder.records)), "leaves": recorder.leaves, "result": made}, value


@pytest.mark.parametrize("name", RIGHT)
def test_a_record_of_right_code_computes_its_result_on_other_arguments(name):
    torch.manual_seed(0)
    one, other = [(torch.randn(6, 4), torch.randn(4, 5)) for _ in range(2)]
    program, value = _record(RIGHT[name], *one)
    for given, expected in ((one, value), (other, RIGHT[name](*other))):
        made = run_again(program, list(given))
        for got, right in zip(made, tensors_in(expected), strict=True):
            torch.testing.assert_close(got, right)
    replay([], program["records"])


def test_numbers_from_elsewhere_do_not_follow_other_arguments():
    one, other = torch.ones(3, 3), torch.full((3, 3), 2.0)
    kept = one.numpy() @ one.numpy()
    program, _ = _record(lambda a: torch.from_numpy(kept).clone() + 0 * a, one)
    assert not torch.allclose(run_again(program, [other])[0], other @ other)


@pytest.mark.parametrize(("parts", "unseen"), [(1, ""), (3, "bmm")])
def test_an_einsum_over_one_element_is_no_hidden_product(parts, unseen):
    weights, outputs = torch.rand(parts, 1, 2, 4), torch.rand(parts, 1, 2, 4, 8)
    with Profile() as profile:
        torch.einsum("pbhs,pbhsd->bhsd", weights, outputs)
    assert profile.unseen({"mul", "sum"}) == unseen


def test_a_record_holds_what_no_operator_made_and_nothing_else():
    c = torch.zeros(8, 8)
    with Recorder({0: c}) as recorder:
        for i in range(8):
            c[i : i + 1] += 1.0
    assert len(recorder.leaves) == 1 and recorder.leaves[0][1] == "given"


@pytest.mark.parametrize("text", ["1" * 30, "9223372036854775808", 7, None])
def test_a_large_number_that_is_none_is_refused(text):
    program, _ = _record(lambda a: a[1:], torch.ones(3))
    sketch = program["records"][0][2]
    assert {"integer": str(2**63 - 1)} in sketch
    sketch[sketch.index({"integer": str(2**63 - 1)})] = {"integer": text}
    with pytest.raises((WireError, ValueError)):
        run_again(program, [torch.ones(3)])
