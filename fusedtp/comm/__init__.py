"""Worlds: symmetric memory, workspaces, signals and plain collectives of a group of ranks."""

from .call import Call
from .communicator import Communicator, Group, Place, check, communicator, place, reserve, set_timeout
from .errors import PeerDied, PeerFailed, SignalTimeout, SignatureMismatch
from .signature import Signature
from .virtual_world import VirtualGroup, VirtualWorld
from .workspace import DeviceView

__all__ = [
    "Call",
    "Communicator",
    "DeviceView",
    "Group",
    "PeerDied",
    "PeerFailed",
    "Place",
    "SignalTimeout",
    "Signature",
    "SignatureMismatch",
    "VirtualGroup",
    "VirtualWorld",
    "check",
    "communicator",
    "place",
    "reserve",
    "set_timeout",
]  # fmt: skip
