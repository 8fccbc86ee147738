"""Watch which operators a student's code really runs, by whatever name it calls them.

A list of forbidden words in the source misses `F.linear`, `getattr(torch, "mat" + "mul")` and a helper defined in
another cell. Here the code runs under two modes of torch instead. The dispatch mode sees every operator below
autograd: `a @ b` and `F.linear` as `aten.mm`, `einsum` as `aten.bmm`, a 1 x 1 convolution as `aten.convolution`.
The function mode sees the calls above it, and with them the ways out of torch: `.numpy()`, `np.asarray(t)`,
`.tolist()`, `.item()`, DLPack. Nobody can see what NumPy does afterwards, so the watch reports that a value left torch.

Of other machinery it sees:

| code under the watch                    | recorded                                                                |
|-----------------------------------------|-------------------------------------------------------------------------|
| `torch.compile`d function               | its operators: torch runs it eagerly while a dispatch mode is on        |
| `torch.inference_mode`                  | the composite operator and what it decomposes into                      |
| Triton kernel                           | the kernel's name, in `kernels`                                         |
| operator of `torch.library`, own C++    | its name, in `custom`: its inside runs below the watch                  |
| thread started inside                   | the same as in this thread                                              |
| NumPy, SQLite on numbers from `.item()` | in `exits`, where numbers go in                                         |
| thread or process that ran before       | nothing                                                                 |
| a library's Python implementation       | its operators, and in `borrowed` whose code ran them                    |
"""

from __future__ import annotations

import functools
import linecache
import os
import re
import sys
import sysconfig
import threading
import types
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.autograd.forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from utils.checking.sizes import MOVES
from utils.files import ROOT

# Operators that compute attention in one call.
FUSED_ATTENTION = (
    r"_?scaled_dot_product_\w+",
    r"_(?:flash|efficient|cudnn)_attention\w*",
    r"\w*multi_head_attention\w*",
    r"flex_attention\w*",
    r"_triton_scaled_dot_attention",
)
# Operators that multiply matrices, or that can be used for it: a decomposition or an inverse of blocks holds a product, and
# so do distances and Fourier transforms. Names without namespace and overload. Outer products
# (`outer`, `addr`) are not among them: they are one step of the sum over k.
_PRODUCTS = r"""
    mm bmm addmm baddbmm addbmm addmv mv dot vdot inner einsum tensordot multi_dot linalg_multi_dot \w*matmul\w*
    matrix_power linalg_matrix_power cov corrcoef hspmm smm sspaddmm \w*_mm\w* _?\w*addmm\w*
    (?!_*upsample)\w*linear\w* fbgemm_\w+ _spsolve
    \w*convolution\w* \w*conv[123]d\w* \w*conv_(?:transpose|tbc|depthwise|dilated)\w*
    _transformer_encoder\w* \w*cdist\w* _euclidean_dist \w*_rnn\w* \w*lstm\w* \w*gru\w* rnn_\w+ \w*_cell\w*
    _?linalg_(?!(?:vector_|matrix_)?norm|cross|diagonal|vecdot)\w+ \w*triangular_solve\w* ormqr orgqr geqrf qr svd
    _?embedding_bag\w* sampled_addmm
    \w*cholesky\w* _?lu_\w+ lu matrix_exp inverse pinverse _?pdist\w* _?fft_\w+
"""
MATMUL = (*_PRODUCTS.split(), *FUSED_ATTENTION)

# How a tensor's values get out of torch, by what the function mode calls it.
_EXITS = {
    "numpy": ".numpy()",
    "__array__": "numpy.asarray(tensor)",
    "tolist": ".tolist()",
    "__dlpack__": "DLPack",
    "data_ptr": ".data_ptr()",
    "untyped_storage": ".untyped_storage()",
    "storage": ".storage()",
    "_typed_storage": ".storage()",
    "__cuda_array_interface__": "__cuda_array_interface__",
    "__array_wrap__": "numpy.asarray(tensor)",
    "const_data_ptr": ".data_ptr()",
    "item": ".item()",
    "__float__": "float(tensor)",
    "__int__": "int(tensor)",
    "__index__": "int(tensor)",
    "__complex__": "complex(tensor)",
    "__bool__": "bool(tensor)",
}
SCALAR_EXITS = frozenset({".item()", "float(tensor)", "int(tensor)", "complex(tensor)", "bool(tensor)"})

# The course's own code. It is a constant, and no list to register at: a submission could register its own folder too.
_COURSE = tuple(str(ROOT / folder) + os.sep for folder in ("utils", "instructor"))


def _library_folders(search_path: list[str]) -> tuple[str, ...]:
    """Return the folders of Python and of installed libraries; a host's may be added to the path by a .pth file."""
    folders = [sysconfig.get_paths()[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")]
    folders += [p for p in search_path if os.path.isabs(p) and {"site-packages", "dist-packages"} & {*Path(p).parts}]
    return tuple(dict.fromkeys(os.path.realpath(folder) + os.sep for folder in folders))


_LIBRARIES = _library_folders(sys.path)  # as it was before any of a student's code could change the path

# Where numbers that left a tensor one by one could be multiplied at once; functions of NumPy that take numbers in.
_FOREIGN = ("numpy", "scipy", "pandas", "sqlite3", "_sqlite3")
_NUMPY = tuple(os.path.join(folder, "numpy") + os.sep for folder in _LIBRARIES)
_TAKES_NUMBERS = frozenset(
    [
        "array",
        "asarray",
        "asanyarray",
        "ascontiguousarray",
        "fromiter",
        "frombuffer",
        "zeros",
        "empty",
        "copyto",
        "concatenate",
        "executemany",
        "execute",
    ]
)
# Where libraries and the course hold formulas written out in Python: whoever calls those has not written them.
_TORCH = os.path.realpath(os.path.dirname(torch.__file__)) + os.sep
_IN_TORCH = (
    *("_refs", "_prims", "_decomp", "_inductor", "_higher_order_ops", os.path.join("nn", "attention")),
    *("ao", "onnx", "testing", "masked", "distributed", "sparse", "distributions"),
)
_MODELS = ("transformers", "diffusers", "flash_attn", "xformers", "timm", "liger_kernel", "torchao", "torchtune", "fla")
_IN_COURSE = ("attention", "kernels", "model", "bench")
_LONG = 200  # bytes of byte code: two people may write the same short function
_FORMULAS = (
    *((_TORCH + part + os.sep, os.path.dirname(_TORCH[:-1]) + os.sep) for part in _IN_TORCH),
    *((folder + name + os.sep, folder) for folder in _LIBRARIES for name in _MODELS),
    *((str(ROOT / "utils" / part) + os.sep, str(ROOT) + os.sep) for part in _IN_COURSE),
)
_MASKS = tuple(
    str(ROOT / "utils" / "attention" / "masks" / name) for name in ("mask_mods.py", "score_mods.py")
)  # handed out


@functools.cache
def _place(file: str) -> str:
    """Return the path of a code's file without links; a name such as <cell 3> stays. Every operator asks for some of them."""
    return os.path.realpath(file) if os.path.isabs(file) else file


@functools.cache
def _whose(file: str) -> str:
    """Return "student", the file of a library's or the course's formulas, or "" for what lies between the two."""
    path = _place(file)
    for folder, above in _FORMULAS:
        if path.startswith(folder) and path not in _MASKS:
            return path.removeprefix(above)
    inside = path.startswith((*_COURSE, *_LIBRARIES)) or file.startswith(("<frozen", "<__array", "<eval_with_key"))
    return "" if inside else "student"


def _codes_in(code: types.CodeType) -> list[types.CodeType]:
    inside = [part for part in code.co_consts if isinstance(part, types.CodeType)]
    return [code, *(deeper for part in inside for deeper in _codes_in(part))]


@functools.cache
def _codes_of_libraries() -> dict[tuple[str, bytes], str]:
    """{(name, byte code): file} of the functions of the libraries' formulas that are imported now, but for short ones."""
    found = {}
    for module in [m for m in list(sys.modules.values()) if type(m) is types.ModuleType]:
        file = getattr(module, "__file__", None) or ""
        if not file.endswith(".py") or _whose(file) in ("", "student"):
            continue
        values = list(vars(module).values())
        values += [v for kind in values if type(kind) is type for v in list(vars(kind).values())]
        for value in values:
            if type(value) is types.FunctionType and value.__code__.co_filename == file:
                for code in _codes_in(value.__code__):
                    if len(code.co_code) >= _LONG:
                        found[code.co_name, code.co_code] = _whose(file)
    return found


def copied_from(code: types.CodeType) -> str:
    """Return the library whose formula a compiled text holds word for word; "" if there is none."""
    known = _codes_of_libraries()
    return next((known[key] for part in _codes_in(code) if (key := (part.co_name, part.co_code)) in known), "")


def _lender() -> str:
    """Return the file and function of a library that runs an operator now, on behalf of a student; "" if there is none."""
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None:
        whose = _whose(frame.f_code.co_filename)
        if whose:
            return "" if whose == "student" else f"{whose}, {frame.f_code.co_name}"
        frame = frame.f_back
    return ""


def _taken_in(function: object) -> str:
    """Return how a function of another library is called in a report, if numbers could go into it; "" for any other."""
    name = getattr(function, "__name__", "")
    if name not in _TAKES_NUMBERS:
        return ""
    module = getattr(function, "__module__", None) or type(getattr(function, "__self__", None)).__module__
    library = str(module).partition(".")[0]
    return f"{library.lstrip('_')}, {name}" if library in _FOREIGN else ""


def _has_float(values: object, depth: int = 0) -> bool:
    """Return whether there is a Python float among the values; sizes and places are integers."""
    if isinstance(values, list | tuple) and depth < 4:
        return any(_has_float(value, depth + 1) for value in values[:1000])
    return isinstance(values, float)


def _on_behalf_of_student(frame: types.FrameType | None) -> bool:
    """Return whether a student's code is the next one outside of the libraries of `_FOREIGN` and of Python."""
    while frame is not None:
        if is_students(frame.f_code):
            return True
        # NumPy makes arrays for itself where a student asks it for something else.
        if _place(frame.f_code.co_filename).startswith((_TORCH, *_COURSE, *_NUMPY)):
            return False
        frame = frame.f_back
    return False


@dataclass(frozen=True)
class StudentLine:
    """A line of a student's code: where something happened."""

    function: str
    number: int
    text: str

    def __str__(self) -> str:
        place = "at the top of the cell" if self.function == "<module>" else f"in {self.function}"
        return f"{place}, line {self.number}" + (f": {self.text}" if self.text else "")


def is_students(code: types.CodeType) -> bool:
    """Return whether a student wrote the code: not Python's, an installed library's, or the course's."""
    name = code.co_filename
    if name.startswith(("<frozen", "<__array", "<eval_with_key")):
        return False
    return not _place(name).startswith((*_COURSE, *_LIBRARIES))


def _line(code: types.CodeType, number: int) -> StudentLine:
    return StudentLine(code.co_name, number, linecache.getline(code.co_filename, number).strip())


def lines_of_traceback(trace: types.TracebackType | None, skip: types.CodeType | None = None) -> list[StudentLine]:
    """Return the lines of a traceback that a student wrote, outermost first.

    Args:
        trace: the traceback.
        skip: the code of a check; its frames do not count, nor do those of the functions that it defines.
    """
    skipped = _with_inner_functions(skip) if skip is not None else set()
    lines = []
    while trace is not None:
        code = trace.tb_frame.f_code
        if code not in skipped and is_students(code):
            lines.append(_line(code, trace.tb_lineno))
        trace = trace.tb_next
    return lines


def _with_inner_functions(code: types.CodeType) -> set[types.CodeType]:
    found = {code}
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            found |= _with_inner_functions(inner)
    return found


def _line_of_stack() -> StudentLine | None:
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None:
        if is_students(frame.f_code):
            return _line(frame.f_code, frame.f_lineno)
        frame = frame.f_back
    return None


@dataclass
class OperationWatch:
    """What ran under `watch_operations`: counts by name, and for each name the student's line that ran it first."""

    operations: Counter[str] = field(default_factory=Counter)  # aten operators, for example "mm"
    calls: Counter[str] = field(default_factory=Counter)  # torch's functions and methods, for example "einsum"
    exits: Counter[str] = field(default_factory=Counter)  # ways out of torch, for example ".numpy()"
    custom: Counter[str] = field(default_factory=Counter)  # operators of other namespaces: "mylib::mm"
    kernels: Counter[str] = field(default_factory=Counter)  # Triton kernels launched
    borrowed: Counter[str] = field(default_factory=Counter)  # a library's formula, whose operators ran: file, function
    lines: dict[str, StudentLine] = field(default_factory=dict)  # name -> the first line that used it
    rules: list[tuple] = field(default_factory=list)  # what was forbidden: (function of this module, its arguments)

    def _note(self, counter: Counter[str], name: str) -> None:
        if name not in counter:
            line = _line_of_stack()
            if line is not None:
                self.lines.setdefault(name, line)
        counter[name] += 1


# A label for the profiler around some code: it computes nothing.
LABELS = frozenset(f"profiler::_record_function_{end}" for end in ("enter", "enter_new", "exit"))


class _Dispatch(TorchDispatchMode):
    supports_higher_order_operators = True  # flex_attention and the like arrive here instead of raising

    def __init__(self, seen: OperationWatch):
        super().__init__()
        self.seen = seen
        self.names: dict[object, tuple[Counter[str], str]] = {}  # operator -> where it counts, and as what

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func not in self.names:
            self.names[func] = self._name(func)
        counter, name = self.names[func]
        if name not in LABELS:
            self.seen._note(counter, name)
            # The engine can be called without the functions that are replaced below; what it needs is a graph.
            if torch.is_grad_enabled() and any(isinstance(a, torch.Tensor) and a.requires_grad for a in args):
                self.seen._note(self.seen.calls, "autograd")
            if name not in MOVES and (lender := _lender()):
                self.seen._note(self.seen.borrowed, lender)
        # Under inference_mode composite operators arrive whole: look inside.
        if torch.is_inference_mode_enabled() and hasattr(func, "decompose"):
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        return func(*args, **kwargs)

    def _name(self, func) -> tuple[Counter[str], str]:
        if not hasattr(func, "_schema"):  # a higher-order operator
            return self.seen.operations, func.__name__
        if func.namespace in ("aten", "prim", "prims"):
            return self.seen.operations, func._schema.name.split("::")[1].rstrip("_") or func.__name__
        return self.seen.custom, func._schema.name


class _Calls(TorchFunctionMode):
    def __init__(self, seen: OperationWatch, launching: threading.local):
        super().__init__()
        self.seen, self.launching = seen, launching

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        if name == "__get__":  # a property: its own name sits on the descriptor
            name = getattr(getattr(func, "__self__", None), "__name__", name)
        if name in _EXITS:
            if not getattr(self.launching, "kernel", False):  # a launch takes the pointers of its arguments
                self.seen._note(self.seen.exits, _EXITS[name])
        elif name != "__get__":
            self.seen._note(self.seen.calls, name)
        return func(*args, **(kwargs or {}))


class watch_operations:
    """Record what runs inside: operators, custom operators, Triton kernels and ways out of torch.

    `with watch_operations() as watch: gemm(a, b)` fills an `OperationWatch`. Everything that is replaced for the
    watch is put back at its end, also when the code inside raises. Operators run slower under it (tens of
    microseconds each): watch small shapes, and never time under it.
    """

    # Functions that torch does not show to a function mode: (module, attribute, what it is called in a report).
    _PATCHED = (
        ("torch._C", "_to_dlpack", "DLPack"),
        ("torch._C", "_to_dlpack_versioned", "DLPack"),
        ("torch.utils.dlpack", "to_dlpack", "DLPack"),
        ("torch", "to_dlpack", "DLPack"),
        ("torch", "from_numpy", "torch.from_numpy (memory shared with NumPy)"),
        ("torch", "frombuffer", "torch.frombuffer (memory shared with Python)"),
    )
    # Through which every derivative by torch goes: backward, autograd.grad, torch.func's vjp, and forward mode.
    _DERIVATIVES = (
        ("torch.autograd", "_engine_run_backward"),
        ("torch.autograd.graph", "_engine_run_backward"),
        ("torch.autograd.forward_ad", "make_dual"),
    )

    def __enter__(self) -> OperationWatch:
        self.seen = OperationWatch()
        self._launching = threading.local()
        self._replaced: list[tuple[object, str, object]] = []
        self._profile: tuple | None = None  # the function that `sys.setprofile` had, in a tuple
        try:
            for module, name, label in self._PATCHED:
                owner = sys.modules.get(module)
                if owner is not None and name in vars(owner):
                    self._replace(owner, name, self._counted(self.seen.exits, getattr(owner, name), label))
            for module, name in self._DERIVATIVES:
                owner = sys.modules[module]
                self._replace(owner, name, self._counted(self.seen.calls, getattr(owner, name), "autograd"))
            self._watch_triton()
            self._watch_threads()
            self._watch_libraries()
            self._modes = self._enter_modes()
        except BaseException:
            self._restore()
            raise
        return self.seen

    def __exit__(self, *error: object) -> None:
        try:
            for mode in reversed(self._modes):
                mode.__exit__(*error)
        finally:
            self._restore()

    def _enter_modes(self) -> list:
        modes: list = [_Dispatch(self.seen), _Calls(self.seen, self._launching)]
        for mode in modes:
            mode.__enter__()
        return modes

    def _replace(self, owner: object, name: str, new: object) -> None:
        self._replaced.append((owner, name, vars(owner)[name]))
        setattr(owner, name, new)

    def _restore(self) -> None:
        if self._profile is not None:
            sys.setprofile(self._profile[0])
            self._profile = None
        while self._replaced:
            owner, name, old = self._replaced.pop()
            setattr(owner, name, old)

    def _counted(self, counter: Counter[str], function, label: str):
        def counted(*args, **kwargs):
            self.seen._note(counter, label)
            return function(*args, **kwargs)

        return counted

    def _watch_libraries(self) -> None:
        """Note calls by which numbers go into NumPy or a data base: a tensor's numbers can leave one at a time."""

        def profile(frame, event, function):
            if event == "c_call" and (name := _taken_in(function)) and _on_behalf_of_student(frame):
                self.seen._note(self.seen.exits, name)

        self._profile = (sys.getprofile(),)
        sys.setprofile(profile)
        if (library := sys.modules.get("numpy")) is not None:
            for name in _TAKES_NUMBERS & set(vars(library)):  # `map` calls it, and no profile function sees that
                self._replace(library, name, self._counted_for_student(getattr(library, name), f"numpy, {name}"))

    def _counted_for_student(self, function, label: str):
        def counted(*args, **kwargs):
            if _has_float(args) and _on_behalf_of_student(sys._getframe(1)):
                self.seen._note(self.seen.exits, label)
            return function(*args, **kwargs)

        return counted

    def _watch_triton(self) -> None:
        """Note the launches of Triton kernels, compiled or interpreted, if Triton is loaded at all."""
        for module, name, method in (
            ("triton.runtime.jit", "JITFunction", "run"),
            ("triton.runtime.interpreter", "GridExecutor", "__call__"),
        ):
            owner = getattr(sys.modules.get(module), name, None)
            if owner is not None and method in vars(owner):
                self._replace(owner, method, self._noted_launch(vars(owner)[method]))

    def _noted_launch(self, launch):
        """A method that launches a kernel, and notes it."""

        def run(kernel, *args, **kwargs):
            function = getattr(kernel, "fn", None)
            self.seen._note(self.seen.kernels, getattr(function, "__name__", type(kernel).__name__))
            before = getattr(self._launching, "kernel", False)
            self._launching.kernel = True
            try:
                return launch(kernel, *args, **kwargs)
            finally:
                self._launching.kernel = before

        return run

    def _watch_threads(self) -> None:
        run = vars(threading.Thread)["run"]

        def watched(thread):
            modes = self._enter_modes()
            try:
                run(thread)
            finally:
                for mode in reversed(modes):
                    mode.__exit__(None, None, None)

        self._replace(threading.Thread, "run", watched)


def _plain(name: str) -> str:
    """`__matmul__` and `matmul_` -> `matmul`."""
    return name.strip("_") if name.startswith("__") else name.rstrip("_")


def forbid(watch: OperationWatch, operations: tuple[str, ...] = MATMUL, hint: str = "") -> None:
    """Assert that none of `operations` ran under `watch`; custom operators, whose inside is hidden, may not run either.

    Args:
        watch: the record of `with watch_operations() as watch`.
        operations: operator names without namespace, each a regular expression; `MATMUL` is the family of matrix
            products, convolutions and attention.
        hint: what to do instead.
    """
    watch.rules.append((forbid, (operations, hint)))
    pattern = re.compile("|".join(f"(?:{name})" for name in operations))
    hint = f" {hint[0].upper()}{hint[1:]}" if hint else ""
    hint += "" if not hint or hint.endswith((".", "!", "?")) else "."
    # A student wrote the call, `einsum`; torch ran the operator, `aten.bmm`.
    called = [name for name in watch.calls if pattern.fullmatch(_plain(name))]
    ran = [name for name in watch.operations if pattern.fullmatch(_plain(name))]
    if called or ran:
        name = (called or ran)[0]
        line = watch.lines.get(name)
        shown = f"torch's {_plain(name)}" if called else f"aten.{name}"
        shown += f" (it ran aten.{ran[0]})" if called and ran and ran[0] != _plain(name) else ""
        raise AssertionError(f"your code may not use {shown} here.{hint}" + (f"\n  {line}" if line else ""))
    if watch.borrowed:
        name = next(iter(watch.borrowed))
        line = watch.lines.get(name)
        raise AssertionError(
            f"your code had a formula of a library computed ({name}). Write it yourself, with torch's operators.{hint}"
            + (f"\n  {line}" if line else "")
        )
    if watch.custom:
        name = next(iter(watch.custom))
        line = watch.lines.get(name)
        raise AssertionError(
            f"your code ran the custom operator {name}, whose inside cannot be watched. Write it with torch's own "
            f"operators.{hint}" + (f"\n  {line}" if line else "")
        )


def forbid_leaving(watch: OperationWatch, hint: str = "", *, scalars: bool = True) -> None:
    """Assert that no tensor left torch (NumPy, lists, DLPack, raw memory) under `watch`.

    Args:
        watch: the record of `with watch_operations() as watch`.
        hint: what to do instead.
        scalars: allow single values to leave, by `.item()`, `float(t)`, `if t:`.
    """
    watch.rules.append((functools.partial(forbid_leaving, scalars=scalars), (hint,)))
    exits = [name for name in watch.exits if not (scalars and name in SCALAR_EXITS)]
    if exits:
        line = watch.lines.get(exits[0])
        hint = f" {hint}" if hint else ""
        raise AssertionError(
            f"your code took a tensor's values out of torch, by {exits[0]}. Keep them in tensors.{hint}"
            + (f"\n  {line}" if line else "")
        )


def demand(watch: OperationWatch, operations: tuple[str, ...], hint: str = "") -> None:
    """Assert that one of `operations` ran under `watch`: a question that names a tool asks for it, not for its values.

    Args:
        watch: the record of `with watch_operations() as watch`.
        operations: operator names without namespace, each a regular expression.
        hint: what to do instead.
    """
    watch.rules.append((demand, (operations, hint)))
    pattern = re.compile("|".join(f"(?:{name})" for name in operations))
    if not any(pattern.fullmatch(_plain(name)) for name in (*watch.calls, *watch.operations)):
        hint = f" {hint[0].upper()}{hint[1:]}." if hint else ""
        raise AssertionError(f"your code runs without the operator that the question asks for.{hint}")
