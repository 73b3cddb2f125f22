"""Memory ordering is in one file: only kernels/signals.py uses atomics with their order and scope, and barriers.

kernels/multimem.py has weak accesses through a multicast address, and their fence, as inline assembly, because no other
form exists. kernels/prefetch.py has prefetches, which order nothing.
"""

import ast
import re
from pathlib import Path

KERNELS = Path(__file__).resolve().parents[2] / "kernels"
HOME = "signals.py"
SWITCH, AHEAD = "multimem.py", "prefetch.py"


def ordering_words(source: str) -> set[str]:
    """A kernel's uses of memory ordering: `sem=`, `scope=`, atomics, barriers, fences, inline assembly."""
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
    """All other kernels call publish and wait. Their order is defined and checked in one place."""
    named = {path.name: words for path in KERNELS.glob("*.py") if (words := ordering_words(path.read_text()))}
    assert named.pop(SWITCH) == named.pop(AHEAD) == {"inline_asm_elementwise"}
    assert set(named) == {HOME}, named
    text = (KERNELS / SWITCH).read_text()
    assert set(re.findall(r"multimem\.\w+\.(\w+)\.", text)) == {"weak"}
    (asm,) = re.findall(r'"(prefetch.*?)"', (KERNELS / AHEAD).read_text())
    assert asm == "prefetch.global.L2 [$1]; mov.b32 $0, 0;"


def test_the_words_are_found() -> None:
    """The search finds each word, so the test above can fail."""
    source = "tl.atomic_add(p, 0, sem='acquire', scope='sys'); tl.debug_barrier(); lib.fence_proxy()"
    assert ordering_words(source) == {"atomic_add", "sem=", "scope=", "debug_barrier", "fence_proxy"}
