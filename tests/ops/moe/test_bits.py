"""Random numbers, so sums round: a repeated exchange gives the same bits, and so does any split of the tokens."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fusedtp
from fusedtp.comm import VirtualWorld
from tests.harness import world
from tests.ops.moe.laws import SKEWS, Case, build, mine
from tests.properties.laws import assert_same

NAMES = ("out", "dx", "dweights")


@st.composite
def cases(draw: st.DrawFn, engines: tuple[str, ...], dtypes: tuple[torch.dtype, ...]) -> Case:
    """Tokens of one rank; 1, 2, 3 and 4 ranks divide the experts; row lengths around those of vector instructions."""
    engine = draw(st.sampled_from(engines))
    few = engine == "triton"  # it is interpreted, which is slow
    return Case(
        engine=engine,
        sizes=(draw(st.integers(0, 5 if few else 12)),),
        num_experts=12 * draw(st.integers(1, 1 if few else 3)),
        top_k=draw(st.integers(2 if few else 1, 4 if few else 8)),
        width=draw(st.sampled_from([1, 7, 33, 64])),
        dtype=draw(st.sampled_from(dtypes)),
        skew=draw(st.sampled_from(SKEWS)),
        dropped=draw(st.sampled_from([0.0, 0.3])),
        seed=draw(st.integers(0, 2**32)),
    )


def exchanged(group, case: Case, sizes: tuple[int, ...], times: int = 1) -> list[list[Tensor]]:
    """out, dx and dweights of this rank's tokens, computed `times` times. Expert e adds e to a row and doubles it."""
    data, split = build(case), Case(**{**vars(case), "sizes": sizes})
    generator = torch.Generator().manual_seed(case.seed)
    x, dy = (torch.randn(data.x.shape, generator=generator).to(case.dtype) for _ in range(2))
    weights = torch.rand(data.weights.shape, generator=generator)
    here, each = mine(split, group.rank()), case.num_experts // group.size()
    results = []
    for _ in range(times):
        leaves = [t[here].clone().requires_grad_() for t in (x, weights)]
        rows, offsets, handle = fusedtp.moe_dispatch(
            leaves[0], data.ids[here], leaves[1], case.num_experts, group, sizes=sizes, engine=case.engine
        )
        numbers = torch.arange(each).repeat_interleave(offsets.diff()) + group.rank() * each
        numbers = torch.nn.functional.pad(numbers, (0, len(rows) - len(numbers)))
        out = fusedtp.moe_combine(2 * (rows + numbers[:, None]), handle)
        out.backward(dy[here])
        results.append([out.detach(), *(leaf.grad for leaf in leaves)])
    return results


def in_threads(case: Case, sizes: tuple[int, ...]) -> list[list[Tensor]]:
    return VirtualWorld(len(sizes)).run(lambda group: exchanged(group, case, sizes)[0])


def in_processes(case: Case, sizes: tuple[int, ...]) -> list[list[Tensor]]:
    return [first for (first,) in world(len(sizes)).run(exchanged, case, sizes)]


def same_for_all_splits(case: Case, splits: list[tuple[int, ...]], run) -> None:
    want = None
    for sizes in splits:
        got = [torch.cat(parts) for parts in zip(*run(case, sizes), strict=True)]
        for name, g, w in zip(NAMES, got, want or got, strict=True):
            assert_same(f"{name} of {sizes}", g, w)
        want = want or got


def splits(draw: st.DrawFn, tokens: int, ranks: list[int]) -> list[tuple[int, ...]]:
    """A random split of the tokens; some ranks may have none."""
    found = []
    for n in ranks:
        cuts = sorted(draw(st.lists(st.integers(0, tokens), min_size=n - 1, max_size=n - 1)))
        found.append(tuple(b - a for a, b in zip([0, *cuts], [*cuts, tokens], strict=True)))
    return found


DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@pytest.mark.slow
@settings(max_examples=30)
@given(st.data())
def test_any_split_gives_the_same_bits(data: st.DataObject):
    case = data.draw(cases(("chunked", "collective"), DTYPES))
    same_for_all_splits(case, splits(data.draw, case.sizes[0], [1, 2, 3, 4]), in_threads)


@pytest.mark.slow
def test_any_split_gives_the_same_bits_by_kernels():
    """One fp32 case, because kernels are interpreted here; the order of four summands shows in fp32."""
    pytest.importorskip("triton")
    case = Case("triton", (6,), 12, 4, 33, torch.float32, "skewed", 0.2, seed=5)
    same_for_all_splits(case, [(4, 2), (1, 0, 5)], in_processes)


@pytest.mark.slow
@settings(max_examples=8)
@given(cases(("chunked", "collective", "triton"), DTYPES[:1] + DTYPES[2:]))
def test_a_repeated_exchange_gives_the_same_bits(case: Case):
    pytest.importorskip("triton")
    sizes = (case.sizes[0] // 3, case.sizes[0] - case.sizes[0] // 3)
    for first, *others in world(2).run(exchanged, case, sizes, 3):
        for again in others:
            for name, got, want in zip(NAMES, again, first, strict=True):
                assert_same(name, got, want)
