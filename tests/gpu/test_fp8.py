"""fp8 on a GPU: the laws of tests/ops/test_scaled_matmuls.py with compiled kernels, and a layer against the formula."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fusedtp
from fusedtp import VirtualWorld
from fusedtp.ops.fp8 import E4M3, E5M2, pack, product, unpack
from fusedtp.ops.launch.plain import multiplies
from tests.nn.test_fp8 import Case as Layer
from tests.nn.test_fp8 import drawn as drawn_for_layer
from tests.nn.test_fp8 import formula, layer_of
from tests.ops.test_scaled_matmuls import Case, cases, equals_the_formula, rounds_once
from tests.properties.laws import assert_same

DEVICE = "cuda"


@pytest.fixture(autouse=True)
def on_a_gpu_with_fp8() -> None:
    if not multiplies(torch.float8_e4m3fn, torch.device(DEVICE)):
        pytest.skip("this GPU multiplies no fp8")


def _world(law, case: Case) -> None:
    def body(group: object) -> None:
        fusedtp.set_timeout(group, 60.0)
        law(group, case)

    VirtualWorld(len(case.sizes), device=DEVICE).run(body)


@pytest.mark.parametrize("engine", ["triton", "chunked", "collective"])
@settings(max_examples=15, deadline=None)
@given(st.data())
def test_the_engines_equal_the_formula(engine, data):
    _world(equals_the_formula, data.draw(cases(engine, rows=200, most=300)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@settings(max_examples=10, deadline=None)
@given(st.data())
def test_results_of_16_bits_are_rounded_once(dtype, data):
    """In one sum of 16 products, Hopper keeps 13 bits below the largest (DeepSeek-V3, section 3.3.2): 17 / 2**13."""
    drawn = cases("triton", (dtype,), 100, 16).filter(lambda case: len(case.sizes) > 1)
    case = data.draw(drawn.filter(lambda case: torch.float8_e5m2 not in case.kinds))
    _world(lambda group, case: rounds_once(group, case, 17 * 2.0**-13), case)


@pytest.mark.parametrize("scales", ["row", "tensor"])
def test_a_layer_equals_the_formula(scales):
    case = Layer("local", "", (260,), 96, 80, scales=scales)
    x, w, b, dy = drawn_for_layer(case, whole=True)
    layer, mine = layer_of(case, w, b).to(DEVICE), x.to(DEVICE).requires_grad_()
    y = layer(mine)
    y.backward(dy.to(DEVICE))
    got = dict(y=y.detach(), dx=mine.grad, dw=layer.weight.grad, db=layer.bias.grad)
    for name, right in formula(case, x.detach(), w, b, dy).items():
        assert_same(name, got[name].cpu(), right.to(case.dtype))


@pytest.mark.parametrize("kinds", [(E4M3, E4M3), (E5M2, E4M3), (E5M2, E5M2)])
@pytest.mark.parametrize("by_row", [True, False])
def test_products_of_rows_as_they_travel(kinds, by_row):
    """With any implementation: integers are exact, and NaN stays in its row, also in a captured graph."""
    g = torch.Generator().manual_seed(0)
    operands, meant = [], []
    for rows, kind in zip((200, 48), kinds, strict=True):
        values = torch.randint(-2, 3, (rows, 96), generator=g).float()
        scale = 2.0 ** torch.randint(-2, 3, (rows if by_row else 1, 1), generator=g)
        rows_of = pack(values.to(kind), scale).to(DEVICE)
        of_rows = unpack(rows_of, 96, kind)
        operands += [of_rows[0], of_rows[1] if by_row else scale.to(DEVICE)]
        meant.append(values.double() * scale)
    want = (meant[0] @ meant[1].t()).bfloat16()
    y = product(*operands, None, torch.bfloat16)
    assert_same("y", y.cpu(), want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = product(*operands, None, torch.bfloat16)
    operands[0].view(torch.uint8)[3, 5] = 0x7F
    graph.replay()
    want[3] = torch.nan
    assert_same("replayed", y.cpu(), want)
