"""Compile the tests' correct kernels for sm_90a, without a GPU: prints one name a line. Run as a script."""

from triton.experimental.gluon import language as gl

from tests.utils.gluon_cpu import gluon_aggregate_kernels as aggregates
from tests.utils.gluon_cpu import gluon_correct_kernels as kernels
from tests.utils.gluon_cpu import gluon_planted_bugs as bugs
from utils.kernels.offline import compile_gluon


def tile(dtype: str, shape: list[int]) -> str:
    layout = gl.NVMMASharedLayout.get_default_for(shape, {"fp16": gl.float16, "fp32": gl.float32}[dtype])
    return f"tensordesc<{dtype}{shape},{layout!r}>"


def compile_for_hopper(kernel, signature: dict, constants: dict, num_warps: int = 4) -> None:
    assert compile_gluon(kernel, signature, constants, num_warps=num_warps).asm["cubin"]
    print(kernel.fn.__name__, flush=True)


def main() -> None:
    f32, i32 = "*fp32", "i32"
    small, wide, square = tile("fp32", [16, 32]), tile("fp32", [16, 64]), tile("fp16", [64, 64])
    a, b = tile("fp16", [64, 32]), tile("fp16", [32, 64])
    compile_for_hopper(kernels.copy_1d, dict(x_ptr=f32, y_ptr=f32, n=i32), dict(BLOCK=256))
    strides = dict.fromkeys(("a_row", "a_column", "b_row", "b_column"), i32)
    compile_for_hopper(
        kernels.scale_add_2d,
        dict(a_ptr="*bf16", b_ptr="*bf16", c_ptr="*bf16", m=i32, n=i32, scale="fp32", **strides),
        dict(ROWS=16, COLUMNS=32),
    )
    compile_for_hopper(
        kernels.softmax_rows,
        dict(x_ptr="*bf16", y_ptr="*bf16", m=i32, n=i32, stride=i32),
        dict(ROWS=8, COLUMNS=128, num_warps=4),
    )
    compile_for_hopper(kernels.transpose, dict(x_ptr=f32, y_ptr=f32, m=i32, n=i32), dict(ROWS=32, COLUMNS=32))
    compile_for_hopper(kernels.reductions, dict(x_ptr=f32, y_ptr=f32), dict(SIZE=512))
    compile_for_hopper(kernels.integers, dict(y_ptr="*i32", a=i32, b=i32, n=i32), {})
    compile_for_hopper(
        kernels.add_double_buffered, dict(a_ptr=f32, b_ptr=f32, c_ptr=f32, n=i32), dict(STEP=256, STEPS=4, STAGES=2)
    )
    compile_for_hopper(kernels.copy_tiles, dict(x_desc=wide, y_desc=wide, columns=i32), dict(SCALE=0.5, STAGES=2))
    for transposed, registers, warps in ((False, False, 4), (True, False, 8), (False, True, 4)):
        compile_for_hopper(
            kernels.matmul,
            dict(a_desc=a, b_desc=a if transposed else b, c_desc=square, k_size=i32),
            dict(TRANSPOSE_B=transposed, A_IN_REGISTERS=registers, num_warps=warps),
            warps,
        )
    compile_for_hopper(
        kernels.matmul_persistent, dict(a_desc=square, b_desc=square, c_desc=square, m=i32, n=i32, k_size=i32), {}
    )
    compile_for_hopper(
        kernels.add_specialized,
        dict(a_desc=small, b_desc=small, c_desc=small, columns=i32, scale="fp32"),
        dict(STAGES=2),
    )
    compile_for_hopper(kernels.halve_cp_async_specialized, dict(x_ptr=f32, y_ptr=f32, n=i32), dict(SIZE=128, STAGES=3))
    compile_for_hopper(bugs.pipeline, dict(x_desc=small, w_desc=small, y_desc=small, steps=i32), dict(STAGES=2, BUG=""))
    compile_for_hopper(
        bugs.product,
        dict(a_ptr="*fp16", b_desc=square, c_ptr=f32),
        dict(SIZE=64, BUG="", layout=gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]), swizzle=128),
    )
    compile_for_hopper(
        bugs.buffered,
        dict(x_ptr=f32, y_ptr=f32, n=i32),
        dict(SIZE=256, BUG="", layout=gl.BlockedLayout([2], [32], [4], [0])),
    )
    compile_for_hopper(
        aggregates.add_with_aggregates,
        dict(x_desc=small, y_desc=small, z_desc=small, steps=i32),
        dict(STAGES=2, SCALE=0.5, BUG=""),
    )
    compile_for_hopper(aggregates.add_pairs, dict(x_ptr=f32, y_ptr=f32, n=i32), {})


if __name__ == "__main__":
    main()
