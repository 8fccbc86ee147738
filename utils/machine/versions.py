"""Which versions of torch, Triton and transformers the course was tested with, and what changed between them.

This is the one place that knows. Kernels, simulator and labs use Gluon's newest names; on an older Triton
`adopt_newest_gluon_names` adds these names as aliases of the old ones. One older name is kept alive:
`blackwell.get_tmem_reg_layout`, which is a method of tensor memory from Triton 3.8 on.
"""

import functools
import os
import re
from collections.abc import Callable
from importlib import metadata

# package -> oldest and newest minor version that the tests have run with; docs/versions.md says how far, and with what result
TESTED = {"torch": ((2, 11), (2, 15)), "triton": ((3, 6), (3, 9)), "transformers": ((5, 17), (5, 24))}


@functools.cache
def package_version(distribution: str) -> str | None:
    """Return the version of an installed distribution, or None."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


@functools.cache
def installed_version(package: str) -> tuple[int, int] | None:
    """Return the major and minor version of an installed package, or None if there is none."""
    found = re.match(r"(\d+)\.(\d+)", package_version(package) or "")
    return (int(found[1]), int(found[2])) if found else None


def untested_versions() -> list[str]:
    """Return a sentence for each installed package whose version the course was not tested with."""
    sentences = []
    for package, (oldest, newest) in TESTED.items():
        version = installed_version(package)
        if version is None or oldest <= version <= newest:
            continue
        tested = f"{package} {'.'.join(map(str, oldest))} to {'.'.join(map(str, newest))}"
        what = "older: kernels and labs may fail" if version < oldest else "newer: kernels and labs may differ"
        sentences.append(
            f"The course was tested with {tested}; {package} {package_version(package)} is {what}. "
            "`make env` installs versions that fit."
        )
    return sentences


@functools.cache
def adopt_newest_gluon_names() -> None:
    """Let Gluon's newest names be used whatever Triton is installed. Names that exist are left as they are."""
    # The kernels' speed and errors count on products and sums fused into one instruction, which Triton 3.10 will leave off.
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia import blackwell
    from triton.experimental.gluon.language.nvidia.ampere import async_copy
    from triton.experimental.gluon.language.nvidia.hopper import tma
    from triton.language import core
    from triton.runtime.jit import ConstexprFunction

    for module, newest, old_module, old in (
        # From Triton 3.8 on; the old names raise an error from 3.9 on.
        (tma, "async_load", tma, "async_copy_global_to_shared"),
        (tma, "async_store", tma, "async_copy_shared_to_global"),
        (async_copy, "async_load", async_copy, "async_copy_global_to_shared"),
        (gluon, "aggregate", core, "_aggregate"),  # from 3.8 on, beside the old name
        (gl, "barrier", gl, "thread_barrier"),  # from 3.7 on
        # From 3.9 on.
        (gl.shared_memory_descriptor, "reinterpret", gl.shared_memory_descriptor, "_reinterpret"),
        (blackwell.tensor_memory_descriptor, "reinterpret", blackwell.tensor_memory_descriptor, "_reinterpret"),
    ):
        if not hasattr(module, newest):
            setattr(module, newest, getattr(old_module, old))
    if not hasattr(tma, "async_atomic_add"):  # from 3.8 on; before, there is the instruction without a function
        tma.async_atomic_add = _make_async_atomic_add()
    if not hasattr(blackwell, "get_tmem_reg_layout"):
        blackwell.get_tmem_reg_layout = ConstexprFunction(_register_layout_of_tile)


def _register_layout_of_tile(element_ty, shape, layout, num_warps, instr_variant="32x32b", cga_layout=()):
    return tensor_memory_registers(element_ty, shape, shape, layout, num_warps, instr_variant)


def tensor_memory_registers(element_ty, shape, alloc_shape, layout, num_warps: int, instr_variant: str):
    """Return the register layout by which an instruction moves a tile of tensor memory, by Triton's own rules.

    Args:
        element_ty: the tile's type.
        shape: its rows and columns.
        alloc_shape: those of the memory that it is a slice of; Triton 3.7 does not ask for them.
        layout: of the tensor memory.
        num_warps: how many warps move it.
        instr_variant: the instruction's shape, such as "32x32b".
    """
    from triton.experimental.gluon.language import _semantic

    alloc = (list(alloc_shape),) if clusters_are_complete() else ()
    return _semantic._compute_tmem_reg_layout(element_ty, list(shape), *alloc, layout, num_warps, instr_variant)


tensor_memory_registers.__triton_builtin__ = True  # type: ignore[attr-defined]  # a constexpr function may call it


def _make_async_atomic_add() -> Callable:
    """Return `tma.async_atomic_add` for a Triton whose Gluon has its instruction, but no function for it."""
    from triton._C.libtriton import ir
    from triton.experimental.gluon.language._core import builtin

    @builtin
    def async_atomic_add(tensor_desc, coord, src, _semantic=None):
        coord = _semantic._convert_to_ir_values(coord, require_i64=False)
        kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
        _semantic.builder.create_async_tma_reduce(kind, tensor_desc.handle, coord, src.handle)

    return async_atomic_add


def replacement_of_removed_gluon_name(name: str) -> str | None:
    """Return what to call in place of a Gluon function that the installed Triton refuses; None if it has it still."""
    if (installed_version("triton") or (0, 0)) < (3, 9):
        return None
    return {"async_copy_global_to_shared": "async_load", "async_copy_shared_to_global": "async_store"}.get(name)


def ptxas_command(target: str = "sm_90a") -> list[str]:
    """Return the program and the options with which the installed Triton assembles PTX for a GPU, by default Hopper.

    Triton 3.9 has two assemblers and takes the newer one for every GPU, under the name `ptxas-blackwell`.
    """
    from triton.backends.nvidia.compiler import get_ptxas

    options = ["--regAllocOptLevel=2"] if (installed_version("triton") or (0, 0)) >= (3, 7) else []
    return [get_ptxas(int(target[3:].rstrip("af"))).path, *options, "-v", f"--gpu-name={target}"]


def workers_need_register_counts() -> bool:
    """Whether `gl.warp_specialize` demands `worker_num_regs`: up to Triton 3.6 it does."""
    return (installed_version("triton") or (3, 7)) < (3, 7)


def layouts_need_names() -> bool:
    """Whether `x.type.layout` must become a `gl.constexpr` before it is given to a jit function: up to Triton 3.6.

    Later versions make a constant of it by themselves; Triton 3.6 raises an AttributeError about `_flatten_ir`.
    """
    return workers_need_register_counts()


def compiler_adds_fences() -> bool:
    """Whether the compiler adds each `fence.proxy.async` that is missing inside of one partition: from Triton 3.7 on."""
    return not workers_need_register_counts()


def cluster_modules() -> tuple:
    """Return Gluon's module for the barrier of a cluster, `hopper.cluster`, in a tuple; an empty one before Triton 3.7."""
    from triton.experimental.gluon.language.nvidia import hopper

    return (hopper.cluster,) if hasattr(hopper, "cluster") else ()


def clusters_are_complete() -> bool:
    """Whether the blocks of a cluster can do together what the language says: from Triton 3.8 on.

    Triton 3.7 makes one mbarrier in each block also where the layout asks for one that several blocks share; it does not
    reduce across blocks; and it leaves it to the kernel to make the initialization of mbarriers visible to the cluster.
    """
    return (installed_version("triton") or (0, 0)) >= (3, 8)


def keep_captured_floats_constant() -> None:
    """Let eager FlexAttention take a second score modifier that captures another number.

    From torch 2.15 on, a Python float that has changed since the last call becomes a symbol of the graph, and eager
    FlexAttention raises an error because it takes no such symbol. As a constant it is compiled anew, as before.
    """
    if (installed_version("torch") or (0, 0)) >= (2, 15):
        import torch._dynamo.config

        torch._dynamo.config.specialize_float = True
