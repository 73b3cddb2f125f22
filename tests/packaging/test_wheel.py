"""A wheel built from the tree holds the package and its kernels, nothing else, and runs outside the tree."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Compute one operation on two ranks with the installed package; argv[1] is where it must come from.
PROGRAM = """
import sys
import torch
import fusedtp, fusedtp.bench.suites.model, fusedtp.cli, fusedtp.kernels, fusedtp.nn, fusedtp.parallel, fusedtp.train

for module in (fusedtp, fusedtp.bench, fusedtp.kernels, fusedtp.nn, fusedtp.parallel, fusedtp.train):
    assert module.__file__.startswith(sys.argv[1]), module.__file__

x, w = torch.arange(12.0).reshape(4, 3), torch.arange(15.0).reshape(5, 3)
got = fusedtp.VirtualWorld(2).run(
    lambda group: fusedtp.all_gather_matmul(x.chunk(2)[group.rank()], [w], group)[0]
)
assert all(torch.equal(y, x @ w.T) for y in got), got
print("ran outside the tree")
fusedtp.cli.main(["bench", "--help"])
"""


def pip(*arguments: str | Path) -> None:
    """Run pip offline: no index, no dependencies."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree, because setuptools leaves files in the folder where it builds."""
    folder = tmp_path_factory.mktemp("copy") / "tree"
    made = shutil.ignore_patterns(".*", "__pycache__", "runs", "build", "dist", "out", "*.egg-info")
    return shutil.copytree(ROOT, folder, ignore=made)


@pytest.fixture(scope="module")
def wheel(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the copy."""
    out = tmp_path_factory.mktemp("dist")
    pip("wheel", "--no-index", "--no-deps", "--no-build-isolation", "-w", out, tree)
    (path,) = out.glob("fusedtp-*.whl")
    return path


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel installed in it."""
    folder = tmp_path_factory.mktemp("site")
    pip("install", "--no-index", "--no-deps", "--target", folder, wheel)
    return folder


def run_outside(site: Path, folder: Path, *command: str | Path) -> str:
    """Run `command` in `folder` with the installed wheel ahead of the tree's editable install."""
    env = os.environ | {"PYTHONPATH": str(site)}
    result = subprocess.run(
        [str(part) for part in command],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.slow
def test_wheel_holds_every_module_and_every_kernel(tree: Path, wheel: Path) -> None:
    """Every source file of fusedtp/, kernels/ and bench/ is in the wheel, byte for byte, and no result."""
    want = {}
    for folder in (tree / "fusedtp", tree / "kernels", tree / "bench"):
        name = "fusedtp" if folder.name == "fusedtp" else f"fusedtp/{folder.name}"
        want |= {f"{name}/{path.relative_to(folder)}": path.read_bytes() for path in folder.rglob("*.py")}
    assert {"fusedtp/kernels/__init__.py", "fusedtp/bench/suites/model.py"} <= set(want)
    with zipfile.ZipFile(wheel) as archive:
        assert {name for name in archive.namelist() if name.endswith(".py")} == set(want)
        assert [name for name, text in want.items() if archive.read(name) != text] == []
        assert "fusedtp/py.typed" in archive.namelist()
        assert not [name for name in archive.namelist() if name.startswith("fusedtp/bench/results")]


def test_wheel_installs_one_top_level_name(wheel: Path) -> None:
    """No top-level `kernels`, `tests` or `bench`; the licence is included."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    info = f"{'-'.join(wheel.name.split('-')[:2])}.dist-info"
    assert {name.split("/")[0] for name in names} == {"fusedtp", info}
    assert f"{info}/licenses/LICENSE" in names


def test_wheel_holds_the_tables(tree: Path, wheel: Path) -> None:
    """Saved measurements are included, byte for byte."""
    tables = {f"fusedtp/ops/tables/{path.name}": path for path in (tree / "fusedtp/ops/tables").iterdir()}
    assert "fusedtp/ops/tables/README.md" in tables
    with zipfile.ZipFile(wheel) as archive:
        assert all(archive.read(name) == path.read_bytes() for name, path in tables.items())


@pytest.mark.slow
def test_wheel_runs_outside_the_tree(site: Path, tmp_path: Path) -> None:
    """All packages import from the wheel, an operation computes the right product, and `bench` lists its suites."""
    said = run_outside(site, tmp_path, sys.executable, "-c", PROGRAM, site)
    assert "ran outside the tree" in said and "all-gather-matmul" in said


@pytest.mark.slow
def test_installed_command_lists_its_subcommands(site: Path, tmp_path: Path) -> None:
    """The wheel's console script starts, and its help lists `train`."""
    assert "train" in run_outside(site, tmp_path, site / "bin" / "fusedtp", "--help")
