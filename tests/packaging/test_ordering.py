"""Memory ordering has one home: only kernels/signals.py names atomics, their order and scope, and barriers.

kernels/multimem.py has weak accesses by a multicast address, and their fence, as inline code: nothing else can have it.
kernels/prefetch.py has prefetches, which order nothing.
"""

import ast
import re
from pathlib import Path

KERNELS = Path(__file__).resolve().parents[2] / "kernels"
HOME = "signals.py"
SWITCH, AHEAD = "multimem.py", "prefetch.py"


def ordering_words(source: str) -> set[str]:
    """What a kernel's source names of memory ordering: `sem=`, `scope=`, atomics, barriers, fences, inline code."""
    words = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.keyword) and node.arg in ("sem", "scope"):
            words.add(f"{node.arg}=")
        elif isinstance(node, ast.Attribute):
            name = node.attr
            if name.startswith(("atomic_", "inline_asm")) or "barrier" in name or "fence" in name:
                words.add(name)
    return words


def test_only_signals_names_memory_ordering() -> None:
    """Any other kernel calls publish and wait, whose order stands in one place and is checked there."""
    named = {path.name: words for path in KERNELS.glob("*.py") if (words := ordering_words(path.read_text()))}
    assert named.pop(SWITCH) == named.pop(AHEAD) == {"inline_asm_elementwise"}
    assert set(named) == {HOME}, named
    text = (KERNELS / SWITCH).read_text()
    assert set(re.findall(r"multimem\.\w+\.(\w+)\.", text)) == {"weak"}
    (asm,) = re.findall(r'"(prefetch.*?)"', (KERNELS / AHEAD).read_text())
    assert asm == "prefetch.global.L2 [$1]; mov.b32 $0, 0;"


def test_the_words_are_found() -> None:
    """The search itself sees each word, so that the law above can fail."""
    source = "tl.atomic_add(p, 0, sem='acquire', scope='sys'); tl.debug_barrier(); lib.fence_proxy()"
    assert ordering_words(source) == {"atomic_add", "sem=", "scope=", "debug_barrier", "fence_proxy"}
