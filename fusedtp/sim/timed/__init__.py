"""Simulates how long a schedule takes on a node described by a data file. See docs/timed-schedule.md."""

from .engine import Engine
from .node import Node, load_node, machines
from .timeline import Segment, Step, Timeline

__all__ = ["Engine", "Node", "Segment", "Step", "Timeline", "load_node", "machines"]
