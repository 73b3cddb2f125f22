"""Communication: symmetric memory, workspaces, signals and plain collectives of a group of ranks."""

from .communicator import (
    Communicator,
    Group,
    Place,
    alone,
    check,
    communicator,
    place,
    propagate_errors,
    registered,
    reserve,
    set_timeout,
)
from .device_view import DeviceView
from .errors import PeerDied, PeerFailed, SignalTimeout, SignatureMismatch, TooManyRows
from .signature import Signature
from .virtual_world import VirtualGroup, VirtualWorld
from .workspace import Call

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
    "TooManyRows",
    "VirtualGroup",
    "VirtualWorld",
    "alone",
    "check",
    "communicator",
    "place",
    "propagate_errors",
    "registered",
    "reserve",
    "set_timeout",
]  # fmt: skip
