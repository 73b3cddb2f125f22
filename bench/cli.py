"""`fusedtp bench SUITE`: runs a suite of suites/, or a command, whose module is imported on demand."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

COMMANDS = {  # name -> (module with main(argv) -> exit code, then its first arguments; help)
    "tune": ("tune", "find the fastest configurations of the kernels on this GPU"),
    "crossover": ("crossover", "measure from how many tokens on fusion wins: the table of engine auto"),
    "compare": ("compare", "two results of one machine: exit code 1 where the second is slower"),
    "gpu": ("gpu", "GPU tests, then all suites in the virtual world, in nine minutes: make gpu"),
    "cpu": ("cpu", "operations and a training step on this machine's CPU: the tables of docs/measured.md"),
    "sim": ("sim", "what a schedule of the simulator costs: compiling, in step, warp by warp"),
    "host": ("host", "host time of eager fused calls, launches stubbed"),
    "hf": ("hf", "models of transformers as they stand, against transformers and torch: tokens a second"),
    "timeline": ("cpu --timeline", "draw one call of each operation on CPU ranks"),
}


def usage() -> str:
    from .suites import SUITES

    width = 2 + max(map(len, [*SUITES, *COMMANDS]))
    suites = [f"  {name:{width}}{suite.help}" for name, suite in SUITES.items()]
    suites.append(f"  {'all':{width}}all of the above in one run")
    others = [f"  {name:{width}}{text}" for name, (_, text) in COMMANDS.items()]
    lines = ["usage: fusedtp bench SUITE [OPTIONS]", "", *suites, "", *others, ""]
    return "\n".join([*lines, "fusedtp bench SUITE --help lists its options; docs/benchmarks.md explains the figures."])


def before_cuda() -> None:
    """Streams of virtual ranks would wait for each other if they shared a connection or loaded modules lazily."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")


def main(argv: Sequence[str]) -> int:
    """Run a suite or a command and return its exit code."""
    if not argv or argv[0] in ("-h", "--help"):
        print(usage())
        return 0 if argv else 2
    name, rest = argv[0], list(argv[1:])
    before_cuda()
    if name in COMMANDS:
        module_name, *first = COMMANDS[name][0].split()
        module = importlib.import_module(f"{__package__}.{module_name}")
        code: int = module.main([*first, *rest])
        return code
    from .suites import SUITES

    if name not in (*SUITES, "all"):
        print(f"fusedtp bench: unknown suite {name!r}\n\n{usage()}", file=sys.stderr)
        return 2
    from . import runner
    from .options import Options, parse
    from .shapes import MODELS

    options = parse(Options, rest, f"fusedtp bench {name}")
    if options.list:
        for model in MODELS.values():
            sizes = f"hidden {model.hidden}, intermediate {model.intermediate}, heads {model.heads}/{model.kv_heads}"
            print(f"{model.name:14}{sizes}, vocabulary {model.vocab}  {model.source}")
        return 0
    return runner.run(name, rest, options)
