"""Slips in lab 1's model answers: (what is wrong, answer cell, [(old text, new text)], words of the visible message).

Each slip changes a line or two of the model answer. Together with `lab1_wrong_answers` they are the catalogue that the
visible checks are held against.
"""

_CEIL = "math.ceil(1.5 * dtype.itemsize * ridge)"
_DTYPE = "The number of bytes depends on the dtype"
_ELEMENTS = "elements, not bytes"
_EVERY = "memory read that nothing was written to"
_PAIRS = "return sum(min(p + 1, window or p + 1) for p in positions)"
_POSITIONS = "range(kv_len - query_len, kv_len)"
_FLOOR = "(weights * weight_bytes + batch * cache * cache_bytes)"
_GEMM = "(m * k + k * n + m * n) * dtype.itemsize"
_GEMV = "(m * k + k + m) * dtype.itemsize"
_CACHE = "2 * batch * tokens * config.num_key_value_heads * config.head_dim * dtype.itemsize"

SLIPS = [
    # ---- 1.1
    ("columns of b by a's rows", "q1_1", [("n_size = b.shape[1]", "n_size = a.shape[0]")], ("shape", "wrong in")),
    ("b transposed", "q1_1", [("b[k, j].item()", "b[j, k].item()")], ("Which index", "IndexError")),
    ("a transposed", "q1_1", [("a[i, k].item()", "a[k, i].item()")], ("Which index", "IndexError")),
    ("assigned, not added", "q1_1", [("total += a[i, k]", "total = a[i, k]")], "where is the sum set back"),
    ("a plus b", "q1_1", [(".item() * b[k", ".item() + b[k")], "is wrong in"),
    ("integers", "q1_1", [("total += a[i, k].item()", "total += int(a[i, k].item())")], "is wrong in"),
    ("always float32", "q1_1", [("dtype=a.dtype, device=a.device", "device=a.device")], "should have dtype"),
    ("on the CPU", "q1_1", [("dtype=a.dtype, device=a.device", "dtype=a.dtype")], "device=a.device"),
    ("row of lists", "q1_1", [("m_size, k_size = a.shape", "m_size, k_size = a.shape\n    a.tolist()")], ".tolist()"),
    (
        "row times column",
        "q1_1",
        [
            ("for k in range(k_size):", "for k in range(1):"),
            ("total += a[i, k].item() * b[k, j].item()", "total = (a[i] * b[:, j]).sum()"),
        ],
        "elements at once",
    ),
    (
        "dot",
        "q1_1",
        [
            ("for k in range(k_size):", "for k in range(1):"),
            ("total += a[i, k].item() * b[k, j].item()", "total = torch.dot(a[i], b[:, j])"),
        ],
        "may not use",
    ),
    ("c not indexed", "q1_1", [("c[i, j] = total", "c[j] = total")], ("wrong in", "IndexError")),
    ("loop too short by a row", "q1_1", [("for i in range(m_size)", "for i in range(m_size - 1)")], "is wrong in"),
    ("loop too short by a column", "q1_1", [("for j in range(n_size)", "for j in range(n_size - 1)")], "is wrong in"),
    (
        "returns inside of the loop",
        "q1_1",
        [("            c[i, j] = total", "            c[i, j] = total\n        return c")],
        "is wrong in",
    ),
    # ---- 1.2
    (
        "accumulator in the inputs' dtype",
        "q1_2",
        [("dtype=torch.float32, device", "dtype=a.dtype, device")],
        "the accumulator",
    ),
    ("products in the inputs' dtype", "q1_2", [("].float()", "]")], "the product of two elements"),
    ("c written in each step", "q1_2", [("accumulator += a_tile", "accumulator = a_tile")], "is wrong in"),
    (
        "edges left out",
        "q1_2",
        [("for i in range(0, m_size, tile_m)", "for i in range(0, m_size - tile_m + 1, tile_m)")],
        (_EVERY, "edges"),
    ),
    (
        "columns at the edge left out",
        "q1_2",
        [("for j in range(0, n_size, tile_n)", "for j in range(0, n_size - tile_n + 1, tile_n)")],
        (_EVERY, "edges"),
    ),
    (
        "last step of K left out",
        "q1_2",
        [("for k in range(0, k_size, tile_k)", "for k in range(0, k_size - tile_k + 1, tile_k)")],
        ("edges", "wrong in", _EVERY),
    ),
    (
        "row tile for columns",
        "q1_2",
        [("for j in range(0, n_size, tile_n)", "for j in range(0, n_size, tile_m)")],
        ("wrong in", "raised", _EVERY),
    ),
    (
        "k tile for rows",
        "q1_2",
        [("rows = slice(i, min(i + tile_m, m_size))", "rows = slice(i, min(i + tile_k, m_size))")],
        ("wrong in", _EVERY),
    ),
    (
        "one accumulator for a row of tiles",
        "q1_2",
        [
            (
                "            accumulator = torch.zeros(rows.stop - i, cols.stop - j, dtype=torch.float32, device=a.device)\n",
                "            accumulator = torch.zeros(rows.stop - i, cols.stop - j, dtype=torch.float32, device=a.device) if j == 0 else accumulator\n",
            )
        ],
        ("wrong in", "raised"),
    ),
    (
        "matmul of two tiles",
        "q1_2",
        [
            (
                "accumulator += a_tile[:, step, None] * b_tile[step, None, :]",
                "accumulator += a_tile[:, step, None].float() @ b_tile[step, None, :].float()",
            )
        ],
        "may not use",
    ),
    (
        "whole rows of A",
        "q1_2",
        [("a_tile = a[rows, k : k + tile_k]", "a_tile = (a * 1.0)[rows, k : k + tile_k]")],
        "Are the tile sizes used",
    ),
    (
        "result in float32",
        "q1_2",
        [("c = torch.empty(m_size, n_size, dtype=a.dtype", "c = torch.empty(m_size, n_size, dtype=torch.float32")],
        "should have dtype",
    ),
    (
        "tiles of 64 whatever is asked",
        "q1_2",
        [("m_size, k_size = a.shape", "m_size, k_size = a.shape\n    tile_m = tile_n = tile_k = 64")],
        "Are the tile sizes used",
    ),
    # ---- 1.3
    ("called twice", "q1_3", [("        fn()\n", "        fn()\n        fn()\n")], "was called 6 times"),
    (
        "mean of all",
        "q1_3",
        [("return times_ms", "return [sum(times_ms) / len(times_ms)] * len(times_ms)")],
        ("each call timed on its own", "start anew"),
    ),
    ("a sum", "q1_3", [("return times_ms", "return sum(times_ms)")], "should return a list of 3 times"),
    (
        "clock never started anew",
        "q1_3",
        [
            ("    times_ms = []\n", "    times_ms, start = [], time.perf_counter()\n"),
            ("        start = time.perf_counter()\n        fn()", "        fn()"),
        ],
        "start anew",
    ),
    ("microseconds", "q1_3", [("* 1e3)", "* 1e6)")], "Is it in ms"),
    # ---- 1.4
    ("C not written", "q1_4", [(_GEMM, "(m * k + k * n) * dtype.itemsize")], "C is written"),
    ("elements", "q1_4", [(_GEMM, "(m * k + k * n + m * n)")], _ELEMENTS),
    ("4 bytes in GEMV", "q1_4", [(_GEMV, "(m * k + k + m) * 4")], _DTYPE),
    ("2 bytes", "q1_4", [(_GEMM, "(m * k + k * n + m * n) * 2")], _DTYPE),
    ("x of M elements", "q1_4", [(_GEMV, "(m * k + m + m) * dtype.itemsize")], "x has K elements"),
    ("y of K elements", "q1_4", [(_GEMV, "(m * k + k + k) * dtype.itemsize")], "y has M elements"),
    ("x not read", "q1_4", [(_GEMV, "(m * k + m) * dtype.itemsize")], "vector x is read"),
    ("bytes of every product", "q1_4", [(_GEMM, "2 * m * n * k * dtype.itemsize")], "not once a product"),
    ("C read as well", "q1_4", [(_GEMM, "(m * k + k * n + 2 * m * n) * dtype.itemsize")], "nothing is read from it"),
    ("MACs are FLOPs", "q1_4", [("macs = m * n * k", "macs = 2 * m * n * k")], "It is twice the right number"),
    (
        "FLOPs are MACs in GEMV",
        "q1_4",
        [("return m * k, 2 * m * k,", "return m * k, m * k,")],
        "half of the right number",
    ),
    ("two numbers", "q1_4", [("return macs, 2 * macs, ", "return macs, ")], "expected (macs, flops, bytes)"),
    ("B has N rows", "q1_4", [(_GEMM, "(m * k + n * n + m * n) * dtype.itemsize")], "is not"),
    # ---- 1.5
    (
        "other= left out",
        "q1_5",
        [
            ("mask=(rows[:, None] < M) & (ks[None, :] < K), other=0.0", "mask=(rows[:, None] < M) & (ks[None, :] < K)"),
            ("mask=(ks[:, None] < K) & (cols[None, :] < N), other=0.0", "mask=(ks[:, None] < K) & (cols[None, :] < N)"),
        ],
        "NaN values",
    ),
    (
        "columns of B not masked",
        "q1_5",
        [("(ks[:, None] < K) & (cols[None, :] < N), other", "(ks[:, None] < K), other")],
        "tl.load reads",
    ),
    (
        "strides of B swapped",
        "q1_5",
        [
            (
                "ks[:, None] * stride_bk + cols[None, :] * stride_bn",
                "ks[:, None] * stride_bn + cols[None, :] * stride_bk",
            )
        ],
        ("tl.load reads", "Look at the strides"),
    ),
    (
        "strides of a row-major B",
        "q1_5",
        [("stride_bk + cols[None, :] * stride_bn", "stride_bk + cols[None, :]")],
        ("tl.load reads", "Look at the strides", "is wrong"),
    ),
    (
        "the sum overwritten",
        "q1_5",
        [("accumulator = tl.dot(a_tile, b_tile, accumulator, ", "accumulator = tl.dot(a_tile, b_tile, ")],
        "added to the accumulator",
    ),
    (
        "other=1.0",
        "q1_5",
        [
            ("(ks[None, :] < K), other=0.0", "(ks[None, :] < K), other=1.0"),
            ("(cols[None, :] < N), other=0.0", "(cols[None, :] < N), other=1.0"),
        ],
        "other= in the loads",
    ),
    ("float32 rounded to ten bits", "q1_5", [(', input_precision="ieee"', "")], "ieee"),
    ("stored where A lies", "q1_5", [("c_tile = c_ptr", "c_tile = a_ptr")], ("tl.store writes", "is wrong")),
    # ---- 1.6
    (
        "rows and columns of tiles swapped",
        "bonus_1_6",
        [("(tile_cols * m * k + tile_rows * k * n", "(tile_rows * m * k + tile_cols * k * n")],
        "tile COLUMN",
    ),
    (
        "whole tiles only",
        "bonus_1_6",
        [("math.ceil(m / tile_m), math.ceil(n / tile_n)", "m // tile_m, n // tile_n")],
        "The last tile",
    ),
    (
        "parts of tiles",
        "bonus_1_6",
        [("math.ceil(m / tile_m), math.ceil(n / tile_n)", "m / tile_m, n / tile_n")],
        "Part of a tile",
    ),
    ("C left out", "bonus_1_6", [("+ tile_rows * k * n + m * n)", "+ tile_rows * k * n)")], "C is written"),
    (
        "fp32 bytes",
        "bonus_1_6",
        [("tile_rows * k * n + m * n) * dtype.itemsize", "tile_rows * k * n + m * n) * 4")],
        _DTYPE,
    ),
    ("one tile too large", "bonus_1_6", [("    return t\n", "    return t + 1\n")], "does not fit"),
    (
        "accumulator of dtype",
        "bonus_1_6",
        [("4 * (t + 1) ** 2", "dtype.itemsize * (t + 1) ** 2")],
        "accumulator is fp32",
    ),
    ("one input tile", "bonus_1_6", [("+ 2 * (t + 1) * tile_k", "+ (t + 1) * tile_k")], "two input tiles"),
    # ---- 2
    (
        "C left out of the intensity",
        "q2_1",
        [("((m * k + k * n + m * n) * dtype.itemsize)", "((m * k + k * n) * dtype.itemsize)")],
        "C is written",
    ),
    ("MACs over bytes", "q2_1", [("return 2 * m * n * k /", "return m * n * k /")], "two FLOPs"),
    (
        "intensity without itemsize",
        "q2_1",
        [("((m * k + k * n + m * n) * dtype.itemsize)", "(m * k + k * n + m * n)")],
        _ELEMENTS,
    ),
    ("2 bytes in the intensity", "q2_1", [("((m * k + k + m) * dtype.itemsize)", "((m * k + k + m) * 2)")], _DTYPE),
    (
        "GEMV upside down",
        "q2_1",
        [
            (
                "return 2 * m * k / ((m * k + k + m) * dtype.itemsize)",
                "return ((m * k + k + m) * dtype.itemsize) / (2 * m * k)",
            )
        ],
        "FLOPs over bytes",
    ),
    ("y left out of GEMV", "q2_1", [("(m * k + k + m) *", "(m * k + k) *")], ("y is written", "x is read", "is not")),
    (
        "bandwidth over peak",
        "q2_2",
        [("peak_tflops / bandwidth_tb_s", "bandwidth_tb_s / peak_tflops")],
        "peak over the bandwidth",
    ),
    (
        "the slope alone",
        "q2_2",
        [("min(peak_tflops, intensity * bandwidth_tb_s)", "intensity * bandwidth_tb_s")],
        "no kernel is faster than the peak",
    ),
    (
        "the ceiling alone",
        "q2_2",
        [("min(peak_tflops, intensity * bandwidth_tb_s)", "peak_tflops")],
        "lower of the two roofs",
    ),
    (
        "divided by the bandwidth",
        "q2_2",
        [("min(peak_tflops, intensity * bandwidth_tb_s)", "min(peak_tflops, intensity / bandwidth_tb_s)")],
        "bandwidth",
    ),
    ("seconds", "q2_3", [("(latency_ms * 1e-3)", "latency_ms")], "in ms, not in seconds"),
    ("GFLOP/s", "q2_3", [("/ 1e12", "/ 1e9")], "not GFLOP/s"),
    ("twice too large", "q2_3", [(_CEIL, "math.ceil(3 * dtype.itemsize * ridge)")], "two for each MAC"),
    ("not an integer", "q2_3", [(_CEIL, "1.5 * dtype.itemsize * ridge")], "n is an integer"),
    ("4 bytes whatever the dtype", "q2_3", [(_CEIL, "math.ceil(6 * ridge)")], _DTYPE),
    ("two matrices", "q2_3", [(_CEIL, "math.ceil(dtype.itemsize * ridge)")], "Three matrices"),
    ("always one more", "q2_3", [(_CEIL, "int(1.5 * dtype.itemsize * ridge) + 1")], "equal to the ridge"),
    ("elements instead of bytes", "q2_3", [(_CEIL, "math.ceil(1.5 * ridge)")], "not elements"),
    # ---- 3.1
    (
        "the query itself left out",
        "q3_1",
        [(_PAIRS, "return sum(min(p, window or p) for p in positions)")],
        "attends to itself",
    ),
    ("first positions", "q3_1", [(_POSITIONS, "range(query_len)")], "LAST query_len"),
    ("window ignored", "q3_1", [(_PAIRS, "return sum(p + 1 for p in positions)")], "window is not used"),
    (
        "window one key too narrow",
        "q3_1",
        [(_PAIRS, "return sum(min(p + 1, (window or p + 2) - 1) for p in positions)")],
        "one key more",
    ),
    (
        "a whole window for each query",
        "q3_1",
        [(_PAIRS, "return query_len * window if window else sum(p + 1 for p in positions)")],
        "fewer keys than a whole window",
    ),
    ("projections left out", "q3_1", [("macs = tokens * weights + 2 * batch", "macs = 2 * batch")], "four projections"),
    (
        "scores without values",
        "q3_1",
        [("+ 2 * batch * q_width * attended", "+ batch * q_width * attended")],
        "AND D MACs for the value",
    ),
    (
        "pairs for key-value heads",
        "q3_1",
        [("2 * batch * q_width * attended", "2 * batch * kv_width * attended")],
        "QUERY head",
    ),
    (
        "hidden states read once",
        "q3_1",
        [("elements += 3 * tokens * hidden", "elements += tokens * hidden")],
        "each read the hidden states",
    ),
    (
        "cache without values",
        "q3_1",
        [("2 * batch * keys_read * kv_width", "batch * keys_read * kv_width")],
        "Keys AND values",
    ),
    ("cache of one sequence", "q3_1", [("2 * batch * keys_read * kv_width", "2 * keys_read * kv_width")], "of its own"),
    (
        "new keys not written",
        "q3_1",
        [("tokens * (q_width + 2 * kv_width)", "tokens * q_width")],
        "written into the cache",
    ),
    (
        "weights for each sequence",
        "q3_1",
        [("elements = weights\n", "elements = batch * weights\n")],
        "batch shares the weights",
    ),
    ("weights not read", "q3_1", [("elements = weights\n", "elements = 0\n")], "weights are read"),
    ("one window read", "q3_1", [("min(kv_len, query_len + window - 1)", "min(kv_len, window)")], "more keys together"),
    (
        "output not written",
        "q3_1",
        [("tokens * q_width + tokens * hidden  # output", "tokens * q_width  # output")],
        "writes the hidden states",
    ),
    (
        "attention's output not read again",
        "q3_1",
        [("elements += tokens * q_width + tokens * hidden  # output", "elements += tokens * hidden  # output")],
        "read by the next",
    ),
    # ---- 3.2
    (
        "bytes of two matrices",
        "q3_2",
        [("elements = 3 * hidden * wide", "elements = 2 * hidden * wide")],
        "three matrices",
    ),
    ("weights not counted", "q3_2", [("elements = 3 * hidden * wide", "elements = 0")], "weights are read"),
    (
        "input read once for gate and up",
        "q3_2",
        [("2 * (tokens * hidden + tokens * wide)", "tokens * hidden + 2 * tokens * wide")],
        "each reads its input",
    ),
    ("product of one tensor", "q3_2", [("+ 3 * tokens * wide", "+ 2 * tokens * wide")], "reads two tensors"),
    (
        "GELU fused into the product",
        "q3_2",
        [("2 * tokens * wide + 3 * tokens * wide", "3 * tokens * wide")],
        ("TWO operators", "own", "is not"),
    ),
    ("norm: weight not read", "q3_2", [("(2 * tokens * width + width)", "(2 * tokens * width)")], "weight is read"),
    ("norm: a weight for each token", "q3_2", [("(2 * tokens * width + width)", "(3 * tokens * width)")], "one vector"),
    (
        "norm: read twice",
        "q3_2",
        [("(2 * tokens * width + width)", "(3 * tokens * width + width)")],
        "reads its input once",
    ),
    ("norm: 3 FLOPs", "q3_2", [("return 4 * tokens * width", "return 3 * tokens * width")], "4 FLOPs an element"),
    (
        "norm: fp32",
        "q3_2",
        [("(2 * tokens * width + width) * dtype.itemsize", "(2 * tokens * width + width) * 4")],
        _DTYPE,
    ),
    (
        "MLP in fp32",
        "q3_2",
        [("return macs, 2 * macs, elements * dtype.itemsize", "return macs, 2 * macs, elements * 4")],
        _DTYPE,
    ),
    # ---- 3.3, 3.4, 3.6
    (
        "MACs of the counter",
        "q3_3",
        [("counter.get_total_flops()", "counter.get_total_flops() // 2")],
        "as the counter gives them",
    ),
    ("called outside", "q3_3", [("        fn(*args)\n", "        pass\n    fn(*args)\n")], "under the counter"),
    (
        "cache of the prompt's length",
        "q3_4",
        [("prompt_len + new_tokens.shape[1])", "prompt_len)")],
        ("raised", "wrong in"),
    ),
    ("positions from zero", "q3_4", [("torch.tensor([prompt_len + step]", "torch.tensor([step]")], "position 8"),
    (
        "positions one too far",
        "q3_4",
        [
            (
                "cache = initialize_kv_cache(layer.config, prompt_len + new_tokens.shape[1])",
                "cache = initialize_kv_cache(layer.config, prompt_len + new_tokens.shape[1] + 1)",
            ),
            ("torch.tensor([prompt_len + step]", "torch.tensor([prompt_len + step + 1]"),
        ],
        ("position 8", "raised"),
    ),
    ("K only", "q3_4", [(_CACHE, _CACHE[4:])], "Keys AND values"),
    (
        "query heads",
        "q3_4",
        [(_CACHE, _CACHE.replace("num_key_value_heads", "num_attention_heads"))],
        "num_key_value_heads heads",
    ),
    ("one layer", "q3_4", [(_CACHE, _CACHE.replace("tokens", "length"))], "Every layer"),
    ("every layer slides", "q3_4", [('if kind == "sliding_attention" else length for', "for")], "Full layers keep"),
    (
        "full layers slide",
        "q3_4",
        [('kind == "sliding_attention" else length', 'kind != "sliding_attention" else length')],
        "Which layers slide",
    ),
    ("cache in fp32", "q3_4", [(_CACHE, _CACHE.replace("dtype.itemsize", "4"))], _DTYPE),
    ("cache of one text", "q3_4", [(_CACHE, _CACHE.replace("batch * ", ""))], "Each sequence"),
    (
        "floor of one layer",
        "bonus_3_6",
        [("(attention + mlp) * config.num_hidden_layers", "(attention + mlp)")],
        ("All 18 layers", "is not"),
    ),
    ("floor in s", "bonus_3_6", [("(bandwidth_tb_s * 1e12) * 1e3", "(bandwidth_tb_s * 1e12)")], "in ms"),
    (
        "weights for each text",
        "bonus_3_6",
        [(_FLOOR, "batch * (weights * weight_bytes + cache * cache_bytes)")],
        "batch shares the weights",
    ),
    ("one cache", "bonus_3_6", [(_FLOOR, "(weights * weight_bytes + cache * cache_bytes)")], "own cache"),
    (
        "no window in the floor",
        "bonus_3_6",
        [('min(length, config.sliding_window) if kind == "sliding_attention" else length', "length")],
        "at most their window",
    ),
    ("cache in the weights' format", "bonus_3_6", [(_FLOOR, "(weights + batch * cache) * weight_bytes")], "own bytes"),
    (
        "break-even rounded down",
        "bonus_3_6",
        [("math.ceil(weights / cache_of_one)", "math.floor(weights / cache_of_one)")],
        "still the smaller",
    ),
    (
        "break-even not rounded",
        "bonus_3_6",
        [("math.ceil(weights / cache_of_one)", "weights / cache_of_one")],
        "A batch is an integer",
    ),
    # ---- 4
    ("no wait", "q4_1", [("            synchronize()\n", "")], "call synchronize()"),
    ("no step", "q4_1", [("            prof.step()\n", "")], ("prof.step()",)),
    ("six calls", "q4_1", [("range(10)", "range(6)")], ("10 times", "prof.step()")),
    (
        "fixed file name",
        "q4_1",
        [("prof.export_chrome_trace(str(trace_path))", 'prof.export_chrome_trace("trace.json")')],
        "no file was written",
    ),
    ("profiler not returned", "q4_1", [("    return prof\n", "")], "return the profiler"),
    ("no 0.5", "q4_2", [("0.5 * x * (1", "x * (1")], ("Compare each factor", "2 times")),
    ("square instead of cube", "q4_2", [("0.044715 * x * x * x", "0.044715 * x * x")], "Compare each factor"),
    ("constant", "q4_2", [("0.044715", "0.44715")], "Compare each factor"),
    ("pi over 2", "q4_2", [("math.sqrt(2 / math.pi)", "math.sqrt(math.pi / 2)")], "Compare each factor"),
    ("no root", "q4_2", [("math.sqrt(2 / math.pi)", "(2 / math.pi)")], "Compare each factor"),
    (
        "SiLU",
        "q4_2",
        [("return 0.5 * x * (1 + torch.tanh(inner))", "return x * torch.sigmoid(x)")],
        "Compare each factor",
    ),
    (
        "F.gelu inside",
        "q4_2",
        [("return 0.5 * x * (1 + torch.tanh(inner))", 'return F.gelu(x, approximate="tanh")')],
        "gelu",
    ),
    (
        "binary operators read one",
        "q4_2",
        [("(2 * one_input + 3 * two_inputs) * numel", "(2 * one_input + 2 * two_inputs) * numel")],
        "reads both",
    ),
    ("chain in fp32", "q4_2", [("* numel * dtype.itemsize", "* numel * 4")], _DTYPE),
    ("chain in elements", "q4_2", [("* numel * dtype.itemsize", "* numel")], _ELEMENTS),
    (
        "speed-up upside down",
        "q4_2",
        [("return (2 * one_input + 3 * two_inputs) / 2", "return 2 / (2 * one_input + 3 * two_inputs)")],
        ("times FASTER", "is not"),
    ),
    (
        "launches counted",
        "q4_2",
        [("return (2 * one_input + 3 * two_inputs) / 2", "return one_input + two_inputs")],
        "Count bytes",
    ),
    (
        "fused kernel only writes",
        "q4_2",
        [("(2 * one_input + 3 * two_inputs) / 2", "(2 * one_input + 3 * two_inputs)")],
        "reads one tensor and writes one",
    ),
    ("no wait", "q4_3", [("            synchronize()\n", "")], "after 0 of 6"),
    ("sum of ten", "q4_3", [('["total"]', '["total"] * 10')], "all 10 calls"),
    ("matrix products only", "q4_3", [('["total"]', '["gemm"]')], ("prof.step()", "not be zero")),
    (
        "the faster sets the pace",
        "q4_4",
        [("max(launch_us, kernel_us)", "min(launch_us, kernel_us)")],
        "slower of the two",
    ),
    (
        "first launch forgotten",
        "q4_4",
        [
            ("return launch_us + (n - 1) * max", "return n * max"),
            ("+ kernel_us\n    ### END SOLUTION\n\n\ndef graph", "\n    ### END SOLUTION\n\n\ndef graph"),
        ],
        "Before the first kernel",
    ),
    ("graph without a launch", "q4_4", [("return launch_us + n * kernel_us", "return n * kernel_us")], "launched, too"),
    (
        "graph launches each",
        "q4_4",
        [("return launch_us + n * kernel_us", "return n * (launch_us + kernel_us)")],
        "not once a kernel",
    ),
    # ---- 5
    ("divided by D", "q5_1", [("/ math.sqrt(q.shape[-1])", "/ q.shape[-1]")], "sqrt(D), not by D"),
    ("scaled by the heads", "q5_1", [("/ math.sqrt(q.shape[-1])", "/ math.sqrt(q.shape[1])")], "is wrong in"),
    ("softmax over heads", "q5_1", [("dim=-1) @ v", "dim=1) @ v")], "Which dimension"),
    (
        "causal",
        "q5_1",
        [
            (
                "return torch.softmax(scores, dim=-1)",
                "scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)\n    return torch.softmax(scores, dim=-1)",
            )
        ],
        "No mask",
    ),
    (
        "exp without a maximum",
        "q5_1",
        [
            (
                "return torch.softmax(scores, dim=-1) @ v",
                "p = torch.exp(scores)\n    return p / p.sum(-1, keepdim=True) @ v",
            )
        ],
        ("overflow", "NaN"),
    ),
    (
        "scores of one head",
        "q5_1",
        [("return batch * heads * length * length", "return batch * length * length")],
        "Each head",
    ),
    (
        "scores linear",
        "q5_1",
        [("return batch * heads * length * length", "return batch * heads * length")],
        "One score for each pair",
    ),
    ("scores in fp32", "q5_1", [("length * length * dtype.itemsize", "length * length * 4")], _DTYPE),
    (
        "both matrices",
        "q5_1",
        [("return batch * heads * length * length", "return 2 * batch * heads * length * length")],
        "One matrix",
    ),
    (
        "longest by one too many",
        "q5_1",
        [
            (
                "return math.isqrt(memory_bytes // (2 * batch * heads * dtype.itemsize))",
                "return math.isqrt(memory_bytes // (2 * batch * heads * dtype.itemsize)) + 1",
            )
        ],
        "does not fit",
    ),
    (
        "longest is linear",
        "q5_1",
        [
            (
                "return math.isqrt(memory_bytes // (2 * batch * heads * dtype.itemsize))",
                "return memory_bytes // (2 * batch * heads * dtype.itemsize)",
            )
        ],
        "square of the length",
    ),
    (
        "result not turned back",
        "q5_2",
        [("enable_gqa=True).transpose(1, 2)", "enable_gqa=True)")],
        ("turned back", "shape"),
    ),
    ("no GQA", "q5_2", [(", enable_gqa=True", "")], "raised"),
    (
        "heads repeated in the wrong order",
        "q5_2",
        [
            (
                "    return F.scaled",
                "    k, v = (t.repeat(1, q.shape[1] // t.shape[1], 1, 1) for t in (k, v))\n    return F.scaled",
            )
        ],
        "which key-value head",
    ),
    (
        "m of the last block",
        "q5_3",
        [("new_m = torch.maximum(m, block.amax(dim=1))\n        l", "new_m = block.amax(dim=1)\n        l")],
        ("ALL blocks", "m of"),
    ),
    (
        "sum rescaled upside down",
        "q5_3",
        [("l = l * torch.exp(m - new_m) + torch.exp(block", "l = l * torch.exp(new_m - m) + torch.exp(block")],
        ("sum so far", "infinite", "NaN"),
    ),
    (
        "block against the old maximum",
        "q5_3",
        [("torch.exp(block - new_m[:, None])", "torch.exp(block - m[:, None])")],
        ("infinite", "sum so far"),
    ),
    (
        "m starts at zero",
        "q5_3",
        [("m = torch.full_like(block[:, 0], -math.inf)", "m = torch.zeros_like(block[:, 0])")],
        "ALL blocks",
    ),
    ("blocks kept in a list", "q5_3", [("    m = l = None\n", "    m = l = None\n    blocks = list(blocks)\n")], "NaN"),
    ("flash: sum not rescaled", "q5_3", [("l = l * rescale + p.sum", "l = l + p.sum")], "BOTH"),
    (
        "flash: output not rescaled",
        "q5_3",
        [("accumulator = accumulator * rescale + p", "accumulator = accumulator + p")],
        "BOTH",
    ),
    ("flash: not scaled", "q5_3", [(".float() / math.sqrt(q.shape[-1])", ".float()")], "square root"),
    ("flash: not divided", "q5_3", [("(accumulator / l)", "accumulator")], ("not divided", "BOTH")),
    (
        "flash: no maximum",
        "q5_3",
        [
            ("new_m = torch.maximum(m, scores.amax(dim=-1, keepdim=True))", "new_m = torch.zeros_like(m)"),
            ("rescale = torch.exp(m - new_m)", "rescale = 1.0"),
        ],
        ("maximum subtracted", "overflow"),
    ),
    (
        "flash: all in the inputs' dtype",
        "q5_3",
        [
            ("q[:, :, i : i + tile_q].float()", "q[:, :, i : i + tile_q]"),
            ("k[:, :, j : j + tile_k].float()", "k[:, :, j : j + tile_k]"),
            ("v[:, :, j : j + tile_k].float()", "v[:, :, j : j + tile_k]"),
        ],
        "fewer bits than float32",
    ),
    (
        "flash: result in float32",
        "q5_3",
        [("output = torch.empty_like(q)", "output = torch.empty(q.shape)")],
        "should have dtype",
    ),
    (
        "flash: last keys left out",
        "q5_3",
        [("range(0, k.shape[2], tile_k)", "range(0, k.shape[2] // tile_k * tile_k, tile_k)")],
        ("edges", "wrong", "raised", "NaN"),
    ),
    (
        "flash: last queries left out",
        "q5_3",
        [("range(0, q.shape[2], tile_q)", "range(0, q.shape[2] // tile_q * tile_q, tile_q)")],
        ("nothing was written", "edges"),
    ),
    (
        "flash: softmax of a tile",
        "q5_3",
        [("p = torch.exp(scores - new_m)", "p = torch.softmax(scores, dim=-1)")],
        "may not use",
    ),
    (
        "flash: all keys at once",
        "q5_3",
        [
            ("range(0, k.shape[2], tile_k)", "range(0, 1)"),
            ("k[:, :, j : j + tile_k]", "k"),
            ("v[:, :, j : j + tile_k]", "v"),
        ],
        "scores at once",
    ),
    (
        "intensity: scores twice",
        "q5_4",
        [("4 * length * length)\n    return", "2 * length * length)\n    return")],
        "four times",
    ),
    (
        "intensity: scores three times",
        "q5_4",
        [("4 * length * length)\n    return", "3 * length * length)\n    return")],
        "not three times",
    ),
    (
        "intensity: O left out",
        "q5_4",
        [("elements = 4 * length * head_dim", "elements = 3 * length * head_dim")],
        "O is written",
    ),
    (
        "intensity: half the FLOPs",
        "q5_4",
        [("return 4 * length * length * head_dim /", "return 2 * length * length * head_dim /")],
        "4 L² D",
    ),
    (
        "intensity: inputs left out",
        "q5_4",
        [
            (
                "elements = 4 * length * head_dim + (0 if flash",
                "elements = (4 * length * head_dim if flash else 0) + (0 if flash",
            )
        ],
        "travel as well",
    ),
    ("intensity: fp32", "q5_4", [("(elements * dtype.itemsize)", "(elements * 4)")], _DTYPE),
    # ---- 5.6
    (
        "one key too many",
        "bonus_5_6",
        [("columns[None, :] < keys, scores", "columns[None, :] <= keys, scores")],
        "One key too many",
    ),
    (
        "keys counted in the block",
        "bonus_5_6",
        [("tl.where(columns[None, :] < keys", "tl.where((columns - start)[None, :] < keys")],
        "from 0",
    ),
    ("l not rescaled", "bonus_5_6", [("l * rescale + tl.sum", "l + tl.sum")], "The sum of the blocks before"),
    ("l of the last block", "bonus_5_6", [("l * rescale + tl.sum", "tl.sum")], "the sum so far is lost"),
    (
        "accumulator of the last block",
        "bonus_5_6",
        [("accumulator * rescale[:, None] + new", "new")],
        "carried from block",
    ),
    ("factor turned around", "bonus_5_6", [("tl.exp(m - new_m)", "tl.exp(new_m - m)")], "turned around"),
    ("scores not scaled", "bonus_5_6", [('input_precision="ieee") * scale', 'input_precision="ieee")')], "square root"),
    ("powers of 2", "bonus_5_6", [("tl.exp(", "tl.exp2(")], "powers of 2"),
    (
        "maximum of the block alone",
        "bonus_5_6",
        [("tl.maximum(m, tl.max(scores, 1))", "tl.max(scores, 1)")],
        "largest score",
    ),
    ("maximum along the columns", "bonus_5_6", [("tl.max(scores, 1)", "tl.max(scores, 0)")], "tl.max(scores, 0)"),
    ("head of the output left out", "bonus_5_6", [("o_ptr + head * stride_oh", "o_ptr")], "its head and its strides"),
    (
        "strides of a contiguous output",
        "bonus_5_6",
        [("* stride_os + dims", "* D + dims")],
        ("its head and its strides", "never written"),
    ),
]
