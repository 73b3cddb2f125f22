"""The `fusedtp` command: one table of subcommands, each a module with `main(argv) -> exit code` (or module:function).

A subcommand's module is imported only when it is called. So `fusedtp --help` is fast, and a subcommand does not need
the dependencies of the others.
"""

from __future__ import annotations

import importlib
import sys

COMMANDS = {
    "train": ("fusedtp.commands.launch", "train a Transformer with fused tensor parallelism on real text"),
    "generate": ("fusedtp.commands.runs:generate_main", "continue a text with the model of a run"),
    "checkpoints": ("fusedtp.commands.runs", "list, verify or export the checkpoints of a run"),
    "report": (
        "fusedtp.commands.report",
        "write a run's report as one HTML page: curves, ranks, pipeline, checkpoints, incidents",
    ),
    "finetune": (
        "fusedtp.commands.launch:finetune_main",
        "train a causal language model of transformers on text with tensor parallelism",
    ),
    "check": (
        "fusedtp.checks.command",
        "find races, deadlocks and wrong results of multi-rank kernels, without a GPU",
    ),
    "explain": (
        "fusedtp.parallel.explain_command",
        "show how a model would be split, from its configuration alone",
    ),
    "bench": ("fusedtp.bench.cli", "benchmark kernels and fused operations against alternatives"),
    "env": ("fusedtp.environment", "print versions, machine and devices for a bug report"),
}


def usage() -> str:
    rows = [f"  {name:12}{help_text}" for name, (_, help_text) in COMMANDS.items()]
    return "\n".join(["usage: fusedtp COMMAND [OPTIONS]", "", *rows, "", "fusedtp COMMAND --help lists its options."])


def main(argv: list[str] | None = None) -> int:
    """Run a subcommand and return its exit code."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help"):
        print(usage())
        return 0 if argv else 2
    if argv[0] not in COMMANDS:
        print(f"fusedtp: unknown command {argv[0]!r}\n\n{usage()}", file=sys.stderr)
        return 2
    module, _, function = COMMANDS[argv[0]][0].partition(":")
    return int(getattr(importlib.import_module(module), function or "main")(argv[1:]))
