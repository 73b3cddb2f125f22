"""`fusedtp train`, `finetune`: validate everything, start the ranks, run one rank.

    fusedtp train ...            validates; then starts torchrun with one process per rank (not for a single rank)
      fusedtp train ... (rank)   the run itself; the user's own torchrun starts this on every node too

Options, shapes, data and the run folder are validated before any process starts, and all errors are reported together.

Note [Finetune]
`fusedtp finetune`: `fusedtp train --model` with defaults for a short run on a pretrained model.

    --model llama --tp 2 --steps 30 --batch 8 --length 128 --weight-decay 0 --sample 0 --name finetune
    --lr       5e-5 to train all weights of a checkpoint folder, otherwise 2e-3
    --warmup   a tenth of the steps
    --out      the folder that `fusedtp checkpoints export` writes at the end
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import (
    ChildFailedError,
    ProcessFailure,
    get_error_handler,
)

from fusedtp.comm import PeerDied
from fusedtp.comm.signature import OF_KERNELS
from fusedtp.commands import elastic, runs
from fusedtp.commands.build import foreign_faults, shard_faults
from fusedtp.commands.run import (
    END,
    INCIDENTS,
    PIPELINE,
    SAVES,
    deterministic,
    ended_in_order,
    misfits,
    note_incident,
    other_tokens,
    run,
)
from fusedtp.commands.verify import VerificationFailed
from fusedtp.environment import cores
from fusedtp.ops.engines import interpreting
from fusedtp.train.checkpoint import CheckpointError, about, faults_of, path_of, steps_in
from fusedtp.train.config import (
    CHECKPOINTS,
    CONFIG,
    DataOptions,
    ForeignOptions,
    OptimOptions,
    ParallelOptions,
    RunOptions,
    TrainConfig,
    faults,
    layout,
    parse,
    resumed,
    with_tokenizer,
)
from fusedtp.train.data import Batches, build_tokens, text_faults
from fusedtp.train.mesh import Place, device_type, sees_one_gpu, torchrun_place, world_of
from fusedtp.train.pulse import FLIGHT, HANG, RankHung, closed_by_a_peer, record_flight
from fusedtp.train.watch import RANKS, NotFinite

OUTPUTS = (
    "metrics.jsonl", "summary.json", "loss.png", "config.json", "versions.json", "tensorboard", "experts.png",
    INCIDENTS, CHECKPOINTS, PIPELINE, SAVES, elastic.JOB, RANKS, HANG, "report.html", FLIGHT,
)  # fmt: skip
LOCK = ".lock"  # in a run's folder: locked by the run that writes there; it contains its process id
WRONG_USAGE, FAILED, INTERRUPTED = 2, 1, 130  # exit codes
SHUTDOWN = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"  # for torchrun: seconds from SIGTERM to SIGKILL; its own default is 30
ASKED = "FUSEDTP_OPTIONS_CHECKED"  # tells ranks that the launching process has validated the options
LAST_LINES = 20  # lines shown from the stderr of a rank that died without an exception


def main(argv: list[str]) -> int:
    """Run the job, or one rank of it under torchrun; returns the exit code."""
    try:
        asked = parse(argv)
    except ValueError as error:
        return refused([str(error)])
    return start(asked, argv)


def _asked_before() -> bool:
    """Whether this process was started by another process of this command, which has validated the options."""
    return torchrun_place() is not None and ASKED in os.environ


def start(asked: TrainConfig, argv: list[str], command: str = "train") -> int:
    """Run the job or one rank of it, with options that are parsed from `argv` of a subcommand."""
    place = torchrun_place()
    ranks, local_ranks = place[2:] if place else 2 * (default_ranks(asked),)
    config, found = elastic.fit(asked, ranks) if asked.parallel.elastic else (asked, [])
    dp, tp = layout(config, ranks, local_ranks)
    if place is None:
        ranks = local_ranks = config.parallel.pp * dp * tp
    found = found or faults(config, dp, tp) + shard_faults(config, dp, tp)
    found += machine_faults(config, dp, tp, ranks, local_ranks)
    if place is None:
        found += data_faults(config) + held_faults(config.run.folder)
    if config.foreign.model is not None and not config.data.faults() and not _asked_before():
        found += foreign_faults(config, dp, tp)
    if found:
        return refused(found, command)
    if place is None and ranks > 1:
        return launch(argv, ranks, command, config.run.folder, config.run.max_restarts)
    return run_rank(config, dp, tp, asked, command)


def default_ranks(config: TrainConfig) -> int:
    """The default number of ranks: pp x tp x dp if tp is given; otherwise two on CPU, one per GPU, divisible by pp."""
    pp = max(1, config.parallel.pp)
    if config.parallel.tp is not None:
        return max(1, pp * config.parallel.tp * (config.parallel.dp or 1))
    here = torch.cuda.device_count() if device_type(config.run.device) == "cuda" else 2
    return max(pp, here - here % pp, 1)


def machine_faults(config: TrainConfig, dp: int, tp: int, ranks: int, local_ranks: int) -> list[str]:
    """Errors that come from this machine, its files or the number of started ranks."""
    found = []
    device = device_type(config.run.device)
    pp = config.parallel.pp
    if min(pp, dp, tp) > 0 and pp * dp * tp != ranks and not config.parallel.elastic:
        asked = (f"--pp {pp} x " if pp > 1 else "") + f"--dp {dp} x --tp {tp}"
        found.append(f"{asked} are {pp * dp * tp} ranks, but {ranks} were started")
    if device == "cuda" and torch.cuda.device_count() < local_ranks and not sees_one_gpu(torchrun_place()):
        found.append(
            f"{local_ranks} ranks on a machine with {torch.cuda.device_count()} GPUs: use fewer ranks or --device cpu"
        )
    engine = config.parallel.engine
    if engine in OF_KERNELS and device == "cpu" and not interpreting():
        found.append(
            f"--engine {engine} on CPU runs in Triton's interpreter: set TRITON_INTERPRET=1 in the environment"
        )
    if config.parallel.elastic:
        found += elastic.store_faults()
    found += text_faults(config.data.data) + folder_faults(config.run.folder)
    return found + (checkpoint_faults(config) if (torchrun_place() or Place()).local_rank == 0 else [])


def checkpoint_faults(config: TrainConfig) -> list[str]:
    """Errors of --resume, --step and --replace: nothing to resume, or checkpoints that a new run would replace."""
    folder = config.run.folder / CHECKPOINTS
    steps = steps_in(folder)
    if config.parallel.elastic and config.run.replace and torchrun_place() and elastic.job() is None:
        return ["--elastic with --replace: give torchrun an --rdzv-id, so that a restart recognizes its checkpoints"]
    run = elastic.goes_on(config, steps).run
    if steps and elastic.undecided(run.folder):
        return []
    if run.resume and not steps:
        return [f"--resume: {folder} holds no checkpoint"]
    if run.step is not None and run.resume and run.step not in steps:
        return [f"--step {run.step}: {folder} has only checkpoints of steps {', '.join(map(str, steps))}"]
    if steps and not run.resume and not run.replace:
        return [elastic.taken(run.folder, steps)]
    return resume_faults(config, [run.step] if run.step is not None else steps) if run.resume else []


def resume_faults(config: TrainConfig, steps: Sequence[int], tokens: Path | None = None) -> list[str]:
    """Why a run cannot resume from the newest readable one of these checkpoints, judging by its about.json.

    tokens   if given, check only whether the checkpoint was trained on these token files
    """
    unread = []
    for step in reversed(steps):
        try:
            words = about(path_of(config.run.folder / CHECKPOINTS, step))
        except CheckpointError as error:
            unread.append(str(error))
            continue
        found = misfits(config, words) if tokens is None else other_tokens(tokens, words)
        damaged = faults_of(path_of(config.run.folder / CHECKPOINTS, step), hashed=False)
        if found or not damaged:
            return [f"--resume: {fault}" for fault in found]
        unread += damaged
    return [f"--resume: no checkpoint can be read: {'; '.join(unread)}"] if tokens is None else []


def data_faults(config: TrainConfig) -> list[str]:
    """Build the token files; return errors of the text itself, which are known only then."""
    if config.data.faults() or text_faults(config.data.data) or folder_faults(config.run.folder):
        return []  # already reported elsewhere; there is nothing to build
    try:
        tokens = prepare_data(config)
    except ValueError as error:
        return [str(error)]
    except OSError as error:
        return [f"cannot write the token files below {config.run.runs}: {error.strerror}"]
    if not config.run.resume:
        return []
    steps = steps_in(config.run.folder / CHECKPOINTS)
    asked = config.run.step
    return resume_faults(config, steps if asked is None else [asked], tokens)


def folder_faults(folder: Path) -> list[str]:
    """Why a folder cannot be created and written; does not create it."""
    existing = folder.absolute()
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir():
        return [f"cannot write the run to {folder}: {existing} is not a folder"]
    if not os.access(existing, os.W_OK | os.X_OK):
        return [f"cannot write the run to {folder}: no permission to write in {existing}"]
    return []


def replace_outputs(folder: Path) -> None:
    """Create the run folder and remove the outputs of an earlier run of this name; other files stay."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in OUTPUTS:
        path = folder / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def prepare_data(config: TrainConfig) -> Path:
    """Folder of the token files, built if necessary. Raises ValueError if the text is too short."""
    data = config.data
    quiet = (torchrun_place() or Place()).local_rank != 0
    folder = build_tokens(data.data, config.run.runs / ".tokens", data.vocabulary, quiet)
    Batches(folder, length=data.length, batch=data.batch)
    return folder


def run_rank(config: TrainConfig, dp: int, tp: int, asked: TrainConfig, command: str = "train") -> int:
    """Run this rank. A failure is printed, and passed to torchrun if it started this process."""
    handler, place = get_error_handler(), torchrun_place() or Place()
    try:
        if device_type(config.run.device) == "cuda":
            record_flight(config.run.folder / FLIGHT)
        with (
            deterministic(config.run.determinism),
            world_of(
                dp,
                tp,
                device_type(config.run.device),
                config.parallel.ep,
                config.parallel.pp,
                config.parallel.copies(dp),
                config.watch.timeout,
            ) as world,
        ):
            folder = config.run.folder
            agents = elastic.agents(world)
            again = config.parallel.elastic or elastic.started_again(folder, agents)
            patience = elastic.PATIENCE if again else 0.0
            with sole_writer(folder, patience) if place.rank == 0 else nullcontext():
                config = elastic.agreed(config, steps_in(folder / CHECKPOINTS), world, agents)
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
            note_incident(config.run.folder, str(error), END)
        told = (VerificationFailed, NotFinite, RankHung, ValueError, CheckpointError, elastic.RanksLeft)
        follows = isinstance(error, PeerDied) or closed_by_a_peer(error)  # caused by another rank
        if not isinstance(error, told) and not (follows and torchrun_place() is not None):
            traceback.print_exc()
        elif "TORCHELASTIC_ERROR_FILE" not in os.environ:  # torchrun shows what its ranks record there
            report([" ".join(str(error).split())], command)
        return FAILED
    return 0


def held_faults(folder: Path) -> list[str]:
    """An error if another run is writing to the folder; see sole_writer."""
    try:
        with open(folder / LOCK) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except BlockingIOError:
        return [_held(folder)]
    except OSError as error:
        return [f"{folder / LOCK} cannot be read: {error.strerror}"]
    return []


@contextmanager
def sole_writer(folder: Path, patience: float = 0.0) -> Iterator[None]:
    """Lock a run's folder for this process; the lock of a killed process is released. Raises ValueError if another
    process still holds it after `patience` seconds, or if the folder cannot be created."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / LOCK, "a+")
    except OSError as error:
        raise ValueError(f"cannot write the run to {folder}: {error.strerror}") from error
    until = time.monotonic() + patience
    with lock as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= until:
                    raise ValueError(_held(folder)) from None
            time.sleep(0.1)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {os.uname().nodename}\n")
        file.flush()
        yield


def _held(folder: Path) -> str:
    return f"{folder} is being written by another run: {(folder / LOCK).read_text().strip()}"


def launch(
    argv: list[str], ranks: int, command: str = "train", folder: Path | None = None, max_restarts: int = 0
) -> int:
    """Start `ranks` processes of a subcommand on this machine through torchrun and wait for them.

    folder         folder of the run, where incidents are recorded
    max_restarts   how often to restart all ranks after one has died
    """
    from torch.distributed import run as torchrun

    logger = logging.getLogger("torch.distributed.elastic")  # silenced: the ranks report their errors
    logger.setLevel(logging.ERROR if max_restarts and folder is not None else logging.CRITICAL)
    logger.propagate, logger.handlers = False, [] if folder is None else [_Restarts(folder, max_restarts)]
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores() // ranks)))
    # Waiting threads should free their cores for other ranks and processes. libgomp's threads spin by default: on two
    # cores with other load, that slowed the reference down from a second to a minute.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ |= {elastic.OWN_STORE: "1", ASKED: "1"}
    os.environ.setdefault(SHUTDOWN, "3600")  # a step and its save may take long; --timeout ends ranks that hang
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
                note_incident(folder, why, END)
            return FAILED
        except (KeyboardInterrupt, SignalException) as error:
            asked = isinstance(error, SignalException) and error.sigval == signal.SIGTERM
            if asked and folder is not None and ended_in_order(folder):
                return 0
            report(["ended by a signal; torchrun has ended the ranks"], command)
            return INTERRUPTED
    return 0


class _Restarts(logging.Handler):
    """Records which rank ended each time torchrun restarts all ranks, which torchrun reports only in its log."""

    FORMAT = "failed (exitcode: %s) local_rank: %s"  # torch.distributed.elastic.multiprocessing.api

    def __init__(self, folder: Path, count: int) -> None:
        super().__init__(logging.ERROR)
        self.folder, self.left = folder, count

    def emit(self, record: logging.LogRecord) -> None:
        if self.left and str(record.msg).startswith(self.FORMAT) and isinstance(record.args, tuple):
            self.left -= 1
            code, rank, *_ = record.args
            note_incident(self.folder, f"rank {rank}, {_end_of(int(str(code)))}", END)


def _end_of(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    known = -code in {*signal.Signals}
    return f"killed by {signal.Signals(-code).name if known else f'signal {-code}'}"


def describe_failure(failures: Mapping[int, ProcessFailure], logs: Path) -> str:
    """The rank that failed first, how it ended, and its error.

    failures   failures by rank, in the order in which torchrun saw them end
    A killed rank records no error. Its peers may record theirs before torchrun notices; the others are ended by
    torchrun's SIGTERM. A rank that hangs is killed after another rank has reported it.
    """
    first = next(iter(failures))

    def order(rank: int) -> tuple[bool, bool, bool, int]:
        failure, said = failures[rank], _recorded(failures[rank])
        hung = rank == first and (said or "").startswith(RankHung.__name__)
        ended_by_torchrun = failure.exitcode == -signal.SIGTERM and rank != first
        return not hung, ended_by_torchrun, said is not None, failure.timestamp

    rank = min(failures, key=order)
    failure = failures[rank]
    end = _end_of(failure.exitcode)
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
    """The message of the exception that a rank recorded (run_rank); None if it died without one."""
    if not Path(failure.error_file).is_file():
        return None
    message = failure.error_file_data["message"]
    return str(message["message"] if isinstance(message, dict) else message)


def report(faults: list[str], command: str = "train") -> None:
    for fault in faults:
        print(f"fusedtp {command}: error: {fault}", file=sys.stderr)


def refused(faults: list[str], command: str = "train") -> int:
    """Print the errors, once per machine; returns the exit code."""
    if (torchrun_place() or Place()).local_rank == 0:
        report(faults, command)
    return WRONG_USAGE


# -- fusedtp finetune --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FinetuneConfig(TrainConfig):
    """Train a causal language model of transformers on text."""

    out: Path | None = None
    """Folder for the trained model (or its adapters), as save_pretrained writes it; default: only checkpoints."""


FINETUNE = FinetuneConfig(
    data=DataOptions(length=128, batch=8, val_batches=2),
    optim=OptimOptions(steps=30, weight_decay=0.0),
    parallel=ParallelOptions(tp=2, dp=1),
    run=RunOptions(name="finetune", verify_steps=5, sample=0),
    foreign=ForeignOptions(model="llama"),
)


def finetune_main(argv: list[str]) -> int:
    """Run the job, or one rank of it under torchrun; returns the exit code."""
    try:
        config = parse_finetune(argv)
    except ValueError as error:
        return refused([str(error)], "finetune")
    if config.out is not None and (found := folder_faults(config.out)):
        return refused(found, "finetune")
    code = start(config, argv, "finetune")
    if code or config.out is None or (torchrun_place() or Place()).rank or _asked_before():
        return code
    if ended_in_order(config.run.folder):  # by a signal, before the last step
        print(f"not all steps were trained: {config.out} is not written")
        return code
    try:
        return runs.export(runs.CheckpointsOptions("export", config.run.folder, config.out))
    except (CheckpointError, ValueError, OSError) as error:
        print(f"fusedtp finetune: error: {error}", file=sys.stderr)
        return FAILED


def parse_finetune(argv: list[str]) -> FinetuneConfig:
    """Parse a command line. Some defaults depend on it: --lr, --warmup, and with --resume the options of that run."""
    first = _parse_finetune(argv, FINETUNE)
    trained = Path(first.foreign.model or "").is_dir() and not first.foreign.lora
    optim = dataclasses.replace(FINETUNE.optim, lr=5e-5 if trained else 2e-3, warmup=max(1, first.optim.steps // 10))
    default = dataclasses.replace(FINETUNE, optim=optim)
    if (before := resumed(first)) is not None:
        default = FinetuneConfig(**vars(before), out=_out_of(first.run.folder))
    return with_tokenizer(_parse_finetune(argv, default))


def _out_of(folder: Path) -> Path | None:
    """The --out of the run in a folder, from its config.json; None if there is none."""
    with suppress(OSError, ValueError, AttributeError):
        out = json.loads((folder / CONFIG).read_text()).get("out")
        return Path(out) if out else None
    return None


def _parse_finetune(argv: list[str], default: FinetuneConfig) -> FinetuneConfig:
    return tyro.cli(tyro.conf.OmitArgPrefixes[FinetuneConfig], prog="fusedtp finetune", args=argv, default=default)
