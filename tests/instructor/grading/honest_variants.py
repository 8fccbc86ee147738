"""Right answers in many hands: each must get its points, and none may be flagged.

`ANSWERS` hold other texts of single answers; `packs` puts one for each question into a notebook. `NOTEBOOKS` are
changes of the notebook around them: cells of the student's own, kept outputs, line ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import zip_longest

from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell, new_output, new_raw_cell

PRODUCTS = {
    "other names": """
def gemm_broadcast(left, right):
    products = left.unsqueeze(2) * right.unsqueeze(0)
    return products.sum(1)
""",
    "three loops, slow": """
def gemm_broadcast(a, b):
    c = torch.zeros(a.shape[0], b.shape[1], dtype=a.dtype)
    for i in range(a.shape[0]):
        for j in range(b.shape[1]):
            for p in range(a.shape[1]):
                c[i, j] += a[i, p] * b[p, j]
    return c
""",
    "one row at a time, with a helper": """
def times_matrix(row, matrix):
    return (row[:, None] * matrix).sum(dim=0)

def gemm_broadcast(a, b):
    return torch.stack([times_matrix(row, b) for row in a])
""",
    "a lambda": "gemm_broadcast = lambda a, b: (a[..., None] * b).sum(-2)\n",
    "an object that is called": """
class Product:
    def __init__(self, dim):
        self.dim = dim

    def __call__(self, a, b):
        return torch.sum(a[:, :, None] * b[None, :, :], dim=self.dim)

gemm_broadcast = Product(1)
""",
    "functools.partial": """
import functools

def product(dim, a, b):
    return (a[:, :, None] * b[None]).sum(dim=dim)

gemm_broadcast = functools.partial(product, 1)
""",
    "a decorator of its own": """
import functools

def checked(function):
    @functools.wraps(function)
    def inner(a, b):
        assert a.shape[1] == b.shape[0], "inner sizes differ"
        return function(a, b)
    return inner

@checked
def gemm_broadcast(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a[:, :, None] * b[None]).sum(dim=1)
""",
    "recursion over k": """
def gemm_broadcast(a, b):
    if a.shape[1] == 1:
        return a * b
    half = a.shape[1] // 2
    return gemm_broadcast(a[:, :half], b[:half]) + gemm_broadcast(a[:, half:], b[half:])
""",
    "outer products, added up": """
def gemm_broadcast(a, b):
    total = 0
    for k in range(a.shape[1]):
        total = total + a[:, k:k+1] * b[k:k+1, :]
    return total
""",
    "unicode names": """
def gemm_broadcast(α, β):
    Σ = (α[:, :, None] * β[None]).sum(dim=1)
    return Σ
""",
    "prints and comments in plenty": """
def gemm_broadcast(a, b):
    # (M, K, 1) * (1, K, N) -> (M, K, N)
    print("shapes", a.shape, b.shape)
    c = (a[:, :, None] * b[None])
    print("products", c.shape, flush=True)
    # the sum over K
    return c.sum(dim=1)
""",
    "float64 inside": """
def gemm_broadcast(a, b):
    wide = a.double()[:, :, None] * b.double()[None]
    return wide.sum(dim=1).to(a.dtype)
""",
    "positional-only, keyword defaults, type hints": """
from typing import Optional
Tensor = torch.Tensor

def gemm_broadcast(a: Tensor, b: Tensor, /, *, dim: Optional[int] = 1) -> "Tensor":
    return (a[:, :, None] * b[None]).sum(dim=dim)
""",
    "no_grad and a warning": """
import warnings

@torch.no_grad()
def gemm_broadcast(a, b):
    warnings.warn("this takes M K N elements")
    return (a[:, :, None] * b[None]).sum(dim=1)
""",
    "torch.vmap": """
def gemm_broadcast(a, b):
    dot = lambda x, y: (x * y).sum()
    return torch.vmap(torch.vmap(dot, (None, 1)), (0, None))(a, b)
""",
    "a staticmethod of a class": """
class Products:
    @staticmethod
    def by_broadcasting(a, b):
        return (a[:, :, None] * b[None]).sum(dim=1)

gemm_broadcast = Products.by_broadcasting
""",
}

COSTS = {
    "statements, one a line": """
def gemm_cost(m, n, k, dtype):
    result = dict()
    result["flops"] = 2 * m * n * k
    result["bytes"] = (m*k + k*n + m*n) * dtype.itemsize
    return result
""",
    "dict(...)": """
def gemm_cost(m, n, k, dtype):
    return dict(bytes=dtype.itemsize * (m * k + n * (k + m)), flops=2 * m * n * k)
""",
    "an OrderedDict": """
from collections import OrderedDict

def gemm_cost(m, n, k, dtype):
    return OrderedDict(flops=2 * m * n * k, bytes=(m * k + k * n + m * n) * dtype.itemsize)
""",
    "a defaultdict": """
from collections import defaultdict

def gemm_cost(m, n, k, dtype):
    cost = defaultdict(int)
    cost["flops"] += m * n * k + m * n * k
    for rows, cols in ((m, k), (k, n), (m, n)):
        cost["bytes"] += rows * cols * dtype.itemsize
    return cost
""",
    "numpy integers": """
import numpy as np

def gemm_cost(m, n, k, dtype):
    m, n, k = np.array([m, n, k], dtype=np.int64)
    return {"flops": 2 * m * n * k, "bytes": (m * k + k * n + m * n) * dtype.itemsize}
""",
    "a numpy float": """
import numpy

def gemm_cost(m, n, k, dtype):
    return {"flops": numpy.float64(2 * m * n * k), "bytes": numpy.float64((m*k + k*n + m*n) * dtype.itemsize)}
""",
    "a 0-d tensor": """
def gemm_cost(m, n, k, dtype):
    sizes = torch.tensor([m * k, k * n, m * n])
    return {"flops": torch.tensor(2 * m * n * k), "bytes": sizes.sum() * dtype.itemsize}
""",
    "bytes measured on tensors": """
def gemm_cost(m, n, k, dtype):
    matrices = [torch.empty(shape, dtype=dtype, device="meta") for shape in ((m, k), (k, n), (m, n))]
    return {"flops": 2 * m * n * k, "bytes": sum(x.numel() * x.element_size() for x in matrices)}
""",
    "lru_cache on a helper": """
from functools import lru_cache

@lru_cache(maxsize=None)
def elements(*shape):
    product = 1
    for size in shape:
        product *= size
    return product

def gemm_cost(m, n, k, dtype):
    return {"flops": 2 * elements(m, n, k),
            "bytes": (elements(m, k) + elements(k, n) + elements(m, n)) * dtype.itemsize}
""",
    "lru_cache on the answer": """
import functools

@functools.lru_cache
def gemm_cost(m, n, k, dtype):
    return {"flops": 2 * m * n * k, "bytes": (m * k + k * n + m * n) * dtype.itemsize}
""",
    "a table of sizes": """
SIZES = {torch.float64: 8, torch.float32: 4, torch.bfloat16: 2, torch.float16: 2}

def gemm_cost(m, n, k, dtype):
    return {"flops": 2 * m * n * k, "bytes": (m * k + k * n + m * n) * SIZES[dtype]}
""",
    "math.prod and floats": """
import math

def gemm_cost(m, n, k, dtype):
    return {"flops": 2.0 * math.prod((m, n, k)), "bytes": float(m * k + k * n + m * n) * dtype.itemsize}
""",
    "try and finally": """
def gemm_cost(m, n, k, dtype):
    try:
        size = dtype.itemsize
    except AttributeError:
        size = torch.empty(0, dtype=dtype).element_size()
    finally:
        flops = 2 * m * n * k
    return {"flops": flops, "bytes": size * (m * k + k * n + m * n)}
""",
    "tabs": "def gemm_cost(m, n, k, dtype):\n\tflops = 2 * m * n * k\n"
    "\treturn {'flops': flops, 'bytes': (m*k + k*n + m*n) * dtype.itemsize}\n",
    "match": """
def gemm_cost(m, n, k, dtype):
    match dtype.itemsize:
        case 1 | 2 | 4 | 8 as size:
            pass
        case _:
            raise ValueError(dtype)
    return {"flops": 2 * m * n * k, "bytes": size * (m * k + k * n + m * n)}
""",
    "a dataclass on the way": """
from dataclasses import asdict, dataclass

@dataclass
class Cost:
    flops: int
    bytes: int

def gemm_cost(m, n, k, dtype):
    return asdict(Cost(2 * m * n * k, (m * k + k * n + m * n) * dtype.itemsize))
""",
}

NUMBERS = {
    "a product": "cache_bytes = 2 * 26 * 1 * 256 * 4096 * 2\n",
    "the number": "cache_bytes = 109051904\n",
    "underscores": "cache_bytes = 109_051_904\n",
    "a float": "cache_bytes = 1.09051904e8\n",
    "names": """
layers, heads, width, tokens, size = 26, 1, 256, 4096, torch.bfloat16.itemsize
cache_bytes = 2 * layers * heads * width * tokens * size
""",
    "a function and a print": """
def kv_bytes(layers, heads, width, tokens):
    return 2 * layers * heads * width * tokens * 2

cache_bytes = kv_bytes(26, 1, 256, 4096)
print(f"{cache_bytes / 2**20:.1f} MiB")
""",
    "an item of a tensor": "cache_bytes = torch.tensor([2, 26, 256, 4096, 2]).prod().item()\n",
    "a 0-d tensor": "cache_bytes = torch.tensor([2, 26, 256, 4096, 2]).prod()\n",
    "a numpy scalar": "import numpy as np\ncache_bytes = np.prod([2, 26, 256, 4096, 2], dtype=np.int64)\n",
    "measured on a tensor": """
cache = torch.empty(2, 26, 4096, 256, dtype=torch.bfloat16, device="meta")
cache_bytes = cache.nbytes
""",
    "set twice": "cache_bytes = 1\ncache_bytes = 26 * 4096 * 256 * 2 * 2\n",
    "two names": "cache_bytes = kv = 2 * 26 * 256 * 4096 * 2\nkv / 1e6\n",
    "a Fraction": "from fractions import Fraction\ncache_bytes = int(Fraction(26, 1) * 4096 * 256 * 4)\n",
    "an in-place sum": """
cache_bytes = 0
for layer in range(26):
    for tensor in ("keys", "values"):
        cache_bytes += 4096 * 256 * 2
""",
    "a walrus and a shift": "print(cache_bytes := 26 << 22)\n",
    "reduce": "import functools, operator\ncache_bytes = functools.reduce(operator.mul, (26, 4, 2**8, 2**12))\n",
}

FILES = {
    "as asked": "%%writefile tiles.toml\nBLOCK_M = 128\nBLOCK_N = 64\nBLOCK_K = 64\n",
    "another order, spaces": "%%writefile tiles.toml\n\nBLOCK_K  =  32\nBLOCK_N  =  128\nBLOCK_M  =  64\n",
    "comments": "%%writefile tiles.toml\n# fp16\nBLOCK_M = 64 # rows\nBLOCK_N = 64 # columns\nBLOCK_K = 16\n",
    "hexadecimal": "%%writefile tiles.toml\nBLOCK_M = 0x40\nBLOCK_N = 0x80\nBLOCK_K = 0x20\n",
    "quoted names": '%%writefile tiles.toml\n"BLOCK_M" = 64\n"BLOCK_N" = 64\n"BLOCK_K" = 48\n',
    "unicode": "%%writefile tiles.toml\n# Größe der Kacheln, 块大小\nBLOCK_M = 96\nBLOCK_N = 96\nBLOCK_K = 32\n",
    "no newline at the end": "%%writefile tiles.toml\nBLOCK_M = 64\nBLOCK_N = 128\nBLOCK_K = 64",
    "%%file": "%%file tiles.toml\nBLOCK_M = 128\nBLOCK_N = 128\nBLOCK_K = 64\n",
    "written by Python": """
from pathlib import Path
lines = [f"BLOCK_{name} = {size}" for name, size in (("M", 64), ("N", 64), ("K", 64))]
Path("tiles.toml").write_text("\\n".join(lines))
""",
    "written by open": """
with open("tiles.toml", "w", encoding="utf-8") as file:
    for name, size in {"M": 128, "N": 128, "K": 32}.items():
        print(f"BLOCK_{name} = {size}", file=file)
""",
    "signs": "%%writefile tiles.toml\nBLOCK_M = +64\nBLOCK_N = +64\nBLOCK_K = +80\n",
}

TIMERS = {
    "perf_counter_ns": """
def time_calls(fn, n_calls, synchronize):
    times = []
    for _ in range(n_calls):
        synchronize()
        start = time.perf_counter_ns()
        fn()
        synchronize()
        times.append((time.perf_counter_ns() - start) / 1e6)
    return times
""",
    "from time import": """
from time import perf_counter as clock

def time_calls(fn, n_calls, synchronize):
    synchronize()
    times = []
    while len(times) < n_calls:
        t0 = clock()
        fn()
        synchronize()
        times += [1000 * (clock() - t0)]
    return times
""",
    "a context manager": """
from contextlib import contextmanager

@contextmanager
def stopwatch(into, synchronize):
    synchronize()
    start = time.perf_counter()
    yield
    synchronize()
    into.append((time.perf_counter() - start) * 1e3)

def time_calls(fn, n_calls, synchronize):
    times = []
    for _ in range(n_calls):
        with stopwatch(times, synchronize):
            fn()
    return times
""",
    "a nested function and a comprehension": """
def time_calls(fn, n_calls: int, synchronize) -> list:
    def once():
        synchronize(); start = time.perf_counter()
        fn(); synchronize()
        return (time.perf_counter() - start) * 1e3
    return [once() for _ in range(n_calls)]
""",
    "time.monotonic": """
def time_calls(fn, n_calls, synchronize):
    result = [0.0] * n_calls
    for i in range(n_calls):
        synchronize()
        start = time.monotonic()
        fn()
        synchronize()
        result[i] = (time.monotonic() - start) * 1000
    return result
""",
    "numpy floats in a list": """
import numpy as np

def time_calls(fn, n_calls, synchronize):
    times = np.zeros(n_calls)
    for i in range(n_calls):
        synchronize()
        start = time.perf_counter()
        fn()
        synchronize()
        times[i] = time.perf_counter() - start
    return list(times * 1e3)
""",
    "tolist of a tensor": """
def time_calls(fn, n_calls, synchronize):
    stamps = torch.zeros(n_calls, 2, dtype=torch.float64)
    for i in range(n_calls):
        synchronize()
        stamps[i, 0] = time.perf_counter()
        fn()
        synchronize()
        stamps[i, 1] = time.perf_counter()
    return ((stamps[:, 1] - stamps[:, 0]) * 1e3).tolist()
""",
    "a generator inside": """
def each(fn, n_calls, synchronize):
    for _ in range(n_calls):
        synchronize()
        start = time.perf_counter()
        fn()
        synchronize()
        yield (time.perf_counter() - start) * 1e3

def time_calls(fn, n_calls, synchronize):
    return list(each(fn, n_calls, synchronize))
""",
    "map over a range": """
def time_calls(fn, n_calls, synchronize):
    def timed(_):
        synchronize()
        begin = time.perf_counter()
        fn()
        synchronize()
        end = time.perf_counter()
        return (end - begin) * 1e3
    return [*map(timed, range(n_calls))]
""",
    "a class of its own": """
class Timer:
    def __enter__(self):
        self.start = time.perf_counter()
        return self

    def __exit__(self, *error):
        self.ms = (time.perf_counter() - self.start) * 1e3

def time_calls(fn, n_calls, synchronize):
    times = []
    for _ in range(n_calls):
        synchronize()
        with Timer() as timer:
            fn()
            synchronize()
        times.append(timer.ms)
    return times
""",
    "keyword arguments never used, garbage collection off": """
import gc

def time_calls(fn, n_calls, synchronize, *, warm_up=0):
    enabled = gc.isenabled()
    gc.disable()
    try:
        times = []
        for _ in range(n_calls):
            synchronize()
            start = time.perf_counter()
            fn()
            synchronize()
            times.append(1e3 * (time.perf_counter() - start))
        return times
    finally:
        if enabled:
            gc.enable()
""",
}

MODULES = {
    "mean of squares": """
class RMSNorm(torch.nn.Module):
    def __init__(self, width, eps=1e-6):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x):
        rms = torch.sqrt((x * x).mean(-1, keepdim=True) + self.eps)
        return self.weight * (x / rms)
""",
    "another name for the weight's memory": """
from torch import nn

class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float = 1e-6) -> None:
        nn.Module.__init__(self)
        self.register_parameter("weight", nn.Parameter(torch.ones((width,))))
        self.eps, self.width = eps, width

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        square = x.square().sum(dim=-1, keepdim=True) / self.width
        return x.mul(torch.rsqrt(square + self.eps)).mul(self.weight)

    def extra_repr(self):
        return f"{self.width}"
""",
    "torch's own, underneath": """
class RMSNorm(torch.nn.Module):
    def __init__(self, width, eps=1e-6):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x):
        return torch.nn.functional.rms_norm(x, x.shape[-1:], self.weight, self.eps)
""",
    "a subclass of torch.nn.RMSNorm": """
class RMSNorm(torch.nn.RMSNorm):
    def __init__(self, width, eps=1e-6):
        super().__init__(width, eps=eps)
""",
    "einsum and norm": """
class RMSNorm(torch.nn.Module):
    def __init__(self, width, eps=1e-6):
        super(RMSNorm, self).__init__()
        self.weight = torch.nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x):
        squared = torch.linalg.vector_norm(x, dim=-1, keepdim=True) ** 2
        return x * (squared / x.size(-1) + self.eps) ** -0.5 * self.weight
""",
    "a base class of its own": """
class Norm(torch.nn.Module):
    def __init__(self, width, eps):
        super().__init__()
        self.weight, self.eps = torch.nn.Parameter(torch.ones(width)), eps

    def forward(self, x):
        return self.normalized(x) * self.weight

class RMSNorm(Norm):
    def __init__(self, width, eps=1e-6):
        super().__init__(width, eps)

    def normalized(self, x):
        return x / torch.sqrt(x.pow(2).mean(-1, True) + self.eps)
""",
    "float32 inside": """
class RMSNorm(torch.nn.Module):
    def __init__(self, width, eps=1e-6):
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.empty(width))
        self.reset_parameters()

    def reset_parameters(self):
        torch.nn.init.ones_(self.weight)

    def forward(self, x):
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).type_as(x) * self.weight
""",
    "a static method": """
class RMSNorm(torch.nn.Module):
    @staticmethod
    def rms(x, eps):
        return x.pow(2).mean(dim=-1, keepdim=True).add(eps).sqrt()

    def __init__(self, width, eps=1e-6):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x):
        return x / self.rms(x, self.eps) * self.weight
""",
    "prints as it works": """
class RMSNorm(torch.nn.Module):
    def __init__(self, width, eps=1e-6):
        super().__init__()
        print("RMSNorm of", width)
        self.weight = torch.nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x):
        y = x * torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + self.eps)
        print("mean square", y.pow(2).mean().item())
        return y * self.weight
""",
    "a loop over rows": """
class RMSNorm(torch.nn.Module):
    def __init__(self, width, eps=1e-6):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x):
        rows = []
        for row in x.reshape(-1, x.shape[-1]):
            rows.append(row / ((row ** 2).mean() + self.eps).sqrt() * self.weight)
        return torch.stack(rows).reshape(x.shape)
""",
}

MLPS = {
    "step by step": """
def mlp(x, w1, w2):
    hidden = gemm_broadcast(x, w1)
    hidden = hidden.clamp(min=0)
    out = gemm_broadcast(hidden, w2)
    return out
""",
    "F.relu": """
import torch.nn.functional as F

def mlp(x, w1, w2):
    return gemm_broadcast(F.relu(gemm_broadcast(x, w1)), w2)
""",
    "where": """
def mlp(x, w1, w2):
    h = gemm_broadcast(x, w1)
    return gemm_broadcast(torch.where(h > 0, h, torch.zeros_like(h)), w2)
""",
    "a loop over layers": """
def mlp(x, *weights):
    for i, w in enumerate(weights):
        x = gemm_broadcast(x if i == 0 else torch.relu(x), w)
    return x
""",
    "a mask": """
def mlp(x, w1, w2):
    h = gemm_broadcast(x, w1)
    return gemm_broadcast(h * (h > 0), w2)
""",
    "maximum": """
def mlp(x, w1, w2):
    zero = x.new_zeros(())
    return gemm_broadcast(torch.maximum(gemm_broadcast(x, w1), zero), w2)
""",
    "reduce": """
from functools import reduce

def mlp(x, w1, w2):
    return reduce(lambda h, w: gemm_broadcast(torch.relu(h), w), [w2], gemm_broadcast(x, w1))
""",
    "a module in the middle": """
activation = torch.nn.ReLU()

def mlp(x, w1, w2):
    return gemm_broadcast(activation(gemm_broadcast(x, w1)), w2)
""",
    "assertions of its own": """
def mlp(x, w1, w2):
    assert x.ndim == 2 and w1.shape[1] == w2.shape[0]
    y = gemm_broadcast(torch.relu(gemm_broadcast(x, w1)), w2)
    assert y.shape == (x.shape[0], w2.shape[1]), y.shape
    return y

assert mlp(torch.ones(1, 2), torch.ones(2, 2), torch.ones(2, 1)).item() == 4
""",
    "half the hidden layer at a time": """
def mlp(x, w1, w2):
    middle = w1.shape[1] // 2
    parts = ((w1[:, :middle], w2[:middle]), (w1[:, middle:], w2[middle:]))
    return sum(gemm_broadcast(gemm_broadcast(x, up).relu(), down) for up, down in parts)
""",
}

GEMVS = {
    "broadcast": "def gemv(a, x):\n    return (a * x).sum(-1)\n",
    "matmul": "def gemv(a, x):\n    return a @ x\n",
    "torch.mv": "gemv = torch.mv\n",
    "a bound partial": "from functools import partial\ngemv = partial(torch.einsum, 'mk,k->m')\n",
    "numpy inside": """
import numpy as np

def gemv(a, x):
    return torch.from_numpy(np.dot(a.numpy(), x.numpy()))
""",
    "lists inside": """
def gemv(a, x):
    rows, column = a.tolist(), x.tolist()
    return torch.tensor([sum(p * q for p, q in zip(row, column)) for row in rows])
""",
    "a thread pool": """
from concurrent.futures import ThreadPoolExecutor

def gemv(a, x):
    with ThreadPoolExecutor(2) as pool:
        return torch.stack(list(pool.map(lambda row: (row * x).sum(), a)))
""",
    "columns, in place": """
def gemv(a, x):
    y = torch.zeros(a.shape[0])
    for j, value in enumerate(x):
        y += a[:, j] * value
    return y
""",
    "itself, with its first row": """
def gemv(a, x):
    first = (a[0] * x).sum().reshape(1)
    return first if len(a) == 1 else torch.cat([first, gemv(a[1:], x)])
""",
    "requires_grad left on": """
def gemv(a, x):
    a = a.clone().requires_grad_()
    return (a * x).sum(1)
""",
    "a view of a larger result": """
def gemv(a, x):
    return torch.cat([a, a]).mul(x).sum(1)[: a.shape[0]]
""",
    "a stride": """
def gemv(a, x):
    twice = torch.zeros(2 * a.shape[0])
    twice[::2] = (a * x).sum(1)
    return twice[::2]
""",
    "inference mode": """
@torch.inference_mode()
def gemv(a, x):
    return torch.linalg.vecdot(a, x)
""",
    "slow on purpose": """
import time

def gemv(a, x):
    time.sleep(0.02)
    return (a * x).sum(dim=1)
""",
    "a warning filter and a seed": """
import warnings
warnings.filterwarnings("ignore")
torch.manual_seed(42)

def gemv(a, x):
    return (a * x).sum(dim=1)
""",
}

MASKS = {
    "a lambda": """
def documents_and(numbers, also):
    return lambda b, h, q, k: (numbers[q] == numbers[k]) & also(b, h, q, k)
""",
    "torch's functions by name": """
def documents_and(numbers, also):
    def mask_mod(b, h, q, k):
        return torch.logical_and(torch.eq(numbers[q], numbers[k]), also(b, h, q, k))
    return mask_mod
""",
    "the other mask first, and where": """
def documents_and(numbers, also):
    def documents(batch, head, query, key):
        seen = also(batch, head, query, key)
        return torch.where(numbers[query] == numbers[key], seen, torch.zeros_like(seen))
    return documents
""",
    "a method of an object": """
class Documents:
    def __init__(self, numbers, also):
        self.numbers, self.also = numbers, also

    def __call__(self, b, h, q, k):
        return (self.numbers[q] == self.numbers[k]) & self.also(b, h, q, k)

documents_and = Documents
""",
    "prints, and counts its calls": """
def documents_and(numbers, also):
    calls = []
    def mask_mod(b, h, q, k):
        calls.append(1)
        print("call", len(calls), q.shape)
        return (numbers[q] == numbers[k]) & also(b, h, q, k)
    return mask_mod
""",
    "functools.partial": """
import functools

def _seen(numbers, also, b, h, q, k):
    return (numbers[q] == numbers[k]) & also(b, h, q, k)

def documents_and(numbers, also):
    return functools.partial(_seen, numbers, also)
""",
    "a default, and a copy of the numbers": """
def documents_and(numbers, also):
    def mask_mod(b, h, q, k, numbers=numbers.clone()):
        return (numbers[q] - numbers[k] == 0) & also(b, h, q, k)
    return mask_mod
""",
    "a vmap over documents": """
def documents_and(numbers, also):
    one_each = torch.arange(3)
    def mask_mod(b, h, q, k):
        inside = torch.vmap(lambda n: (numbers[q] == n) & (numbers[k] == n))(one_each)
        return inside.any() & also(b, h, q, k)
    return mask_mod
""",
}

ANSWERS: dict[str, dict[str, str]] = {
    "q1_1": PRODUCTS,
    "q1_2": COSTS,
    "q1_3": NUMBERS,
    "q1_4": FILES,
    "q2_1": TIMERS,
    "q2_2": MODULES,
    "q2_3": MLPS,
    "bonus_2_5": GEMVS,
    "q3_1": MASKS,
}


def packs() -> Iterator[dict[str, tuple[str, str]]]:
    """Notebooks' worth of variants: {answer cell: (variant, its text)}, each variant in one of them."""
    columns = [[(cell, name, text) for name, text in variants.items()] for cell, variants in ANSWERS.items()]
    for row in zip_longest(*columns):
        yield {cell: (name, text) for cell, name, text in filter(None, row)}


# ---- notebooks -----------------------------------------------------------------------------------------------------


def _put(grade_id: str, *cells: NotebookNode, after: bool = False) -> Callable[[NotebookNode], None]:
    def edit(notebook: NotebookNode) -> None:
        ids = [c.metadata.get("nbgrader", {}).get("grade_id") for c in notebook.cells]
        place = ids.index(grade_id) + after
        notebook.cells[place:place] = [cell.copy() for cell in cells]

    return edit


def _code(grade_id: str, code: str, after: bool = False) -> Callable[[NotebookNode], None]:
    return _put(grade_id, new_code_cell(code), after=after)


def _outputs(notebook: NotebookNode) -> None:
    """What JupyterLab leaves: counts in the order of use, outputs, timings, a collapsed cell."""
    for number, cell in enumerate(c for c in notebook.cells if c.cell_type == "code"):
        cell.execution_count = (number * 7) % 31 + 1
        cell.outputs = [new_output("stream", name="stdout", text="✓ passed.\n")]
        cell.metadata["execution"] = {"iopub.execute_input": "2026-01-01T00:00:00.000000Z"}
        cell.metadata["collapsed"] = number % 2 == 0
        cell.metadata["jupyter"] = {"outputs_hidden": False}
    notebook.metadata["toc-autonumbering"] = True
    notebook.metadata["widgets"] = {"application/vnd.jupyter.widget-state+json": {"state": {}}}


def _old_errors(notebook: NotebookNode) -> None:
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [new_output("error", ename="WrongAnswer", evalue="not answered yet", traceback=["✗"])]


def _kernel(notebook: NotebookNode) -> None:
    notebook.metadata.kernelspec = {"display_name": "my env (conda)", "language": "python", "name": "conda-env-my-py"}
    notebook.metadata.language_info = {"name": "python", "version": "3.12.1", "mimetype": "text/x-python"}


def _without_ids(notebook: NotebookNode) -> None:
    """As an editor writes that knows no cell ids (nbformat 4.4)."""
    notebook.nbformat_minor = 4
    for cell in notebook.cells:
        cell.pop("id", None)


def _new_ids(notebook: NotebookNode) -> None:
    for number, cell in enumerate(notebook.cells):
        cell.id = f"renumbered-{number}"


def _trailing_space(notebook: NotebookNode) -> None:
    for cell in notebook.cells:
        cell.source += "\n\n   \n" if cell.cell_type == "markdown" else "\n\n"


def _line_ends(notebook: NotebookNode) -> None:
    for cell in notebook.cells:
        cell.source = cell.source.replace("\n", "\r\n")


def _prose(notebook: NotebookNode) -> None:
    notes = new_markdown_cell("My notes: ✓ ∑ 中文 🙂, and `assert`, `import instructor`, `os._exit`.")
    notebook.cells[3:3] = [notes, new_raw_cell("raw")]
    notebook.cells.append(new_markdown_cell("# The end\n\n<b>bold</b>"))


NOTEBOOKS: dict[str, Callable[[NotebookNode], None]] = {
    "outputs and odd counts kept": _outputs,
    "old errors kept": _old_errors,
    "another kernel's name": _kernel,
    "no cell ids": _without_ids,
    "new cell ids": _new_ids,
    "blank lines at the ends": _trailing_space,
    "carriage returns in the cells": _line_ends,
    "prose and raw cells": _prose,
    "an empty cell": _code("q1_2", ""),
    "a comment cell": _code("q1_2", "# todo: look at this again"),
    "a helper in a cell before": _code("q1_1", "def helper(x):\n    return x + 1\n\nhelper(2)"),
    "a scratch cell with an error": _code("q1_2", "1 / 0"),
    "a scratch cell with a syntax error": _code("q1_2", "def broken(:\n    pass"),
    "an experiment that prints much": _code("q1_2", "for i in range(2000):\n    print(i, i * i)"),
    "a plot": _code("q1_2", "%matplotlib inline\nimport matplotlib.pyplot as plt\nplt.plot([1, 4, 9])\nplt.show()"),
    "shell and magics": _code("q1_2", "!echo hello\n%timeit -n 1 -r 1 sum(range(10))\n%%time\n"[:-7] + "%who int"),
    "names of builtins used as variables": _code("setup", "sum = 0\nmax = min = 3\ninput = 'x'\nid = 7", True),
    "the checks' names used as variables": _code(
        "q1_1_tests", "x = seed = generator = a = b = got = expected = shape = 5", True
    ),
    "seeds": _code(
        "setup", "import random, numpy as np\nrandom.seed(1)\nnp.random.seed(1)\ntorch.manual_seed(1)", after=True
    ),
    "torch's defaults changed and put back": _code(
        "q1_1",
        (
            "torch.set_default_dtype(torch.float64)\ny = torch.ones(2)\ntorch.set_default_dtype(torch.float32)\n"
            "torch.set_printoptions(precision=3)\ntorch.set_grad_enabled(False)\ntorch.set_grad_enabled(True)"
        ),
    ),
    "logging and warnings set up": _code(
        "setup",
        (
            "import logging, sys, warnings\nlogging.basicConfig(level=logging.INFO, stream=sys.stderr)\n"
            "logging.info('ready')\nwarnings.simplefilter('always')\nwarnings.warn('loud')"
        ),
        True,
    ),
    "an environment variable, a path, a recursion limit": _code(
        "setup",
        ("import os, sys\nos.environ['OMP_NUM_THREADS'] = '1'\nsys.path.append('.')\nsys.setrecursionlimit(5000)"),
        True,
    ),
    "memory traced": _code(
        "q1_2",
        (
            "import tracemalloc, gc\ntracemalloc.start()\nz = torch.ones(100)\nprint(tracemalloc.get_traced_memory())\n"
            "tracemalloc.stop()\ngc.collect()"
        ),
    ),
    "signatures and sources looked at": _code(
        "q1_2",
        (
            "import inspect, dis\nprint(inspect.signature(gemm_broadcast), inspect.getsource(gemm_broadcast))\n"
            "dis.dis(gemm_broadcast)\nhelp(len)\ndir(torch)[:3]\ngemm_broadcast?"
        ),
    ),
    "a file of its own": _code(
        "q1_2",
        (
            "import json\nfrom pathlib import Path\nPath('mine').mkdir(exist_ok=True)\n"
            "Path('mine/notes.json').write_text(json.dumps({'a': 1}))\n"
            "print(json.loads(Path('mine/notes.json').read_text()))"
        ),
    ),
    "time taken by hand": _code(
        "q1_2",
        (
            "import time\nstart = time.time()\ngemm_broadcast(torch.ones(20, 20), torch.ones(20, 20))\n"
            "print(time.time() - start)\ntime.sleep(0.05)"
        ),
    ),
    "the checks called by the student": _code("q1_1_tests", "check_gemm(gemm_broadcast, (3, 3, 3), seed=5)", True),
    "an answer tried and caught": _code(
        "q1_2",
        ("try:\n    gemm_broadcast(torch.ones(2), None)\nexcept Exception as error:\n    print('as expected', error)"),
    ),
    "the profiler": _code(
        "q1_2",
        (
            "with torch.profiler.profile() as prof:\n    gemm_broadcast(torch.ones(3, 3), torch.ones(3, 3))\n"
            "print(len(prof.events()))"
        ),
    ),
    "a dispatch mode of its own": _code(
        "q1_2",
        (
            "from utils.checking import watch_operations\nwith watch_operations() as mine:\n"
            "    gemm_broadcast(torch.ones(3, 3), torch.ones(3, 3))\nprint(mine.operations)"
        ),
    ),
    "everything of utils": _code("setup", "from utils import *\nget_ridge_point('A100', 'bf16')", True),
    "pandas": _code("q1_2", "import pandas as pd\npd.DataFrame({'n': [1, 2], 'ms': [0.1, 0.4]})"),
    "a long output": _code("q1_2", "'x' * 20000"),
    "async": _code("q1_2", "import asyncio\nawait asyncio.sleep(0.01)\nprint('awaited')"),
    "a class with __eq__ and __float__": _code(
        "q1_2",
        (
            "class Money:\n    def __init__(self, cents): self.cents = cents\n"
            "    def __float__(self): return self.cents / 100\n"
            "    def __eq__(self, other): return self.cents == other.cents\nfloat(Money(250)), Money(1) == Money(1)"
        ),
    ),
}
