"""What a student's code changes in lists, dictionaries and tables arrives at the check; what it leaves alone does not."""

import json

import numpy as np
import pandas as pd
import pytest
import torch

from instructor.grading.wire.containers import Container, containers_in, overwrite
from instructor.grading.wire.values import Decoder, Encoder


def _table() -> pd.DataFrame:
    return pd.DataFrame({"shape": ["a", "b"], "ms": [1.0, float("nan")]}, index=[7, 3])


def _called(given: list, change) -> list:
    """The check's arguments after a call that changes the student's copies of them: `given` itself, written to."""
    encode = Encoder(trusted=True)
    node = json.loads(json.dumps(encode(given)))
    copies = Decoder([bytearray(b) for b in encode.blobs], trusted=True)(node)
    kept = [Container(value) for value in containers_in(copies)]
    change(*copies)
    encode = Encoder()
    changed = [[i, *container.nodes(encode)] for i, container in enumerate(kept) if container.has_changed()]
    decode = Decoder([bytearray(b) for b in encode.blobs])
    theirs = [*containers_in(given)]
    for place, contents, about in json.loads(json.dumps(changed)):
        overwrite(theirs[place], decode(contents), decode(about))
    return [place for place, *_ in changed]


@pytest.mark.parametrize(
    ("given", "change", "after"),
    [
        ([3, 1, 2], list.sort, [1, 2, 3]),
        ([1.5, 2.5], lambda x: x.pop(), [1.5]),
        ({"a": 1}, lambda x: x.update(b=[2]), {"a": 1, "b": [2]}),
        ({"a": [1, [2]]}, lambda x: x["a"][1].append(3), {"a": [1, [2, 3]]}),
        ((1, [2], {3: [4]}), lambda x: x[2][3].clear(), (1, [2], {3: []})),
        ({1, 2}, lambda x: x.add(3), {1, 2, 3}),
    ],
)
def test_a_change_arrives(given, change, after):
    assert _called([given], change)
    assert given == after and type(given) is type(after)


def test_an_array_arrives():
    given = np.arange(4.0)
    assert _called([given], lambda x: x.__setitem__(2, 9.0)) and given.tolist() == [0.0, 1.0, 9.0, 3.0]


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.sort_values("ms", inplace=True, ascending=False, na_position="first"),
        lambda t: t.__setitem__("mine", 1),
        lambda t: setattr(t.index, "name", "row"),
        lambda t: t.attrs.update(kept=object()),
        lambda t: t.__setitem__("when", pd.Timestamp(0)),  # what cannot travel
    ],
)
def test_a_table_that_was_changed_is_another_one(change):
    given, before = _table(), _table()
    assert _called([given], change)
    assert not given.equals(before) or given.attrs != before.attrs


def test_a_column_arrives():
    given = pd.Series([1.0, 2.0], name="ms")
    assert _called([given], lambda x: x.__setitem__(0, 5.0)) and given.tolist() == [5.0, 2.0]


def test_what_is_only_read_does_not_travel():
    nan = float("nan")
    given = [[1, nan, "a", [torch.zeros(2)]], {"k": (2, [3])}, {4}, _table(), np.array([nan]), frozenset({5}), range(3)]
    before = repr(given)

    def read(numbers, pairs, members, table, array, *rest):
        sorted(map(str, numbers)), dict(pairs), members | {9}, table.sort_values("ms"), array + 1
        numbers[0] = int("1")  # the same again

    assert not _called(given, read) and repr(given) == before
