"""Without a GPU: each step of the ladder compiles for sm_90a, and the assembly is what the step claims."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.utils.kernel_keys import keys_in_two_processes
from utils.attention.gluon.plan import plan_for
from utils.machine.device import offline_compile_support

pytestmark = pytest.mark.skipif(not offline_compile_support(), reason=offline_compile_support().reason)

ROOT = Path(__file__).resolve().parents[3]
STEPS_1_TO_4 = [{"step": step, "head_dim": 128, "flags": {"mask": "causal", "lse": True}} for step in (1, 2, 3, 4)]
STEP_5 = [
    {"step": 5, "head_dim": head_dim, "flags": flags}
    for head_dim, flags in (
        (64, {}),
        (64, {"mask": "causal"}),
        (64, {"variant": "few"}),
        (64, {"variant": "four", "mask": "causal"}),
        (128, {"mask": "causal", "dtype": "fp16"}),
        (128, {}),
        (128, {"variant": "three"}),
        (80, {"mask": "causal"}),
        (128, {"mask": "window"}),
        (64, {"mask": "window"}),
        (64, {"mask": "packed", "overhang": True}),
        (64, {"mask": "packed window"}),
        (256, {"mask": "causal"}),
        (256, {"variant": "one"}),
    )
]


@pytest.fixture(scope="module")
def report(request):
    """What was compiled: steps 1 to 4, and the cases of step 5 that run in this session."""
    chosen = [item.callspec.params.get("case") for item in request.session.items if hasattr(item, "callspec")]
    cases = STEPS_1_TO_4 + [case for case in STEP_5 if case in chosen]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("offline_report.py")), json.dumps(cases)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=550,
        cwd=ROOT,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("REPORT ")]
    assert lines, f"compiling failed:\n{done.stderr[-3000:]}"
    return json.loads(lines[0].removeprefix("REPORT "))


def plan_of(case):
    return plan_for(case["step"], case["head_dim"], case["flags"].get("variant", ""))


def of(report, case):
    return report[json.dumps(case, sort_keys=True)]


@pytest.mark.parametrize("case", STEPS_1_TO_4 + STEP_5, ids=str)
@pytest.mark.slow
def test_uses_hopper_products_and_nothing_spills(report, case):
    row = of(report, case)
    assert row["wgmma"] and row["HGMMA"] and not row["HMMA"]
    assert row["covered_barriers"] == []
    assert row["spill_bytes"] == row["stack_bytes"] == row["local_memory"] == 0
    # ptxas warns where it has to serialize wgmma. With one consumer there are 256 registers for a thread, one more than it takes.
    alone = plan_of(case).consumers == 1 and case["step"] == 5
    assert all("Too many maxnreg" in text and alone for text in row["warnings"])
    assert row["shared_bytes"] <= 227 * 1024


@pytest.mark.parametrize(
    ("step", "has", "lacks"),
    [
        (1, "", "cp_async tma_load mbarrier_wait setmaxnreg"),
        (2, "cp_async LDGSTS", "tma_load mbarrier_wait setmaxnreg"),
        (3, "tma_load UTMALDG UTMASTG mbarrier_wait expect_bytes", "cp_async setmaxnreg"),
        (4, "tma_load mbarrier_wait setmaxnreg", ""),
    ],
)
@pytest.mark.slow
def test_a_step_has_the_instructions_that_it_teaches(report, step, has, lacks):
    row = of(report, STEPS_1_TO_4[step - 1])
    assert all(row[name] for name in has.split()) and not any(row[name] for name in lacks.split())


@pytest.mark.parametrize("case", STEP_5, ids=str)
@pytest.mark.slow
def test_step_5_is_specialized_within_its_register_budget(report, case):
    row = of(report, case)
    assert row["tma_load"] and row["mbarrier_wait"] and row["setmaxnreg"]
    assert row["tma_store"]
    warpgroups = plan_of(case).consumers + 1
    assert row["registers"] * 128 * warpgroups <= 65536


@pytest.mark.parametrize("case", STEP_5, ids=str)
@pytest.mark.slow
def test_step_5_overlaps_the_softmax_with_the_second_product(report, case):
    """The loop queues both products, waits for the first, and computes exponentials during the second, or after both."""
    loop = of(report, case)["loop"]
    waits = [i for i, text in enumerate(loop) if text.startswith("WARPGROUP.DEPBAR")]
    products = [i for i, text in enumerate(loop) if text.startswith("HGMMA")]
    exponentials = [i for i, text in enumerate(loop) if text.startswith("MUFU.EX2")]
    assert len(waits) == 2 and loop[waits[0]].rstrip().endswith("0x1") and loop[waits[1]].rstrip().endswith("0x0")
    assert products[-1] < waits[0] < exponentials[0], "the scores are waited for with P V already queued"
    plan = plan_of(case)
    if plan.depth:  # one product of the scores for each 16 columns; P V has the same columns, and only those are scaled
        assert [f"64x{plan.depth}x16" in loop[i] for i in products] == [False] * (plan.depth // 16) + [True] * 8
        assert sum(text.startswith("FMUL") for text in loop) < plan.depth / 2 + 8
    # A thread has BLOCK_N / 2 scores. Half of them, or all with three consumers, are turned into probabilities while P V runs.
    before = sum(i < waits[1] for i in exponentials)
    assert before >= plan.block_n / 2 * (0.9 if plan.consumers == 3 else 0.25)
    assert not any(text.startswith("BAR.SYNC") for text in loop[waits[1] :]), "no barrier after the products"
    masks = sum(text.startswith("FSEL") for text in loop)
    hiding = "window" in case["flags"].get("mask", "")
    assert hiding or masks < plan.block_n / 8, "a mask in vain"


@pytest.mark.parametrize(
    "case", [x for x in STEP_5 if x["head_dim"] == 64 and "packed" not in x["flags"].get("mask", "")], ids=str
)
@pytest.mark.slow
def test_a_rows_maximum_stands_between_the_other_rows_exponentials(report, case):
    """With too few registers ptxas puts the second row's maximum, 31 instructions, after the first row's exponentials: 10% of a block.

    In the kernels of packed sequences it still does so: the threads' own stores take the registers.
    """
    apart, longest = 0, 0
    loop = of(report, case)["loop"]
    first = next(i for i, text in enumerate(loop) if text.startswith("MUFU.EX2"))
    for text in loop[first:]:
        apart = 0 if text.startswith("MUFU.EX2") else apart + text.startswith("FMNMX")
        longest = max(longest, apart)
    assert longest <= 10


@pytest.mark.slow
def test_a_compiled_kernel_is_found_again_by_another_process():
    keys = keys_in_two_processes(
        "from utils.attention.gluon import launch\n"
        "from utils.attention.gluon.backward import arguments as backward\n"
        "from utils.attention.gluon.decode import cluster, kernel, keys, merge, quantized_keys, rows\n"
        "kernels = [launch.kernel_of(step) for step in range(1, 6)]\n"
        "names = 'step1_atomics.attention_backward_step1', 'step3_warp_specialized.attention_backward_step3'\n"
        "names += 'step6_one_consumer.attention_backward_step6', 'wide_heads.attention_backward_wide', 'dq.attention_backward_dq'\n"
        "kernels += [backward.kernel_of(name) for name in names]\n"
        "modules = cluster, kernel, keys, merge, quantized_keys, rows\n"
        "kernels += [found for module in modules for name, found in vars(module).items() if name.startswith(('attention_decode', 'attend_'))]"
    )
    assert keys[0] == keys[1] and keys[0].count(",") > 15
