"""`fusedtp finetune`: a causal language model of transformers on text, split over tensor-parallel ranks as it stands.

    fusedtp finetune ...           checks; then starts one process a rank, as fusedtp train does
      fusedtp finetune ... (rank)  load, add adapters, parallelize, train, verify, save

A model type (llama) starts from random weights and a small configuration, so that nothing is downloaded; a folder is a
checkpoint. Text is tokenized by the folder's tokenizer, or else a token is a byte. Dropout is off: ranks and one
process then compute the same, which --verify checks as fusedtp.train.verify does.
"""

from __future__ import annotations

import os
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from fusedtp.parallel import clip_grad_norm_, from_pretrained, parallelize
from fusedtp.train import launch
from fusedtp.train.config import TrainConfig
from fusedtp.train.data import Batches
from fusedtp.train.environment import cores
from fusedtp.train.metrics import Metrics, screen, sinks_for
from fusedtp.train.optim import adamw, set_learning_rate
from fusedtp.train.options import DataOptions, ModelOptions, OptimOptions, ParallelOptions, RunOptions
from fusedtp.train.report import plot
from fusedtp.train.verify import SHAKE, Numbers, Verification, VerificationFailed, compare, shake_
from fusedtp.train.world import World, device_type, torchrun_place, world_of

BYTES, BOS, EOS = 256, 256, 257  # ids of a model without a tokenizer: a byte each, then two specials
# The Llama that a run without a folder trains; other types are as small as the copies that plans are proved on.
LLAMA = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
}


@dataclass(frozen=True)
class FinetuneOptions:
    """Train a causal language model of transformers on text, tensor parallel."""

    model: str = "llama"
    """A folder with a checkpoint, or a model type of transformers, which starts small and with random weights."""
    data: tuple[Path, ...] = ()
    """Text files or folders; default: the source of the Python standard library of this machine."""
    tp: int = 2
    """Tensor-parallel ranks."""
    steps: int = 30
    """Optimizer steps."""
    batch: int = 8
    """Sequences of a step."""
    length: int = 128
    """Tokens of a sequence."""
    lr: float | None = None
    """Highest learning rate; default: 5e-5 for all weights of a folder, else 2e-3."""
    lora: int = 0
    """Train adapters (PEFT's LoRA) of this rank on all linear layers instead of the weights; 0: none."""
    verify: bool = False
    """Train the first steps again in one plain process and compare; exit 1 if they differ."""
    verify_steps: int = 5
    """Steps that --verify compares."""
    out: Path | None = None
    """Folder for the trained model (or its adapters), as save_pretrained writes it; default: it is not saved."""
    seed: int = 0
    """Seed of random weights and of the batches."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train; auto takes the GPUs if there are any."""
    name: str = "finetune"
    """Name of the run; a run of the same name is replaced."""
    runs: Path = Path("runs")
    """Folder of all runs and of the token cache."""

    @property
    def is_folder(self) -> bool:
        return os.path.isdir(self.model)

    @property
    def tokenizer(self) -> Path | None:
        """The folder, where it has one."""
        files = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
        return Path(self.model) if any(Path(self.model, file).exists() for file in files) else None

    @property
    def rate(self) -> float:
        return self.lr if self.lr is not None else 5e-5 if self.is_folder and not self.lora else 2e-3

    def as_train_config(self, config: Any = None) -> TrainConfig:
        """What loop, metrics and verification of `fusedtp train` read. config: of the transformers model."""
        sizes = {}
        if config is not None:
            hidden = config.hidden_size
            inner = getattr(config, "intermediate_size", None)
            sizes = {
                "layers": config.num_hidden_layers,
                "width": hidden,
                "mlp_width": inner if isinstance(inner, int) else 4 * hidden,
            }
        return TrainConfig(
            ModelOptions(**sizes),
            DataOptions(data=self.data, tokenizer=self.tokenizer, length=self.length, batch=self.batch),
            OptimOptions(steps=self.steps, lr=self.rate, warmup=max(1, self.steps // 10), weight_decay=0.0),
            ParallelOptions(tp=self.tp, dp=1),
            RunOptions(
                name=self.name,
                runs=self.runs,
                seed=self.seed,
                device=self.device,
                verify_steps=self.verify_steps,
            ),
        )


def main(argv: list[str]) -> int:
    """Run the job, or one rank of it under torchrun; returns the exit code."""
    options = tyro.cli(FinetuneOptions, prog="fusedtp finetune", args=argv)
    if torchrun_place() is not None:
        return run_rank(options)
    try:
        found = faults(options)
    except ModuleNotFoundError as error:
        found = [f"{error}: pip install 'fusedtp[hf]'" + (" peft" if options.lora else "")]
    if found:
        launch.report([" ".join(fault.split()) for fault in found], "finetune")
        return launch.FAILED
    return launch.launch(argv, options.tp, "finetune") if options.tp > 1 else run_rank(options)


# --- what is wrong, before a process starts ---------------------------------------------------------------------


def faults(options: FinetuneOptions) -> list[str]:
    """Everything that can be known without loading weights. Builds the token files."""
    config = options.as_train_config()
    found = [f"--tp {options.tp} is not positive"] if options.tp < 1 else []
    found += [f"--lora {options.lora} is negative"] if options.lora < 0 else []
    found += [f for part in (config.data, config.optim, config.run) for f in part.faults()]
    found += launch.machine_faults(config, 1, options.tp, options.tp, options.tp) if not found else []
    found += [] if found else launch.data_faults(config)
    if options.out is not None:
        found += launch.folder_faults(options.out)
    if options.lora:
        import peft  # noqa: F401
    return found + model_faults(options)


def model_faults(options: FinetuneOptions) -> list[str]:
    """Why this model cannot be loaded, read the text, or be split over the ranks."""
    from transformers import AutoModelForCausalLM

    from fusedtp.comm import VirtualWorld
    from fusedtp.parallel.foreign_plan import check_plan

    try:
        config = config_of(options)
        vocabulary = config.get_text_config().vocab_size
        if options.tokenizer is None and vocabulary < BYTES:
            return [f"{options.model} has no tokenizer, and its {vocabulary} tokens are too few for bytes"]
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        plan = dict(getattr(model, "tp_plan", None) or {})
        if plan and options.tp > 1:
            VirtualWorld(options.tp).run(lambda group: check_plan(model, group, plan, complete=False))
    except (ValueError, OSError) as error:
        return [str(error)]
    return []


def config_of(options: FinetuneOptions) -> Any:
    """The model's configuration. Raises ValueError, OSError where there is none that can be trained."""
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

    from fusedtp.parallel.twin import NoTwin, small_config

    name = options.model
    if options.is_folder:
        if not Path(name, "config.json").exists():
            raise ValueError(f"{name} has no config.json, so it is no folder of a transformers model")
        config = AutoConfig.from_pretrained(name, local_files_only=True)
        if getattr(config, "quantization_config", None) is not None:
            raise ValueError(f"{name} is quantized; only weights in a floating-point dtype can be trained")
        return config
    if name not in CONFIG_MAPPING or CONFIG_MAPPING[name] not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(
            f"--model {name} is no folder and no causal language model of transformers, such as llama"
        )
    words: dict[str, Any] = {
        "vocab_size": BYTES + 2,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": None,
    }
    words["max_position_embeddings"] = max(64, options.length)
    if name == "llama":
        return CONFIG_MAPPING[name](**{**words, **LLAMA})
    try:
        return small_config(CONFIG_MAPPING[name](), max(options.tp, 4), **words)
    except NoTwin as why:
        raise ValueError(f"--model {name} has no small configuration; give a folder ({why})") from why


# --- text -------------------------------------------------------------------------------------------------------


class Texts:
    """Batches as a function of the step, the same on every rank: input_ids and labels [batch, length]."""

    def __init__(self, folder: Path, options: FinetuneOptions, device: torch.device) -> None:
        self.options = options
        self.batches = Batches(
            folder, length=options.length, batch=options.batch, seed=options.seed, device=device
        )

    def batch(self, step: int) -> dict[str, Tensor]:
        """Labels are the ids: a model of transformers shifts them itself."""
        self.batches.samples = step * self.options.batch
        (found,) = self.batches.step()
        ids = found.input_ids
        if self.options.tokenizer is None and not self.options.is_folder:
            ids = ids.masked_fill(ids == 0, EOS)
        return {"input_ids": ids, "labels": ids}


# --- a rank -----------------------------------------------------------------------------------------------------


def run_rank(options: FinetuneOptions) -> int:
    """This process's part of the job. A failure is printed, and handed to torchrun where that started us."""
    handler = get_error_handler()
    try:
        with world_of(1, options.tp, device_type(options.device)) as world:
            if world.rank == 0:
                launch.replace_outputs(options.runs / options.name)
            world.wait_for_all()
            run(options, world)
    except KeyboardInterrupt:
        return launch.INTERRUPTED
    except Exception as error:
        handler.record_exception(error)
        if not isinstance(error, (VerificationFailed, ValueError)):
            traceback.print_exc()
        elif torchrun_place() is None:
            launch.report([" ".join(str(error).split())], "finetune")
        return launch.FAILED
    return 0


def run(options: FinetuneOptions, world: World) -> None:
    """Train; rank 0 writes the run's folder. Raises VerificationFailed last, when all is written."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    console = screen(quiet=world.rank != 0)
    tokens = launch.prepare_data(options.as_train_config())
    model = build(options, world)
    config = options.as_train_config(model.config.get_text_config())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    console.print(
        f"{type(model).__name__} of {options.model}: {sum(p.numel() for p in model.parameters()):,} parameters, "
        f"{trained:,} of them trained, on {world.size} ranks, {world.device.type}",
        highlight=False,
    )
    texts = Texts(tokens, options, world.device)
    with Metrics(config, world, sinks_for(config, world, console)) as metrics:
        for step, numbers in train(model, texts, config, options.steps, world):
            metrics.step(step, **numbers)
    verification = verify(options, config, texts, metrics, world, console) if options.verify else None
    if options.out is not None:
        save(model, options.tokenizer, options.out, world)
    if world.rank == 0:
        unit = "byte" if options.tokenizer is None else "token"
        plot(config.run.folder / "loss.png", metrics, unit)
        show(console, options, metrics, verification, unit)
    world.wait_for_all()
    if verification is not None and not verification.passed:
        raise VerificationFailed("the parallel run is not the run of one process: " + verification.in_words())


def build(options: FinetuneOptions, world: World) -> Any:
    """The model, split over the ranks of a world that has several; the same start in both. Dropout is off (eval)."""
    from transformers import AutoModelForCausalLM

    mesh = world.tp_mesh
    if options.is_folder and mesh is not None and not options.lora:
        return from_pretrained(options.model, mesh, dtype=torch.float32)
    torch.manual_seed(options.seed)  # of random weights, and of adapters after it
    if options.is_folder:
        model: Any = AutoModelForCausalLM.from_pretrained(
            options.model, dtype=torch.float32, local_files_only=True
        )
    else:
        model = AutoModelForCausalLM.from_config(config_of(options), dtype=torch.float32)
    if options.lora:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(options.seed)
        adapters = LoraConfig(r=options.lora, lora_alpha=2 * options.lora, target_modules="all-linear")
        model = get_peft_model(model, adapters)
    model.to(world.device).eval()
    return model if mesh is None else parallelize(model, mesh)


def train(
    model: nn.Module, texts: Texts, config: TrainConfig, steps: int, world: World, shaken: bool = False
) -> Any:
    """Yield (step, its numbers) for so many steps. shaken: see fusedtp.train.verify."""
    optimizer = adamw(model, config.optim)
    generator = torch.Generator(world.device).manual_seed(config.run.seed)
    for step in range(steps):
        if shaken:
            shake_(model, SHAKE["fp32"], generator)
        rate = set_learning_rate(optimizer, config.optim, step)
        loss = model(**texts.batch(step), use_cache=False).loss
        loss.backward()
        norm = clip_grad_norm_(model, config.optim.clip).item()
        world.check()
        optimizer.step()
        optimizer.zero_grad()
        yield step, {"loss": loss.item(), "grad_norm": norm, "lr": rate}


def verify(
    options: FinetuneOptions,
    config: TrainConfig,
    texts: Texts,
    metrics: Metrics,
    world: World,
    console: Console,
) -> Verification | None:
    """Compare the first steps with those of one process: on rank 0, with all cores, while the others wait."""
    first = metrics.steps[: options.verify_steps]
    console.print(f"training the first {len(first)} steps again in one process ...", highlight=False)
    result = None
    if world.rank == 0:
        threads = torch.get_num_threads()
        torch.set_num_threads(cores())
        alone = World(device=world.device)
        runs: list[list[Numbers]] = []
        for shaken in (False, True):
            steps = train(build(options, alone), texts, config, len(first), alone, shaken)
            runs.append([numbers for _, numbers in steps])
        result = compare(config, first, *runs)
        torch.set_num_threads(threads)
        for step, (ours, theirs) in enumerate(zip(first, runs[0], strict=True)):
            console.print(
                f"step {step + 1}: loss {ours['loss']:.6f}, in one process {theirs['loss']:.6f}",
                highlight=False,
            )
    world.wait_for_all()
    return result


def save(model: Any, tokenizer: Path | None, folder: Path, world: World) -> None:
    """save_pretrained; every rank gathers, the first one writes."""
    model.save_pretrained(str(folder))
    if world.rank == 0 and tokenizer is not None:
        from transformers import AutoTokenizer

        AutoTokenizer.from_pretrained(str(tokenizer), local_files_only=True).save_pretrained(str(folder))


def show(
    console: Console, options: FinetuneOptions, metrics: Metrics, verification: Verification | None, unit: str
) -> None:
    """The table at the end of a run."""
    table = Table(show_header=False, title="fine-tuning", title_justify="left")
    losses = [record["loss"] for record in metrics.steps]
    table.add_row("loss", f"{losses[0]:.3f} -> {losses[-1]:.3f} nats/{unit}")
    table.add_row(
        "time", f"{sum(record['seconds'] for record in metrics.steps):.1f} s for {len(losses)} steps"
    )
    if verification is not None:
        table.add_row(f"against one process ({verification.steps} steps)", verification.in_words())
    if options.out is not None:
        table.add_row("saved to", str(options.out))
    console.print(table)
    console.print(f"written to {options.runs / options.name}", highlight=False)
