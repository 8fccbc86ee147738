"""The host side of a decode call: what is kept for the next call, what the launcher gets, on which device it runs."""

import collections
import contextlib
import types

import pytest
import torch

from tests.utils.attention.errors import relative_error
from utils.attention import attention_decode, decode, decode_reference
from utils.attention.gluon.decode import launch as decode_launch
from utils.attention.gluon.decode.launch import LOG2_E, Launch
from utils.attention.gluon.decode.plan import ALONE_BYTES, TILES, Arrangement, arrange
from utils.machine.device import Support


@pytest.mark.parametrize("window", [2**31 - 1, 2**31 + 7, 10**12])
@pytest.mark.parametrize("lengths", [None, [100, 3]])
@pytest.mark.parametrize("causal", [False, True])
def test_a_window_beyond_32_bits_sees_everything(window, lengths, causal):
    """The sum of a position and such a window overflowed 32 bits: all keys were masked, or a loop did not end."""
    pytest.importorskip("triton", reason="the simulator needs Triton for the language")
    from utils import gluon_cpu

    q = torch.randn(2, 2, 5, 64).bfloat16()
    k, v = (torch.randn(2, 1, 100, 64).bfloat16() for _ in "kv")
    seqlens = None if lengths is None else torch.tensor(lengths, dtype=torch.int32)
    launch = Launch(q, k, v, causal, 0.1, window, seqlens is not None, None, Arrangement(TILES["keys", 64], 3))
    with gluon_cpu.simulate(max_steps=20_000):
        out = launch(q, k, v, seqlens)
    assert relative_error(out, decode_reference(q, k, v, seqlens=seqlens, causal=causal, scale=0.1)) < 4e-3


def test_no_new_token_is_no_launch(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    q, k = torch.randn(2, 4, 0, 64).bfloat16(), torch.randn(2, 2, 50, 64).bfloat16()
    out = decode_launch.decode(q, k, k)
    assert out.shape == (2, 4, 0, 64) and out.dtype == torch.bfloat16


def test_a_scale_that_is_a_tensor_is_read_at_each_call():
    q, k, v = torch.randn(2, 4, 1, 16), torch.randn(2, 2, 50, 16), torch.randn(2, 2, 50, 16)
    scale = torch.tensor(0.1)
    for number in (0.1, 0.9):
        scale.fill_(number)
        assert relative_error(attention_decode(q, k, v, scale=scale), decode_reference(q, k, v, scale=number)) < 1e-5
    with pytest.raises(ValueError, match="a finite number"):
        attention_decode(q, k, v, scale=[0.1])


def test_a_cache_without_pages_is_named():
    q, pages, lengths = torch.randn(2, 4, 1, 16), torch.randn(0, 2, 16, 16), torch.zeros(2, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"k_cache has no pages: .* \(0, 2, 16, 16\)"):
        attention_decode(q, pages, pages, seqlens=lengths, block_table=torch.zeros(2, 3, dtype=torch.int32))


@pytest.fixture
def compiled(monkeypatch):
    """Return what Triton compiles, with the attributes that an adapted copy of it reads."""
    from utils.kernels import assembling

    monkeypatch.setattr(assembling, "assemble", lambda ptx: b"")
    monkeypatch.setattr(assembling, "policy_copies", lambda ptx: ptx)
    metadata = collections.namedtuple("Metadata", "shared num_warps")(70000, 4)
    return types.SimpleNamespace(metadata=metadata, module="loaded", function=1, _run=2, asm={"ptx": ""})


def cluster_launch(keys):
    q, k = torch.zeros(1, 8, 1, 128).bfloat16(), torch.zeros(1, 2, keys, 128).bfloat16()
    return Launch(q, k, k, True, 0.1, 0, False, None, Arrangement(TILES["cluster", 128], 8, parts=4))


def test_a_cache_that_grows_has_one_adapted_kernel(compiled):
    """Each length has a launch of its own; if each had a kernel of its own, too, all would stay loaded."""
    first = cluster_launch(4000)._adapt(compiled)
    assert first is cluster_launch(4001)._adapt(compiled) and first.module is None and compiled.module == "loaded"
    assert first.metadata.shared == ALONE_BYTES > compiled.metadata.shared == 70000


def test_queries_whose_rows_have_no_one_distance_are_copied():
    k = torch.zeros(2, 2, 50, 64).bfloat16()

    def copies(heads, sq):
        q = torch.zeros(2, sq, heads, 64).bfloat16().transpose(1, 2)  # tokens first
        return tuple(Launch(x, k, k, True, 0.1, 0, False, None).copies for x in (q, q.contiguous()))

    assert copies(4, 3) == (True, False)
    assert copies(4, 1) == copies(2, 3) == (False, False)  # one token, or groups of one head


class OnGpu(torch.Tensor):
    """A tensor that says it is on the second of two GPUs."""

    is_cuda = True
    device = torch.device("cuda", 1)

    def get_device(self):
        return 1


@pytest.mark.parametrize("current", [0, 1])
def test_a_call_runs_on_the_device_of_its_tensors(monkeypatch, current):
    """Kernels are loaded and launched on the current device, so it has to be that of the tensors."""
    entered, launched = [current], []

    @contextlib.contextmanager
    def on_device(device):
        entered.append(device.index)
        yield
        entered.pop()

    def launch(*given):
        launched.append(entered[-1])

    launch.copies = False
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: entered[-1], raising=False)
    monkeypatch.setattr(torch.cuda, "device", on_device)
    monkeypatch.setattr(decode_launch, "_LAUNCHES", types.SimpleNamespace(get=lambda key: launch))
    q, k = (torch.zeros(2, heads, 1, 64).as_subclass(OnGpu) for heads in (4, 2))
    decode_launch.decode(q, k, k)
    assert launched == [1] and entered == [current]


@pytest.fixture
def launched(monkeypatch):
    """Return the tensors and the sizes of launches of kernels that were compiled before, on a made-up GPU of 132 SMs."""
    calls = []

    def compile_none(self, *given):
        sizes = self.sizes, self.merge_sizes
        self.handles = [lambda *tensors, rest=rest: calls.append((tensors, rest)) for rest in sizes]
        calls.append("compiled")

    monkeypatch.setattr(decode_launch, "arrange", lambda shape, _: arrange(shape, 132))
    monkeypatch.setattr(decode_launch, "placeholder", lambda device, *dtype: torch.zeros(4))
    monkeypatch.setattr(Launch, "_compile", compile_none)
    monkeypatch.setattr(decode, "gluon_takes", lambda *given, **more: Support(True))
    monkeypatch.setattr(decode, "_decided", {})
    monkeypatch.setattr(decode_launch, "_LAUNCHES", {})
    return calls


def problem(batch=9, slots=1024):
    q, k, v = torch.randn(batch, 32, 1, 128), torch.randn(batch, 8, slots, 128), torch.randn(batch, 8, slots, 128)
    return *(x.bfloat16() for x in (q, k, v)), torch.full((batch,), slots, dtype=torch.int32)


def test_a_kept_launch_gets_the_tensors_of_this_call(launched):
    attention_decode(*problem()[:3], seqlens=problem()[3])
    q, k, v, lengths = problem()
    out = attention_decode(q, k, v, seqlens=lengths)
    assert launched.pop(0) == "compiled" and len(launched) == 4
    (first, sizes), (merge, merge_sizes) = launched[-2:]
    assert all(x is y for x, y in zip((*first[:4], first[5]), (q, k, v, out, lengths), strict=True))
    assert merge == first[3:5] and sizes[-2] == merge_sizes[-1] == 128**-0.5 * LOG2_E


def test_arguments_that_differ_find_other_launches(launched):
    q, k, v, lengths = problem(2, 256)
    page = k.view(4, 8, 128, 128)
    table = torch.arange(4, dtype=torch.int32).view(2, 2)
    fp8, scales = k.to(torch.float8_e4m3fn), torch.ones(2, 8)
    given = (
        ((q, k, v), {}),
        ((q, k, v), {"seqlens": lengths}),
        ((q, k, v), {"window": 100}),
        ((q, k, v), {"causal": False}),
        ((q, k, v), {"scale": 0.25}),
        ((q.half(), k.half(), v.half()), {}),
        ((q, k.transpose(1, 2).contiguous().transpose(1, 2), v), {}),
        ((q, page, page), {"seqlens": lengths, "block_table": table}),
        ((q, page, page), {"seqlens": lengths, "block_table": table.T.contiguous().T[:, :1]}),
        ((q, fp8, fp8), {"kv_scales": scales}),
    )
    for tensors, options in given:
        attention_decode(*tensors, **options)
    assert launched.count("compiled") == len(given) == len(decode_launch._LAUNCHES)


def test_a_cache_that_starts_off_a_multiple_of_16_bytes_is_copied_each_time(launched):
    q, k, v, _ = problem(2, 256)
    attention_decode(q, k, v)
    shifted = torch.empty(k.numel() + 1, dtype=k.dtype)[1:].view(k.shape).copy_(k)
    for _ in range(2):
        attention_decode(q, shifted, v)
        base = launched[-1][0][1]
        assert base.data_ptr() % 16 == 0 and torch.equal(base, k) and base is not shifted


@pytest.mark.parametrize("with_lengths", [False, True])
def test_torch_compiles_a_call_that_was_never_made(with_lengths):
    """torch.compile cannot trace the choice of the backend; the decision of an earlier eager call had hidden that."""
    decode._decided.clear()
    torch._dynamo.reset()
    q, k, v = torch.randn(2, 4, 3, 16), torch.randn(2, 2, 50, 16), torch.randn(2, 2, 50, 16)
    lengths = torch.tensor([50, 7], dtype=torch.int32) if with_lengths else None
    compiled = torch.compile(
        lambda q, k, v, n: 2 * attention_decode(q, k, v, seqlens=n, scale=0.3, window=20),
        fullgraph=True,
        backend="eager",
    )
    expected = decode_reference(q, k, v, seqlens=lengths, scale=0.3, window=20)
    assert relative_error(compiled(q, k, v, lengths) / 2, expected) < 1e-5
