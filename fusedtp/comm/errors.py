"""Errors of a group's calls when its ranks do not act together."""


class SignalTimeout(RuntimeError):
    """A rank waited longer than the group's timeout for a peer's signal; the group's workspace is not used again."""


class PeerDied(SignalTimeout):
    """The process of a peer ended while this rank waited for its signal."""


class PeerFailed(RuntimeError):
    """A peer raised before or during an operation, and notified the others before it left."""


class TooManyRows(RuntimeError):
    """More rows were routed to a rank's experts than it has room for; a kernel found it, on all ranks."""


class SignatureMismatch(ValueError):
    """Two ranks called different operations, or the same one with different shapes, dtypes or engines."""
