"""The process that compiles: reads requests as lines of JSON, answers with where the compiled code lies.

A process that interprets cannot compile, so this one runs without TRITON_INTERPRET and its parent may interpret.

    {"case": {...}, "package": folder or null, "out": folder}  ->  {"made": [{"stem": ..., ...}]} or {"error": ...}
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import json
import linecache
import os
import subprocess
import sys
import tempfile
import traceback
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from ..case import Launch
from ..launching import plain
from .targets import target as target_named

PACKAGE = "fusedtp.kernels"


def use_package(folder: str | None) -> None:
    """Let `folder` stand in for the package of kernels; None: the one that is installed."""
    for name in [n for n in sys.modules if n == PACKAGE or n.startswith(PACKAGE + ".")]:
        del sys.modules[name]
    linecache.clearcache()
    importlib.invalidate_caches()
    if folder is not None:
        _load(PACKAGE, Path(folder) / "__init__.py", [folder])


def _load(name: str, path: Path, search: list[str] | None = None) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path, submodule_search_locations=search)
    if spec is None or spec.loader is None or not path.is_file():
        raise FileNotFoundError(f"no Python file {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def specialised(kernel: Any, args: dict[str, Any], options: dict[str, int], gpu: Any) -> tuple[Any, Any]:
    """(source, options) that a launch with these arguments would compile: the same specialisation of them."""
    from triton.compiler import ASTSource

    backend, binder = _binder(kernel, gpu)
    bound, specialization, chosen = binder(**args, **options)
    packed = kernel._pack_args(backend, {"debug": False, **options}, bound, specialization, chosen)
    chosen, signature, constants, attributes = packed
    return ASTSource(kernel, signature, constants, attributes), chosen.__dict__


@lru_cache
def _binder(kernel: Any, gpu: Any) -> tuple[Any, Any]:
    from triton.compiler.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    backend = make_backend(gpu)
    return backend, create_function_from_signature(kernel.signature, kernel.params, backend)


def sources(case: dict[str, Any], gpu: Any) -> list[tuple[Any, Any, tuple[str, ...]]]:
    """(source, options, shared arguments) of every compilation of a case."""
    from triton.compiler import ASTSource

    if case["planner"]:
        module_name, _, function = case["planner"].partition(":")
        plan = getattr(importlib.import_module(module_name), function)
        kernel, args, options = plan(case["kernel"], case["target"], **case["given"])
        return [(*specialised(kernel, args, options, gpu), ())]
    path = Path(case["path"])
    if str(path.parent) not in sys.path:  # as for a script: what lies beside it can be imported
        sys.path.insert(0, str(path.parent))
    module = _load("fusedtp_linted", path)
    if case["launch"]:
        return _launches(_attribute(module, case["launch"]), case["options"], gpu)
    kernel = _attribute(module, case["kernel"])
    signature = {**case["signature"], **dict.fromkeys(case["constexprs"], "constexpr")}
    names = list(kernel.arg_names)
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in case["aligned"]}
    constants = {(names.index(name),): value for name, value in case["constexprs"].items()}
    ordered = {name: signature[name] for name in names}
    pointers = tuple(name for name, kind in ordered.items() if kind.startswith("*"))
    shared = pointers if case["shared"] is None else tuple(case["shared"])
    return [(ASTSource(kernel, ordered, constants, attributes), case["options"], shared)]


def _attribute(module: ModuleType, name: str) -> Any:
    value: Any = module
    for part in name.split("."):
        if not hasattr(value, part):
            raise ValueError(f"{module.__file__} has no {name!r}")
        value = getattr(value, part)
    return value


def _launches(case: Any, options: dict[str, int], gpu: Any) -> list[tuple[Any, Any, tuple[str, ...]]]:
    """The launches of a case of the simulator, one of each kernel. Shared is what two ranks were given."""
    if inspect.isfunction(case):
        case = case()
    run = plain(case.make() if hasattr(case, "make") else case)
    launches = [(rank, w) for rank, work in enumerate(run.work) for w in work if isinstance(w, Launch)]
    owners: dict[int, set[int]] = {}
    for rank, launch in launches:
        for value in launch.args.values():
            if isinstance(value, torch.Tensor):
                owners.setdefault(value.data_ptr(), set()).add(rank)
    for memory in run.memory:
        for tensor in memory.tensors:
            owners.setdefault(tensor.data_ptr(), set()).update((-1, -2))
    made, seen = [], set()
    for _rank, launch in launches:
        source, chosen = specialised(launch.kernel, launch.args, {**launch.options, **options}, gpu)
        if source.hash() in seen:
            continue
        seen.add(source.hash())
        tensors = {n: v for n, v in launch.args.items() if isinstance(v, torch.Tensor)}
        shared = tuple(n for n, v in tensors.items() if len(owners[v.data_ptr()]) > 1)
        made.append((source, chosen, shared))
    return made


def compile_case(case: dict[str, Any], out: Path) -> list[dict[str, Any]]:
    import triton
    from triton.backends.compiler import GPUTarget

    chosen = target_named(case["target"])
    gpu = GPUTarget(chosen.backend, chosen.arch, chosen.wave)
    answers = []
    for source, options, shared in sources(case, gpu):
        made = triton.compile(source, target=gpu, options=dict(options))
        stem = str(out / f"{made.metadata.name}-{made.hash[:16]}-{chosen.name}")
        for kind in ("ttir", "ttgir", "ptx", "amdgcn"):
            if kind in made.asm:
                Path(f"{stem}.{kind}").write_text(made.asm[kind])
        answers.append(
            dict(
                stem=stem,
                name=made.metadata.name,
                triton=triton.__version__,
                shared_bytes=made.metadata.shared,
                tensor_columns=getattr(made.metadata, "tmem_size", None) or 0,
                num_warps=made.metadata.num_warps,
                num_stages=made.metadata.num_stages,
                shared=shared,
                usage=_usage(made.asm["cubin"]) if "cubin" in made.asm else "",
            )
        )
    return answers


def _usage(cubin: bytes) -> str:
    """What the assembler says of registers and local memory; of each instruction that spills, its text."""
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        dump = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        said = subprocess.run(dump, capture_output=True, text=True, check=True).stdout
        if " STACK:0 " in said and " LOCAL:0 " in said:
            return said
        dump[1] = "-sass"
        sass = subprocess.run(dump, capture_output=True, text=True, check=True).stdout
        return said + "".join(
            f"{line.strip()}\n" for line in sass.splitlines() if "STL" in line or "LDL" in line
        )


def main() -> None:
    # the answers go where stdout went; what a kernel's module prints must not mix with them
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    package: str | None = None
    cache = os.environ["TRITON_CACHE_DIR"]
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if request["package"] != package:
                package = request["package"]
                use_package(package)
                # Triton's cache knows a kernel by its text, not its place: of a copy it could name another copy's files
                own = Path(request["out"]) / f"cache-{hashlib.sha256(str(package).encode()).hexdigest()[:16]}"
                os.environ["TRITON_CACHE_DIR"] = cache if package is None else str(own)
            answer: dict[str, Any] = {"made": compile_case(request["case"], Path(request["out"]))}
        except BaseException as error:  # a kernel that does not compile must not end the process
            if isinstance(error, KeyboardInterrupt):
                raise
            answer = {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
