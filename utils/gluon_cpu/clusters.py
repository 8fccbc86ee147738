"""The barrier at which the blocks of a cluster meet, and the fence for their mbarriers."""

from __future__ import annotations

from utils.machine import versions

from . import context
from .barriers import MODULES, spend_barrier
from .context import Knowledge, join, refuse
from .known import constant, known

CLUSTER = versions.cluster_modules()


@known(of=MODULES)
def fence_init_release_cluster() -> None:
    """Make the mbarriers that were initialized so far visible to the cluster, for whoever meets at its barrier next."""
    for block in context.partition().blocks:
        join(block.inits, {component: count for component, count in block.clock.items() if component[0] == "init"})


@known("arrive", of=CLUSTER)
def cluster_arrive(relaxed=False) -> None:
    """Arrive at the cluster's barrier; a relaxed arrival passes on nothing but fenced initializations."""
    program = context.program()
    if program.num_ctas == 1:
        refuse("kernel", "cluster.arrive needs a cluster: the compiler refuses it unless num_ctas is 2 or more.")
    if program.cluster_arrival is not None:
        refuse("barrier", "cluster.arrive: the barrier has been arrived at already; cluster.wait comes first.")
    program.check_outside_of_partitions("cluster.arrive")
    relaxed = constant(relaxed, "relaxed")
    program.cluster_arrival = [
        Knowledge(dict(block.inits), {}) if relaxed else block.copy() for block in program.partition.blocks
    ]
    spend_barrier("cluster")


@known("wait", of=CLUSTER)
def cluster_wait() -> None:
    """Wait until all blocks have arrived at the cluster's barrier."""
    program = context.program()
    if program.cluster_arrival is None:
        refuse("barrier", "cluster.wait waits for ever: cluster.arrive() comes first.")
    for block in program.partition.blocks:
        for known_there in program.cluster_arrival:
            block.learn(known_there)
    program.cluster_arrival = None
    spend_barrier("cluster")


@known("barrier", of=CLUSTER)
def cluster_barrier(relaxed=False) -> None:
    """Let the blocks of the cluster meet."""
    if context.program().num_ctas > 1:
        cluster_arrive(relaxed)
        cluster_wait()
