"""`import fusedtp` needs neither Triton nor transformers, and imports inside the project go in one direction."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fusedtp.comm.constant import constant_to_compiler

ROOT = Path(__file__).resolve().parents[2]

# Lower layers first: a module may import from its own layer and from earlier ones.
LAYERS = (
    "kernels",
    "comm",
    "ops",
    "nn",
    "parallel",
    "limits",
    "targets",
    "sim",
    "lint",
    "checks",
    "plan",
    "environment",
    "train",
    "commands",
    "bench",
    "cli",
)
BESIDE = ("kernels", "bench")  # folders at the root, mapped into the package

# Make the modules named in argv impossible to import, then compute one operation on two ranks.
WITHOUT = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in sys.argv[1:]:
            raise ModuleNotFoundError(f"{name} is blocked", name=name)

sys.meta_path.insert(0, Blocker())
import torch
import fusedtp, fusedtp.nn, fusedtp.parallel

assert "torch._dynamo" not in sys.modules, "a third of what there would be to import"
x, w = torch.arange(12.0).reshape(4, 3), torch.arange(15.0).reshape(5, 3)
got = fusedtp.VirtualWorld(2).run(
    lambda group: fusedtp.all_gather_matmul(x.chunk(2)[group.rank()], [w], group)[0]
)
assert all(torch.equal(y, x @ w.T) for y in got), got
assert not set(sys.argv[1:]) & set(sys.modules)
"""


# Print where Python would find a top-level module.
FIND = """
import importlib.util, sys
spec = importlib.util.find_spec(sys.argv[1])
print(spec.origin if spec else None)
"""


def sources(layer: str) -> list[Path]:
    """The files of a layer: a folder of fusedtp/ or beside it, or one module."""
    module = ROOT / "fusedtp" / f"{layer}.py"
    folder = ROOT / layer if layer in BESIDE else ROOT / "fusedtp" / layer
    return [module] if module.exists() else sorted(folder.rglob("*.py"))


def imports(path: Path) -> set[str]:
    """Absolute names of everything that a file imports, including imports inside functions."""
    parts = path.relative_to(ROOT).parent.parts
    package = list(parts) if parts[0] == "fusedtp" else ["fusedtp", *parts]
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            up = package[: len(package) + 1 - node.level] if node.level else []
            base = ".".join([*up, *([node.module] if node.module else [])])
            names |= {f"{base}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.slow
@pytest.mark.parametrize("blocked", [["triton", "transformers"], ["tyro", "rich", "tensorboard", "matplotlib"]])
def test_package_imports_and_computes_without(blocked: list[str]) -> None:
    """The library works if `blocked` is not installed."""
    result = subprocess.run([sys.executable, "-c", WITHOUT, *blocked], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_constants_are_marked_as_torch_marks_them() -> None:
    """Ours does not import the compiler."""
    ours, theirs = constant_to_compiler(lambda: 1), torch.compiler.assume_constant_result(lambda: 1)
    assert vars(ours) == vars(theirs) != {}


@pytest.mark.parametrize("name", BESIDE)
def test_editable_install_shows_nothing_of_ours_at_the_top_level(name: str, tmp_path: Path) -> None:
    """Other packages use these names too. Outside the tree, ours must not be found instead of them."""
    command = [sys.executable, "-c", FIND, name]
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=True, env=env)
    assert not Path(done.stdout.strip()).is_relative_to(ROOT / name), done.stdout


def test_every_module_has_a_layer() -> None:
    """Every folder or module of fusedtp/ must be in LAYERS; otherwise the next test would not see it."""
    found = {path.name.removesuffix(".py") for path in (ROOT / "fusedtp").iterdir() if path.name[0] not in "._"}
    assert found - set(LAYERS) == {"py.typed"}


@pytest.mark.slow
@pytest.mark.parametrize("layer", [layer for layer in LAYERS if sources(layer)])
def test_imports_run_one_way(layer: str) -> None:
    """No layer imports from a later one."""
    above = LAYERS[LAYERS.index(layer) + 1 :]
    wrong = {
        f"{path.relative_to(ROOT)} imports {name}"
        for path in sources(layer)
        for name in imports(path)
        if name.startswith("fusedtp.") and name.split(".")[1] in above
    }
    assert wrong == set()


def test_kernels_import_triton_only() -> None:
    """Device code imports triton, other device code and the standard library."""
    allowed = {"triton", "fusedtp", *sys.stdlib_module_names}
    files = sources("kernels")
    assert files
    wrong = {f"{p.name} imports {name}" for p in files for name in imports(p) if name.split(".")[0] not in allowed}
    assert wrong == set()


def test_the_simulator_knows_nothing_of_the_library_but_its_kernels() -> None:
    """Whatever it simulates, lints or times is passed in. fusedtp/checks and bench/ know operations; sim/ does not."""
    files = sources("sim")
    assert files
    wrong = {
        f"{path.relative_to(ROOT)} imports {name}"
        for path in files
        for name in imports(path)
        if name.split(".")[0] == "fusedtp"
        and name.split(".")[1:2] not in (["sim"], ["kernels"], ["targets"], ["limits"])
    }
    assert wrong == set()


def test_models_do_not_communicate_themselves() -> None:
    """nn/ holds single-device modules. Parallelism is added to them from outside."""
    files = sources("nn")
    assert files
    wrong = {
        f"{path.name} imports {name}"
        for path in files
        for name in imports(path)
        if name.startswith("torch.distributed")
    }
    assert wrong == set()


def module_graph() -> dict[str, set[str]]:
    """module -> our modules that it imports, also inside functions and for types. A package counts as its __init__."""
    files = {}
    for layer in LAYERS:
        for path in sources(layer):
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(parts if parts[0] == "fusedtp" else ("fusedtp", *parts))
            files[name.removesuffix(".__init__")] = path
    graph = {}
    for name, path in files.items():
        found = set()
        for imported in imports(path):
            while imported and imported not in files:
                imported = imported.rpartition(".")[0]
            found.add(imported)
        graph[name] = found - {"", name}
    return graph


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Modules in or between import cycles: repeatedly drop those that import no remaining one or that none imports."""
    left = {name: set(to) for name, to in graph.items()}
    while True:
        imported = set().union(*left.values()) if left else set()
        ends = {name for name, to in left.items() if not to & set(left) or name not in imported}
        if not ends:
            return [sorted(left)] if left else []
        left = {name: to - ends for name, to in left.items() if name not in ends}


@pytest.mark.slow
def test_no_modules_import_each_other_in_a_circle() -> None:
    assert circles(module_graph()) == []


def test_a_circle_would_be_seen() -> None:
    straight = {"a": {"b", "c"}, "b": {"c"}, "c": set()}
    assert circles(straight) == []
    assert circles(straight | {"c": {"a"}}) == [["a", "b", "c"]]
    assert circles(straight | {"c": {"d"}, "d": {"e"}, "e": {"d"}}) == [["d", "e"]]
