"""The tile and the rings of `cluster.py`: plain Python, no Triton."""

from __future__ import annotations

from dataclasses import replace

from utils.attention.gluon.decode.plan import (
    KEYS_BLOCK,
    MOST_COLUMNS,
    ROWS_BLOCK,
    ROWS_FROM,
    SHARED_BYTES,
    Plan,
    block_width,
    power_of_two,
)

# Clusters of so many programs that run at the same time on 132 SMs if each program has an SM to itself: a cluster lies in
# one GPC, and seven of the eight have 16 or 18 SMs.
FITTING_CLUSTERS = {2: 66, 4: 30, 8: 15, 16: 7}


def cluster_plan(
    head_dim: int,
    group: int,
    sq: int,
    keys: int,
    heads: int,
    parts: int,
    consumers: int | None = None,
    block_n: int | None = None,
    slots: int | None = None,
    merge: str | None = None,
    page: int | None = None,
    in_turn: bool = True,
    per_sm: int = 1,
    halvings: int = 0,
    load: int = 19,
    base: int = 0,
    order: bool = False,
    where: bool = False,
) -> Plan:
    """Choose the tile of `cluster.py`; heads: of keys, of all sequences; parts: programs of a head; page: of its tokens.

    The arguments from `consumers` on, but for the page, overrule the choice. consumers: 0 makes keys the rows of the products, 1
    query rows. in_turn: programs take a head's blocks in turn, and not a run of them each. per_sm: programs that share an SM;
    with two, any number of clusters, since nothing waits for another cluster. halvings: how often a cluster may be halved
    (`divide.py`).
    """
    block_d = block_width(head_dim)
    group = power_of_two(group)
    consumers = int(group * sq >= ROWS_FROM) if consumers is None else consumers
    most = 64 if consumers else MOST_COLUMNS
    if group > most:
        raise ValueError(f"a program of a cluster has up to {most} query rows, and a group needs {group}.")
    queries = min(power_of_two(sq), most // group)
    columns = most if consumers else max(group * queries, 8)
    heads *= -(-sq // queries)
    if merge not in (None, "cluster", "last"):
        raise ValueError(f"a cluster merges in shared memory, or in the simulator by its last program; not {merge!r}.")
    if heads > FITTING_CLUSTERS.get(parts, 0) and (per_sm == 1 or parts not in FITTING_CLUSTERS):
        raise ValueError(f"clusters have 2, 4, 8 or 16 programs and run at once; {heads} of {parts} do not.")
    largest = (ROWS_BLOCK if consumers else KEYS_BLOCK)[block_d]
    if block_n and not consumers and block_n < 64:
        raise ValueError(f"a product has 64 rows at least; with keys as rows a block has as many keys, not {block_n}.")
    for block in (block_n,) if block_n else (largest, largest // 2):
        blocks = -(-keys // block)
        if blocks < parts:
            raise ValueError(f"each program of a cluster takes a block at least, and {parts} share {blocks} blocks.")
        box = min(block, page) if page else block
        plan = Plan(
            block_d, block, columns // queries, queries, 0, 1, box, consumers=consumers, cluster=parts, per_sm=per_sm
        )
        plan = replace(plan, merge=merge or "cluster", sent=group * queries, in_turn=in_turn, halvings=halvings)
        plan = replace(plan, load=load, base=base, order=order, where=where)
        # Beside the tiles there are barriers, and the sums that reductions exchange.
        room = (
            SHARED_BYTES // per_sm
            - (192 if per_sm == 1 else 1024 + 192)
            - plan.shared_bytes
            - (0 if consumers else 32 * columns)
        )
        share = -(-blocks // parts)  # of the programs with the most
        wanted, tile = slots or min(16, 2 * share), 2 * block * block_d
        # A large inbox does not cost tiles: it takes their place.
        in_ring = replace(plan, inbox_in_ring=plan.inbox_bytes > 8192)
        fit, most_fit = (min((room - p.inbox_space) // tile // 2 * 2, wanted) for p in (plan, in_ring))
        plan = replace(plan if fit == most_fit else in_ring, slots=most_fit)
        if slots and plan.slots != slots:
            raise ValueError(f"{slots} slots of {block} keys do not fit; there is room for {plan.slots}.")
        if plan.slots >= min(6, 2 * share):  # two more blocks on their way beside the one in use
            break
    if plan.inbox_in_ring and plan.inbox_bytes > plan.shared_bytes:
        raise ValueError(f"an inbox of {plan.inbox_bytes} bytes does not fit into the place of the tiles.")
    if plan.slots < min(4, 2 * share):
        raise ValueError(f"two blocks of {block} keys do not fit beside the rest of a program's memory.")
    return plan
