"""Functions called under vmap, and block masks, across two processes: as if both were one, and no forgery counts."""

import ast
import importlib
import inspect
import json
import os
import socket
import sys
import time
import types

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask, _get_mod_type, create_block_mask, create_mask, flex_attention

from instructor.build import ROOT
from instructor.grading.submission.conditions import update_watch
from instructor.grading.submission.library import RUNNERS, put_behind_walls
from instructor.grading.submission.remote import CannotTravel, Gone, Remote
from instructor.grading.submission.student import Student
from instructor.grading.wire.block_masks import rebuild_block_mask
from instructor.grading.wire.channel import Channel, WireError
from instructor.grading.wire.signatures import Proxy, parameters_of
from instructor.grading.wire.values import Decoder
from utils.attention.masks import dense_mask
from utils.attention.masks.score_mods import modify_scores
from utils.checking import OperationWatch
from utils.checking.masks import count_arguments


@pytest.fixture
def across():
    """Put functions into a process of their own; called with name=function, returns their proxies and the Remote."""
    started = []

    def start(**functions):
        ours, theirs = socket.socketpair()
        process = os.fork()
        if process == 0:
            try:
                ours.close()
                shell = types.SimpleNamespace(user_ns=functions, outputs=None)
                Student(Channel(theirs), shell).serve()
            finally:
                os._exit(1)
        theirs.close()
        remote = Remote(Channel(ours))
        remote.within(300)  # of all calls of a test, also on a machine that has much else to do
        started.append((process, remote))
        found = remote.values(list(functions), new=True)
        return [found[name] for name in functions] + [remote]

    yield start
    for process, remote in started:
        remote.channel.close()
        os.waitpid(process, 0)


NUMBERS = torch.tensor([0, 0, 1, 1, 1, 2, 2, -1])


def _in_place(b, h, q, k):
    q += 1
    return k <= q


def _inner_vmap(b, h, q, k):
    return torch.vmap(lambda n: (n == NUMBERS[q]) & (k <= q))(NUMBERS[k].expand(3)).all()


MODS = {
    "causal": lambda b, h, q, k: k <= q,
    "reads a tensor": lambda b, h, q, k: (NUMBERS[q] == NUMBERS[k]) & (NUMBERS[q] >= 0),
    "keys alone": lambda b, h, q, k: k < 3,
    "queries and the head": lambda b, h, q, k: (q + h) % 2 == 0,
    "the same for all pairs": lambda b, h, q, k: torch.tensor(True),
    "where": lambda b, h, q, k: torch.where(q > 2, k <= q, k == 0),
    "a vmap of its own": _inner_vmap,
    "writes into an index": _in_place,
    "asks for True or False": lambda b, h, q, k: k if q > k else q,
    "takes a number out": lambda b, h, q, k: k <= q.item(),
    "numbers for truth values": lambda b, h, q, k: q - k,
    "a truth value of Python's": lambda b, h, q, k: True,
    "nothing": lambda b, h, q, k: None,
    "a whole row": lambda b, h, q, k: NUMBERS[k] == NUMBERS,
    "fails": lambda b, h, q, k: NUMBERS[[]][7],
    "a dice": lambda b, h, q, k: torch.rand(()) < 2,
}


def _outcome(function, *args, **kwargs):
    """What comes out, to be compared: a result, or an exception's type and first words."""
    try:
        return function(*args, **kwargs).tolist()
    except Exception as error:
        return type(error).__name__, str(error).split("<")[0][:60]


def test_masks_do_what_they_do_in_one_process(across):
    *proxies, _ = across(**{f"mod{i}": mod for i, mod in enumerate(MODS.values())})
    for (what, mod), proxy in zip(MODS.items(), proxies, strict=True):
        proxy.__name__ = mod.__name__
        for b, h in ((0, 0), (1, 2)):
            assert _outcome(dense_mask, proxy, 8, 8, b=b, h=h) == _outcome(dense_mask, mod, 8, 8, b=b, h=h), what
        assert _outcome(create_mask, proxy, 2, 3, 8, 8, "cpu") == _outcome(create_mask, mod, 2, 3, 8, 8, "cpu"), what


def test_score_modifiers_and_blocks(across):
    slopes = torch.tensor([1.0, 0.5])
    alibi = lambda s, b, h, q, k: s - slopes[h] * (q - k)  # noqa: E731
    mod, mask, _ = across(alibi=alibi, mask=MODS["reads a tensor"])
    scores = torch.randn(6, 8)
    assert torch.equal(modify_scores(mod, scores, h=1), modify_scores(alibi, scores, h=1))
    built = create_block_mask(mask, None, None, 8, 8, device="cpu", BLOCK_SIZE=2)
    expected = create_block_mask(MODS["reads a tensor"], None, None, 8, 8, device="cpu", BLOCK_SIZE=2)
    assert torch.equal(built.to_dense(), expected.to_dense())


def test_a_mask_of_both_sides_calls_to_and_fro(across):
    def negate(mod):
        return lambda b, h, q, k: ~mod(b, h, q, k)

    def twice(call, mod):
        return call(negate(mod))

    negate_, twice_, _ = across(negate=negate, twice=twice)
    assert torch.equal(
        dense_mask(negate_(lambda b, h, q, k: NUMBERS[q] == NUMBERS[k]), 8, 8),
        dense_mask(lambda b, h, q, k: NUMBERS[q] != NUMBERS[k], 8, 8),
    )
    # The check's function is called by the student's, and calls a mask of theirs, which calls one of the check's.
    seen = twice_(lambda mod: dense_mask(mod, 4, 4), lambda b, h, q, k: k <= q)
    assert torch.equal(seen, ~torch.ones(4, 4, dtype=torch.bool).tril())


def test_operators_under_vmap_are_seen(across):
    mod, _ = across(mod=lambda b, h, q, k: torch.dot(q * torch.ones(3), k * torch.ones(3)) > 1)
    with OperationWatch() as watch:
        dense_mask(mod, 4, 4)
    assert any(name in ("mm", "mv", "bmm", "dot") for name in watch.operations) and watch.operations["gt"]


def test_a_watch_sees_the_same_operators(across):
    def product(a, b):
        return F.scaled_dot_product_attention(a[None, None], b.T[None, None], b.T[None, None]) * (a @ b).sum()

    there, _ = across(product=product)
    seen = []
    for function in (there, product):
        with OperationWatch() as watch:
            for _ in range(2):
                function(torch.ones(3, 4), torch.ones(4, 5))
        seen.append([getattr(watch, name) for name in watch.SEEN if name not in ("calls", "lines")])
    assert seen[0] == seen[1] and len(seen[0]) == 6


def test_another_mode_of_a_check_is_refused(across):
    there, _ = across(there=lambda x: x + 1)
    with pytest.raises(CannotTravel, match="DeviceContext"), torch.device("meta"):
        there(torch.ones(3))


@pytest.mark.parametrize("text", ['{"steps": 3}', "{}", '{"steps": [], "largest": {}}', "[]"])
def test_forged_data_of_a_watch_are_refused(text):
    with pytest.raises((WireError, AttributeError)):
        update_watch(OperationWatch(), text)


def test_tensors_of_calls_under_vmap_do_not_pile_up(across):
    mod, remote = across(mod=MODS["causal"])
    dense_mask(mod, 4, 4)
    assert not remote.tensors and not remote.keys


def test_other_transformations_do_not_travel(across):
    f, _ = across(f=lambda x: (x * x).sum())
    with pytest.raises(CannotTravel):
        torch.func.grad(f)(torch.ones(3))
    assert _outcome(torch.vmap(f), torch.ones(2, 3)) == [3.0, 3.0]


# ---- block masks ---------------------------------------------------------------------------------------------------


def test_block_masks_travel_both_ways_and_stay_the_same_object(across):
    def prepare(attention, mod, length):
        block_mask = create_block_mask(mod, None, None, length, length, device="cpu", BLOCK_SIZE=4)
        return lambda: attention(block_mask)

    def visible(block_mask):
        zero = torch.tensor(0)
        assert int(block_mask.kv_num_blocks.sum()) and block_mask.seq_lengths == (8, 8)
        return block_mask.mask_mod(zero, zero, torch.arange(8)[:, None], torch.arange(8))

    prepare_, visible_, _ = across(prepare=prepare, visible=visible)
    given, asked = [], []

    def mod(b, h, q, k):
        asked.append(1)
        return k <= q

    attend = prepare_(given.append, mod, 8)
    assert len(asked) == 1  # one way for all pairs
    attend()
    attend()
    assert type(given[0]) is BlockMask and given[0] is given[1] and given[0].mask_mod is mod and len(asked) == 1
    ours = create_block_mask(mod, None, None, 8, 8, device="cpu", BLOCK_SIZE=4)
    assert torch.equal(given[0].to_dense(), ours.to_dense())
    assert torch.equal(visible_(ours), torch.ones(8, 8, dtype=torch.bool).tril())


def test_eager_flex_attention_of_the_student_calls_the_checks_masks(across):
    def run(q, mod, score_mod):
        block_mask = create_block_mask(mod, None, None, 16, 16, device="cpu", BLOCK_SIZE=16)
        return flex_attention(q, q, q, score_mod=score_mod, block_mask=block_mask)

    run_, _ = across(run=run)
    q = torch.randn(1, 2, 16, 16)
    got = run_(q, lambda b, h, q, k: k <= q, lambda s, b, h, q, k: s + 0)
    expected = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def _fields(**changes):
    made = vars(create_block_mask(MODS["causal"], None, None, 8, 8, device="cpu"))
    return {name: made[name] for name in inspect.signature(BlockMask.__init__).parameters if name in made} | changes


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"mask_mod": None},
        {"kv_num_blocks": 3},
        {"BLOCK_SIZE": (-1, 4)},
        {"__class__": 1},
        {"full_kv_indices": None},
    ],
)
def test_forged_block_masks_are_refused(values):
    with pytest.raises(WireError):
        rebuild_block_mask(_fields(**values) if values else {})
    assert type(rebuild_block_mask(_fields())) is BlockMask


# ---- forged replies ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "view", [[1, [4], [1], 20], [1, [2, 2], [1], 0], [1, [2], [-1], 4], [1, [2], [1], -1], [1, [2], [12], 0]]
)
def test_forged_views_are_refused(view):
    with pytest.raises(WireError):
        Decoder([], known={1: torch.zeros(3, 4)}.__getitem__)(["view", *view])


@pytest.mark.parametrize(
    "change",
    [
        {"value": ["tensor", {"dtype": "bool", "shape": [], "stride": None, "device": "meta", "grad": False}]},
        {"value": ["known", 99]},
        {"written": [99]},
        {"value": ["object", {"id": 5, "kind": "block_mask", "parts": {"mask_mod": None}}]},
        {"op": "callback", "id": 0, "vmaps": [], "written": [], "args": ["items", "tuple", []], "kwargs": ["dict", []]},
    ],
)
def test_a_forged_reply_under_vmap_ends_the_question_and_not_the_run(change):
    ours, theirs = socket.socketpair()
    if (process := os.fork()) == 0:
        try:
            ours.close()
            peer = Channel(theirs)
            said = {"id": 1, "kind": "function", "name": "f", "answered": True, "parameters": [["x", 1, False]]}
            while True:
                message, _ = peer.receive()
                reply = {"op": "result", "n": message["n"], "written": [], "value": None}
                if message["op"] == "values":
                    reply |= {"op": "values", "values": {"f": ["object", said]}}
                peer.send(reply if message["op"] == "values" else {**reply, **change})
        finally:
            os._exit(0)
    theirs.close()
    remote = Remote(Channel(ours))
    remote.within(20)
    f = remote.values(["f"], new=True)["f"]
    began = time.monotonic()
    with pytest.raises(Gone) as gone:
        torch.vmap(f)(torch.ones(3))
    assert gone.value.kind == "protocol" and time.monotonic() - began < 10
    assert torch.vmap(lambda x: x + 1)(torch.ones(3)).tolist() == [2, 2, 2]  # no level is left behind
    ours.close()
    os.waitpid(process, 0)


# ---- names, parameters, views, columns -----------------------------------------------------------------------------


def _optional(a, /, b, c=3, *more, d, e=5, **named):
    pass


@pytest.mark.parametrize("count", [4, 5])
def test_flex_attention_counts_the_parameters_of_a_proxy(count):
    mod = eval(f"lambda {', '.join('sbhqk'[-count:])}, cap=3: 1")
    made = Proxy(print, "made", json.loads(json.dumps(parameters_of(mod))))
    assert made.__name__ == "made" and count_arguments(made) == count
    assert _get_mod_type(made) is _get_mod_type(mod)


def test_a_proxy_hands_over_what_it_was_given_and_no_default():
    made = Proxy(lambda args, kwargs: (args, kwargs), "made", parameters_of(_optional))
    assert made(1, 2, d=4) == ((1, 2), {"d": 4})
    assert made(1, 2, 3, 4, d=1, other=3) == ((1, 2, 3, 4), {"d": 1, "other": 3})
    with pytest.raises(TypeError, match="missing a required argument"):
        made(1, d=2)


@pytest.mark.parametrize(
    "said",
    [
        3,
        [["b", "plain", 1]],
        [["b=f()", 1, False]],
        [["if", 1, False]],
        [["b", 1, False]] * 2,
        [["a", 3, False], ["b", 1, False]],
        [["a", 1, True], ["b", 1, False]],
        [[f"a{i}", 1, False] for i in range(99)],
    ],
)
def test_forged_parameters_make_a_function_of_anything(said):
    made = Proxy(lambda args, kwargs: (args, kwargs), "made", said)
    assert made(1, 2, c=3) == ((1, 2), {"c": 3})


def test_views_of_the_checks_tensors_stay_views(across):
    view, copy, _ = across(view=lambda x: (x[1:, ::2].T, x), copy=lambda x: x[1:].clone())
    x = torch.arange(12.0).reshape(3, 4)
    part, whole = view(x)
    assert whole is x and torch.equal(part, x[1:, ::2].T) and part.stride() == x[1:, ::2].T.stride()
    assert part.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    assert copy(x).untyped_storage().data_ptr() != x.untyped_storage().data_ptr()


def test_the_items_of_a_checks_iterator_come_one_after_the_other(across):
    taken = []

    def arriving():
        for number in range(3):
            taken.append(torch.full((2,), float(number)))
            yield taken[-1]
            taken[-1].fill_(-1.0)

    keep, seen, _ = across(
        keep=lambda items: (next(items).clone(), [float(item[0]) for item in items], list(items)),
        seen=lambda items: list(items),
    )
    first, others, rest = keep(arriving())
    assert first.tolist() == [0, 0] and others == [1, 2] and rest == [] and len(taken) == 3
    assert [item.tolist() for item in seen(arriving())] == [
        [-1, -1]
    ] * 3  # as in one process: they are the check's tensors


def test_a_check_may_replace_an_earlier_answer(across):
    space = {}
    exec("def first(x):\n    return x + 1\n\ndef second(x):\n    return 2 * first(x)", space)
    second, remote = across(second=space["second"])
    # `across` keeps the notebook's names apart from the globals of the functions; in a notebook they are one.
    names = second.__globals__
    assert "second" in names and "third" not in names and names["second"] is second
    names.update({"second": lambda x: -x})
    assert remote.values(["second"])["second"](3) == -3 and second(3) == 8
    names["second"] = second
    assert remote.values(["second"])["second"] is second


def test_checks_that_were_loaded_before_get_the_functions_that_run_behind_the_walls(monkeypatch):
    owner = importlib.import_module("utils.checking.kernel_exercises")
    before = owner.simulate_file
    check = types.ModuleType("utils.checking.labs.of_a_test")
    check.held = before
    monkeypatch.setitem(sys.modules, check.__name__, check)
    for key, held in list(sys.modules.items()):  # as they are again after this test
        if key.startswith(("utils.checking", "instructor.checks")):
            for attribute, value in list(vars(held).items()):
                monkeypatch.setattr(held, attribute, value)
    put_behind_walls(base := {"mine": before}, lambda *call: call[:2])
    assert check.held is base["mine"] is owner.simulate_file is not before


def test_no_check_runs_a_students_text_or_starts_a_process():
    """Only `RUNNERS` do, and they run behind the walls: a check runs where the tests are."""
    running = {
        "exec",
        "eval",
        "compile",
        "import_file",
        "load_kernels",
        "simulate_failure",
        "import_module",
        "subprocess",
    }
    running |= {"system", "Popen", "posix_spawn", "execv", "run_path", "run_module", "get_ipython"}
    found = []
    for path in [*(ROOT / "instructor/checks").rglob("*.py"), *(ROOT / "utils/checking/labs").rglob("*.py")]:
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for node in ast.parse(path.read_text()).body:
            if not isinstance(node, ast.Import | ast.ImportFrom) and getattr(node, "name", "") not in RUNNERS.get(
                module, ()
            ):
                used = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
                used |= {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)} - {
                    "compile"
                }  # of re and torch
                found += [(module, node.lineno, name) for name in used & running]
    assert not found
