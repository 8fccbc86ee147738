"""`labs bench choose`: the sweep and its file, the choices and how well they hold, and `attention` going by them."""

import json

import pytest
import torch
from typer.testing import CliRunner

from utils.attention import attention, find_backend, last_run, make_problem
from utils.attention import choosing as choices
from utils.bench import choose as choosing
from utils.bench.cli import app
from utils.bench.documents import to_json
from utils.bench.errors import BenchError
from utils.bench.workload import Workload
from utils.files import ROOT
from utils.machine.environment import cpu_model

CPU = torch.device("cpu")
GRID = ROOT / "assets/results/h200/sdpa_grid.json"
TINY = [
    Workload(1, 2, 16, 16, "fp32", "causal", direction="both"),
    Workload(1, 2, 24, 16, "fp32", "causal"),
    Workload(2, 4, 1, 16, "fp32", kv_heads=2, seq_len_kv=40),
]


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    path = tmp_path_factory.mktemp("sweep") / "grid.json"
    return path, choosing.sweep(TINY, path, CPU, backends=("flash", "math", "cudnn", "naive"), samples=5)


@pytest.fixture(autouse=True)
def nothing_in_force(monkeypatch):
    monkeypatch.delenv(choices.VARIABLE, raising=False)
    yield
    choices.use_choices(None)


# ---- the sweep ---------------------------------------------------------------------------------------------


def test_a_row_holds_what_the_schema_promises(swept):
    path, document = swept
    assert choosing.GRID.read(path) == json.loads(json.dumps(document)) and document["status"] == "complete"
    rows = {(row["label"], row["backend"]): row for row in document["rows"]}
    assert len(rows) == 12 and {row["default"] for row in document["rows"]} == {"flash"}
    training, prefill, decode = (one.label for one in TINY)
    flash = rows[training, "flash"]
    assert (flash["kind"], flash["pass"], flash["status"]) == ("training", "both", "ok")
    assert flash["ms_low"] <= flash["ms"] <= flash["ms_high"] and flash["tflops"] > 0
    assert flash["peak_mb"] > 0 and 0 < flash["error"] < 1e-6
    assert any("flash_attention_for_cpu_backward" in name for name in flash["kernels"])
    assert rows[decode, "math"]["kind"] == "decode" and rows[training, "naive"]["status"] == "ok"
    if not torch.cuda.is_available():
        assert rows[prefill, "cudnn"]["status"] == "refused" and "NVIDIA GPU" in rows[prefill, "cudnn"]["refused"]


def test_wrong_results_are_kept_out_of_the_race(monkeypatch):
    call = choosing.backend_call

    def wrong(workload, name, inputs):
        found = call(workload, name, inputs)
        return (lambda: found().roll(1, dims=1)) if name == "math" else found

    monkeypatch.setattr(choosing, "backend_call", wrong)
    rows = {row["backend"]: row for row in choosing.measure_shape(TINY[1], ("flash", "math"), CPU, seed=1, samples=3)}
    assert rows["math"]["status"] == "failed" and "float64" in rows["math"]["refused"] and "ms" not in rows["math"]
    assert rows["flash"]["status"] == "ok"


def test_other_backends_are_proved_too(monkeypatch):
    import dataclasses

    claims = dataclasses.replace(find_backend("naive"), cpu_operators="aten::something_else")
    monkeypatch.setattr("utils.bench.targets.proof.find_backend", lambda name: claims)
    if torch.cuda.is_available():
        pytest.skip("the operators are a CPU's")
    (row,) = choosing.measure_shape(TINY[1], ("naive",), CPU, seed=1, samples=3)
    assert row["status"] == "failed" and "none of what was launched is its own" in row["refused"]
    (row,) = choosing.measure_shape(TINY[1], ("triton",), CPU, seed=1, samples=3)
    assert row["status"] == "refused" and "interpreter" in row["refused"]


def test_a_backend_without_a_backward_pass_says_so_of_training():
    if torch.cuda.is_available():
        pytest.skip("FlexAttention has a backward pass on a GPU")
    naive, flex = choosing.measure_shape(TINY[0], ("naive", "flex"), CPU, seed=1, samples=3)
    assert naive["status"] == "ok" and naive["pass"] == "both" and naive["error"] < 1e-5
    assert flex["status"] == "refused" and "no backward pass on a CPU" in flex["refused"]


def interrupt_at(monkeypatch, number, error=KeyboardInterrupt):
    measure, seen = choosing.measure_shape, []

    def counted(workload, *args, **kwargs):
        seen.append(workload.label)
        if len(seen) == number:
            raise error
        return measure(workload, *args, **kwargs)

    monkeypatch.setattr(choosing, "measure_shape", counted)
    return seen


def test_ctrl_c_leaves_a_valid_file_and_the_sweep_goes_on_from_it(tmp_path, monkeypatch):
    path, options = tmp_path / "grid.json", {"backends": ("flash", "math"), "samples": 3}
    seen = interrupt_at(monkeypatch, 3)
    with pytest.raises(KeyboardInterrupt):
        choosing.sweep(TINY, path, CPU, **options)
    document = choosing.GRID.read(path)
    assert document["status"] == "interrupted" and len(document["rows"]) == 4
    done = [row["ms"] for row in document["rows"]]
    seen.clear()
    document = choosing.sweep(TINY, path, CPU, **options)
    assert seen == [TINY[2].label] and document["status"] == "complete"
    assert [row["ms"] for row in document["rows"]][:4] == done
    with pytest.raises(BenchError, match="samples 3 \\(here 5\\)"):
        choosing.sweep(TINY, path, CPU, backends=("flash", "math"), samples=5)
    document["environment"]["cpu"] = "another one"
    path.write_text(to_json(document, "rows"))
    with pytest.raises(BenchError, match=r"begun elsewhere.* cpu another one"):
        choosing.sweep(TINY, path, CPU, **options)
    path.write_text(path.read_text()[:400])
    with pytest.raises(BenchError, match="truncated"):
        choosing.sweep(TINY, path, CPU, **options)


def test_a_time_limit_stops_between_shapes(tmp_path):
    document = choosing.sweep(TINY, tmp_path / "grid.json", CPU, backends=("flash",), samples=3, max_seconds=1e-9)
    assert document["status"] == "stopped" and document["rows"] == []
    with pytest.raises(BenchError, match="nothing to choose by"):
        choosing.choices_document(document)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_grid_covers_kinds_head_dims_and_groups(device):
    grid = choosing.shapes(device, (64, 128, 256), "bf16")
    fields = [choosing.shape_fields(one) for one in grid]
    assert len({one.label for one in grid}) == len(grid) == {"cpu": 27, "cuda": 237}[device]
    assert {(one["kind"], one["head_dim"]) for one in fields} == {(k, d) for k in choices.KINDS for d in (64, 128, 256)}
    assert {one["heads"] == one["kv_heads"] for one in fields} == {True, False}


# ---- the choices -------------------------------------------------------------------------------------------


def decode_row(batch, keys, **ms):
    workload = Workload(batch, 16, 1, 128, "bf16", kv_heads=4, seq_len_kv=keys)
    fields = choosing.shape_fields(workload)
    return [
        fields | {"set": "grid", "backend": name, "status": "ok", "refused": None, "ms": value, "default": "cudnn"}
        for name, value in ms.items()
    ]


@pytest.fixture
def made_up():
    """Decode where flash wins at few keys and cudnn at many."""
    rows = [
        row
        for keys, cudnn, flash in ((512, 2.0, 1.0), (1024, 1.5, 1.0), (8192, 1.0, 1.5), (16384, 1.0, 2.0))
        for row in decode_row(4, keys, cudnn=cudnn, flash=flash)
    ]
    environment = {
        "gpu": None,
        "cpu": cpu_model(),
        "torch": torch.__version__,
        "cuda": None,
        "cudnn": None,
        "driver": None,
        "commit": None,
    }
    return {"status": "complete", "finished": "now", "environment": environment, "method": {}, "rows": rows}


def test_the_numbers_of_a_sweep(made_up):
    (group,) = choosing.by_group(made_up)
    assert group["best"] == {"flash": 2, "cudnn": 2} and group["worst"] == 2.0
    assert group["worst_at"] == "B4 H16/4 S1x512 D128 bf16 full"
    assert group["default_over_best"] == pytest.approx((2.0 * 1.5) ** 0.25)


def request(batch, heads, kv_heads, sq, sk, head_dim=128, causal=False, dtype=torch.bfloat16, grad=False):
    q = torch.empty(batch, heads, sq, head_dim, dtype=dtype, requires_grad=grad)
    k = torch.empty(batch, kv_heads, sk, head_dim, dtype=dtype)
    return make_problem(q, k, k, causal=causal)


def test_a_shape_is_ranked_like_its_neighbours(made_up):
    found = choices.parse_choices(choosing.choices_document(made_up), "made up")
    assert len(found.points) == 4
    assert found.rank(request(4, 16, 4, 1, 1024)) == ("flash", "cudnn")
    assert found.relative_times(choices.point_of(request(4, 16, 4, 1, 1024))) == {
        "flash": 1.0,
        "cudnn": pytest.approx(1.5),
    }
    between = found.relative_times(choices.point_of(request(4, 16, 4, 1, 2048)))
    assert 1.0 < between["cudnn"] < 1.5 and next(iter(between)) == "flash"
    assert found.rank(request(4, 16, 4, 1, 10_000)) == ("cudnn", "flash")
    assert found.rank(request(4, 16, 4, 1, 10_000, head_dim=64)) == ("cudnn", "flash")  # the nearest there is
    assert found.rank(request(1, 8, 8, 512, 512, causal=True)) == ()  # no prefill was measured
    assert found.rank(request(4, 16, 4, 1, 10_000, dtype=torch.float32)) == ()
    assert choices.kind_of(512, 512, True) == "training" and choices.kind_of(4, 4096, False) == "decode"
    assert choices.kind_of(4, 4, False) == "prefill"


def written(tmp_path, document, **machine):
    small = choosing.choices_document(document)
    small["machine"] |= machine
    path = tmp_path / "choices.json"
    path.write_text(to_json(small, "points"))
    return path


def test_attention_goes_by_the_file(tmp_path, swept, monkeypatch):
    _, document = swept
    if torch.cuda.is_available():
        pytest.skip("the made-up file is of a CPU")
    document = json.loads(json.dumps(document))
    for row in document["rows"]:
        if row["status"] == "ok":
            row["ms"] = {"math": 1.0, "naive": 2.0, "flash": 3.0}[row["backend"]]
    path = written(tmp_path, document)
    q = torch.randn(1, 2, 20, 16)
    attention(q, q, q, causal=True)
    assert (last_run().backend, last_run().chosen_by) == ("flash", "")
    assert choices.use_choices(path).machine["cpu"] == cpu_model()
    attention(q, q, q, causal=True)
    assert (last_run().backend, last_run().chosen_by) == ("math", str(path))
    attention(q, q, q, causal=True, backend="flash")
    assert (last_run().backend, last_run().chosen_by) == ("flash", "")
    choices.use_choices(None)
    attention(q, q, q, causal=True)
    assert last_run().backend == "flash"
    monkeypatch.setenv(choices.VARIABLE, str(path))
    choices.use_choices(None)  # the variable is read again
    attention(q, q, q, causal=True)
    assert (last_run().backend, last_run().chosen_by) == ("math", str(path))


@pytest.mark.skipif(torch.cuda.is_available(), reason="the made-up files are of a CPU")
def test_files_that_are_not_for_this_machine(tmp_path, made_up):
    with pytest.raises(ValueError, match="measured on NVIDIA A100, and this is"):
        choices.use_choices(written(tmp_path, made_up, gpu="NVIDIA A100"))
    with pytest.raises(ValueError, match="measured on another CPU"):
        choices.use_choices(written(tmp_path, made_up, cpu="another CPU"))
    with pytest.warns(UserWarning, match="torch 1.0 \\(here"):
        choices.use_choices(written(tmp_path, made_up, torch="1.0"))
    for text, said in (("{", "no JSON"), ('{"schema": "else"}', "no labs-attention-choices file")):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(ValueError, match=said):
            choices.use_choices(tmp_path / "bad.json")
    with pytest.raises(ValueError, match="cannot be read"):
        choices.use_choices(tmp_path / "nowhere.json")
    damaged = json.loads(written(tmp_path, made_up).read_text())
    del damaged["points"][0]["heads"]
    (tmp_path / "bad.json").write_text(json.dumps(damaged))
    with pytest.raises(ValueError, match="damaged"):
        choices.use_choices(tmp_path / "bad.json")


def test_the_recorded_h200_grid_is_read():
    document = choosing.GRID.read(GRID)
    assert document["environment"]["gpu"] == "NVIDIA H200" and len(choosing.measured_shapes(document)) >= 60


# ---- the command -------------------------------------------------------------------------------------------


def command(*words):
    return CliRunner().invoke(app, ["choose", *map(str, words)])


@pytest.mark.skipif(torch.cuda.is_available(), reason="the tiny shapes are fp32, for a CPU")
def test_the_command_end_to_end(tmp_path, monkeypatch):
    monkeypatch.setattr(choosing, "shapes", lambda *args: TINY)
    out = tmp_path / "here" / "grid.json"
    seen = interrupt_at(monkeypatch, 3)
    result = command("--out", out, "--samples", 3)
    assert result.exit_code == 130 and "goes on from there" in result.stderr
    result = command("--out", out, "--samples", 3, "--json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["status"] == "complete" and sum(group["shapes"] for group in told["groups"]) == 3
    assert {path.name for path in out.parent.iterdir()} == {"grid.json", "grid_choices.json"}
    assert len(seen) == 4
    result = command("--out", out, "--samples", 3)
    assert "Who is best where" in result.stdout and "LABS_ATTENTION_CHOICES" in result.stdout and len(seen) == 4


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--kinds", "decod"), "Did you mean decode"),
        (("--head-dims", "96"), "64, 128, 256"),
        (("--kinds", ","), "names nothing"),
        (("--dtype", "fp8"), "fp16, bf16, fp32"),
        (("--providers", "gluonn"), "Did you mean gluon"),
        (("--samples", "1"), "3 or more"),
        (("--max-seconds", "0"), "above 0"),
    ],
)
def test_wrong_words_are_refused_before_anything_runs(tmp_path, monkeypatch, words, said):
    monkeypatch.setattr(choosing, "sweep", lambda *args, **kwargs: pytest.fail("it ran"))
    result = command("--out", tmp_path / "grid.json", *words)
    assert result.exit_code == 2 and said in result.stderr
