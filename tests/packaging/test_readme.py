"""The README's program runs as it stands there, and its figures are the saved ones."""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
from pathlib import Path

from fusedtp.bench import markdown

ROOT = Path(__file__).parents[2]


def test_the_block_of_the_readme_runs_on_two_ranks(tmp_path: Path):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.S)
    (program,) = [b for b in blocks if "torchrun --nproc-per-node 2" in b]
    # Each rank says so in a file of its own: what two of them print interleaves.
    says = (
        "import os, pathlib\npathlib.Path(os.environ['RANK']).write_text(f'{tuple(y.shape)} {x.shape[0]}')\n"
    )
    (tmp_path / "block.py").write_text(program + "\n" + says)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "block.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["(512, 256) 512"] * 2
    assert re.search(r"mlp\.down_proj +matmul_reduce_scatter +chunked", done.stdout)


def test_the_measured_tables_are_those_of_the_saved_result():
    (path,) = (ROOT / "bench" / "results").glob("*cores/bench.json")
    result, text = json.loads(path.read_text()), (ROOT / "README.md").read_text()
    for part in (markdown.machine, markdown.operations, markdown.training_step):
        assert part(result) in text, part.__name__
    rows = result["operations"]["rows"]
    removed, ratios = [row["share_removed"] for row in rows], [row["ratio"] for row in rows]
    said = (
        f"Removed in the median row {statistics.median(removed):.2f}, at least {min(removed):.2f}; "
        f"geometric mean of gloo / fusedtp {statistics.geometric_mean(ratios):.2f}."
    )
    assert said in text
