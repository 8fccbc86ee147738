"""Files of Question 5.3 that race: cheats, each of which has to be refused, and honest ones, none of which may be.

Each is the model answer with a few lines changed. `stage` says what refuses a cheat: "text" (before any of it runs),
"compiled" (the compiler, or the machine code that it became), "run" (what a call wrote, or when).
"""

from dataclasses import dataclass

Edits = tuple[tuple[str, str], ...]

HEAD = "from utils.attention.gluon.step4_warp_specialized import producer\n"
OWN_SOFTMAX = """

@gluon.jit
def own_softmax(s, m, total, c):
    top = gl.maximum(m, gl.max(s, 1))
    alpha = gl.exp2((m - top) * c)
    p = gl.exp2(s * c - (top * c)[:, None])
    total = total * alpha + gl.sum(p, 1)
    return p, top, total, alpha
"""
USE_OWN = ("online_softmax(s, m, total, c)", "own_softmax(s, m, total, c)")
STORE = "    tma_store(o_desc, [batch, gl.program_id(1) - batch * heads, row, 0], q_tiles.index(W))\n"
SHAPE = "    shape = (sq, sk, heads, 1)\n"
KERNEL = "@gluon.jit\ndef attention("
CONSUMERS = (
    (
        "(compute_partition, (o_desc, tiles, bars, shape, c, 0",
        "(compute_partition, (o_desc, q_desc, tiles, bars, shape, c, 0",
    ),
    (
        "(compute_partition, (o_desc, tiles, bars, shape, c, 1",
        "(compute_partition, (o_desc, q_desc, tiles, bars, shape, c, 1",
    ),
    ("def compute_partition(o_desc, tiles,", "def compute_partition(o_desc, q_desc, tiles,"),
)


@dataclass(frozen=True)
class File:
    """A file that races: its name, the changes of the model answer, and the stage that refuses it ("" for none)."""

    name: str
    edits: Edits
    stage: str = ""
    words: str = ""  # in the refusal

    def text(self, model: str) -> str:
        """Return the file; every edit has to fit."""
        for old, new in self.edits:
            assert old in model, f"{self.name}: {old!r} is not in the model answer"
            model = model.replace(old, new)
        return model


def softmax(old: str, new: str) -> Edits:
    """Edits that use a softmax of their own with one line changed."""
    assert old in OWN_SOFTMAX
    return (HEAD, HEAD + OWN_SOFTMAX.replace(old, new)), USE_OWN


def after_imports(text: str) -> Edits:
    """One edit that puts a text behind the imports."""
    return ((HEAD, f"{HEAD}{text}\n"),)


def at_end(text: str) -> Edits:
    """One edit that puts a text behind the kernel."""
    return (("    ], [4, 1], [240, 24])", f"    ], [4, 1], [240, 24])\n\n\n{text}\n"),)


def asm(text: str) -> Edits:
    """Edits with assembly on the factor of each row."""
    call = f'gl.inline_asm_elementwise({text}, "=f,f", [alpha], dtype=gl.float32, is_pure=True, pack=1)'
    return softmax("    return p, top", f"    alpha = {call}\n    return p, top")


CHEATS = [
    # Python beside the kernel
    File("the timer is replaced", after_imports("import time\ntime.perf_counter = lambda: 0.0"), "text", "import time"),
    File(
        "the events are replaced",
        after_imports("import torch\ntorch.cuda.Event.elapsed_time = lambda a, b: 1e-3"),
        "text",
        "import torch",
    ),
    File(
        "the work goes to another stream",
        at_end(
            "class Launcher:\n    def __getitem__(self, grid):\n        import torch\n\n"
            "        torch.cuda.set_stream(torch.cuda.Stream())\n\n\nattention = Launcher()"
        ),
        "text",
        "import torch",
    ),
    File(
        "the result of the last call is returned",
        at_end("KEPT = {}\ndef attention(*args):\n    KEPT.setdefault(1, args)"),
        "compiled",
        "gluon.jit",
    ),
    File(
        "cuDNN in the place of the kernel",
        after_imports("from torch.nn.functional import scaled_dot_product_attention"),
        "text",
        "torch.nn.functional",
    ),
    File(
        "the course's fastest kernel",
        after_imports("from utils.attention.gluon.step5_overlapped import attention as fast"),
        "text",
        "step5_overlapped",
    ),
    # assembly
    File("assembly stores to an address", asm('"st.global.f32 [0], $1; mov.f32 $0, $1;"'), "compiled"),
    File("assembly ends the block early", asm('"exit; mov.f32 $0, $1;"'), "run"),
    File(
        "assembly lets the next kernel begin",
        asm('"griddepcontrol.launch_dependents; mov.f32 $0, $1;"'),
        "compiled",
        "PREEXIT",
    ),
    # memory by address
    File(
        "results are kept at an address",
        (
            (
                SHAPE,
                "    place = gl.cast(sq.to(gl.int64) * 65536, gl.pointer_type(gl.int32), bitcast=True)\n"
                "    gl.store(place, heads)\n" + SHAPE,
            ),
        ),
        "compiled",
    ),
    File(
        "an address is read",
        (
            (
                SHAPE,
                "    place = gl.cast(sq.to(gl.int64) * 65536, gl.pointer_type(gl.int32), bitcast=True)\n"
                "    sk = sk + gl.load(place)\n" + SHAPE,
            ),
        ),
        "compiled",
    ),
    # kernels that do less
    File("nothing is written", ((STORE, ""),), "run", "not written"),
    File("zeros", (("(o * gl.convert_layout(inverse,", "(o * 0.0 * gl.convert_layout(inverse,"),), "run", "differ"),
    File(
        "what an earlier kernel left in shared memory", (("    q.store((o * ", "    unused = ((o * "),), "run", "differ"
    ),
    File(
        "the last block is left out",
        ((SHAPE, "    sk = gl.maximum(sk - BLOCK_N, BLOCK_N)\n" + SHAPE),),
        "run",
        "differ",
    ),
    File(
        "the tail is not masked",
        (("    s = mask_scores(s, 0, (blocks - 1) * BLOCK_N, 0, sk, scores, False)\n", ""),),
        "run",
        "tail",
    ),
    File("one of the two consumers stores", ((STORE, "    if W == 0:\n    " + STORE),), "run", "not written"),
    File("every other tile", ((STORE, "    if gl.program_id(0) % 2 == 0:\n    " + STORE),), "run", "not written"),
    File("the first head for all heads", ((STORE, STORE.replace("gl.program_id(1) - batch * heads", "0")),), "run"),
    File(
        "one tile in five, by the clock",
        (
            (
                STORE,
                '    now = gl.inline_asm_elementwise("mov.u32 $0, %clock;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)\n'
                "    if now % 5 != 0:\n    " + STORE,
            ),
        ),
        "run",
    ),
    File(
        "P in 8 bits",
        (
            ("p_next.to(dtype)", "p_next.to(gl.float8e4nv).to(dtype)"),
            ("p.to(dtype), left", "p.to(gl.float8e4nv).to(dtype), left"),
        ),
        "run",
        "differ",
    ),
    File(
        "scores in 8 bits",
        softmax("    top = gl.max", "    s = s.to(gl.float8e5).to(gl.float32)\n    top = gl.max"),
        "run",
    ),
    File(
        "exponentials by a straight line",
        softmax("gl.exp2(s * c - (top * c)[:, None])", "gl.maximum(1.0 + 0.7 * (s * c - (top * c)[:, None]), 0.0)"),
        "run",
    ),
    File(
        "no maximum is subtracted",
        softmax("top = gl.maximum(m, gl.max(s, 1))", "top = gl.maximum(m, 0.0) * 0.0"),
        "run",
    ),
    File(
        "the output is not rescaled",
        softmax("return p, top, total, alpha", "return p, top, total, alpha * 0.0 + 1.0"),
        "run",
    ),
    File(
        "small weights count nothing",
        softmax("    total = total", "    p = gl.where(p > 0.05, p, 0.0)\n    total = total"),
        "run",
    ),
    File(
        "it writes into its inputs",
        (*CONSUMERS, (STORE, STORE + STORE.replace("o_desc", "q_desc"))),
        "run",
        "into its inputs",
    ),
    File(
        "inputs are recognised, and a stored answer is given", ((STORE, "    if sk % 64 != 0:\n    " + STORE),), "run"
    ),
    File(
        "it never ends",
        (
            ("        mbarrier.arrive(k_empty.index(k_slot), count=1)\n", ""),
            ("    mbarrier.arrive(k_empty.index(0), count=1)\n", ""),
        ),
        "run",
    ),
]

HONEST = [
    File("the model answer", ()),
    File("an own softmax", softmax("    return p, top, total, alpha", "    return p, top, total, alpha  # mine")),
    File("assembly that computes", asm('"mov.f32 $0, $1;"')),
    File(
        "an exponential in assembly",
        softmax(
            "p = gl.exp2(s * c - (top * c)[:, None])",
            'x = s * c - (top * c)[:, None]\n    p = gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], '
            "dtype=gl.float32, is_pure=True, pack=1)",
        ),
    ),
    File(
        "no overlap",
        (
            ("s = warpgroup_mma_wait(1, deps=[s])", "s, o = warpgroup_mma_wait(0, deps=[s, o])"),
            ("        o = warpgroup_mma_wait(0, deps=[o])\n", ""),
        ),
    ),
    File(
        "products that wait at once",
        (
            ("zero, use_acc=False, is_async=True)", "zero, use_acc=False)"),
            ("        s = warpgroup_mma_wait(1, deps=[s])\n", ""),
        ),
    ),
    File(
        "V is awaited first",
        (
            ("        mbarrier.wait(v_full.index(v_slot), v_phase)\n", ""),
            (
                "        mbarrier.wait(k_full.index(k_slot), k_phase)\n",
                "        mbarrier.wait(v_full.index(v_slot), v_phase)\n        mbarrier.wait(k_full.index(k_slot), k_phase)\n",
            ),
        ),
    ),
    File("other registers", (("[240, 24]", "[232, 40]"),)),
    File(
        "K's slot is given back late",
        (
            ("        mbarrier.arrive(k_empty.index(k_slot), count=1)\n", ""),
            (
                "        mbarrier.arrive(v_empty.index(v_slot), count=1)\n",
                "        mbarrier.arrive(k_empty.index(k_slot), count=1)\n        mbarrier.arrive(v_empty.index(v_slot), count=1)\n",
            ),
        ),
    ),
    File(
        "constants and a print at import",
        after_imports('LOG2E: gl.constexpr = gl.constexpr(1.4427)\nprint("compiling")'),
    ),
    File("an aggregate", after_imports("\n\n@gluon.jit\ndef half(x):\n    return x * 0.5")),
    File(
        "every score is masked",
        (
            (
                "p_next, m, total, alpha =",
                "s = mask_scores(s, 0, (blocks - 1 - i) * BLOCK_N, 0, sk, scores, False)\n        p_next, m, total, alpha =",
            ),
        ),
    ),
]
