"""transformers' Trainer for models that are split, with checkpoints that training resumes from.

transformers trains a split model, but refuses to save more than its weights: an optimizer whose states are DTensors
needs a checkpoint in which every rank takes part. This Trainer writes one (torch.distributed.checkpoint), beside the
model's own folder, and any number of ranks may read it.

    checkpoint-3/model.safetensors   as of the model on one device
    checkpoint-3/optimizer/          the optimizer's states, all ranks' parts
    checkpoint-3/scheduler.pt, trainer_state.json, rng_state_*.pth
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save


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
