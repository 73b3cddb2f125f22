"""Input that cannot be simulated is refused in one clear line; exceptions of users' own code keep their traceback."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from fusedtp.checks.workers import Part, find, names_of, run_part
from fusedtp.sim.explore import schedules

HEADER = """
import torch
import triton
import triton.language as tl
from fusedtp.sim import Await, Case, Copy, Launch, Run, Signal, compare
"""

ADD = """
@triton.jit
def kernel(x, y):
    tl.store(y, tl.load(x))

def run(*args, check=True):
    work = [[Launch(kernel, 1, given)] for given in args]
    return Run(work, (), (lambda: None) if check else None)

x, half = torch.zeros(1), torch.zeros(1, dtype=torch.float16)

def case_no_reference():
    return run(dict(x=x, y=x), check=False)

def case_dtypes():
    return run(dict(x=x, y=x.clone()), dict(x=half, y=x.clone()))

@triton.jit
def scale(x, s):
    tl.store(x, tl.load(x) * s)

def case_scalars():
    given = [torch.ones(1), torch.ones(1)]
    work = [[Launch(scale, 1, dict(x=each, s=s))] for each, s in zip(given, (2, 1.5))]
    return Run(work, (), lambda: compare("x", given, [torch.full((1,), 2.0), torch.full((1,), 1.5)]))

def case_right():
    return run(dict(x=x, y=x.clone()))

def case_names():
    return run(dict(x=x, y=x.clone()), dict(x=x.clone()))

def case_false():
    return Run(case_right().work, (), lambda: torch.equal(x, x + 1))

def case_true():
    return Run(case_right().work, (), lambda: torch.equal(x, x))

def case_flat():
    return Run(case_right().work[0], (), lambda: None)

def case_item():
    return Run([["hello"]], (), lambda: None)

def copies(dst, src, **how):
    return Run([[Copy(dst, src, **how)]], (), lambda: None)

def case_strided():
    return copies(torch.zeros(4, 2), torch.zeros(4, 4)[:, :2])

def case_sizes():
    return copies(torch.zeros(16), torch.zeros(4))

def case_widths():
    return copies(torch.zeros(4, dtype=torch.float64), torch.zeros(4))

def case_pieces():
    return copies(torch.zeros(4), torch.zeros(4), pieces=0)

def case_flags():
    return Run([[Signal(torch.zeros(2, dtype=torch.int32), 1)]], (), lambda: None)

def case_float():
    return Run([[Await(torch.zeros(1), 1)]], (), lambda: None)

def case_words():
    return Run(case_right().work, (), lambda: ["x differs"])
"""

RAISES = """
@triton.jit
def kernel(x):
    tl.static_assert(x.dtype.element_ty == tl.float16, "only halves")
    tl.store(x, 1.0)

def helper():
    raise ValueError("mine: no such shape")

def case_makes():
    return helper()

def case_makes_later():
    def make():
        return helper()
    return Case("later", make)

def case_does_not_compile():
    x = torch.zeros(1)
    return Run([[Launch(kernel, 1, dict(x=x))]], (), lambda: None)

def case_exits():
    raise SystemExit("mine: usage")

def case_checks():
    def check():
        raise KeyError("mine: reference")
    x = torch.zeros(1, dtype=torch.float16)
    return Run([[Launch(kernel, 1, dict(x=x))]], (), check)
"""


def written(folder: Path, source: str) -> Path:
    path = folder / "kernels_of_mine.py"
    path.write_text(HEADER + source)
    return path


def outcome(name: str, world_size: int | None = None) -> tuple[str, str]:
    """How the check ends: ("ok" | "fault" | "refused" | "raised", the message)."""
    (found,) = find(name, world_size)
    if found.refused or found.raised:
        return ("refused", found.refused) if found.refused else ("raised", found.raised)
    part: Part = run_part(found, list(schedules(2)))
    if part.refused or part.raised:
        return ("refused", part.refused) if part.refused else ("raised", part.raised)
    return ("fault", str(part.fault)) if part.fault else ("ok", "")


REFUSED = {
    "no_reference": (ADD, r"case '.*::case_no_reference' has no reference: its Run needs a `check`"),
    "names": (ADD, r"'kernel' is launched without y"),
    "false": (ADD, r"check returned bool; it must return the mismatches of `compare`, or None, or raise"),
    "true": (ADD, r"check returned bool; it must return the mismatches of `compare`, or None, or raise"),
    "words": (ADD, r"check returned list; it must return the mismatches of `compare`, or None, or raise"),
    "flat": (ADD, r"the work of rank 0 is Launch; it must be a list of launches, copies, signals and waits"),
    "item": (ADD, r"the work of rank 0 is str; it must be a list of launches, copies, signals and waits"),
    "strided": (ADD, r"rank 0: dst, src must be contiguous, of one shape and dtype, pieces >= 1"),
    "sizes": (ADD, r"rank 0: dst, src must be contiguous"),
    "widths": (ADD, r"rank 0: dst, src must be contiguous"),
    "pieces": (ADD, r"rank 0: dst, src must be contiguous"),
    "flags": (ADD, r"rank 0: a flag must be a single element of int32 or int64"),
    "float": (ADD, r"rank 0: a flag must be a single element of int32 or int64"),
    "absent": (ADD, r"has no 'case_absent'; its cases are case_no_reference, case_dtypes, .*, case_words$"),
    "not_a_case": ("case_not_a_case = 3", r"is int; it must be a Case or return a Case or a Run"),
    "returns": ("def case_returns(): return 3", r"returned int; it must return a Case or a Run"),
    "wants": ("def case_wants(n): pass", r"needs arguments \['n'\]; a case may take only world_size"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_checked_is_refused_in_one_line(name, tmp_path):
    source, words = REFUSED[name]
    path = written(tmp_path, source)
    kind, said = outcome(f"{path}::case_{name}")
    assert kind == "refused" and "\n" not in said
    assert re.search(words, said), said


@pytest.mark.parametrize("name", ["dtypes", "scalars"])
def test_ranks_may_launch_a_kernel_with_arguments_of_different_types(name, tmp_path):
    """Triton compiles a kernel for each."""
    assert outcome(f"{written(tmp_path, ADD)}::case_{name}") == ("ok", "")


def test_a_kernel_that_does_not_compile_is_refused_with_the_compilers_words(tmp_path):
    path = written(tmp_path, RAISES)
    kind, said = outcome(f"{path}::case_does_not_compile")
    assert kind == "refused" and "kernel does not compile for sm_90" in said and "only halves" in said


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nowhere.py", "no such file: nowhere.py"),
        ("all_gather", "no kernel is called 'all_gather': it must be one of all_gather_matmul, "),
    ],
)
def test_a_name_that_stands_for_nothing_says_so(name, words):
    kind, said = outcome(name)
    assert kind == "refused" and words in said


def test_a_file_named_without_its_ending_is_pointed_out(tmp_path, monkeypatch):
    monkeypatch.chdir(written(tmp_path, ADD).parent)
    wanted = "no kernel is called 'kernels_of_mine'; for the cases of that file, name kernels_of_mine.py"
    assert outcome("kernels_of_mine") == ("refused", wanted)


def test_a_file_without_a_case_says_how_to_name_one(tmp_path):
    path = written(tmp_path, "def mine(): pass")
    kind, said = outcome(str(path))
    assert kind == "refused" and said.endswith(f"name one: {path}::NAME")


@pytest.mark.parametrize(
    "statement", ["from theirs import case_one, other, case_two as case_x", "from theirs import *"]
)
@pytest.mark.parametrize("as_module", [False, True])
def test_cases_that_a_file_imports_are_not_its_own(statement, as_module, tmp_path, monkeypatch):
    """They are checked where they are named. Its own are also those it makes by theirs, or redefines."""
    (tmp_path / "theirs.py").write_text(
        HEADER + "def case_one(): return 1\ndef case_two(): return 2\nother = Case('other', case_one)\n"
        "def made():\n    def case(): return 3\n    return case\n"
    )
    (tmp_path / "mine.py").write_text(
        f"import theirs\nfrom fusedtp.sim import Case\n{statement}\ncase_made = theirs.made()\n"
        "def case_two(): return 4\nown = Case('own', case_two)\n"
        "def helper():\n    from theirs import other as own\n    return own\n"
        "if False:\n    from nothing_of_this_name import *\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("theirs", "mine"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    place = "mine:" if as_module else f"{tmp_path}/mine.py::"
    assert sorted(names_of(place)) == [f"{place}{name}" for name in ("case_made", "case_two", "own")]
    assert names_of(f"{place}case_one") == [f"{place}case_one"]


def test_a_world_size_for_a_case_that_takes_none_is_refused(tmp_path):
    kind, said = outcome(f"{written(tmp_path, ADD)}::case_right", 2)
    assert kind == "refused" and "takes no world_size" in said


@pytest.mark.parametrize(
    ("name", "line", "error"),
    [
        ("makes", 'raise ValueError("mine: no such shape")', "ValueError: mine: no such shape"),
        ("makes_later", 'raise ValueError("mine: no such shape")', "ValueError: mine: no such shape"),
        ("exits", 'raise SystemExit("mine: usage")', "SystemExit: mine: usage"),
        ("checks", 'raise KeyError("mine: reference")', "KeyError: 'mine: reference'"),
    ],
)
def test_what_the_users_code_raises_keeps_its_traceback(name, line, error, tmp_path):
    path = written(tmp_path, RAISES)
    kind, said = outcome(f"{path}::case_{name}")
    assert kind == "raised" and said.startswith("Traceback (most recent call last):")
    assert f'File "{path}"' in said and line in said and error in said
    first = next(text for text in said.splitlines() if text.startswith("  File "))
    assert str(path) in first, "the traceback begins with the user's file"


def test_a_file_that_does_not_import_keeps_its_traceback(tmp_path):
    path = written(tmp_path, "import nothing_of_this_name")
    kind, said = outcome(str(path))
    assert kind == "raised" and f'File "{path}"' in said and "ModuleNotFoundError" in said


def test_a_file_with_a_syntax_error_shows_its_line_and_no_frame_of_ours(tmp_path):
    path = written(tmp_path, "def case_x(:")
    kind, said = outcome(str(path))
    assert kind == "raised" and said.startswith(f'  File "{path}", line ') and "SyntaxError" in said
    assert "def case_x(:" in said and "Traceback" not in said
