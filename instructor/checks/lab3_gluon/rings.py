"""What the copies of a ring do, in the simulator's events: each tile once, as far ahead as slots allow, and no wait for more."""

from __future__ import annotations

from utils.checking.kernel_exercises import Run
from utils.gluon_cpu.timeline import Event

MORE_WORK = 1.3  # times the work of a ring of three slots that a ring of one may do; 1.0 in the model answers
LATE = 25.0  # model cycles: a wait may end so much after the copies of its tile; a copy more takes 50 at least


def expect_same_work(runs: dict[int, Run]) -> None:
    """Assert that a ring of one slot does the work of one of three: if it wastes time, a comparison with it says nothing.

    Args:
        runs: {number of slots: its simulation, with a timeline}.
    """
    busy, copies = {}, {}
    for stages, run in runs.items():
        of_program = [e for e in run.events if not e.kind.endswith("wait")]
        copies[stages] = sum(e.kind == "copy in" for e in of_program)
        busy[stages] = sum(e.end - e.start for e in of_program if e.kind not in ("copy in", "copy out", "wgmma"))
    few, many = min(runs), max(runs)
    if copies[few] > copies[many] or busy[few] > MORE_WORK * busy[many]:
        raise AssertionError(
            f"with {few} slot the kernel starts {copies[few]} copies and works for {busy[few]:.0f} model cycles, with {many} "
            f"slots {copies[many]} and {busy[many]:.0f}. The same tiles take the same work, however many slots there are; "
            "only the time that it waits is shorter."
        )


TILES = 8  # of the rings that are timed
TILES_IN_FLIGHT = 1.2  # on average, with three slots: 1.8 and 2.2 in the model answers, less than 0.9 without overlap


def expect_in_flight(run: Run, copies: int, tiles: int) -> None:
    """Assert that in a ring of three slots more than one tile is on its way at a time, whatever a ring of one slot does.

    Args:
        run: the simulation with three slots, with a timeline of all programs.
        copies: copies of a tile.
        tiles: tiles of a program.
    """
    for number, events in enumerate(run.programs()):
        expect_each_once(events, copies, tiles)
        _expect_in_flight(number, events, run.cycles[number], copies)


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


def _expect_in_flight(number: int, events: list[Event], cycles: float, copies: int) -> None:
    times = [e.end - e.start for e in events if e.kind == "copy in"]
    under_way = sum(times) / copies / cycles
    if under_way < TILES_IN_FLIGHT:
        raise AssertionError(
            f"with three slots {under_way:.2f} tiles of program {number} are on their way at a time, on average: the copies wait for each other. "
            "Issue the copies of the next tiles before you wait for this one."
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


def expect_no_wait_for_more(events: list[Event], stages: int, tiles: int) -> None:
    """Assert that a program goes on when its tile is there: no wait ends later because of copies for later tiles.

    The last tiles do not count: behind them there is nothing to order, and many answers wait for all that is left.
    """
    rings = sorted({e.buffer.partition("[")[0] for e in events if e.kind == "copy in"})
    copies = [sorted((e for e in events if _is_in(e, "copy in", ring)), key=lambda e: e.start) for ring in rings]
    reads = [sorted(e.start for e in events if _is_in(e, "shared load", ring)) for ring in rings]
    begin = 0.0
    for tile in range(tiles - stages):
        arrived, read = max(ring[tile].end for ring in copies), min(ring[tile] for ring in reads)
        waits = [e.end for e in events if e.kind in ("wait", "copy wait") and begin <= e.start < read]
        if (late := max(waits, default=0.0) - arrived) > LATE:
            raise AssertionError(
                f"with {stages} slots the program waits for {late:.0f} model cycles more than tile {tile} of {tiles} takes to arrive: it "
                "waits for copies of later tiles, too. They should stay under way while this one is worked on."
            )
        begin = read


def _is_in(event: Event, kind: str, ring: str) -> bool:
    return event.kind == kind and event.buffer.partition("[")[0] == ring
