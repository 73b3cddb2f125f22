"""A small node for the tests of timed runs, one with free communication, and how to time a problem on them."""

from __future__ import annotations

from math import inf

from fusedtp.bench.timed import Problem, fused_run
from fusedtp.sim.timed import Engine, Node, Timeline, load_node

SMALL = load_node("h100").but(name="small", sms=12)
IDEAL = SMALL.but(
    name="ideal", memory_bandwidth=inf, sm_bandwidth=inf, link_bandwidth=inf, copy_bandwidth=inf, memory_latency=0.0,
    link_latency=0.0, launch_latency=0.0, copy_latency=0.0,
)  # fmt: skip


def time(problem: Problem, node: Node = SMALL, **options: bool) -> Timeline:
    return Engine(fused_run(problem, node), node, **options).run()
