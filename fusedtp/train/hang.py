"""Which rank hangs, when the others time out.

    rank 0    compute ... all_gather_matmul [waits for 1 ..... timeout] -> reads where all are -> RankHung names rank 1
    rank 1    compute ... stuck in its own code                         (its thread goes on telling where it is)

Every rank has a thread that writes once a second where the rank is into a store of the job's own: the kind of work that
its clock books (clocks.py), since when, and its last call that communicated. The thread goes on while the rank hangs. A
rank whose wait times out reads what the others wrote last: who is in no wait hangs; who has written nothing new is
frozen or gone; and if all wait, they wait for different calls, which are named.
"""

from __future__ import annotations

import json
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from fusedtp.comm import PeerDied, SignalTimeout, communicator
from fusedtp.train.clocks import Clocks
from fusedtp.train.world import World

HANG, FLIGHT = "hang.json", "flight"  # of a run's folder
WAITING = ("tp_wait", "pp_wait", "dp_wait", "norm")  # kinds in which a rank waits for others
TIMED_OUT = re.compile(r"tim(ed|e) ?out", re.IGNORECASE)  # what gloo and NCCL say of it


class RankHung(RuntimeError):
    """A wait for other ranks timed out; the message names the rank that did not come."""


@dataclass
class Position:
    """Where a rank is. beat: counts how often it has said so; seconds: for how long it has been at `kind`.

    call, calls   the last call that communicated, and how many there were of its sort
    gave_up       whether its own wait has timed out
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

    @property
    def waits(self) -> bool:
        return self.gave_up or self.kind in WAITING

    def in_words(self) -> str:
        call = f"; its last call was {self.call} (number {self.calls})" if self.call else ""
        at = f"in {self.kind} of step {self.step + 1} for {self.seconds:.0f} s"
        return f"rank {self.rank} on {self.host} has been {at}{call}"


class Pulse:
    """Tells the other ranks where this one is, within `with`; an error that is a timeout leaves it as RankHung.

    step     what step this rank is at
    folder   where hang.json is written, by one of the ranks that are left; None: nowhere
    beat     seconds from one word to the next
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
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Pulse:
        """Collective: rank 0 makes the store, all connect."""
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
        if error is None or not timed_out(error):
            return
        self._here.gave_up = True
        self._write()
        before = self._read()
        time.sleep(3 * self.beat)
        after = self._read()
        told, hung = judge(before, after, self.world.size)
        if self.folder is not None and self.world.rank == min(set(range(self.world.size)) - hung, default=0):
            report = {"time": time.time(), "what": told, "ranks": [asdict(each) for each in after]}
            (self.folder / HANG).write_text(json.dumps(report, indent=1) + "\n")
        raise RankHung(f"{told}. {' '.join(str(error).split())}") from error

    def _beat(self) -> None:
        while not self._ended.wait(self.beat):
            self._look()
            try:
                self._write()
            except RuntimeError:
                return  # the rank that holds the store is gone

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

    def _write(self) -> None:
        self._store.set(f"rank {self.world.rank}", json.dumps(asdict(self._here)))

    def _read(self) -> list[Position]:
        """Of every rank that has said anything."""
        names = [f"rank {rank}" for rank in range(self.world.size)]
        try:
            return [
                Position(**json.loads(self._store.get(name))) for name in names if self._store.check([name])
            ]
        except RuntimeError:
            return []


def record_flight(folder: Path) -> None:
    """Have NCCL keep its last collectives and write them into the folder, a file a rank, when one times out.

    Before the process groups are made. What the environment says already stays. `torchfrtrace` reads the files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    where = str(folder.absolute() / "rank-")
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", where)
    os.environ.setdefault("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", where)  # its name before torch 2.9


def timed_out(error: BaseException) -> bool:
    """Whether a wait for other ranks ended because one did not come; a rank that died is named by who started it."""
    if isinstance(error, SignalTimeout):
        return not isinstance(error, PeerDied)
    return isinstance(error, RuntimeError) and TIMED_OUT.search(str(error)) is not None


def judge(before: Sequence[Position], after: Sequence[Position], ranks: int) -> tuple[str, set[int]]:
    """Who hangs, in words and by rank, from where all ranks were at two times that are some beats apart."""
    if not after:
        return "no rank says where it is: the one that kept note of it is gone", set()
    beats = {each.rank: each.beat for each in before}
    silent = set(range(ranks)) - {each.rank for each in after}
    frozen = [each for each in after if not each.gave_up and beats.get(each.rank) == each.beat]
    busy = [each for each in after if not each.waits and each not in frozen]
    told = [f"{each.in_words()}, and it answers no more" for each in frozen]
    told += [each.in_words() for each in busy]
    told += [f"rank {rank} never said where it is" for rank in sorted(silent)]
    if told:
        return "; ".join(told), {each.rank for each in [*frozen, *busy]} | silent
    return "all ranks wait, in different calls: " + "; ".join(each.in_words() for each in after), set()
