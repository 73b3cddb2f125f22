"""`fusedtp explain`: how a model of transformers would be split, from its configuration alone."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

import torch

HEADS = (
    "AutoModelForSeq2SeqLM",
    "AutoModelForSpeechSeq2Seq",
    "AutoModelForImageTextToText",
    "AutoModelForCausalLM",
    "AutoModelForMaskedLM",
    "AutoModel",
)
MODEL = "a hub name, a folder, a config.json, or a model type"


def main(argv: list[str]) -> int:
    """Print the table of `explain` for a model without weights, split over virtual ranks.

    Returns the exit code: 1 if there is no such model or it cannot be split this way, 2 without transformers.
    """
    parser = argparse.ArgumentParser(prog="fusedtp explain", description=__doc__)
    parser.add_argument("--model", required=True, help=MODEL)
    parser.add_argument("--tp", type=int, default=2, help="ranks that share the model (default 2)")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of the forward asked about (default 4096)")
    parser.add_argument("--whole-tokens", action="store_true", help="without sequence parallelism")
    options = parser.parse_args(argv)
    for option in ("tp", "tokens"):
        if getattr(options, option) < 1:
            parser.error(f"--{option} {getattr(options, option)} must be at least 1")
    try:
        print(explained(options.model, options.tp, options.tokens, not options.whole_tokens))
    except ModuleNotFoundError as error:
        print(f"fusedtp explain needs transformers: pip install 'fusedtp[hf]' ({error})", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"fusedtp explain: error: {error}\n--model takes {MODEL}, such as llama", file=sys.stderr)
        return 1
    except ValueError as error:
        print(f"fusedtp explain: error: {error}", file=sys.stderr)
        return 1
    return 0


def explained(name: str, ranks: int, tokens: int, sequence_parallel: bool) -> str:
    """The table, see main. Raises ValueError if the model cannot be split this way, OSError if it does not exist."""
    from transformers import CONFIG_MAPPING, AutoConfig

    from fusedtp.comm import VirtualGroup, VirtualWorld

    from .explain import explain
    from .parallelize import parallelize
    from .pretrained import build_on_meta

    known = name in CONFIG_MAPPING and not os.path.exists(name)
    config = CONFIG_MAPPING[name]() if known else AutoConfig.from_pretrained(name)
    model = build_on_meta(class_of(config), config, torch.float32)

    def one(group: VirtualGroup) -> str:
        import copy

        own = parallelize(copy.deepcopy(model), group, sequence_parallel=sequence_parallel)
        return str(explain(own, tokens))

    split: str = VirtualWorld(ranks).run(one)[0]
    return f"{type(model).__name__} over {ranks} ranks, as this machine would run it\n{split}"


def class_of(config: Any) -> Any:
    """The model class of a config: what it names, or else the first head that transformers has for its type."""
    import transformers

    for name in config.architectures or ():
        found = getattr(transformers, name, None)
        if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel):
            return found
    for auto in HEADS:
        if type(config) in getattr(transformers, auto)._model_mapping:
            return getattr(transformers, auto)
    raise ValueError(f"transformers has no model of type {config.model_type!r}")
