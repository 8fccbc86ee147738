"""What both Triton questions append to a student's file: in the interpreter's process no block may be larger than asked for."""

from __future__ import annotations

LIMIT_BLOCKS = """

def limit_blocks_of_the_check(most):
    from triton.runtime import interpreter

    def make_range(*args):  # the last two are its ends
        if args[-1] - args[-2] > most:
            raise ValueError(f"a block of {args[-1] - args[-2]}, and the largest here has {most}: work block by block")
        return type(interpreter.interpreter_builder).create_make_range(interpreter.interpreter_builder, *args)

    interpreter.interpreter_builder.create_make_range = make_range
"""
