"""fusedtp bench gpu, or make gpu: runs the GPU tests, then every suite on one GPU, unattended, in nine minutes.

    tests      pytest tests/gpu tests/nn/test_gpu.py -m gpu, in several processes    (in a checkout)
    matmul     Llama 3 70B's shapes on a rank of eight, and 8192 cubed
    virtual-8  the fused operations with eight ranks side by side on the GPU: Llama 3 70B's shapes, many tokens
    fp8        fp8 matmuls and quantization: Llama 3 70B's shapes on a rank of eight
    pointwise  RMSNorm, SwiGLU, rotary embedding of Llama 3 8B
    loss       Llama 3 8B's output head and cross-entropy, on one rank and on eight
    block      Llama 3 8B's block on one rank and on eight
    step       a training step, 2048 and 4096 wide, on one rank
    fewer      the fused operations with two and four ranks
    short      virtual-8 with few tokens
    decode     a layer's matmuls for 1, 16 and 64 tokens on eight ranks, eager and in a CUDA graph
    experts    the matmuls of published MoE models on a rank of eight
    moe        a MoE layer split over eight virtual ranks; DeepSeek-V3's dispatch and combine alone
    host       host time of fused calls, two processes on the GPU

Every part is a separate process with a time limit. It keeps a journal, and writes bench/results/<gpu>/<part>.json when
it ends. Another call with the same code skips finished parts and resumes the interrupted one; tests resume with those
that have not passed yet. --fresh starts over. A failing part does not stop the others; the exit code is 1 if any part
failed.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from . import machine
from .options import parse

FUSED = "all-gather-matmul,matmul-reduce-scatter,matmul-all-reduce"
LEAST_SECONDS = 20.0  # a part is not started with less
USUAL_SECONDS = 45.0  # minimum for a part while there is time; starting CUDA and compiling take half of it
END_SECONDS = 5.0  # time to stop a part


@dataclass(frozen=True)
class Part:
    """The work of one process. share: its weight when the remaining time is divided among it and the later parts."""

    name: str
    share: float
    command: tuple[str, ...]
    goes_on: bool = True  # accepts --minutes and --resume


@dataclass(frozen=True)
class Options:
    """GPU tests, then all suites on this machine's one GPU."""

    minutes: float = 9.0
    """The total time limit."""
    fresh: bool = False
    """Repeat measurements that were already made at this commit."""
    tests: bool = True
    """Run the GPU tests first."""
    device: str = "cuda"
    """cpu: a dry run of the plan with small shapes."""
    out: str = ""
    """Folder of the results. Default: bench/results/<gpu>."""


def parts(options: Options) -> list[Part]:
    """The parts in the order they run."""
    on_cpu = options.device == "cpu"
    found = []
    if options.tests and machine.in_checkout():
        tests = ("tests/gpu", "tests/nn/test_gpu.py")
        command = (sys.executable, "-m", "pytest", "-q", "-m", "gpu", *processes_for_tests(), *tests)
        found.append(Part("tests", 9.0, command))

    def add(name: str, share: float, suites: str, sizes: str, *more: str) -> None:
        small = "--smoke --device cpu" if on_cpu else sizes
        words = ["-m", "fusedtp", "bench", "all", "--suites", suites, *small.split(), *more]
        found.append(Part(name, share, (sys.executable, *words)))

    ranks = "2" if on_cpu else "8"
    virtual = ("--world", "virtual", "--tp")
    # torch.compile of a matmul calls the vendor's, or searches for minutes.
    add("matmul", 1.2, "matmul", "--shapes llama3-70b,square-8192 --tokens 8192 --no-compile", "--tp", ranks)
    add(f"virtual-{ranks}", 3.5, FUSED, "--shapes llama3-70b --tokens 8192,16384", *virtual, ranks)
    add("fp8", 1.0, "fp8", "--shapes llama3-70b --tokens 8192 --no-compile", "--tp", ranks)
    add("pointwise", 2.5, "pointwise", "--shapes llama3-8b --tokens 8192", "--tp", "1")
    add("loss", 1.5, "linear-cross-entropy", "--shapes llama3-8b --tokens 8192", *virtual, f"1,{ranks}")
    add("block", 3.0, "block", "--shapes llama3-8b --tokens 8192", *virtual, f"1,{ranks}")
    add("step", 2.0, "train-step", "", "--tp", "1")
    if not on_cpu:
        add("fewer", 2.0, FUSED, "--shapes llama3-70b --tokens 8192", *virtual, "2,4")
        add("short", 1.0, FUSED, "--shapes llama3-70b --tokens 2048", *virtual, ranks)
        add("decode", 1.0, "decode", "--shapes llama3-70b --engine triton,chunked", *virtual, ranks)
        add("experts", 1.0, "grouped-matmul", "--tokens 8192", "--tp", ranks)
        # 1024 tokens per rank
        add("moe", 1.0, "moe,moe-exchange", "--tokens 8192", *virtual, ranks)
        host = (sys.executable, "-m", "fusedtp", "bench", "host", "--gpu")
        found.append(Part("host", 1.0, host, goes_on=False))
    return found


def processes_for_tests() -> tuple[str, ...]:
    """pytest options for as many processes as cores and memory allow: the tests mostly compile.

    Each process loads all of torch's kernels (see tests/gpu/conftest.py), which take 5 GB on an H100.
    """
    if importlib.util.find_spec("xdist") is None or not torch.cuda.is_available():
        return ()
    memory = torch.cuda.get_device_properties(0).total_memory
    count = min(8, len(os.sched_getaffinity(0)), memory // (8 << 30))
    return ("-n", str(count), "--dist", "worksteal") if count > 1 else ()


def seconds_for(part: Part, later: Sequence[Part], left: float) -> float:
    """The time limit of a part when `left` seconds are left for it and the later parts."""
    fair = left * part.share / (part.share + sum(other.share for other in later))
    return max(fair, min(USUAL_SECONDS, left))


def is_done(path: Path, commit: str) -> bool:
    """Whether a part's status file exists, for this code and without failures."""
    try:
        found = json.loads(path.read_text())
        return bool(commit) and found["commit"] == commit and found["code"] == 0
    except (OSError, ValueError, KeyError, TypeError):
        return False


def run_within(command: Sequence[str], seconds: float) -> int:
    """The exit code of a command; 124 if it was killed, with all its children, after this many seconds."""
    folder = machine.ROOT if machine.in_checkout() else None
    process = subprocess.Popen(command, start_new_session=True, stdin=subprocess.DEVNULL, cwd=folder)
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return 124
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def main(argv: Sequence[str]) -> int:
    """Returns 0 if every part passed, 1 if one failed or was not started, 2 without a GPU."""
    options = parse(Options, argv, "fusedtp bench gpu")
    about = machine.describe_run(options.device, ["gpu", *argv]) if _has(options.device) else None
    if about is None:
        print("fusedtp bench gpu: torch sees no GPU here", file=sys.stderr)
        return 2
    folder = Path(options.out) if options.out else machine.folder_of(about, save=True)
    return run_parts(parts(options), folder.absolute(), about["commit"], options, run_within)


def _has(device: str) -> bool:
    return device != "cuda" or torch.cuda.is_available()


def run_parts(
    every: Sequence[Part],
    folder: Path,
    commit: str,
    options: Options,
    run: Callable[[Sequence[str], float], int],
) -> int:
    """Run the parts that are not done yet, in order; returns 1 if any part is not done in the end."""
    folder.mkdir(parents=True, exist_ok=True)
    end, codes = time.monotonic() + 60 * options.minutes, {}
    todo = [part for part in every if options.fresh or not is_done(_status(folder, part), commit)]
    for part in every:
        if part not in todo:
            print(f"{part.name}: already done at {commit}", flush=True)
    for i, part in enumerate(todo):
        left = end - time.monotonic()
        seconds = seconds_for(part, todo[i + 1 :], left) - END_SECONDS
        if seconds < min(LEAST_SECONDS, 6 * options.minutes):
            print(f"{part.name}: no time left", flush=True)
            codes[part.name] = 124
            continue
        command = [*part.command]
        if part.name == "tests":
            passed = folder / "tests.passed"
            if options.fresh:
                passed.unlink(missing_ok=True)
            command += ["-p", "tests.resume", "--resume", str(passed), "--code", commit]
        else:
            # Startup, compilation (mainly torch.compile), roofs, checks and pictures take longer than the samples.
            command += ["--out", str(folder / f"{part.name}.json")]
            if part.goes_on:
                command += [
                    "--minutes",
                    f"{0.3 * seconds / 60:.3f}",
                    *([] if options.fresh else ["--resume"]),
                ]
        print(f"{part.name}: at most {seconds:.0f} s", flush=True)
        begin = time.monotonic()
        code = codes[part.name] = run(command, seconds)
        took = time.monotonic() - begin
        status = {"commit": commit, "code": code, "seconds": round(took, 1), "command": command[1:]}
        _status(folder, part).write_text(json.dumps(status, indent=1) + "\n")
        print(f"{part.name}: {'passed' if code == 0 else f'exit code {code}'} after {took:.0f} s", flush=True)
    failed = [name for name, code in codes.items() if code]
    print(f"{len(every) - len(failed)} of {len(every)} parts done" + (f"; not: {', '.join(failed)}" if failed else ""))
    return 1 if failed else 0


def _status(folder: Path, part: Part) -> Path:
    return folder / f"{part.name}.status.json"
