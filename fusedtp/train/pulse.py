"""Finds the rank that hangs when the others time out.

    rank 0    compute ... all_gather_matmul [waits for 1 ..... timeout] -> reads all positions -> RankHung names rank 1
    rank 1    compute ... stuck in its own code                         (its thread keeps reporting its position)

Every rank has a thread that writes the rank's position once a second into a store of the job: the kind of work that its
clock books (clocks.py), for how long, and its last call that communicated. The thread keeps running while the rank
hangs. A rank whose wait times out reads the last positions of the others. A rank that is not waiting hangs. A rank that
has written nothing new is frozen or dead. If all wait, they wait in different calls, and the message lists the calls.
Rank 0 holds the store, which does not answer if that rank is frozen. A call to torch's store has no timeout then, so
each call runs in a thread.
"""

from __future__ import annotations

import json
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from fusedtp.comm import PeerDied, SignalTimeout, communicator
from fusedtp.train.clocks import APART, Clocks
from fusedtp.train.mesh import World

HANG, FLIGHT = "hang.json", "flight"  # in a run's folder
WAITING = ("tp_wait", "pp_wait", "dp_wait", "norm")  # kinds in which a rank waits for others
STORE_BEATS = 10  # beats that a rank waits for an answer of the store
KEPT = 30  # beats that the rank with the store stays alive for ranks that have not timed out yet
# error messages: of gloo and NCCL for a timeout, and of gloo for a peer that has left
TIMED_OUT = re.compile(r"tim(ed|e) ?out", re.IGNORECASE)
CLOSED = re.compile(r"(closed|reset) by peer|broken pipe", re.IGNORECASE)


class RankHung(RuntimeError):
    """A wait for other ranks timed out; the message names the rank that hangs."""


@dataclass
class Position:
    """Where a rank is. beat: number of reports so far; seconds: how long it has been in `kind`.

    call, calls   the last call that communicated, and its number
    gave_up       whether its own wait has timed out
    left          whether it has left the context of Pulse and no longer needs the store
    """

    rank: int
    host: str
    beat: int = 0
    step: int = 0
    kind: str = ""
    seconds: float = 0.0
    call: str = ""
    calls: int = 0
    gave_up: bool = False
    left: bool = False

    @property
    def waits(self) -> bool:
        return self.gave_up or self.kind in WAITING

    def in_words(self) -> str:
        return f"{self._who} has been {self._where} for {self.seconds:.0f} s{self._last}"

    def fell_silent(self) -> str:
        """The message for a rank whose heartbeat stopped."""
        return f"{self._who} no longer responds; it was last seen {self._where}{self._last}"

    @property
    def _who(self) -> str:
        return f"rank {self.rank} on {self.host}"

    @property
    def _where(self) -> str:
        return f"in {'validation' if self.kind == APART else self.kind} of step {self.step + 1}"

    @property
    def _last(self) -> str:
        return f"; its last call was {self.call} (number {self.calls})" if self.call else ""


class Pulse:
    """A context that reports this rank's position to the other ranks, and turns a timeout into RankHung.

    A connection that a peer closed because its own wait timed out also becomes RankHung: either may come first.

    step     returns the current step of this rank
    folder   where one of the remaining ranks writes hang.json; None: nowhere
    beat     seconds between reports
    """

    def __init__(
        self,
        world: World,
        clocks: Clocks,
        step: Callable[[], int],
        folder: Path | None = None,
        beat: float = 1.0,
    ) -> None:
        self.world, self.clocks, self.step, self.folder, self.beat = world, clocks, step, folder, beat
        self._here = Position(world.rank, socket.gethostname())
        self._ended, self._workspaces = threading.Event(), list[Any]()
        self._store: Any = None
        self._asking: threading.Thread | None = None  # runs the last request to the store
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Pulse:
        """Collective. Rank 0 creates the store, and all ranks connect before any continues: it ends with rank 0."""
        if self.world.size == 1:
            return self
        shared = [communicator(mesh) for mesh in self.world.shared_meshes]
        self._workspaces = [comm.workspace for comm in shared if comm.has_workspace]
        host = os.environ.get("MASTER_ADDR", "localhost")
        first = self.world.rank == 0
        if first:
            self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        port = next(filter(None, self.world.gather_objects(self._store.port if first else 0)))
        if not first:
            self._store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=60))
        self.world.gather_objects(None)
        self._look()
        self._write()  # a rank without new reports from now on has stopped
        self._thread = threading.Thread(target=self._beat, name="fusedtp pulse", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ended.set()
        if self._thread is None:
            return
        self._thread.join()
        if error is None:
            return
        waited = timed_out(error) or (closed_by_a_peer(error) and self._peer_gave_up())
        told, hung = self._who_hangs() if waited else ("", set())
        self._here.left = True
        self._write()
        if not waited:
            return
        if self.world.rank == 0:
            self._keep_store(set(range(1, self.world.size)) - hung)
        raise RankHung(f"{told}. {' '.join(str(error).split())}") from error

    def _who_hangs(self) -> tuple[str, set[int]]:
        """(message, hanging ranks), once this rank's own wait has ended. A rank that does not hang writes hang.json."""
        self._here.gave_up = True
        self._write()
        before = self._read()
        time.sleep(3 * self.beat)
        after = self._read()
        told, hung = judge(before, after, self.world.size)
        if self._silent:
            told, hung = "rank 0, which stores the positions of all ranks, no longer responds", {0}
            after = [self._here]
        if self.folder is not None and self.world.rank == min(set(range(self.world.size)) - hung, default=0):
            report = {"time": time.time(), "what": told, "ranks": [asdict(each) for each in after]}
            (self.folder / HANG).write_text(json.dumps(report, indent=1) + "\n")
        return told, hung

    def _peer_gave_up(self) -> bool:
        """Whether another rank reports within three beats that its wait timed out; a dead rank reports nothing."""
        until = time.monotonic() + 3 * self.beat
        while not any(each.gave_up and each.rank != self.world.rank for each in self._read()):
            if time.monotonic() > until:
                return False
            time.sleep(self.beat / 4)
        return True

    def _keep_store(self, ranks: set[int]) -> None:
        """Stay alive until all of these ranks have left, for at most KEPT beats: the store ends with this rank."""
        until = time.monotonic() + KEPT * self.beat
        while any(each.rank in ranks and not each.left for each in self._read()):
            if time.monotonic() > until:
                return
            time.sleep(self.beat / 4)

    def _beat(self) -> None:
        while not self._ended.wait(self.beat):
            self._look()
            if not self._write() and not self._silent:  # a silent store may answer again
                return

    def _look(self) -> None:
        here, clocks = self._here, self.clocks
        here.beat, here.step, here.kind = here.beat + 1, self.step(), clocks.kind
        here.seconds = time.perf_counter() - clocks.since
        here.call, here.calls = clocks.last, clocks.calls
        for workspace in self._workspaces:
            here.call, here.calls = workspace.operation or here.call, workspace.number or here.calls
            if (since := workspace.asleep_since) is not None:
                here.kind, here.seconds = "tp_wait", time.monotonic() - since
                break

    @property
    def _silent(self) -> bool:
        """Whether a request to the store is still unanswered."""
        return self._asking is not None and self._asking.is_alive()

    def _ask(self, question: Callable[[], Any]) -> Any:
        """The store's answer. Raises RuntimeError if the rank that holds the store is gone or does not answer."""
        answer = list[Any]()

        def asking() -> None:
            try:
                answer.append(question())
            except Exception as error:
                answer.append(error)

        if not self._silent:
            self._asking = threading.Thread(target=asking, name="fusedtp store", daemon=True)
            self._asking.start()
            self._asking.join(STORE_BEATS * self.beat)
        if not answer:
            raise RuntimeError("the store does not answer")
        if isinstance(answer[0], Exception):
            raise answer[0]
        return answer[0]

    def _write(self) -> bool:
        """Report this rank's position. Returns whether the store answered."""
        here = json.dumps(asdict(self._here))
        try:
            self._ask(lambda: self._store.set(f"rank {self.world.rank}", here))
        except RuntimeError:
            return False
        return True

    def _read(self) -> list[Position]:
        """The positions of all ranks that have reported one."""
        names = [f"rank {rank}" for rank in range(self.world.size)]
        try:
            said = self._ask(lambda: [self._store.get(name) for name in names if self._store.check([name])])
        except RuntimeError:
            return []
        return [Position(**json.loads(each)) for each in said]


def record_flight(folder: Path) -> None:
    """Enable NCCL's flight recorder: when a collective times out, each rank writes its last ones to a file in `folder`.

    Call before process groups are created. Environment variables that are already set are kept. `torchfrtrace` reads
    the files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    where = str(folder.absolute() / "rank-")
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", where)
    os.environ.setdefault("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", where)  # the name before torch 2.9


def timed_out(error: BaseException) -> bool:
    """Whether a wait for other ranks timed out. A dead rank does not count: the launcher reports it."""
    for each in _with_causes(error):
        if isinstance(each, SignalTimeout):
            return not isinstance(each, PeerDied)
        if isinstance(each, RuntimeError) and TIMED_OUT.search(str(each)):
            return True
    return False


def closed_by_a_peer(error: BaseException) -> bool:
    """Whether a collective ended because a peer closed its connection."""
    return any(isinstance(each, RuntimeError) and CLOSED.search(str(each)) for each in _with_causes(error))


def _with_causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error and its causes, since torch's schedules raise an error of their own from a stage's error."""
    while error is not None:
        yield error
        error = error.__cause__


def judge(before: Sequence[Position], after: Sequence[Position], ranks: int) -> tuple[str, set[int]]:
    """(message, hanging ranks), from the positions of all ranks at two times that are a few beats apart."""
    if not after:
        return "no positions of ranks are known: the rank that stored them is gone", set()
    beats = {each.rank: each.beat for each in before}
    silent = set(range(ranks)) - {each.rank for each in after}
    frozen = [each for each in after if not each.gave_up and beats.get(each.rank) == each.beat]
    busy = [each for each in after if not each.waits and each not in frozen]
    told = [each.fell_silent() for each in frozen]
    told += [each.in_words() for each in busy]
    told += [f"rank {rank} never reported its position" for rank in sorted(silent)]
    if told:
        return "; ".join(told), {each.rank for each in [*frozen, *busy]} | silent
    return "all ranks wait, in different calls: " + "; ".join(each.in_words() for each in after), set()
