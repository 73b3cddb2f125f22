"""Rates, sizes and latencies of a node, read from data files that give the source of each number.

A file holds an entry {"value": ..., "source": ...} for every field; units are bytes, seconds, FLOP/s. If the source
begins with "assumed", no published value was found for this GPU.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from importlib import resources
from typing import Any

RING = {"start", "hop", "bandwidth"}


@dataclass(frozen=True)
class Node:
    """GPUs of one kind, all linked through switches.

    sms                     SMs of one GPU; each runs one program at a time
    shared_bytes            shared memory that one program may use
    flops                   sustained matmul rate of one GPU by dtype
    memory_bandwidth        of one GPU's memory, reads and writes together
    l2_bytes                size of one GPU's L2 cache
    sm_bandwidth            of one SM to and from the cache
    link_bandwidth          payload of one GPU per direction; it sends and receives at the same time
    copy_bandwidth          of one copy engine
    copy_engines            engines of one GPU that may copy between GPUs at once
    memory_latency          of a load, and of an atomic in the GPU's own memory
    link_latency            from a store until the peer can see it
    launch_latency          from the end of a stream's work to the start of its next
    copy_latency            startup latency of a copy
    collectives             costs of a library's ring gather or scatter, by protocol: of the "start", of each of the
                            W - 1 "hop"s, and "bandwidth", bytes per second that reach a rank
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
    collectives: dict[str, dict[str, float]]

    def but(self, **changes: Any) -> Node:
        """A copy of the node with some fields changed."""
        return replace(self, **changes)


def machines() -> list[str]:
    """Names of the nodes shipped with the package."""
    folder = resources.files(__package__) / "machines"
    return sorted(f.name.removesuffix(".json") for f in folder.iterdir() if f.name.endswith(".json"))


def load_node(name: str) -> Node:
    """Loads a node by name or from a .json path. Raises ValueError for an unknown name, and missing or extra fields."""
    if name.endswith(".json"):
        with open(name) as file:
            return read_node(name, file.read())
    if name not in machines():
        raise ValueError(f"machine is {name!r}; it must be one of {', '.join(machines())}, or a path to a .json file")
    return read_node(name, (resources.files(__package__) / "machines" / f"{name}.json").read_text())


def read_node(name: str, text: str) -> Node:
    """Parses a node from the text of a data file."""
    try:
        entries = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"machine {name}: {error}") from error
    wanted = {f.name for f in fields(Node)} - {"name"}
    faults = [f"{key} is missing" for key in sorted(wanted - entries.keys())]
    faults += [f"{key} is unknown" for key in sorted(entries.keys() - wanted)]
    faults += [f"{key} {fault}" for key in sorted(wanted & entries.keys()) if (fault := _fault(key, entries[key]))]
    if faults:
        raise ValueError(f"machine {name}: {'; '.join(faults)}")
    return Node(name=name, **{key: entries[key]["value"] for key in wanted})


def _fault(key: str, entry: Any) -> str:
    """Describes the error in an entry; "" if there is none."""
    if not isinstance(entry, dict) or not entry.get("source"):
        return "has no source"
    value = entry.get("value")
    parts = {"flops": [value], "collectives": list(value.values()) if isinstance(value, dict) else [value]}
    for part in parts.get(key, [{"": value}]):
        if not isinstance(part, dict) or not part:
            return "gives no numbers"
        if key == "collectives" and part.keys() != RING:
            return f"gives {', '.join(part)} of a ring; wanted {', '.join(sorted(RING))}"
        if not all(isinstance(number, (int, float)) and number > 0 for number in part.values()):
            return "is not positive"
    return ""
