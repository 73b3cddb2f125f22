"""Plans: what they match, all their faults in one error that leaves the model unchanged, and what explain reports."""

import copy
import re
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel
from torch.nn.utils import parametrizations, prune

from fusedtp.comm import VirtualWorld, communicator
from fusedtp.nn import ModelConfig, TransformerBlock
from fusedtp.ops import measured
from fusedtp.parallel import FusedColwise, FusedRowwise, explain, parallelize
from fusedtp.parallel.foreign_styles import is_linear
from fusedtp.parallel.plan import plan_of
from tests.harness import world
from tests.parallel.support import SMALL, assert_close, batch, dp_tp_mesh, make, make_pair


def message_of(model: nn.Module, world_size: int, **options) -> str:
    """The error of parallelizing over so many ranks, on rank 0 of a virtual world."""

    def attempt(group) -> str:
        with pytest.raises(ValueError) as caught:
            parallelize(model, group, **options)
        return str(caught.value)

    return VirtualWorld(world_size).run(attempt)[0]


def test_heads_that_do_not_divide_name_the_sizes_that_would_work():
    text = message_of(make(num_attention_heads=6, num_key_value_heads=2), 4)
    assert text.startswith("CausalLM cannot be parallelized over 4 ranks:")
    assert text.count("\n") == 1  # one line covers all layers
    assert "layers.*.self_attn: 4 ranks cannot evenly share 6 query heads and 2 kv heads" in text
    assert text.endswith("sizes that would work: 1, 2, 6")
    assert "4 query heads and 4 kv heads; sizes that would work: 1, 2, 4" in message_of(
        make(num_attention_heads=4, num_key_value_heads=4), 3
    )


def test_all_faults_are_reported_together_and_nothing_is_changed():
    model = make(num_attention_heads=4, num_key_value_heads=4)
    plan = {
        **model.tp_plan,
        "layers.*.mlp.gate_proj": "diagonal",
        "layers.*.mlp.gate_project": "colwise",
        "norm": "colwise",
        "lm_head": ColwiseParallel(),
        "layers.0.mlp.up_proj": "rowwise",
    }
    text = message_of(model, 3, plan=plan)
    for fault in (
        "layers.*.mlp.gate_proj: unknown style 'diagonal'; known are colwise, colwise_gather_output, rowwise",
        "layers.*.mlp.gate_project: no module has such a name",
        "norm: RMSNorm is not a linear layer",
        "lm_head: ColwiseParallel is not a style of fusedtp",
        "layers.0.mlp.up_proj: more than one pattern of the plan matches it",
        "layers.*.self_attn: 3 ranks cannot evenly share 4 query heads",
    ):
        assert text.count(f"\n  - {fault}") == 1, (fault, text)
    assert text.count("\n") == 6
    assert not any(isinstance(p, DTensor) for p in model.parameters())
    assert not any(getattr(m, "parallel", None) for m in model.modules())


MAKERS = {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "old weight_norm": nn.utils.weight_norm,
    "pruning": partial(prune.random_unstructured, name="weight", amount=0.5),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("maker", MAKERS)
def test_weights_that_are_computed_are_not_split(maker: str, bias: bool):
    model = nn.ModuleDict({"up": nn.Linear(8, 16, bias=bias), "down": nn.Linear(16, 8, bias=bias)})
    for linear in model.values():
        MAKERS[maker](linear)
    text = message_of(model, 2, plan={"up": "colwise", "down": "rowwise"})
    for name in model:
        assert text.count(f"\n  - {name}: its weight is computed from other parameters") == 1, text
    assert not any(map(is_linear, model.values())), "no plan that is inferred names them either"


def test_a_style_refuses_a_weight_that_is_computed():
    with pytest.raises(ValueError, match="its weight is computed from other parameters"):
        VirtualWorld(1).run(lambda group: FusedColwise()._apply(parametrizations.weight_norm(nn.Linear(4, 4)), group))


def test_a_table_that_changes_as_it_is_read_is_refused():
    model = nn.ModuleDict({"table": nn.Embedding(8, 8, max_norm=1.0), "up": nn.Linear(8, 8)})
    assert "\n  - table: an embedding with max_norm changes its table" in message_of(model, 2, plan={"up": "colwise"})


class Paired(nn.Module):
    """A single expert with alternating gate and up columns, and a bias after the down projection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate_up, self.down = (nn.Parameter(torch.randn(1, *shape)) for shape in ((4, 2 * width), (width, 4)))
        self.bias = nn.Parameter(torch.randn(1, 4))

    def forward(self, x):
        hidden = x @ self.gate_up[0]
        return (hidden[..., ::2] * hidden[..., 1::2]) @ self.down[0] + self.bias[0]


PAIRED = {"0": "moe_tp_experts", "0.gate_up": "rowwise_pairs", "0.down": "colwise", "0.bias": "divided"}


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_pairs_of_features_and_a_bias_of_a_sum(world_size: int):
    """Each rank has whole pairs and adds a share of the bias to its partial sum. The bias's gradient is complete."""
    torch.manual_seed(0)
    whole, x = nn.Sequential(Paired(6)), torch.randn(5, 4)
    want = whole(x)
    want.square().sum().backward()

    def run(group) -> None:
        split = parallelize(copy.deepcopy(whole), group, plan=PAIRED)
        got = split(x)
        got.square().sum().backward()
        assert_close("y", got, want)
        rank = group.rank()
        for name, parameter in split.named_parameters():
            own = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
            full = whole.get_parameter(name).grad
            dim = {"0.gate_up": 2, "0.down": 1}.get(name)
            assert_close(name, own, full if dim is None else full.chunk(world_size, dim)[rank])

    VirtualWorld(world_size).run(run)


def test_pairs_that_ranks_cannot_share_are_refused():
    assert "0: gate_up has 6 features in pairs, which 2 ranks cannot share" in message_of(
        nn.Sequential(Paired(3)), 2, plan=PAIRED
    )


def test_wholes_are_not_summed():
    text = message_of(nn.Sequential(Paired(6)), 2, plan={"0": "moe_tp_experts", "0.bias": "divided"})
    assert "0: its outputs are summed over ranks, but the plan splits none of its parameters" in text


def test_a_model_without_a_plan():
    first, *faults = message_of(nn.Linear(2, 2), 2).splitlines()
    assert first == "Linear cannot be parallelized over 2 ranks:"
    assert [fault[:49] for fault in faults] == ["  - neither it nor any submodule has a tp_plan; pass one"[:49]]


def test_a_model_is_parallelized_once():
    def twice(group) -> str:
        model = parallelize(make(), group)
        with pytest.raises(ValueError) as caught:
            parallelize(model, group)
        return str(caught.value)

    assert "layers.*.mlp.up_proj: it is parallel already" in VirtualWorld(2).run(twice)[0]


def test_tied_parameters_must_be_planned_alike():
    model = make(tie_word_embeddings=True)
    text = message_of(model, 2, plan={k: v for k, v in model.tp_plan.items() if k != "lm_head"})
    assert re.search(r"embed_tokens.weight and lm_head.weight are one parameter, but planned as Shard\(dim=0\)", text)


def test_a_block_inside_a_model_of_others_brings_its_plan():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stack = nn.ModuleList(TransformerBlock(ModelConfig(**SMALL)) for _ in range(2))

    plan = plan_of(Model())
    assert plan["stack.1.self_attn.q_proj"] == "colwise" and len(plan) == 14


def test_patterns_match_one_part_of_a_name():
    model = nn.ModuleDict({"a": nn.ModuleDict({"b": nn.Linear(2, 2)}), "b": nn.Linear(2, 2)})

    def attempt(group) -> list[str]:
        parallelize(model, group, plan={"*.b": FusedColwise(), "b": FusedRowwise()})
        return [type(m.parallel).__name__ for m in (model["a"]["b"], model["b"])]

    assert VirtualWorld(1).run(attempt) == [["ColumnParallel", "RowParallel"]]


def test_what_is_no_module_is_refused():
    def attempt(group) -> None:
        with pytest.raises(TypeError, match=r"takes a torch.nn.Module, not str; from_pretrained loads one"):
            parallelize("gpt2", group)

    VirtualWorld(1).run(attempt)


def refuse_empty_shards(group) -> None:
    mesh = dp_tp_mesh()
    with pytest.raises(ValueError) as caught:
        parallelize(make(vocab_size=1, intermediate_size=1), mesh["tp"])
    text = str(caught.value)
    assert "lm_head.weight of shape (1, 24) leaves a rank with an empty shard, which FSDP2 cannot reduce" in text
    assert "layers.0.mlp.gate_proj.weight of shape (1, 24)" in text
    parallelize(make(vocab_size=3, intermediate_size=2), mesh["tp"])
    with pytest.raises(ValueError, match=r"\('dp', 'tp'\); pass one of them, as in mesh\['tp'\]"):
        parallelize(make(), mesh)


def test_shards_that_fsdp2_could_not_reduce():
    world(4).run(refuse_empty_shards)


def explained(group) -> str:
    _, parallel = make_pair(group, options={"engine": "collective"}, num_hidden_layers=1)
    with pytest.raises(ValueError, match=r"Linear has no parallel layer; call fusedtp\.parallelize first"):
        explain(nn.Linear(2, 2))
    parallel(*batch(2, 4))
    return str(explain(parallel, tokens=8))


def test_explain_names_engine_and_reason_of_every_layer():
    text = world(2).run(explained)[0]
    assert text.startswith("forward of 8 tokens\n")
    assert re.search(r"layers.0.self_attn.q_proj +all_gather_matmul +collective +asked for", text)
    assert re.search(r"layers.0.mlp.down_proj +matmul_reduce_scatter +collective +asked for", text)
    assert re.search(r"embed_tokens +lookup, reduce_scatter +chunked +CPU ranks read", text)
    assert re.search(r"calls so far in group \S+: all_gather_matmul: .*collective \d", text)


def transports(group) -> list[str]:
    """explain's output for gathers by programs, by copies, with few rows, and after a graph capture."""
    _, parallel = make_pair(group, options={"engine": "triton"}, num_hidden_layers=1)
    workspace, said = communicator(group).workspace, []
    for transport, captured, tokens in (
        ("programs", False, 200),
        ("copy", False, 200),
        ("copy", False, 8),
        ("copy", True, 200),
    ):
        measured.hold(transport)
        kept = workspace.on_cpu, workspace.epochs
        try:
            if captured:  # on a GPU, the host then no longer knows the epoch
                workspace.on_cpu, workspace.epochs = False, None
            said.append(str(explain(parallel, tokens=tokens, dtype=torch.float32)))
        finally:
            workspace.on_cpu, workspace.epochs = kept
            measured.hold(None)
    return said


def test_explain_names_the_transport_of_an_operation_that_has_two():
    pytest.importorskip("triton")
    wanted = ("programs", "copy", "programs", "programs")
    for text, transport in zip(world(2).run(transports)[0], wanted, strict=True):
        assert re.search(rf"self_attn.q_proj +all_gather_matmul +triton by {transport} +asked for", text)
        assert re.search(r"mlp.down_proj +matmul_reduce_scatter +triton +asked for", text)


def virtual(changes: dict, sequence_parallel: bool) -> None:
    plain = make(**changes)
    ids, labels = batch(2, 5)
    want = plain(ids, labels).loss
    want.backward()

    def body(group) -> tuple:
        model = parallelize(make(**changes), group, sequence_parallel=sequence_parallel)
        loss = model(ids, labels).loss
        loss.backward()
        return loss.detach(), {name: p.grad for name, p in model.named_parameters()}

    results = VirtualWorld(3).run(body)
    for loss, _ in results:
        assert_close("loss", loss, want)
    for name, parameter in plain.named_parameters():
        parts = [gradients[name] for _, gradients in results]
        dims = [d for d in range(parameter.dim()) if parts[0].shape[d] != parameter.shape[d]]
        got = torch.cat(parts, dims[0]) if dims else parts[2]
        assert_close(f"gradient of {name}", got, parameter.grad)


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_models_run_in_the_virtual_world(sequence_parallel: bool):
    virtual({"num_key_value_heads": 1, "qk_norm": True, "attention_bias": True}, sequence_parallel)


def small_dtypes(group) -> None:
    _, parallel = make_pair(group, dtype="bfloat16", param_dtype="float32")
    parallel(*batch(2, 4)).loss.backward()
    assert {p.grad.dtype for p in parallel.parameters()} == {torch.float32}


def test_fp32_parameters_compute_in_bf16():
    world(2).run(small_dtypes)
