"""What a student with a weekend would try: forged records, libraries that work below the watch, answers of odd kinds."""

from __future__ import annotations

from tests.instructor.grading.attacks import COST, FILE, GEMV, MASK, NUMBER, PRODUCT, TIMER, Attack
from tests.instructor.grading.attacks_watch import _CLOSE, _UNWATCHED, _WALK

_OFF = "import numpy as np\nimport torch.utils._python_dispatch as dispatch\n"
_PROFILER = """
from torch._C._profiler import _ExperimentalConfig
from torch.autograd import ProfilerActivity, ProfilerConfig, ProfilerState, _disable_profiler, _enable_profiler, _prepare_profiler


def start_again():
    config = ProfilerConfig(
        ProfilerState.KINETO, False, False, False, False, False, _ExperimentalConfig(profile_all_threads=True), ""
    )
    _prepare_profiler(config, {ProfilerActivity.CPU})
    _enable_profiler(config, {ProfilerActivity.CPU})


def multiply(a, b):
    watched = torch.autograd._profiler_enabled()
    with dispatch._disable_current_modes(), torch._C.DisableTorchFunction():
        if watched:
            _disable_profiler()
        product = a @ b
        if watched:
            start_again()
    return product
"""
_FORGED_PROGRAM = """
do_call = server.do_call


def forged(message, blobs):
    wanted = message["conditions"]
    record, wanted["watch"], wanted["record"] = wanted["record"], False, False
    reply, data = do_call(message, blobs)
    if record:
        ends = [{"tensor": [[size], "float32", "meta", -1]} for size in wanted["canary"]]
        reply["records"] = [["aten::special_i1e", "default", [end], {}, end] for end in ends]
        reply["watch"] = {name: {} for name in ("operations", "calls", "exits", "custom", "kernels", "borrowed", "lines")}
        reply["program"] = PROGRAM
    return reply, data


server.do_call = forged
"""
_LEAF = '{"leaves": [[0, "made", reply["value"]]], "result": [0]}'
_SPEAKER = """
import hashlib, json, os, socket, struct, sys
channel, signs = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])


def read(size):
    data = b""
    while len(data) < size:
        data += channel.recv(size - len(data))
    return data


def say(n, blobs=(), **reply):
    os.write(signs, json.dumps({"beat": n}).encode() + b"\\n")
    header = json.dumps({**reply, "n": n, "blobs": [len(b) for b in blobs]}).encode()
    channel.sendall(struct.pack("<QQ", len(header), sum(map(len, blobs))) + header + b"".join(blobs))


number = int(sys.argv[3])
say(number, op="ran", ok=True, outputs=[], exhausted="")
function = {"id": 1, "kind": "function", "type": "function", "answered": True, "name": "gemm_broadcast", "parameters": None}
while True:
    header, blobs = struct.unpack("<QQ", read(16))
    message = json.loads(read(header))
    data = [bytearray(read(size)) for size in message["blobs"]]
    if message["op"] == "get":
        say(message["n"], op="values", values={name: ["object", function] for name in message["names"]})
    elif message["op"] == "call":
        import numpy as np
        a, b = (node[1] for node in message["args"][1])
        x, y = (np.frombuffer(data[t["data"]], np.float32).reshape(t["shape"]) for t in (a, b))
        made = (x @ y).astype(np.float32)
        ends = [{"tensor": [[size], "float32", "meta", -1]} for size in message["conditions"]["canary"]]
        value = ["tensor", {"dtype": "float32", "shape": list(made.shape), "stride": None, "device": "cpu", "grad": False,
                            "key": None, "data": 0}]
        say(message["n"], [made.tobytes()], op="result", value=value, mutated=[], sdpa=message["conditions"]["sdpa"],
            profile=[], shown="", records=[["aten::special_i1e", "default", [e], {}, e] for e in ends],
            watch={k: {} for k in ("operations", "calls", "exits", "custom", "kernels", "borrowed", "lines")},
            program={"leaves": [], "result": [0]})
    elif message["op"] == "room":
        say(message["n"], op="room", exhausted="")
    else:
        say(message["n"], op="ran", ok=True, outputs=[], exhausted="")
"""
_SPEAK = f"""
import os, stat, sys
open("speaker.py", "w").write({_SPEAKER!r})
pipe = next(n for n in range(3, 64) if os.path.exists(f"/proc/self/fd/{{n}}") and stat.S_ISFIFO(os.fstat(n).st_mode))
line = next(n for n in range(3, 64) if os.path.exists(f"/proc/self/fd/{{n}}") and stat.S_ISSOCK(os.fstat(n).st_mode))
for descriptor in (pipe, line):
    os.set_inheritable(descriptor, True)
"""

# ---- below the watch -----------------------------------------------------------------------------------------------

BELOW = [
    Attack(
        "NumPy where no mode is on",
        PRODUCT,
        answer=_OFF
        + """
def gemm_broadcast(a, b):
    out = torch.zeros(a.shape[0], b.shape[1])
    with dispatch._disable_current_modes(), torch._C.DisableTorchFunction():
        out.numpy()[...] = a.numpy() @ b.numpy()
    return out
""",
    ),
    Attack(
        "modes off and the profiler stopped, the product copied into place",
        PRODUCT,
        answer=_OFF
        + _PROFILER
        + """
def gemm_broadcast(a, b):
    return torch.zeros(a.shape[0], b.shape[1]).copy_(multiply(a, b))
""",
    ),
    Attack(
        "a product that is remembered for the next call of its shape",
        PRODUCT,
        answer=_OFF
        + _PROFILER
        + """
seen = {}

def gemm_broadcast(a, b):
    key = a.shape, b.shape
    if key in seen:
        return seen.pop(key) + 0 * a.sum()
    seen[key] = multiply(a, b)
    return seen[key] + 0 * a.sum()
""",
    ),
    Attack(
        "numbers of the product put in one by one",
        PRODUCT,
        answer=_OFF
        + _PROFILER
        + """
def gemm_broadcast(a, b):
    out = torch.zeros(a.shape[0], b.shape[1])
    for i, row in enumerate(np.asarray(multiply(a, b).tolist())):
        for j, value in enumerate(row):
            out[i, j] = float(value)
    return out
""",
    ),
    Attack(
        "the product as a tensor made of Python's numbers",
        PRODUCT,
        answer=_OFF
        + _PROFILER
        + """
def gemm_broadcast(a, b):
    with dispatch._disable_current_modes(), torch._C.DisableTorchFunction():
        numbers = multiply(a, b).tolist()
    return torch.tensor(numbers)
""",
    ),
    Attack(
        "the record's lists emptied by way of the stack of modes",
        PRODUCT,
        answer=_OFF
        + """
def gemm_broadcast(a, b):
    product = a @ b
    for mode in dispatch._get_current_dispatch_mode_stack():
        for name in ("records", "leaves"):
            if hasattr(mode, name):
                del getattr(mode, name)[1:]
        if hasattr(mode, "seen"):
            for counter in (mode.seen.operations, mode.seen.calls):
                counter.clear()
    return product
""",
    ),
    Attack(
        "mm goes into the record under another name",
        PRODUCT,
        answer=_OFF
        + """
def gemm_broadcast(a, b):
    product = a @ b
    for mode in dispatch._get_current_dispatch_mode_stack():
        for record in getattr(mode, "records", ()):
            record[0] = record[0].replace("::mm", "::mul")
        if hasattr(mode, "seen"):
            mode.seen.operations.pop("mm", None)
            mode.seen.calls.clear()
            mode.seen.operations["mul"] += 1
    return product
""",
    ),
    Attack(
        "an operator of one's own in torch's namespace",
        PRODUCT,
        """
library = torch.library.Library("prims", "FRAGMENT")
library.define("sum_of_parts(Tensor a, Tensor b) -> Tensor")
library.impl("sum_of_parts", lambda a, b: a @ b, "CompositeExplicitAutograd")
""",
        "\ndef gemm_broadcast(a, b):\n    return torch.ops.prims.sum_of_parts(a, b)\n",
    ),
    Attack(
        "aten::hypot means a product",
        PRODUCT,
        """
import warnings
warnings.simplefilter("ignore")
library = torch.library.Library("aten", "IMPL")
library.impl("hypot", lambda a, b: a @ b, "CPU")
""",
        "\ndef gemm_broadcast(a, b):\n    return torch.hypot(a, b)\n",
    ),
    Attack(
        "an autograd function whose forward works where no mode is on",
        PRODUCT,
        _OFF
        + _PROFILER
        + """
class Quiet(torch.autograd.Function):
    @staticmethod
    def forward(context, a, b):
        return multiply(a, b)
""",
        "\ndef gemm_broadcast(a, b):\n    return Quiet.apply(a, b)\n",
    ),
    Attack(
        "a thread that was there before the watch, and a queue",
        PRODUCT,
        """
import queue, threading
asked, told = queue.Queue(), queue.Queue()
def work():
    while True:
        a, b = asked.get()
        told.put(a @ b)
threading.Thread(target=work, daemon=True).start()
""",
        "\ndef gemm_broadcast(a, b):\n    asked.put((a, b))\n    return told.get() + 0 * a.sum()\n",
    ),
    Attack(
        "another process multiplies, and files carry the numbers",
        PRODUCT,
        _OFF
        + """
import os, subprocess, sys, time
program = '''
import numpy as np, os, time
while True:
    if os.path.exists("asked.npz"):
        time.sleep(0.01)
        given = np.load("asked.npz")
        np.save("told_.npy", given["a"] @ given["b"])
        os.remove("asked.npz")
        os.rename("told_.npy", "told.npy")
    time.sleep(0.005)
'''
helper = subprocess.Popen([sys.executable, "-c", program])
""",
        """
def gemm_broadcast(a, b):
    with dispatch._disable_current_modes(), torch._C.DisableTorchFunction():
        np.savez("asked_.npz", a=a.numpy(), b=b.numpy())
        os.rename("asked_.npz", "asked.npz")
        for _ in range(400):
            if os.path.exists("told.npy"):
                break
            time.sleep(0.01)
        time.sleep(0.02)
        product = torch.from_numpy(np.load("told.npy"))
        os.remove("told.npy")
    return product.clone()
""",
        flagged_at="q2_3",  # q1_1 is refused in words: its check names torch.from_numpy
        alone=True,
    ),
]

# ---- the process that serves the checker ---------------------------------------------------------------------------

_FRAMES = {
    "traceback's walk": "import traceback\nframe = next(iter(traceback.walk_stack(None)))[0]\n",
    "an expression of pandas": (
        "import pandas\nframe = None\nfor level in range(2, 60):\n    try:\n"
        "        server = pandas.eval('self', level=level, parser='pandas', engine='python')\n"
        "    except Exception:\n        continue\n    if type(server).__name__ == 'Student':\n        break\n"
    ),
}
_UP = (
    "while frame is not None and type(frame.f_locals.get('self')).__name__ != 'Student':\n    frame = frame.f_back\n"
    "if frame is not None:\n    server = frame.f_locals['self']\n"
)
_PRODUCT = "\ndef gemm_broadcast(a, b):\n    return a @ b\n"

SERVERS = [
    *(
        Attack(
            f"calls made unwatched, by way of {name}, with a record that holds the result",
            PRODUCT,
            code + _UP + _FORGED_PROGRAM.replace("PROGRAM", _LEAF),
            _PRODUCT,
            alone=True,
        )
        for name, code in _FRAMES.items()
    ),
    Attack(
        "calls made unwatched, with a record that names no operator",
        PRODUCT,
        _WALK + _FORGED_PROGRAM.replace("PROGRAM", '{"leaves": [], "result": []}'),
        _PRODUCT,
        alone=True,
    ),
    Attack(
        "calls made unwatched, with a record that says nothing",
        PRODUCT,
        _WALK + _FORGED_PROGRAM.replace("PROGRAM", '{"leaves": [], "result": None}'),
        _PRODUCT,
        alone=True,
    ),
    Attack(
        "calls made unwatched, with a pickle in the record",
        PRODUCT,
        _WALK + _FORGED_PROGRAM.replace("PROGRAM", '{"leaves": [[0, "made", ["pickle", 0]]], "result": [0]}'),
        _PRODUCT,
        alone=True,
    ),
    Attack(
        "the watch muted by way of a closure, and everything looked at",
        PRODUCT,
        """
import gc, os
for cell in os._exit.__closure__ or ():
    inside = cell.cell_contents
    if hasattr(inside, "reported"):
        inside.reported.update(range(500))
        inside.busy = True
gc.get_objects()
"""
        + _WALK
        + _UNWATCHED,
        _PRODUCT,
        alone=True,
    ),
    Attack("the signs' pipe closed, and calls unwatched", PRODUCT, _WALK + _CLOSE + _UNWATCHED, _PRODUCT, alone=True),
    Attack(
        "another program takes over the channel and the pipe, and speaks for the process",
        PRODUCT,
        _SPEAK
        + _WALK
        + """
message = frame.f_back.f_back.f_locals["message"]
os.execv(sys.executable, [sys.executable, "speaker.py", str(line), str(pipe), str(message["n"])])
""",
        alone=True,
    ),
    Attack(
        "a child of the process speaks for it, while the cell waits",
        PRODUCT,
        _SPEAK
        + _WALK
        + """
import subprocess
message = frame.f_back.f_back.f_locals["message"]
subprocess.Popen([sys.executable, "speaker.py", str(line), str(pipe), str(message["n"])], pass_fds=(line, pipe)).wait()
""",
        alone=True,
    ),
]

# ---- answers of odd kinds ------------------------------------------------------------------------------------------


def _number(name: str, text: str) -> Attack:
    return Attack(f"a number that is {name}", NUMBER, answer=f"\n{text}\n", flagged=False)


ODD = [
    _number("none", "cache_bytes = float('nan')"),
    _number("without end", "cache_bytes = float('inf')"),
    _number("all at once", "import numpy as np\ncache_bytes = np.arange(109051900, 109051910)"),
    _number("a tensor of many", "cache_bytes = torch.arange(109051900, 109051910)"),
    _number("a range", "cache_bytes = range(10**15)"),
    _number("text", "cache_bytes = '109051904'"),
    Attack(
        "costs that are no numbers",
        COST,
        answer="\ndef gemm_cost(m, n, k, dtype):\n    return {'flops': float('nan'), 'bytes': float('nan')}\n",
        flagged=False,
    ),
    Attack(
        "a product of NaN",
        GEMV,
        answer="\ndef gemv(a, x):\n    return torch.full((a.shape[0],), float('nan'))\n",
        flagged=False,
    ),
    Attack(
        "a product that would fit by broadcasting",
        GEMV,
        answer="\ndef gemv(a, x):\n    return (a * x).sum()[None]\n",
        flagged=False,
    ),
    Attack(
        "times without end",
        TIMER,
        answer="\nimport itertools\ndef time_calls(fn, n_calls, synchronize):\n    return itertools.count()\n",
        flagged=False,
    ),
    Attack(
        "a list of times that no machine can hold",
        TIMER,
        answer="\ndef time_calls(fn, n_calls, synchronize):\n    return range(10**15)\n",
        flagged=False,
    ),
    Attack(
        "a chain of exceptions as long as the stack",
        COST,
        answer="""
def gemm_cost(m, n, k, dtype):
    error = None
    for _ in range(100_000):
        new = ValueError("passed")
        new.__cause__ = error
        error = new
    raise error
""",
        flagged=False,
    ),
    Attack(
        "the file answer is a hard link to another",
        FILE,
        answer="import os, sys\nopen('other.toml', 'w').write('BLOCK_M = 1')\nos.link('other.toml', 'tiles.toml')\n",
        flagged=False,
    ),
    Attack(
        "a mask that learns how often it is called",
        MASK,
        answer="""
def documents_and(numbers, also):
    calls = []
    def mod(b, h, q, k):
        calls.append(1)
        return (k <= q) if len(calls) > 1 else (numbers[q] == numbers[k]) & also(b, h, q, k)
    return mod
""",
        flagged=False,
    ),
]

WEEKEND_ATTACKS = [*BELOW, *SERVERS, *ODD]
