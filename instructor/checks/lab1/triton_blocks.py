"""What both Triton questions append to a student's file: in the interpreter's process, the size of blocks and the products."""

from __future__ import annotations

LIMIT_BLOCKS = """

def limit_blocks_of_the_check(most):
    # No range is longer than `most`. Returns the products that each program makes by tl.dot, {program: number}.
    from triton.runtime import interpreter

    builder, products = interpreter.interpreter_builder, {}

    def make_range(*args):  # the last two are its ends
        if args[-1] - args[-2] > most:
            raise ValueError(f"a block of {args[-1] - args[-2]}, and the largest here has {most}: work block by block")
        return type(builder).create_make_range(builder, *args)

    def dot(a, b, d, precision, *rest):
        if a.dtype.is_fp32() and "IEEE" not in str(precision):
            raise ValueError('tl.dot without input_precision="ieee": a GPU would round float32 tiles to ten bits')
        products[builder.grid_idx] = products.get(builder.grid_idx, 0) + 1
        return type(builder).create_dot(builder, a, b, d, precision, *rest)

    builder.create_make_range, builder.create_dot = make_range, dot
    return products


def expect_products_of_the_check(products, programs, each):
    # Every one of so many programs makes so many products.
    made = sorted(set(products.values())) if len(products) == programs else [0, *sorted(set(products.values()))]
    if made != [each]:
        raise ValueError(f"a program makes {made[0]} products of tiles by tl.dot, and its blocks take {each}: each block once")
"""
