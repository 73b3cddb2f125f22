"""Every code block of docs/drop-in.md runs unchanged after the first one, on as many ranks as it says."""

import re
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest

from tests.harness import world

from .launch import as_torchrun

PAGE = Path(__file__).parents[3] / "docs" / "drop-in.md"
TEXT = PAGE.read_text()
FIRST, *BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, flags=re.S)
HEADINGS = [re.findall(r"^## (.*)$", TEXT[: TEXT.index(block)], flags=re.M)[-1] for block in BLOCKS]


def ranks(block: str) -> int:
    asked = re.match(r"# torchrun --nproc-per-node (\d+)", block)
    return int(asked[1]) if asked else 2


def run(group: Any, block: str, folder: str) -> None:
    with as_torchrun(group), chdir(folder):
        exec(compile(FIRST + block, PAGE.name, "exec"), {"__name__": "__main__"})


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(BLOCKS)), ids=lambda i: f"{i}: {HEADINGS[i]}")
def test_block(number: int, tmp_path: Path):
    if "from trl import" in BLOCKS[number]:
        pytest.importorskip("trl", reason="see test_trl.py")
    world(ranks(BLOCKS[number])).run(run, BLOCKS[number], str(tmp_path), timeout=200)


def test_blocks_are_found():
    """Otherwise a page without blocks would pass."""
    assert len(BLOCKS) >= 10 and TEXT.count("```") == 2 * (1 + len(BLOCKS)) and "init_device_mesh" in FIRST
