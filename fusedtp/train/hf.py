"""transformers' Trainer and accelerate's Accelerator for models that are split.

The Trainer writes checkpoints that training resumes from:

transformers trains a split model, but refuses to save more than its weights: an optimizer whose states are DTensors
needs a checkpoint in which every rank takes part. This Trainer writes one (torch.distributed.checkpoint), beside the
model's own folder, and any number of ranks may read it.

    checkpoint-3/model.safetensors   as of the model on one device
    checkpoint-3/optimizer/          the optimizer's states, all ranks' parts
    checkpoint-3/scheduler.pt, trainer_state.json, rng_state_*.pth

The Accelerator shards a split model over data-parallel ranks with accelerate's FSDP2 plugin. Both refuse to train on
several data-parallel ranks if nothing averages gradients over them.
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
    """transformers.Trainer, with its arguments; resumes with `train(resume_from_checkpoint=...)`."""

    def __init__(self, model: Any = None, args: Any = None, **options: Any) -> None:
        if args is None:
            raise ValueError("give TrainingArguments: their output_dir is where checkpoints go")
        only_model, args.save_only_model = args.save_only_model, True  # what it refuses is done here
        try:
            super().__init__(model, args, **options)
        finally:
            args.save_only_model = only_model
        if self.is_distributed_loading_by_transformers:  # then transformers does not wrap it, whatever args.fsdp says
            parallelism = self.accelerator.parallelism_config
            check_data_parallel(self._module(), 1 if parallelism is None else parallelism.data_parallel_size)
            if parallelism is not None:
                if args.eval_use_gather_object and parallelism.non_data_parallel_size > 1:
                    raise ValueError("eval_use_gather_object would count each row once a rank; leave it out")
                count_rows_once(self.accelerator, parallelism.non_data_parallel_size)
                self.gather_function = self.accelerator.gather_for_metrics

    def create_accelerator_and_postprocess(self) -> None:
        # accelerate takes ParallelismConfig on GPUs alone, for no reason that concerns a model that is split
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
    """`gather_for_metrics` of this accelerator gives each row once, not once for each of `ranks` ranks that share it.

    transformers makes losses, predictions and metrics of an evaluation from it; accelerate gathers over all ranks.
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
    """accelerate.Accelerator, with its arguments; `prepare` takes split models with the FSDP2 plugin or without.

    Raises ValueError if data-parallel ranks would train apart, or if the plugin asks for cpu_ram_efficient_loading.
    """

    def _prepare_tp(self, *args: Any) -> tuple[Any, ...]:
        # accelerate replicates plain parameters here, by a class that transformers no longer has. A split model has
        # none: all of its parameters are DTensors.
        models = [each for each in args if isinstance(each, torch.nn.Module) and is_split(each)]
        if not models:
            prepared: tuple[Any, ...] = super()._prepare_tp(*args)
            return prepared
        for model in models:
            if not self.is_fsdp2:
                check_data_parallel(model, self.parallelism_config.data_parallel_size)
            elif self.state.fsdp_plugin.cpu_ram_efficient_loading:
                raise ValueError(
                    "cpu_ram_efficient_loading sends whole weights from the first rank, which has only its part of a "
                    "split model; set it to False, and load with fusedtp.from_pretrained, which reads as little"
                )
        return args


def is_split(model: torch.nn.Module) -> bool:
    """Whether all of its parameters are DTensors, as parallelize makes them."""
    parameters = list(model.parameters())
    return bool(parameters) and all(isinstance(parameter, DTensor) for parameter in parameters)


def check_data_parallel(model: torch.nn.Module, data_parallel_size: int) -> None:
    """Raises ValueError that names parameters whose gradients data-parallel ranks do not average."""
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
