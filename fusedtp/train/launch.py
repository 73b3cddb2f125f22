"""`fusedtp train`: check everything, start the ranks, run one of them.

    fusedtp train ...            checks; then starts torchrun with one process a rank (none for a single rank)
      fusedtp train ... (rank)   the run itself; also what a torchrun of the user's starts on every node

What can be known before a process starts is checked before it and reported together: options, shapes, data, run folder.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import (
    ChildFailedError,
    ProcessFailure,
    get_error_handler,
)

from fusedtp.ops.engines import interpreting
from fusedtp.train import elastic, text
from fusedtp.train.build import shard_faults
from fusedtp.train.checkpoint import CheckpointError, about, path_of, steps_in
from fusedtp.train.config import TrainConfig, faults, layout, parse
from fusedtp.train.data import Batches
from fusedtp.train.determinism import deterministic
from fusedtp.train.environment import cores
from fusedtp.train.foreign_build import foreign_faults
from fusedtp.train.run import (
    CHECKPOINTS,
    INCIDENTS,
    PIPELINE,
    ended_in_order,
    misfits,
    note_incident,
    other_tokens,
    run,
)
from fusedtp.train.tokenizer import tokenizer_of
from fusedtp.train.verify import VerificationFailed
from fusedtp.train.world import Place, device_type, torchrun_place, world_of

OUTPUTS = (
    "metrics.jsonl", "summary.json", "loss.png", "config.json", "versions.json", "tensorboard", "experts.png",
    INCIDENTS, CHECKPOINTS, PIPELINE, elastic.JOB,
)  # fmt: skip
WRONG_USAGE, FAILED, INTERRUPTED = 2, 1, 130  # exit codes
LAST_LINES = 20  # of the stderr of a rank that died without an exception


def main(argv: list[str]) -> int:
    """Run the job, or one rank of it under torchrun; returns the exit code."""
    return start(parse(argv), argv)


def start(asked: TrainConfig, argv: list[str], command: str = "train") -> int:
    """The same of what `argv` of that subcommand says."""
    place = torchrun_place()
    ranks, local_ranks = place[2:] if place else 2 * (default_ranks(asked),)
    config, found = elastic.fit(asked, ranks) if asked.parallel.elastic else (asked, [])
    dp, tp = layout(config, ranks, local_ranks)
    if place is None:
        ranks = local_ranks = config.parallel.pp * dp * tp
    found = found or faults(config, dp, tp) + shard_faults(config, dp, tp)
    found += machine_faults(config, dp, tp, ranks, local_ranks)
    if place is None:
        found += data_faults(config)
        if config.foreign.model is not None and not config.data.faults():
            found += foreign_faults(config, dp, tp)
    if found:
        if place is None or place.local_rank == 0:
            report(found, command)
        return WRONG_USAGE
    if place is None and ranks > 1:
        return launch(argv, ranks, command, config.run.folder, config.run.max_restarts)
    return run_rank(config, dp, tp, asked, command)


def default_ranks(config: TrainConfig) -> int:
    """The default number of ranks: two on CPU, one a GPU otherwise; at least one a pipeline stage."""
    pp = max(1, config.parallel.pp)
    if config.parallel.tp is not None:
        return max(1, pp * config.parallel.tp * (config.parallel.dp or 1))
    here = torch.cuda.device_count() if device_type(config.run.device) == "cuda" else 2
    return max(pp, here - here % pp, 1)


def machine_faults(config: TrainConfig, dp: int, tp: int, ranks: int, local_ranks: int) -> list[str]:
    """What this machine, its files or the number of started ranks cannot do."""
    found = []
    device = device_type(config.run.device)
    pp = config.parallel.pp
    if min(pp, dp, tp) > 0 and pp * dp * tp != ranks and not config.parallel.elastic:
        asked = (f"--pp {pp} x " if pp > 1 else "") + f"--dp {dp} x --tp {tp}"
        found.append(f"{asked} are {pp * dp * tp} ranks, but {ranks} were started")
    if device == "cuda" and torch.cuda.device_count() < local_ranks:
        found.append(
            f"{local_ranks} ranks on a machine of {torch.cuda.device_count()} GPUs: use --device cpu or fewer"
        )
    if config.parallel.engine == "triton" and device == "cpu" and not interpreting():
        found.append(
            "--engine triton on CPU runs in Triton's interpreter: set TRITON_INTERPRET=1 in the environment"
        )
    if config.parallel.elastic:
        found += elastic.store_faults()
    found += text.faults(config.data.data) + folder_faults(config.run.folder)
    return found + (checkpoint_faults(config) if (torchrun_place() or Place()).local_rank == 0 else [])


def checkpoint_faults(config: TrainConfig) -> list[str]:
    """Whether there is nothing to resume, or something that a new run would replace."""
    folder = config.run.folder / CHECKPOINTS
    steps = steps_in(folder)
    if config.parallel.elastic and config.run.replace and torchrun_place() and elastic.job() is None:
        return [
            "--elastic with --replace: give torchrun an --rdzv-id, by which a restart knows its own checkpoints"
        ]
    run = elastic.goes_on(config, steps).run
    if run.resume and not steps:
        return [f"--resume: {folder} holds no checkpoint"]
    if run.step is not None and run.step not in steps:
        return [f"--step {run.step}: {folder} has checkpoints of the steps {', '.join(map(str, steps))}"]
    if steps and not run.resume and not run.replace:
        return [
            f"{run.folder} holds checkpoints up to step {steps[-1]}: --resume goes on from there, --replace removes "
            "them, another --name leaves them"
        ]
    return resume_faults(config, [run.step] if run.step is not None else steps) if run.resume else []


def resume_faults(config: TrainConfig, steps: Sequence[int], tokens: Path | None = None) -> list[str]:
    """Why a run cannot go on from the newest of these checkpoints that can be read, as far as its about.json says.

    tokens   if given, whether they are the checkpoint's is all that is looked at
    """
    unread = []
    for step in reversed(steps):
        try:
            words = about(path_of(config.run.folder / CHECKPOINTS, step))
        except CheckpointError as error:
            unread.append(str(error))
            continue
        found = misfits(config, words) if tokens is None else other_tokens(tokens, words)
        return [f"--resume: {fault}" for fault in found]
    return [f"--resume: no checkpoint can be read: {'; '.join(unread)}"] if tokens is None else []


def data_faults(config: TrainConfig) -> list[str]:
    """What is wrong with the text itself, which is known when the token files are built; builds them."""
    if config.data.faults() or text.faults(config.data.data) or folder_faults(config.run.folder):
        return []  # these are reported; without them there is nothing to build
    try:
        tokens = prepare_data(config)
    except (ValueError, OSError) as error:
        return [str(error)]
    if not config.run.resume:
        return []
    steps = steps_in(config.run.folder / CHECKPOINTS)
    asked = config.run.step
    return resume_faults(config, steps if asked is None else [asked], tokens)


def folder_faults(folder: Path) -> list[str]:
    """Why a folder could not be made and written, without making it."""
    existing = folder.absolute()
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir():
        return [f"cannot write the run to {folder}: {existing} is no folder"]
    if not os.access(existing, os.W_OK | os.X_OK):
        return [f"cannot write the run to {folder}: no permission to write in {existing}"]
    return []


def replace_outputs(folder: Path) -> None:
    """Make the run folder and remove what an earlier run of this name wrote; other files stay."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in OUTPUTS:
        path = folder / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def prepare_data(config: TrainConfig) -> Path:
    """Folder of the token files, built if need be; raises ValueError where the text is too short."""
    data = config.data
    quiet = (torchrun_place() or Place()).local_rank != 0
    folder = text.build(data.data, config.run.runs / ".tokens", tokenizer_of(data.tokenizer), quiet)
    Batches(folder, length=data.length, batch=data.batch)
    return folder


def run_rank(config: TrainConfig, dp: int, tp: int, asked: TrainConfig, command: str = "train") -> int:
    """This process's part of the job. A failure is printed, and handed to torchrun where that started us."""
    handler, place = get_error_handler(), torchrun_place() or Place()
    try:
        with (
            deterministic(config.run.determinism),
            world_of(
                dp,
                tp,
                device_type(config.run.device),
                config.parallel.ep,
                config.parallel.pp,
                config.parallel.copies(dp),
            ) as world,
        ):
            folder = config.run.folder
            patience = elastic.PATIENCE if config.parallel.elastic or elastic.started_again(folder) else 0.0
            with sole_writer(folder, patience) if place.rank == 0 else nullcontext():
                config = elastic.agreed(config, steps_in(folder / CHECKPOINTS), world)
                if place.rank == 0 and not config.run.resume:
                    replace_outputs(folder)
                if place.local_rank == 0:
                    prepare_data(config)
                world.wait_for_all()
                run(config, prepare_data(config), world, asked)
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:
        handler.record_exception(error)
        if place.ranks == 1:
            note_incident(config.run.folder, str(error))
        if not isinstance(error, (VerificationFailed, ValueError, CheckpointError, elastic.RanksLeft)):
            traceback.print_exc()
        elif torchrun_place() is None:
            report([" ".join(str(error).split())], command)
        return FAILED
    return 0


@contextmanager
def sole_writer(folder: Path, patience: float = 0.0) -> Iterator[None]:
    """Hold a run's folder for this process. Raises ValueError where another one does, after so many seconds; a killed
    one holds nothing."""
    folder.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + patience
    with open(folder / ".lock", "a+") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= until:
                    file.seek(0)
                    held = f"{folder} is being written by another run: {file.read().strip()}"
                    raise ValueError(held) from None
            time.sleep(0.1)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {os.uname().nodename}\n")
        file.flush()
        yield


def launch(
    argv: list[str], ranks: int, command: str = "train", folder: Path | None = None, max_restarts: int = 0
) -> int:
    """Start `ranks` processes of a subcommand on this machine through torchrun and wait for them.

    folder         of the run, which notes why it failed
    max_restarts   how often all are started again when one has died
    """
    from torch.distributed import run as torchrun

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # the ranks say what is wrong
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores() // ranks)))
    os.environ[elastic.OWN_STORE] = "1"
    os.environ.setdefault("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "[rank ${rank}] ")
    with tempfile.TemporaryDirectory(prefix="fusedtp-train-") as logs:
        where = ["--standalone", f"--nproc-per-node={ranks}", f"--log-dir={logs}", "--tee=2"]  # stderr
        where.append(f"--max-restarts={max_restarts}")
        try:
            torchrun.run(torchrun.parse_args([*where, "-m", "fusedtp", command, *argv]))
        except ChildFailedError as error:
            why = describe_failure(error.failures, Path(logs))
            report([why], command)
            if folder is not None:
                note_incident(folder, why)
            return FAILED
        except (KeyboardInterrupt, SignalException) as error:
            asked = isinstance(error, SignalException) and error.sigval == signal.SIGTERM
            if asked and folder is not None and ended_in_order(folder):
                return 0
            report(["ended by a signal; torchrun has ended the ranks"], command)
            return INTERRUPTED
    return 0


def describe_failure(failures: Mapping[int, ProcessFailure], logs: Path) -> str:
    """The rank that failed first, how it ended, and its error.

    failures   of ranks, in the order in which torchrun saw them end
    A rank that is killed records no error. Its peers may record theirs before torchrun sees it; those that do not
    notice are ended by torchrun's SIGTERM.
    """

    def order(rank: int) -> tuple[bool, bool, int]:
        failure = failures[rank]
        ended_by_torchrun = failure.exitcode == -signal.SIGTERM and rank != next(iter(failures))
        return ended_by_torchrun, _recorded(failure) is not None, failure.timestamp

    rank = min(failures, key=order)
    failure = failures[rank]
    killed = failure.exitcode < 0
    end = f"killed by {failure.signal_name()}" if killed else f"exit code {failure.exitcode}"
    if (message := _recorded(failure)) is not None:
        return f"rank {rank}, {end}: {message}"
    lines = [
        line
        for path in logs.glob(f"*/attempt_*/{failure.local_rank}/stderr.log")
        for line in path.read_text(errors="replace").splitlines()
    ]
    if not lines:
        return f"rank {rank}, {end}; it wrote nothing to stderr"
    return "\n    ".join([f"rank {rank}, {end}; the last lines of its stderr:", *lines[-LAST_LINES:]])


def _recorded(failure: ProcessFailure) -> str | None:
    """The message of the exception that a rank recorded (run_rank); None where it died without one."""
    if not Path(failure.error_file).is_file():
        return None
    message = failure.error_file_data["message"]
    return str(message["message"] if isinstance(message, dict) else message)


def report(faults: list[str], command: str = "train") -> None:
    for fault in faults:
        print(f"fusedtp {command}: error: {fault}", file=sys.stderr)
