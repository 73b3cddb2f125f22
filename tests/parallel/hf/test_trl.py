"""TRL's SFTTrainer with a split model equals a single process: the loss per token is not counted once per rank."""

import copy
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

import fusedtp
from tests.harness import world
from tests.parallel.support import tp_mesh

from .families import model_of
from .launch import as_torchrun
from .parity import full

pytest.importorskip("trl", reason="trl brings some 300 MB (pyarrow, pandas); `make test-models` installs it")

WORDS = 40
LENGTHS = (3, 9, 5, 7, 4, 8, 6, 10)


def tokenizer() -> Any:
    """A tokenizer with words w0, w1 and so on."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<unk>", "</s>", *(f"w{i}" for i in range(WORDS))]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")


def trained(model: nn.Module, folder: str) -> list[dict[str, float]]:
    """Logs of three steps, each of two microbatches, on texts of different lengths."""
    import huggingface_hub.constants
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    generator = torch.Generator().manual_seed(0)
    numbers = [torch.randint(WORDS, (length,), generator=generator).tolist() for length in LENGTHS]
    texts = Dataset.from_list([{"text": " ".join(f"w{i}" for i in each)} for each in numbers])
    options = SFTConfig(
        output_dir=folder,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=3,
        logging_steps=1,
        learning_rate=1e-2,
        save_only_model=True,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    with patch.object(huggingface_hub.constants, "HF_HUB_OFFLINE", True):
        trainer = SFTTrainer(model=model, args=options, train_dataset=texts, processing_class=tokenizer())
        trainer.train()
    return [log for log in trainer.state.log_history if "loss" in log]


def with_trl(group: Any, folder: str) -> None:
    plain = model_of("llama")
    parallel = fusedtp.parallelize(copy.deepcopy(plain), tp_mesh(group))
    alone = trained(plain, f"{folder}/{group.rank()}")
    with as_torchrun(group):
        split = trained(parallel, f"{folder}/split")
    for name in ("loss", "grad_norm", "entropy", "mean_token_accuracy", "num_tokens"):
        want, got = ([log[name] for log in each] for each in (alone, split))
        assert len(want) == 3 and got == pytest.approx(want, rel=1e-3), name
    wanted = dict(plain.named_parameters())
    for name, parameter in parallel.named_parameters():
        torch.testing.assert_close(full(parameter.detach()), wanted[name].detach(), rtol=0, atol=1e-3, msg=name)


def test_supervised_fine_tuning(tmp_path: Path):
    world(2).run(with_trl, str(tmp_path), timeout=200)
