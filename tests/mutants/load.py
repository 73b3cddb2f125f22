"""A mutated copy of the kernels, imported under a name of its own and put in the library's place for a while."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

PACKAGE = "fusedtp.kernels"
_numbers = itertools.count()


@contextmanager
def in_place_of_kernels(texts: Mapping[str, str]) -> Iterator[None]:
    """While entered, `from fusedtp.kernels.x import y` in this process finds these modules (file name -> text).

    Not for processes that run kernels in other threads meanwhile.
    """
    name = f"mutated_kernels_{next(_numbers)}"
    with tempfile.TemporaryDirectory(prefix="fusedtp-mutant-") as folder:
        for file, text in texts.items():
            (Path(folder) / file).write_text(text)
        before = {key: module for key, module in sys.modules.items() if _of(PACKAGE, key)}
        try:
            spec = importlib.util.spec_from_file_location(
                name, f"{folder}/__init__.py", submodule_search_locations=[folder]
            )
            assert spec is not None and spec.loader is not None
            package = importlib.util.module_from_spec(spec)
            sys.modules[name] = sys.modules[PACKAGE] = package
            spec.loader.exec_module(package)
            for file in texts:
                stem = file.removesuffix(".py")
                if stem != "__init__":
                    sys.modules[f"{PACKAGE}.{stem}"] = importlib.import_module(f"{name}.{stem}")
            yield
        finally:  # whatever else was imported meanwhile stays: triton cannot be imported twice
            for key in [key for key in sys.modules if _of(PACKAGE, key) or _of(name, key)]:
                del sys.modules[key]
            sys.modules.update(before)


def _of(package: str, module: str) -> bool:
    return module == package or module.startswith(f"{package}.")
