"""CPU: what ends an interpreted kernel whose peer is gone."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from .errors import SignalTimeout

if TYPE_CHECKING:
    from .call import Call


class PeerWatch(threading.Thread):
    """CPU: fails an interpreted kernel that waits for a rank whose process has ended or that gave up."""

    GRACE_SECONDS = 2.0  # a peer that ended after its last signal fails nobody

    def __init__(self, call: Call) -> None:
        super().__init__(daemon=True, name="fusedtp watch")
        self.call, self._stopped = call, threading.Event()
        self.error: SignalTimeout | None = None
        self.start()

    def stop(self) -> None:
        self._stopped.set()
        self.join()

    def run(self) -> None:
        while not self._stopped.wait(0.2):
            fault = next((f for p in self.call.peers if (f := self.call.lost(p)) is not None), None)
            if fault is not None and not self._stopped.wait(self.GRACE_SECONDS):
                self.error = fault
                self.call.ws.status[0] = 1
                return
