"""Attacks on the watch over a student's functions: on the calls that it sees, on its record, and on its signs."""

from __future__ import annotations

from tests.instructor.grading.attacks import FORBIDDEN, PRODUCT, Attack

_WALK = """
try:
    raise ValueError
except ValueError as error:
    frame = error.__traceback__.tb_frame
    while frame is not None and type(frame.f_locals.get("self")).__name__ != "Student":
        frame = frame.f_back
    server = frame.f_locals["self"]
"""
_CLOSE = """
import os
import stat

for number in range(3, 64):
    try:
        if stat.S_ISFIFO(os.fstat(number).st_mode):
            os.close(number)
    except OSError:
        pass
"""
_UNWATCHED = """
do_call = server.do_call


def unwatched(message, blobs):
    wanted = message["conditions"]
    record, wanted["watch"], wanted["record"] = wanted["record"], False, False
    reply, data = do_call(message, blobs)
    if record:
        ends = [{"tensor": [[size], "float32", "meta"]} for size in wanted["canary"]]
        reply["records"] = [["aten::special_i1e", "default", [end], {}, end] for end in ends]
        reply["watch"] = {name: {} for name in ("operations", "calls", "exits", "custom", "kernels", "borrowed", "lines")}
    return reply, data


server.do_call = unwatched
"""
_OTHER_NAME = _UNWATCHED.replace(
    'for end in ends]\n        reply["watch"]',
    'for end in ends]\n        out = {"tensor": [reply["value"][1]["shape"], "float32", "cpu"]}\n'
    '        reply["records"].insert(1, ["aten::mul", "Tensor", [out], {}, out])\n        reply["watch"]',
)
_RIGHT = "    product = (a[:, :, None] * b[None]).sum(dim=1)\n"

WATCH_ATTACKS = [
    Attack(
        "the library where no mode is on",
        PRODUCT,
        answer="\ndef gemm_broadcast(a, b):\n    if torch._C._len_torch_dispatch_stack():\n        return None\n    return a @ b\n",
        flagged=False,
    ),
    Attack(
        "the library except for the visible shape",
        PRODUCT,
        answer=f"\ndef gemm_broadcast(a, b):\n{_RIGHT}    return product if a.shape == (2, 3) else a @ b\n",
        flagged=False,
    ),
    Attack(
        "a right product that writes into its input",
        PRODUCT,
        answer=f"\ndef gemm_broadcast(a, b):\n{_RIGHT}    a.add_(1)\n    return product\n",
        flagged=False,
    ),
    Attack("the pipe of the signs closed", PRODUCT, _CLOSE + "import gc\ngc.get_objects()\n", FORBIDDEN, alone=True),
    Attack("calls made unwatched, with empty records", PRODUCT, _WALK + _UNWATCHED, FORBIDDEN, alone=True),
    Attack(
        "calls made unwatched, with a record and an empty watch", PRODUCT, _WALK + _OTHER_NAME, FORBIDDEN, alone=True
    ),
    Attack(
        "the watch's method replaced in its class",
        PRODUCT,
        _WALK + "type(server.watcher).sign = lambda *given: None\nimport gc\ngc.get_objects()\n",
        FORBIDDEN,
        alone=True,
    ),
    Attack(
        "the watch itself replaced",
        PRODUCT,
        _WALK
        + """
class Blind:
    def __getattr__(self, name):
        return lambda *given: None


server.watcher = Blind()
""",
        FORBIDDEN,
        alone=True,
    ),
]
