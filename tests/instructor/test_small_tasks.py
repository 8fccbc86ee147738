"""The lines that students write for no points: the right one gets a tick, usual wrong ones a sentence, and nothing stops."""

import importlib
import math

import pytest

# {lab: {check: (right lines, wrong lines with a word of what is said)}}
TASKS = {
    "lab1": {
        "check_full_sum": ([256, 2**8], {512: "before", 128: "129", 10**400: "Try it"}),
        "check_bandwidth": ([989.4 / (312 / 2.039), 6.466], {2.039: "further right", 4.8: "peak over"}),
        "check_users": ([(141e9 - 0.2e9) // (2 * 2 * 256 * (15 * 512 + 3 * 32768))], {1299: "share", 233: "slide"}),
        "check_busy": ([167.4 / 1582.8, 0.1058], {167.4: "between 0 and 1", 0.5: "eager_time_us"}),
        "check_kernel_us": ([17, 17.0], {8.5: "one kernel runs"}),
        "check_row_stats": (
            [((3, 1.135), (5, 1.154)), [[3, 1 + math.exp(-2)], [5, 1 + math.exp(-2) * (1 + math.exp(-2))]]],
            {((3, 1.135), (5, 2.135)): "rescaled", ((3, 1.135),): "largest so far", 3: "largest so far"},
        ),
        "check_limit": ([128 / 2], {128: "two bytes", 256: "four times", 206: "long texts"}),
    },
    "lab2_flexattention": {
        "check_mask_outweighs": ([4 * 128], {128: "four of them", 1024: "L numbers"}),
        "check_longest_mask": ([(141e9 / 2) ** 0.5, 265518], {375499: "two bytes", 141e9 / 2: "pair", 1e5: "solve"}),
        "check_seen_by_60": ([(50, 60)], {(50, 69): "later", (0, 60): "its own", (50, 61): "which document"}),
        "check_boundaries": ([[0, 5, 6, 9, 11, 12, 16]], {(5, 6, 9, 11, 12, 16): "at 0", (0, 5, 1): "Seven"}),
        "check_causal_promise": ([128 / 65, 1.97], {2: "diagonal", 65 / 128: "the share", 64 / 65: "last one all"}),
        "check_slope": ([8 / 64], {8: "64", 0.5: "distance"}),
        "check_weight": (
            [math.exp(-0.125 * 64), 3.35e-4],
            {8: "loses", 1 / 8: "share", 2981: "smaller", 1: "exponential"},
        ),
        "check_calls": ([28], {27: "tenth", 10: "n"}),
        "check_eager_lengths": ([12 - 8], {12: "compiled", 8: "limit"}),
        "check_training_promise": ([1024 / 80], {8: "causal", 16: "pairs", 64: "leaves 10"}),
        "check_padding": ([1 / 2], {1 / 3: "computed", 512: "in tokens", 1.5: "alone", 0.25: "mean text"}),
        "check_quarter_block": ([1 / 4], {1: "whole"}),
        "check_place": ([2 * 64 + 36], {100: "position", 36: "in the page", 356: "Which of its pages"}),
        "check_empty": ([16 * 64 - 1000], {40: "last page", 1024: "all", 15: "Whole"}),
        "check_patch": ([(72 // 16, 16 + 72 % 16)], {(1, 72): "row by row", (4, 8): "column 16", (2, 44): "A tile"}),
        "check_sparse_mask": (
            [lambda b, h, q, k: (k <= q) & ((q - k) % 16 == 0), lambda b, h, q, k: (k <= q) & ((q + k) % 15 == 0)],
            {
                lambda b, h, q, k: k <= q: "100%",
                lambda b, h, q, k: (k <= q) & (q - k < 8): "blocks are empty",
                lambda b, h, q, k: (q - k) % 16 == 0: "not causal",
            },
        ),
    },
    "lab3_gluon": {
        "check_same_time": ([4096 / 4 / 16], {128: "two products", 32: "4096"}),
        "check_naive_mb": ([(4 * 256 + 4 * 4096) * 4 * 1024 / 1e6], {67.1: "travel", 37.7: "read again", 4.2: "once"}),
        "check_sectors": ([(32, 0.125)], {(32, 1 / 32): "four bytes", (4, 1): "of its own"}),
        "check_held": ([32 * 32 / 128], {4: "repeated", 32: "warps", 1: "threads"}),
        "check_tile_11": ([(11 % 3, 11 // 3 % 2)], {(2, 3): "parity", (11, 0): "Slot"}),
        "check_slots": ([math.ceil(600 * 20 / 2048)], {5: "up", 600 * 20 / 2048: "whole", 12: "times"}),
        "check_lane": ([4 * 3 + 6 // 2], {18: "Two columns", 6: "Row r"}),
        "check_place": ([2 ^ 3], {5: "carry", 2: "XOR", 3: "XOR"}),
        "check_causal_blocks": ([math.ceil((128 + 100) / 64)], {2: "further on", 5: "No row", 3: "127"}),
        "check_registers": ([(384 * 168 - 128 * 40) / 256], {464: "two consumers", 240: "keep 40"}),
        "check_row_a_thread": ([128 * 128 / 128], {64: "Hopper", 1: "rows"}),
        "check_columns": ([2 * 128 + 2 * 128], {256: "Two tiles", 128: "128 rows"}),
    },
    "lab4_sdpa": {
        "check_first_version": ([91501], {91500: "not newer", 91600: "9.15.0"}),
        "check_third": (["math", "Math"], {"efficient": "second", "cudnn": "last", "flash": "8.0"}),
        "check_score_mb": ([4 * 1024**2 * 4 / 1e6], {4.194304: "head", 16: "10^6", 67: "pair"}),
        "check_both_flops": ([7 / 2], {2.5: "Forward", 5: "Divide", 7: "five"}),
        "check_full_batch": ([math.ceil(132 / 8)], {16: "idle", 132: "batch times"}),
        "check_cache_mb": ([2 * 8 * 32768 * 128 * 2 / 1e6], {67.1: "values", 536.9: "kept", 1: "Two tensors"}),
        "check_lse_numbers": ([2 * 4 * 24], {6144: "for D", 24: "head", 8: "query"}),
        "check_your_strides": (
            [(480, 16, 48, 1)],
            {(480, 160, 16, 1): "H, S", (480, 48, 16, 1): "order", 1: "far apart"},
        ),
        "check_both_errors": ([math.hypot(0.003, 0.004)], {0.007: "root", 0.001: "in squares"}),
        "check_after_one": ([1.0078125], {1.00390625: "halfway", 1.5: "significant"}),
        "check_your_mean": ([(1.25 * 0.8) ** 0.5], {1.025: "both ways", 2.05: "multiply"}),
    },
}
ROWS = [(lab, name) for lab, tasks in TASKS.items() for name in tasks]


@pytest.mark.parametrize(("lab", "name"), ROWS, ids=[name for _, name in ROWS])
def test_a_line_gets_a_tick_or_a_hint(capsys, lab, name):
    check = getattr(importlib.import_module(f"utils.labs.{lab}"), name)
    right, wrong = TASKS[lab][name]
    for line in right:
        check(line)
        assert capsys.readouterr().out.startswith("✓"), line
    for line, word in wrong.items():
        check(line)
        said = capsys.readouterr().out
        assert said[0] in "✗…" and word in said, said
    if name != "check_sparse_mask":
        check(None)
        assert "write your line" in capsys.readouterr().out


@pytest.mark.parametrize("lab", TASKS)
def test_every_small_task_stands_in_its_lab_and_in_this_table(lab):
    from tests.instructor.lab_cases import built

    module = importlib.import_module(f"utils.labs.{lab}")
    tasks = {name for name, value in vars(module).items() if hasattr(value, "what") or name == "check_sparse_mask"}
    assert tasks == set(TASKS[lab])
    assert [name for name in tasks if f"{name}(" not in built(lab).student] == []
