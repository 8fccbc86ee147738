"""What the copies of a ring do, in the simulator's events: each tile once, as far ahead as slots allow, and no wait for more."""

from __future__ import annotations

from utils.gluon_cpu.timeline import Event


def expect_each_once(events: list[Event], copies: int, tiles: int) -> None:
    """Assert that each tile comes into shared memory once, is read there once, and comes by no other way."""
    started = sum(e.kind == "copy in" for e in events)
    if started != copies * tiles:
        raise AssertionError(
            f"a program with {tiles} tiles starts {started} copies; {copies * tiles} bring each tile once."
        )
    if loads := [e for e in events if e.kind == "load"]:
        raise AssertionError(f"line {loads[0].line} loads from memory into registers: all tiles come through the ring.")
    read = sum(e.kind == "shared load" for e in events)
    if read != started:
        raise AssertionError(
            f"{started} tiles arrive in shared memory, and {read} are read from there: read each once."
        )


def expect_ahead(events: list[Event], stages: int, tiles: int) -> None:
    """Assert that the copies of a program run as far ahead as the slots allow, all the time.

    When tile t is read, every other slot has been ordered anew: t + `stages` tiles in all, unless there are fewer. A ring that
    uses two of five slots, or that is emptied as a whole before it is filled again, has ordered fewer.
    """
    for ring in {e.buffer.partition("[")[0] for e in events if e.kind == "copy in"}:
        mine = [e for e in events if e.buffer.partition("[")[0] == ring]
        copies = sorted((e for e in mine if e.kind == "copy in"), key=lambda e: e.start)
        if len(copies) != tiles:
            raise AssertionError(
                f"a program with {tiles} tiles starts {len(copies)} copies into {ring}: each tile comes once."
            )
        if (used := len({e.buffer for e in copies})) != stages:
            raise AssertionError(f"{used} slots are used, and there are {stages}: tile i lies in slot i % STAGES.")
        for tile, copy in enumerate(copies):
            reads = [
                e.start for e in mine if e.kind == "shared load" and e.buffer == copy.buffer and e.start >= copy.start
            ]
            issued = sum(e.kind == "issue" and e.start <= min(reads, default=copy.end) for e in mine)
            if issued < min(tiles, tile + stages):
                raise AssertionError(
                    f"with {stages} slots, {issued} copies into {ring} have been issued when tile {tile} is read, and "
                    f"{min(tiles, tile + stages)} should be: use every slot, and refill each as soon as it is free."
                )
