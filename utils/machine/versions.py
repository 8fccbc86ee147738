"""The tested versions of torch, Triton and transformers, and the differences between versions.

Only this file knows them. Kernels, simulator and labs use Gluon's newest names. On an older Triton,
`adopt_newest_gluon_names` adds these names as aliases of the old names. It also keeps an old name:
`blackwell.get_tmem_reg_layout` became a method of tensor memory in Triton 3.8.
"""

import functools
import os
import re
from collections.abc import Callable
from importlib import metadata

# package -> oldest and newest minor version in tests; docs/versions.md has the results
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
    """Add Gluon's newest names to an older Triton. Existing names do not change."""
    # The kernels need fused multiply-add for their speed and accuracy. Triton 3.10 will no longer fuse by default.
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
    if not hasattr(tma, "async_atomic_add"):  # from 3.8 on; older versions have only the instruction
        tma.async_atomic_add = _make_async_atomic_add()
    if not hasattr(blackwell, "get_tmem_reg_layout"):
        blackwell.get_tmem_reg_layout = ConstexprFunction(_register_layout_of_tile)


def _register_layout_of_tile(element_ty, shape, layout, num_warps, instr_variant="32x32b", cga_layout=()):
    return tensor_memory_registers(element_ty, shape, shape, layout, num_warps, instr_variant)


def tensor_memory_registers(element_ty, shape, alloc_shape, layout, num_warps: int, instr_variant: str):
    """Return the register layout for an instruction that moves a tile of tensor memory; Triton computes it.

    Args:
        element_ty: the tile's type.
        shape: its rows and columns.
        alloc_shape: rows and columns of the whole memory, if the tile is a slice of it; Triton 3.7 does not use them.
        layout: the layout of the tensor memory.
        num_warps: number of warps that move the tile.
        instr_variant: the instruction's shape, such as "32x32b".
    """
    from triton.experimental.gluon.language import _semantic

    alloc = (list(alloc_shape),) if clusters_are_complete() else ()
    return _semantic._compute_tmem_reg_layout(element_ty, list(shape), *alloc, layout, num_warps, instr_variant)


tensor_memory_registers.__triton_builtin__ = True  # type: ignore[attr-defined]  # a constexpr function may call it


def _make_async_atomic_add() -> Callable:
    """Return `tma.async_atomic_add` for a Triton that has the instruction, but no Gluon function for it."""
    from triton._C.libtriton import ir
    from triton.experimental.gluon.language._core import builtin

    @builtin
    def async_atomic_add(tensor_desc, coord, src, _semantic=None):
        coord = _semantic._convert_to_ir_values(coord, require_i64=False)
        kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
        _semantic.builder.create_async_tma_reduce(kind, tensor_desc.handle, coord, src.handle)

    return async_atomic_add


def replacement_of_removed_gluon_name(name: str) -> str | None:
    """Return the new name of a Gluon function that the installed Triton has removed; None if the function exists."""
    if (installed_version("triton") or (0, 0)) < (3, 9):
        return None
    return {"async_copy_global_to_shared": "async_load", "async_copy_shared_to_global": "async_store"}.get(name)


def ptxas_command(target: str = "sm_90a") -> list[str]:
    """Return the command by which the installed Triton assembles PTX for a GPU: program and options.

    Triton 3.9 has two assemblers and uses the newer assembler, `ptxas-blackwell`, for every GPU.
    """
    from triton.backends.nvidia.compiler import get_ptxas

    options = ["--regAllocOptLevel=2"] if (installed_version("triton") or (0, 0)) >= (3, 7) else []
    return [get_ptxas(int(target[3:].rstrip("af"))).path, *options, "-v", f"--gpu-name={target}"]


def workers_need_register_counts() -> bool:
    """Whether `gl.warp_specialize` needs `worker_num_regs`. It does up to Triton 3.6."""
    return (installed_version("triton") or (3, 7)) < (3, 7)


def layouts_need_names() -> bool:
    """Whether `x.type.layout` must become a `gl.constexpr` before it is given to a jit function: up to Triton 3.6.

    Without it Triton 3.6 raises an AttributeError about `_flatten_ir`. Later versions make the constant themselves.
    """
    return workers_need_register_counts()


def compiler_adds_fences() -> bool:
    """Whether the compiler adds each `fence.proxy.async` that is missing inside of one partition: from Triton 3.7 on."""
    return not workers_need_register_counts()


def cluster_modules() -> tuple:
    """Return a tuple of Gluon's module for the barrier of a cluster, `hopper.cluster`. It is empty before Triton 3.7."""
    from triton.experimental.gluon.language.nvidia import hopper

    return (hopper.cluster,) if hasattr(hopper, "cluster") else ()


def clusters_are_complete() -> bool:
    """Whether Triton implements clusters of blocks completely. It does from Triton 3.8 on.

    Triton 3.7 makes an mbarrier in each block, even if the layout asks for a shared mbarrier. It does not reduce across
    blocks. And the kernel itself must make the initialization of mbarriers visible to the cluster.
    """
    return (installed_version("triton") or (0, 0)) >= (3, 8)


def keep_captured_floats_constant() -> None:
    """Let eager FlexAttention take a score modifier with a captured float that has changed.

    From torch 2.15 on, a Python float that changes between two calls becomes a symbol of the graph. Eager FlexAttention
    does not take a symbol and raises an error. With this setting the float stays a constant, and torch compiles again.
    """
    if (installed_version("torch") or (0, 0)) >= (2, 15):
        import torch._dynamo.config

        torch._dynamo.config.specialize_float = True
