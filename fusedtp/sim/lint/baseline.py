"""The figures of every kernel as they were when they were last looked at, kept beside the code.

    {"3.9": {"sm_90/matmul_kernel/bf16": {"registers": 168, "spills": 0, "shared_bytes": 147456, "occupancy": 1}}}

A compiler's figures are its own, so they are kept for each minor version of Triton. A kernel that broke a rule then
has their names under "broken"; that excuses nothing, it tells a new fault from an old one. To keep new figures:
`python -m fusedtp.sim.lint --write-baseline`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .report import FIGURES, Change, Report

PATH = Path(__file__).with_name("baseline.json")


def read(path: Path = PATH) -> dict[str, dict[str, dict[str, Any]]]:
    """Triton's minor version -> key of a report -> figures."""
    return json.loads(path.read_text()) if path.exists() else {}


def version_of(report: Report) -> str:
    return ".".join(report.triton.split(".")[:2])


def compare(reports: Sequence[Report], path: Path = PATH) -> list[Change]:
    """Figures that differ from the baseline's of the same Triton, better or worse.

    A kernel that the baseline lacks, or a Triton, gives none: see `missing`.
    """
    known = read(path)
    changes = []
    for report in reports:
        was = known.get(version_of(report), {}).get(report.key)
        if was is None:
            continue
        was = {**{name: was[name] for name in FIGURES}, **dict.fromkeys(was.get("broken", ()), 1)}
        now = {**report.figures, **dict.fromkeys(report.broken, 1)}
        changes += [
            Change(report.key, name, was.get(name, 0), now.get(name, 0))
            for name in sorted(was | now)
            if was.get(name, 0) != now.get(name, 0)
        ]
    return changes


def missing(reports: Sequence[Report], path: Path = PATH) -> list[str]:
    """Keys that the baseline has no figures for, although it knows this Triton."""
    known = read(path)
    versions = {version_of(report) for report in reports} & set(known)
    return [r.key for r in reports if version_of(r) in versions and r.key not in known[version_of(r)]]


def write(reports: Sequence[Report], path: Path = PATH) -> None:
    """Keep these figures: what the baseline has of the same Triton goes, that of others stays."""
    known = read(path)
    for version in {version_of(report) for report in reports}:
        known[version] = {r.key: _entry(r) for r in reports if version_of(r) == version}
    lines = []
    for version in sorted(known, key=lambda v: [int(part) for part in v.split(".")]):
        rows = [f"    {json.dumps(key)}: {json.dumps(known[version][key])}" for key in sorted(known[version])]
        lines.append(f"  {json.dumps(version)}: {{\n" + ",\n".join(rows) + "\n  }")
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def _entry(report: Report) -> dict[str, Any]:
    broken: dict[str, Any] = {"broken": list(report.broken)} if report.broken else {}
    return {**report.figures, **broken}
