"""What both Triton questions append to a student's file: in the interpreter's process a program works on its own tile alone."""

from __future__ import annotations

LIMIT_BLOCKS = """

def limit_blocks_of_the_check(most, loaded):
    # No range is longer than `most`, no program reads more than `loaded` elements, and no element has two writers.
    import numpy
    from triton.runtime import interpreter

    builder, read, writers = interpreter.interpreter_builder, {}, {}

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

    def store(pointers, value, mask, *rest):
        for address in numpy.broadcast_to(pointers.data, mask.data.shape)[mask.data].tolist():
            if writers.setdefault(address, builder.grid_idx) != builder.grid_idx:
                raise ValueError("two programs write the same element: one program computes one tile, and nobody else does")
        return type(builder).create_masked_store(builder, pointers, value, mask, *rest)

    builder.create_make_range, builder.create_masked_load, builder.create_masked_store = make_range, load, store
"""
