"""Register this library's layers with transformers' own registries, as an alternative to `fusedtp.parallelize`.

    fusedtp.parallel.registry.register_with_transformers()
    config = DistributedConfig(tp_size=2, tp_plan={"model.layers.*.mlp.down_proj": "fusedtp_rowwise"})
    model = AutoModelForCausalLM.from_pretrained(name, distributed_config=config)

    in a tp_plan         fusedtp_colwise, fusedtp_colwise_gather_output, fusedtp_rowwise: like the originals
    ep_implementation    fusedtp: tokens travel through this library's exchange

transformers places and loads the parameters; only the forwards are this library's. Sequence parallelism is not
available this way: it needs a view of the whole model, so tokens stay whole. Use `fusedtp.parallelize` for that.
"""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from fusedtp.comm import communicator
from fusedtp.ops.rows import split
from fusedtp.ops.tokens import gather_tokens, take_tokens

from .foreign import Model
from .foreign_experts import exchanged
from .foreign_styles import Colwise, Rowwise, faults_of_linear


def register_with_transformers() -> None:
    """Register the names. May be called again. Raises ImportError without transformers 5.20 or later."""
    from transformers.distributed.expert_parallel import EPImplementation, EPImplementationInterface
    from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES
    from transformers.distributed.tensor_parallel import TensorParallelLayer

    class Fused(TensorParallelLayer):
        """A transformers style that installs one of this library's styles."""

        def __init__(self, kind: str, gather_output: bool = False) -> None:
            self.kind, self.gather_output = kind, gather_output

        def shard_param(self, module: Any, param: str, mesh: Any) -> None:
            whole = module._parameters.get(param)
            if whole is None:
                return
            if self.kind == "colwise":
                placement: Shard | Replicate = Shard(0)
            else:
                placement = Replicate() if param == "bias" else Shard(whole.dim() - 1)
            module._parameters[param] = nn.Parameter(
                distribute_tensor(whole, mesh, [placement], src_data_rank=None), whole.requires_grad
            )

        def install_forward(self, module: Any, mesh: Any) -> Any:
            faults = faults_of_linear(module)
            if faults:
                raise ValueError(f"fusedtp_{self.kind}: {'; '.join(faults)}")
            options = {"sequence_parallel": False}
            if self.kind == "colwise":
                style: Any = Colwise(Model(), gather_output=self.gather_output, **options)
            else:
                style = Rowwise(Model(), **options)
            style.install(module, communicator(mesh), mesh)
            return module

    class FusedExchange(EPImplementation):
        """Each rank takes its part of a shared batch; tokens travel through moe_dispatch and moe_combine."""

        def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
            if not self.shares_batch:
                raise ValueError("ep_implementation='fusedtp' needs ep_size == tp_size")
            comm, here = communicator(self.ep_mesh), cast(int, self.num_local_experts)
            sizes = split(hidden_states.shape[0], comm.world_size)
            x, weights = (
                take_tokens(each, comm.name, sizes) for each in (hidden_states, top_k_weights.to(hidden_states.dtype))
            )
            begin = sum(sizes[: comm.rank])
            index = top_k_index[begin : begin + sizes[comm.rank]]
            y = exchanged(
                x,
                index,
                weights,
                self.experts_forward,
                here,
                comm.world_size,
                comm.name,
                sizes,
            )
            return gather_tokens(y, comm.name, sizes)

    styles: Any = ALL_PARALLEL_STYLES
    styles.register("fusedtp_colwise", Fused("colwise"))
    styles.register("fusedtp_colwise_gather_output", Fused("colwise", gather_output=True))
    styles.register("fusedtp_rowwise", Fused("rowwise"))
    EPImplementationInterface.register("fusedtp", FusedExchange)
