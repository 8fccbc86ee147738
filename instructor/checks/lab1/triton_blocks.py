"""What both Triton questions append to a student's file: in the interpreter's process a program works on its own tile alone."""

from __future__ import annotations

LIMIT_BLOCKS = """

def limit_blocks_of_the_check(most, loaded, doubled=False):
    # No range is longer than `most`, no program reads more than `loaded` elements, and no element is written twice.
    # Returns the products that each program makes, {program: number}. Each is twice as large as it should be with `doubled`, so
    # a result that was computed beside them shows.
    import numpy
    from triton.runtime import interpreter

    builder, read, writers, products = interpreter.interpreter_builder, {}, {}, {}

    def make_range(*args):  # the last two are its ends
        if args[-1] - args[-2] > most:
            raise ValueError(f"a block of {args[-1] - args[-2]}, and the largest here has {most}: work block by block")
        return type(builder).create_make_range(builder, *args)

    def load(pointers, mask, *rest):
        who = builder.grid_idx
        read[who] = read.get(who, 0) + int(mask.data.sum())
        if read[who] > loaded:
            raise ValueError(f"one program reads more than {loaded} elements: it computes one tile, and others the other ones")
        return type(builder).create_masked_load(builder, pointers, mask, *rest)

    def dot(a, b, d, precision, *rest):
        if a.dtype.is_fp32() and "IEEE" not in str(precision):
            raise ValueError('tl.dot without input_precision="ieee": a GPU would round float32 tiles to ten bits')
        products[builder.grid_idx] = products.get(builder.grid_idx, 0) + 1
        result = type(builder).create_dot(builder, a, b, d, precision, *rest)
        if doubled:
            result.data = (2 * result.data - d.data).astype(result.data.dtype)
        return result

    def store(pointers, value, mask, *rest):
        for address in numpy.broadcast_to(pointers.data, mask.data.shape)[mask.data].tolist():
            if address in writers:
                if writers[address] == builder.grid_idx:
                    raise ValueError("a program writes an element twice: what it computes stays on the chip until it is done")
                raise ValueError("two programs write the same element: one program computes one tile, and nobody else does")
            writers[address] = builder.grid_idx
        return type(builder).create_masked_store(builder, pointers, value, mask, *rest)

    builder.create_make_range, builder.create_masked_load, builder.create_masked_store = make_range, load, store
    builder.create_dot = dot
    return products


def expect_products_of_the_check(products, programs, each):
    # Every one of so many programs makes so many products.
    made = sorted(set(products.values())) if len(products) == programs else [0, *sorted(set(products.values()))]
    if made != [each]:
        raise ValueError(f"a program makes {made[0]} products of tiles by tl.dot, and its blocks take {each}: each block once")
"""
