"""python -m fusedtp.sim.lint: compile every kernel for every target, print the table, exit 1 on a finding."""

from __future__ import annotations

import argparse
import sys

from . import TARGETS, check, table
from .cases import ARRIVING_VARIANTS, FUSED_VARIANTS, GROUPED_VARIANTS, LOCAL_VARIANTS, OWN


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m fusedtp.sim.lint", description=__doc__)
    parser.add_argument("--kernel", action="append", choices=OWN, help="only this one; may be repeated")
    parser.add_argument("--target", action="append", choices=list(TARGETS))
    variants = FUSED_VARIANTS | LOCAL_VARIANTS | GROUPED_VARIANTS | ARRIVING_VARIANTS
    parser.add_argument("--variant", action="append", choices=list(variants))
    parser.add_argument("--package", help="a folder in place of the package fusedtp.kernels")
    parser.add_argument("--python", help="an interpreter with another Triton")
    given = parser.parse_args(argv)

    from rich.console import Console

    console = Console()
    console.width = max(console.width, 120)
    reports = check(
        given.kernel, given.target, variants=given.variant, package=given.package, python=given.python
    )
    console.print(table(reports))
    for report in reports:
        for finding in report.findings:
            console.print(f"{report.key}  {finding}", markup=False, soft_wrap=True)
    return int(any(report.findings for report in reports))


if __name__ == "__main__":
    sys.exit(main())
