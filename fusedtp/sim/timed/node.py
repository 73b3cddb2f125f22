"""What a node is made of: rates, sizes and latencies, read from data files that say where each number is from.

A file holds an entry {"value": ..., "source": ...} for every field; units are bytes, seconds, FLOP/s. A value whose
source begins with "assumed" could not be found published.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from importlib import resources
from typing import Any

from fusedtp.ops.launch import Machine


@dataclass(frozen=True)
class Node:
    """GPUs of one kind, all linked through switches.

    sms                     of one GPU; each runs one program at a time
    shared_bytes            shared memory that one program may use
    flops                   sustained matmul rate of one GPU by dtype
    memory_bandwidth        of one GPU's memory, reads and writes together
    l2_bytes                of one GPU's cache
    sm_bandwidth            what one SM moves to and from the cache
    link_bandwidth          payload that one GPU sends, and receives at the same time
    copy_bandwidth          of one copy engine
    copy_engines            of one GPU
    memory_latency          of a load, and of an atomic in the GPU's own memory
    link_latency            from a store until the peer can see it
    launch_latency          from the end of a stream's work to the start of its next
    copy_latency            of starting a copy
    collective_bandwidth    bytes a second that a library's all-gather or reduce-scatter brings to a rank
    collective_latency      of starting it
    """

    name: str
    sms: int
    shared_bytes: int
    flops: dict[str, float]
    memory_bandwidth: float
    l2_bytes: int
    sm_bandwidth: float
    link_bandwidth: float
    copy_bandwidth: float
    copy_engines: int
    memory_latency: float
    link_latency: float
    launch_latency: float
    copy_latency: float
    collective_bandwidth: float
    collective_latency: float

    @property
    def machine(self) -> Machine:
        """What the launchers ask of a GPU."""
        return Machine(clock="cuda", programs=self.sms, shared_bytes=self.shared_bytes)

    def but(self, **changes: Any) -> Node:
        """The same node with other numbers."""
        return replace(self, **changes)


def machines() -> list[str]:
    """Names of the nodes that come with the package."""
    folder = resources.files(__package__) / "machines"
    return sorted(f.name.removesuffix(".json") for f in folder.iterdir() if f.name.endswith(".json"))


def load_node(name: str) -> Node:
    """A node by name, or from a path that ends in .json. Raises ValueError for what is unknown, missing or extra."""
    if name.endswith(".json"):
        with open(name) as file:
            return read_node(name, file.read())
    if name not in machines():
        raise ValueError(f"machine {name!r}; known are {', '.join(machines())}, or a path to a .json file")
    return read_node(name, (resources.files(__package__) / "machines" / f"{name}.json").read_text())


def read_node(name: str, text: str) -> Node:
    """A node from a data file's text."""
    try:
        entries = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"machine {name}: {error}") from error
    wanted = {f.name for f in fields(Node)} - {"name"}
    faults = [f"{key} is missing" for key in sorted(wanted - entries.keys())]
    faults += [f"{key} is not known" for key in sorted(entries.keys() - wanted)]
    for key in sorted(wanted & entries.keys()):
        entry = entries[key]
        if not isinstance(entry, dict) or not entry.get("source"):
            faults.append(f"{key} has no source")
        elif not all(v > 0 for v in (entry["value"].values() if key == "flops" else [entry["value"]])):
            faults.append(f"{key} is not positive")
    if faults:
        raise ValueError(f"machine {name}: {'; '.join(faults)}")
    return Node(name=name, **{key: entries[key]["value"] for key in wanted})
