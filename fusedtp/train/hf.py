"""transformers' Trainer and accelerate's Accelerator for models that are split.

The Trainer writes checkpoints that training can resume from:

transformers trains a split model, but refuses to save more than its weights: if the optimizer's states are DTensors,
every rank must take part in the checkpoint. This Trainer writes such a checkpoint (torch.distributed.checkpoint) next
to the model's weights, and any number of ranks can read it.

    checkpoint-3/model.safetensors   same as for the model on one device
    checkpoint-3/optimizer/          the optimizer's states, in one part per rank
    checkpoint-3/scheduler.pt, trainer_state.json, rng_state_*.pth

The Accelerator shards a split model over data-parallel ranks with accelerate's FSDP2 plugin. Trainer and Accelerator
refuse to train on several data-parallel ranks if nothing averages gradients over them.
"""

from __future__ import annotations

import os
from functools import wraps
from typing import Any
from unittest.mock import patch

import accelerate  # type: ignore[import-untyped]
import torch
import torch.distributed as dist
import transformers
from accelerate.utils import recursively_apply  # type: ignore[import-untyped]
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor


class Trainer(transformers.Trainer):
    """transformers.Trainer with the same arguments; resumes with `train(resume_from_checkpoint=...)`."""

    def __init__(self, model: Any = None, args: Any = None, **options: Any) -> None:
        if args is None:
            raise ValueError("pass TrainingArguments as args: checkpoints go to their output_dir")
        if args.optim == "adafactor" and model is not None and is_split(model):
            raise ValueError(
                "optim='adafactor' cannot train a split model: DTensor lacks what its factored state needs; "
                "take another, such as adamw_torch_fused"
            )
        only_model, args.save_only_model = args.save_only_model, True  # this class saves what transformers refuses to
        try:
            super().__init__(model, args, **options)
        finally:
            args.save_only_model = only_model
        if self.is_distributed_loading_by_transformers:  # then transformers ignores args.fsdp
            parallelism = self.accelerator.parallelism_config
            check_data_parallel(self._module(), 1 if parallelism is None else parallelism.data_parallel_size)
            if parallelism is not None:
                if args.eval_use_gather_object and parallelism.non_data_parallel_size > 1:
                    raise ValueError("eval_use_gather_object would count each row once per rank; leave it out")
                count_rows_once(self.accelerator, parallelism.non_data_parallel_size)
                self.gather_function = self.accelerator.gather_for_metrics

    def create_accelerator_and_postprocess(self) -> None:
        # accelerate accepts ParallelismConfig only on GPUs, a limit that a split model does not need
        several = property(lambda self: self.num_processes > 1)
        with patch.object(accelerate.Accelerator, "multi_device", several):
            super().create_accelerator_and_postprocess()

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self.is_distributed_loading_by_transformers:
            return super()._save_optimizer_and_scheduler(output_dir)
        save({"optimizer": self._optimizer_state()}, checkpoint_id=os.path.join(output_dir, "optimizer"))
        if self.args.should_save and self.lr_scheduler is not None:
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, "scheduler.pt"))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        folder = os.path.join(checkpoint or "", "optimizer")
        if checkpoint is None or not self.is_distributed_loading_by_transformers or not os.path.isdir(folder):
            return super()._load_optimizer_and_scheduler(checkpoint)
        state = {"optimizer": self._optimizer_state()}
        load(state, checkpoint_id=folder)
        set_optimizer_state_dict(self._module(), self._own_optimizer(), state["optimizer"])
        scheduler = torch.load(os.path.join(checkpoint, "scheduler.pt"), weights_only=True)
        if self.lr_scheduler is not None:
            self.lr_scheduler.load_state_dict(scheduler)
        if dist.is_initialized():
            dist.barrier()

    def _optimizer_state(self) -> dict[str, Any]:
        """States by parameter names, as DTensors."""
        return get_optimizer_state_dict(self._module(), self._own_optimizer())

    def _own_optimizer(self) -> Any:
        """torch's optimizer inside accelerate's."""
        return getattr(self.optimizer, "optimizer", self.optimizer)

    def _module(self) -> torch.nn.Module:
        assert self.model is not None
        return self.model


def count_rows_once(accelerator: Any, ranks: int) -> None:
    """Make this accelerator's `gather_for_metrics` count each row once, not once per rank of `ranks` that share it.

    transformers computes losses, predictions and metrics of an evaluation from it; accelerate gathers over all ranks.
    """
    gather, for_metrics = accelerator.gather, accelerator.gather_for_metrics

    def first_of_each(rows: Any) -> Any:
        every = rows.unflatten(0, (accelerator.num_processes, -1))  # tensor-parallel ranks are neighbours
        return every[::ranks].flatten(0, 1)

    def once(data: Any) -> Any:
        return recursively_apply(first_of_each, gather(data))

    @wraps(for_metrics)
    def gather_for_metrics(input_data: Any, use_gather_object: bool = False) -> Any:
        accelerator.gather = once
        try:
            return for_metrics(input_data, use_gather_object)
        finally:
            accelerator.gather = gather

    accelerator.gather_for_metrics = gather_for_metrics


class Accelerator(accelerate.Accelerator):
    """accelerate.Accelerator with the same arguments; `prepare` takes split models, with or without the FSDP2 plugin.

    Raises ValueError if nothing averages gradients over data-parallel ranks, or if the plugin has
    cpu_ram_efficient_loading.
    """

    def _prepare_tp(self, *args: Any) -> tuple[Any, ...]:
        # accelerate replicates plain parameters here, with a class that transformers no longer has. A split model has
        # no plain parameters: all are DTensors.
        models = [each for each in args if isinstance(each, torch.nn.Module) and is_split(each)]
        if not models:
            prepared: tuple[Any, ...] = super()._prepare_tp(*args)
            return prepared
        for model in models:
            if not self.is_fsdp2:
                check_data_parallel(model, self.parallelism_config.data_parallel_size)
            elif self.state.fsdp_plugin.cpu_ram_efficient_loading:
                raise ValueError(
                    "cpu_ram_efficient_loading sends whole weights from the first rank, which holds only its part of a "
                    "split model; set it to False, and load with fusedtp.from_pretrained, which reads only that part"
                )
        return args


def is_split(model: torch.nn.Module) -> bool:
    """Whether all parameters are DTensors, as after parallelize."""
    parameters = list(model.parameters())
    return bool(parameters) and all(isinstance(parameter, DTensor) for parameter in parameters)


def check_data_parallel(model: torch.nn.Module, data_parallel_size: int) -> None:
    """Raise ValueError with the names of parameters whose gradients are not averaged over data-parallel ranks."""
    alone = [
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and isinstance(parameter, DTensor) and parameter.device_mesh.ndim == 1
    ]
    if data_parallel_size > 1 and alone:
        more = f" and {len(alone) - 3} more" if len(alone) > 3 else ""
        raise ValueError(
            f"{data_parallel_size} data-parallel ranks would see different batches, but nothing averages the gradients "
            f"of {', '.join(alone[:3])}{more}: call fully_shard(model, mesh=mesh['dp']) after parallelize, or give "
            "fusedtp.train.hf.Accelerator an FSDP2 plugin"
        )
