"""`fusedtp bench SUITE`: one table of what there is, each a module that is imported when it is called."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

SUITES = {
    "matmul": "the plain matmul against the vendor's",
    "all-gather-matmul": "fused against gather, then matmul, and torch's own fusion",
    "matmul-reduce-scatter": "fused against matmul, then reduce-scatter, and torch's own fusion",
    "matmul-all-reduce": "fused against matmul, then all-reduce",
    "pointwise": "RMSNorm, SwiGLU, rotary embedding against torch, torch.compile and Liger-Kernel",
    "linear-cross-entropy": "output head and loss against torch, torch.compile, Liger-Kernel, NCCL",
    "block": "a Transformer block, forward and backward",
    "grouped-matmul": "rows by the weights of their experts, against torch's grouped_mm",
    "moe-exchange": "dispatch and combine of a mixture of experts alone, against a copy",
    "moe": "a layer of experts split over ranks, against all_to_all with torch",
    "all": "all of the above in one run",
}
COMMANDS = {  # name -> module with main(argv) -> exit code and what its argv begins with, help
    "tune": ("tune", "find the fastest configurations of the kernels on this GPU"),
    "crossover": ("crossover", "measure from how many tokens on fusion wins: the table of engine auto"),
    "compare": ("compare", "two results of one machine: exit code 1 where the second is slower"),
    "gpu": ("gpu", "GPU tests, then all suites in the virtual world, in nine minutes: make gpu"),
    "cpu": ("cpu", "operations and a training step on this machine's CPU: the tables of docs/measured.md"),
    "sim": ("sim", "what simulating a kernel costs beside interpreting it"),
    "host": ("host", "host time of eager fused calls, launches stubbed"),
    "timeline": ("cpu --timeline", "draw one call of each operation on CPU ranks"),
}


def usage() -> str:
    width = 2 + max(map(len, [*SUITES, *COMMANDS]))
    suites = [f"  {name:{width}}{text}" for name, text in SUITES.items()]
    others = [f"  {name:{width}}{text}" for name, (_, text) in COMMANDS.items()]
    lines = ["usage: fusedtp bench SUITE [OPTIONS]", "", *suites, "", *others, ""]
    return "\n".join(
        [*lines, "fusedtp bench SUITE --help lists its options; docs/benchmarks.md explains the figures."]
    )


def before_cuda() -> None:
    """Streams of virtual ranks that share a connection, or load a module lazily, would wait for each other."""
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
    if name not in SUITES:
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
