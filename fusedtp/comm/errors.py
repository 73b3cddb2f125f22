"""What a group's calls raise when the ranks of the group do not act together."""


class SignalTimeout(RuntimeError):
    """A rank waited longer than the group's timeout for a peer's signal; the group's workspace is not used again."""


class PeerDied(SignalTimeout):
    """The process of a peer ended while this rank waited for its signal."""


class PeerFailed(RuntimeError):
    """A peer raised before an operation or in the middle of it, and said so before it left."""


class TooManyRows(RuntimeError):
    """More rows were routed to a rank's experts than it has room for; a kernel found it, on all ranks alike."""


class SignatureMismatch(ValueError):
    """Two ranks called different operations, or the same one with different shapes, dtypes or engines."""
