"""--elastic: a run on a varying number of ranks, and how a run resumes after torchrun restarts its ranks.

When a node is lost or joins, torchrun stops all ranks and restarts them on the available nodes. tp and pp stay as
configured, dp follows the number of ranks, and --accumulate compensates. A step has the same sequences in the same
order, samples [accumulate, dp, rows] (data.py), and its loss is the mean over all its labels:

    4 ranks    --tp 2 --dp 2 --accumulate 1      [1, 2, 4]     of --batch 8
    2 ranks    --tp 2 --dp 1 --accumulate 2      [2, 1, 4]
    6 ranks    --tp 2 --dp 3                     refused: 8 sequences do not divide by 3; 4 ranks would do

A rank never gets more rows per microbatch than it was configured for, so that activations fit. With fewer ranks, the
shards of parameters grow; with --dp-replicate, the shards stay and there are fewer replicas.

Restarted ranks resume from the newest good checkpoint. They must be told apart from the first ranks of a new job that
finds an older run in its folder. So the folder records the job's name, torchrun's --rdzv-id, and its agents, the
torchrun process of every machine. At least one agent must still be the same, as a later job may have the same name.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fusedtp.commands.build import shard_faults
from fusedtp.train.config import TrainConfig, faults
from fusedtp.train.mesh import Place, World, torchrun_place
from fusedtp.train.stages import pipeline_faults

JOB = ".job"  # in a run's folder: the torchrun job that trains it, and its agents
OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"  # for torchrun: every start of the ranks gets its own store
NEWS_SECONDS = 5.0  # seconds within which torchrun's SIGTERM reaches all nodes, if it ends the whole job
PATIENCE = 30.0  # seconds that a restarted rank waits for its predecessor to release the folder


class RanksLeft(RuntimeError):
    """Other ranks were asked to end and this one was not: torchrun should restart it on the remaining nodes."""


# -- the mesh ----------------------------------------------------------------------------------------------------------


def fit(config: TrainConfig, ranks: int) -> tuple[TrainConfig, list[str]]:
    """(the configuration on `ranks` ranks, its errors). Errors also suggest a number of ranks that works."""
    parallel = config.parallel
    found = []
    if not config.checkpoint.save:
        found.append("--elastic with --no-save: there would be no checkpoint to resume from")
    if parallel.tp is None or parallel.dp is None:
        found.append("--elastic lets --dp follow the ranks: give --tp, and the --dp of the whole job")
    if found:
        return config, found + faults(config, parallel.dp or 1, parallel.tp or 1)
    assert parallel.tp is not None and parallel.dp is not None
    if min(parallel.tp, parallel.dp, parallel.pp, parallel.dp_replicate) < 1 or (
        min(config.data.accumulate, config.data.batch) < 1 or parallel.dp % parallel.dp_replicate
    ):
        return config, faults(config, parallel.dp, parallel.tp)
    on_ranks, why = _judged(config, ranks)
    if why:
        why.append(_that_fits(config, ranks))
    return on_ranks, why


def fitted(config: TrainConfig, ranks: int) -> TrainConfig:
    """The configuration with dp, dp_replicate and accumulate for `ranks` ranks. Raises ValueError if none fits."""
    parallel, data = config.parallel, config.data
    assert parallel.tp is not None and parallel.dp is not None
    unit, shards = parallel.pp * parallel.tp, parallel.dp // parallel.dp_replicate
    if ranks % unit:
        raise ValueError(f"--elastic: {ranks} ranks do not divide by --pp {parallel.pp} x --tp {parallel.tp}")
    dp, copies = ranks // unit, parallel.dp_replicate
    if copies > 1:
        if dp % shards:
            raise ValueError(
                f"--elastic: {dp} data-parallel ranks are not a multiple of the {shards} shards of --dp {parallel.dp} "
                f"--dp-replicate {copies}"
            )
        copies = dp // shards
    pieces = parallel.dp * data.accumulate
    on_mesh = replace(parallel, dp=dp, dp_replicate=copies)
    for accumulate in range(-(-pieces // dp), data.batch // dp + 1):
        if data.batch % (dp * accumulate):
            continue
        found = replace(config, parallel=on_mesh, data=replace(data, accumulate=accumulate))
        schedule = (parallel.schedule, parallel.pp, parallel.virtual_stages)
        if not pipeline_faults(*schedule, layers=sys.maxsize, microbatches=accumulate):
            return found
    raise ValueError(
        f"--elastic: --batch {data.batch} does not divide over {dp} data-parallel ranks in microbatches of at most "
        f"{data.batch / pieces:g} sequences"
    )


def _judged(config: TrainConfig, ranks: int) -> tuple[TrainConfig, list[str]]:
    try:
        found = fitted(config, ranks)
    except ValueError as error:
        return config, [str(error)]
    dp, tp = found.parallel.dp, found.parallel.tp
    assert dp is not None and tp is not None
    return found, faults(found, dp, tp) + shard_faults(found, dp, tp)


def _that_fits(config: TrainConfig, ranks: int) -> str:
    """A message with the largest number of ranks up to `ranks` that works, or else the smallest one above."""
    parallel = config.parallel
    assert parallel.tp is not None and parallel.dp is not None
    unit = parallel.pp * parallel.tp
    here = ranks // unit
    for dp in (*range(here, 0, -1), *range(here + 1, parallel.dp + 1)):
        found, why = _judged(config, dp * unit)
        if not why:
            return f"{dp * unit} ranks would do: {in_words(found)}"
    return "no number of ranks would do"


def in_words(config: TrainConfig) -> str:
    """The mesh as options: --pp 2 --dp 2 --tp 2 --accumulate 4."""
    parallel = config.parallel
    pp = f"--pp {parallel.pp} " if parallel.pp > 1 else ""
    copies = f"--dp-replicate {parallel.dp_replicate} " if parallel.dp_replicate > 1 else ""
    return f"{pp}--dp {parallel.dp} {copies}--tp {parallel.tp} --accumulate {config.data.accumulate}"


def store_faults() -> list[str]:
    """An error if ranks cannot be restarted because torchrun would give them the addresses of their predecessors."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return []
    return [
        "--elastic: torchrun shares one store between all starts of the ranks, so restarted ranks would find the "
        f"addresses of the old ones (pytorch issue 135712): set {OWN_STORE}=1 in its environment, on all nodes"
    ]


# -- restarted ranks ---------------------------------------------------------------------------------------------------


def job() -> str | None:
    """Name of this rank's torchrun job, which stays the same across restarts; None if it has no name."""
    name = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    return None if name == "none" else name


def agent(process: int | None = None) -> str:
    """The agent that started a process (default: this one), as host name, boot id, process id and start time.

    A script may run between the two; its environment has the job's name, while the agent's has not.
    """
    process = parent(process or os.getpid())
    while process > 1 and f"TORCHELASTIC_RUN_ID={job()}".encode() in _of(process, "environ").split(b"\0"):
        process = parent(process)
    began = _of(process, "stat").rpartition(b")")[2].split()[19:20]
    boot = _of("sys/kernel/random", "boot_id").decode().strip()
    return " ".join([os.uname().nodename, boot, str(process), *(each.decode() for each in began)])


def parent(process: int) -> int:
    """The parent of a process; 0 if it is unknown."""
    after_its_name = _of(process, "stat").rpartition(b")")[2].split()
    return int(after_its_name[1]) if after_its_name else 0


def _of(process: int | str, file: str) -> bytes:
    try:
        return Path(f"/proc/{process}/{file}").read_bytes()
    except OSError:
        return b""


def agents(world: World) -> list[str]:
    """The agents of all ranks. Collective."""
    return sorted(set(world.gather_objects(agent())))


def note_job(folder: Path, agents: Sequence[str]) -> None:
    """Record the job's name and its agents in the run's folder."""
    (folder / JOB).write_text(json.dumps({"job": job(), "agents": list(agents)}) + "\n")


def _noted(folder: Path) -> tuple[str | None, list[str]]:
    try:
        noted = json.loads((folder / JOB).read_text())
        return noted["job"], noted["agents"]
    except (OSError, ValueError, KeyError, TypeError):  # none, or from an older version
        return None, []


def started_again(folder: Path, agents: Sequence[str] = ()) -> bool:
    """Whether ranks of this job have trained the run before. For a job without a name, torchrun's restart count tells,
    which does not count nodes that join. agents: those of all ranks; default: only this rank's."""
    if (name := job()) is None:
        return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    before, known = _noted(folder)
    return before == name and not set(agents or [agent()]).isdisjoint(known)


def undecided(folder: Path) -> bool:
    """Whether this machine may have joined a running job of this name; only all agents together can tell (agreed)."""
    place = torchrun_place() or Place()
    known = job() is not None and _noted(folder)[0] == job()
    return known and place.local_ranks < place.ranks and not started_again(folder)


def taken(folder: Path, steps: Sequence[int]) -> str:
    """The error of a new run in a folder with checkpoints."""
    return (
        f"{folder} holds checkpoints up to step {max(steps)}: --resume continues from there, --replace removes them, "
        "another --name keeps them"
    )


def goes_on(config: TrainConfig, steps: Sequence[int], agents: Sequence[str] = ()) -> TrainConfig:
    """The configuration, with --resume if this rank should resume from existing checkpoints without being asked."""
    run = config.run
    if steps and started_again(run.folder, agents):  # --replace and --step applied to the first start only
        return replace(config, run=replace(run, resume=True, replace=False, step=None))
    if steps and config.parallel.elastic and not run.replace:
        return replace(config, run=replace(run, resume=True))
    return config


def agreed(config: TrainConfig, steps: Sequence[int], world: World, agents: Sequence[str] = ()) -> TrainConfig:
    """The result of goes_on on rank 0, for all ranks: other ranks may see an older state of a shared disk.

    Raises ValueError on all ranks if the folder belongs to another run.
    """
    found = goes_on(config, steps, agents).run if world.rank == 0 else config.run
    first = [found.resume, found.replace, 0 if found.step is None else found.step + 1, max(steps, default=0)]
    resume, replaces, step, newest = world.largest(first if world.rank == 0 else [0, 0, 0, 0])
    if newest and not resume and not replaces:
        raise ValueError(taken(config.run.folder, [int(newest)]))
    run = replace(config.run, resume=bool(resume), replace=bool(replaces), step=step - 1 if step else None)
    return replace(config, run=run)


def because(about: Mapping[str, Any], world: World, folder: Path) -> str:
    """Why ranks were restarted, as text; empty if they were not."""
    before = int(about.get("ranks", world.size))
    if before != world.size:
        return f"{before} ranks became {world.size}"
    return "torchrun restarted the ranks" if started_again(folder, agents(world)) else ""


def moved(about: Mapping[str, Any], config: TrainConfig, world: World) -> str:
    """A message about the mesh of a resumed run, if it differs from the checkpoint's."""
    mesh = {"pp": world.pp, "dp": world.dp, "tp": world.tp}
    if about.get("mesh", mesh) == mesh:
        return ""
    pp = f"pp {world.pp}, " if world.pp > 1 else ""
    return f"; now on {world.size} ranks, {pp}dp {world.dp}, tp {world.tp}, accumulate {config.data.accumulate}"
