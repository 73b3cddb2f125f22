"""The custom ops pass torch's own checks, and compiled layers equal eager ones, gradients included."""

import re
import shutil
from pathlib import Path

import pytest
import torch
import torch._inductor.config
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd

import fusedtp
from fusedtp.comm import communicator
from tests.engines import ENGINES
from tests.harness import world

SIZES, TESTS = (2, 0, 3), Path(__file__).parent


def numbers(*shape: int, seed: int = 0, grad: bool = True) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, shape, generator=generator).float().requires_grad_(grad)


def arguments(name: str, engine: str, group) -> tuple:
    """Arguments of the custom op `name` on this rank; x has ragged rows, 4 features, and two weights if allowed."""
    r, place = group.rank(), (group.group_name, group.rank(), list(SIZES), 1)
    shard, full = numbers(SIZES[r], 4, seed=r, grad=False), numbers(sum(SIZES), 4, seed=r, grad=False)
    weights = [numbers(5, 4, seed=10 + r, grad=False), numbers(2, 4, seed=20 + r, grad=False)]
    bias = numbers(5, seed=30, grad=False)
    return {
        "all_gather_matmul": (shard, weights, [bias, None], False, *place, engine, 7, "", []),
        "matmul_reduce_scatter": ([full], weights[:1], bias, *place, engine, 7, "mlp", []),
        "matmul_all_reduce": (full, weights[0], bias, *place, engine, 7, "", []),
        "all_gather_wgrad": (
            shard, [numbers(5, 3, grad=False), numbers(5, 1, grad=False)], torch.float32, *place, engine, 0, "", [],
        ),
        "column_grads": (
            shard, [numbers(5, 5, grad=False), numbers(5, 2, grad=False)], weights, torch.float32,
            *place, engine, 0, "", [],
        ),
        "all_gather_rows": (shard, *place, engine, 0, "", []),
        "all_gather_tensors": ([shard, shard[:, :1].long(), shard[:, 1:] > 0], *place, engine, 0, "", []),
        "reduce_scatter_rows": (full, *place, engine, 0, "embedding", []),
        "reduce_scatter_tensors": ([full, full[:, :3].bfloat16()], *place, engine, 0, "", []),
        "all_reduce_rows": (full, *place, engine, 0, "", []),
    }[name]  # fmt: skip


OPS = [
    "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce", "all_gather_wgrad", "column_grads",
    "all_gather_rows", "all_gather_tensors", "reduce_scatter_rows", "reduce_scatter_tensors",
    "all_reduce_rows",
]  # fmt: skip


def check_op(group, name: str, engine: str) -> None:
    fusedtp.reserve(group, 4096)  # registers the group; custom ops know it by name
    torch.library.opcheck(getattr(torch.ops.fusedtp, name).default, arguments(name, engine, group))


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", OPS)
def test_opcheck(name, engine):
    world(3).run(check_op, name, engine)


def every_op_is_listed(group) -> set[str]:
    return {name.split("::")[1].split(".")[0] for name in torch._C._dispatch_get_all_op_names() if "fusedtp" in name}


def test_no_op_is_left_out():
    """Every op is named, by its name or as torch.ops has it, in a test file here that runs torch's checks."""
    checked = "".join(t for t in (p.read_text() for p in TESTS.rglob("*.py")) if "opcheck(" in t)
    (every,) = world(1).run(every_op_is_listed)
    assert {*OPS} < every
    left_out = [name for name in sorted(every) if not re.search(rf'[".]{name}\b["./,]', checked)]
    assert not left_out


def layers(group, engine: str, dim: int):
    def mlp(x: Tensor, up: Tensor, gate: Tensor, down: Tensor, b: Tensor, out: Tensor) -> Tensor:
        u, g = fusedtp.all_gather_matmul(x, [up, gate], group, biases=[b, None], dim=dim, engine=engine)
        h = fusedtp.matmul_reduce_scatter(u * g.relu(), down, group, dim=dim, engine=engine)
        return h + fusedtp.matmul_all_reduce(out, down[:, :2], group, engine=engine).sum()

    return mlp


def compiled_against_eager(group, engine: str, dim: int, by_name: bool = False) -> None:
    r = group.rank()
    fusedtp.reserve(group, 1 << 16)
    x = numbers(3, 4, seed=r) if dim == 0 else numbers(2, 3, 4, seed=r)
    given = [x, numbers(5, 4, seed=r), numbers(5, 4, seed=9 + r), numbers(4, 5, seed=19 + r), numbers(5, seed=r),
             numbers(3, 2, seed=29 + r)]  # fmt: skip
    found = []
    group = communicator(group).name if by_name else group
    torch._dynamo.reset()
    for function in (layers(group, engine, dim), _compile(layers(group, engine, dim))):
        leaves = [t.detach().clone().requires_grad_() for t in given]
        y = function(*leaves)
        y.backward(torch.arange(y.numel()).view(y.shape).float())
        found.append([y.detach(), *(leaf.grad for leaf in leaves)])
    for i, (eager, compiled) in enumerate(zip(*found, strict=True)):
        assert torch.equal(eager, compiled), f"tensor {i} differs"


def _compile(function, backend: str = "aot_eager"):
    return torch.compile(function, fullgraph=True, backend=backend)


@pytest.mark.slow
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("engine", [*ENGINES, "auto"])
def test_one_compiled_graph_equals_eager(engine, dim):
    world(2).run(compiled_against_eager, engine, dim, True, timeout=120)


@pytest.mark.slow
def test_a_compiled_function_takes_the_group_itself():
    world(2).run(compiled_against_eager, "auto", 0, timeout=120)


def compiled_by_inductor(group) -> None:
    torch._dynamo.reset()
    fusedtp.reserve(group, 1 << 16)
    sizes, r = (1, 40), group.rank()
    name = communicator(group).name

    def two_layers(x: Tensor, up: Tensor, gate: Tensor, down: Tensor) -> Tensor:
        (u,) = fusedtp.all_gather_matmul(x, [up], name, sizes=sizes)
        (g,) = fusedtp.all_gather_matmul(x, [gate], name, sizes=sizes)
        return fusedtp.matmul_reduce_scatter(u * g.relu(), down, name, sizes=sizes)

    found = []
    for function in (two_layers, _compile(two_layers, "inductor")):
        given = (
            numbers(sizes[r], 4, seed=r),
            numbers(5, 4, seed=r),
            numbers(5, 4, seed=9),
            numbers(4, 5, seed=19),
        )
        leaves = [t.detach().clone().requires_grad_() for t in given]
        # Inductor's disk cache is keyed by torch's version, not by the arguments that our operations take in ours. By
        # default each rank would start compiler processes for one small graph, and probe the machine's vector units.
        alone = {"force_disable_caches": True, "compile_threads": 1, "cpp.vec_isa_ok": False}
        with torch._inductor.config.patch(alone):
            y = function(*leaves)
            y.backward(torch.ones_like(y))
        found.append([y.detach(), *(leaf.grad for leaf in leaves)])
    for i, (eager, compiled) in enumerate(zip(*found, strict=True)):
        assert torch.equal(eager, compiled), f"tensor {i} differs"


@pytest.mark.slow
@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="Inductor needs a C++ compiler")
def test_inductor_equals_eager_with_very_uneven_rows():
    world(2).run(compiled_by_inductor, timeout=300)


def calls_in_a_chain(group) -> int:
    """How many of the graph's calls take an effect token from the previous call."""
    torch._dynamo.reset()
    fusedtp.reserve(group, 1 << 16)
    name, chained = communicator(group).name, []

    def look(graph, inputs):
        chained.extend(node for node in graph.graph.nodes if "with_effects" in str(node.target))
        return graph

    x, w = numbers(3, 4, grad=False), numbers(5, 4, grad=False)

    def independent(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return (
            fusedtp.all_gather_matmul(x, [w], name)[0],
            fusedtp.matmul_all_reduce(x, w, name),
        )

    torch.compile(independent, fullgraph=True, backend=aot_autograd(fw_compiler=look))(x, w)
    return len(chained)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(torch.library.CustomOpDef, "register_effect"), reason="older torch has no such mark")
def test_a_compiler_may_not_swap_two_calls():
    assert world(2).run(calls_in_a_chain, timeout=120) == [2, 2]


def compiled_of_changing_shape(group) -> None:
    torch._dynamo.reset()
    fusedtp.reserve(group, 1 << 16)
    layer = layers(communicator(group).name, "chunked", 0)
    function = _compile(layer)
    weights = [numbers(5, 4), numbers(5, 4, seed=1), numbers(4, 5, seed=2), numbers(5), numbers(3, 2)]
    for rows in (3, 4, 6, 3):
        x = numbers(rows, 4, seed=group.rank())
        assert torch.equal(function(x, *weights), layer(x, *weights)), f"{rows} rows"


@pytest.mark.slow
def test_a_compiled_graph_takes_other_numbers_of_rows():
    world(2).run(compiled_of_changing_shape, timeout=120)
