"""Transformer blocks as ordinary modules; `fusedtp.parallelize` makes them parallel in place."""

from .attention import Attention
from .block import TransformerBlock
from .config import ModelConfig
from .dropout import HiddenDropout
from .embedding import VocabParallelEmbedding
from .experts import Experts
from .fp8 import FP8Linear, advance_fp8_
from .generate import generate
from .init import init_
from .layout import TokenLayout, document_ids_from_lengths
from .linear import Linear, project
from .linear_loss import linear_cross_entropy
from .loss import vocab_parallel_cross_entropy
from .mlp import MLP
from .model import CausalLM, CausalLMOutput
from .moe import MoE
from .moe_config import MoEConfig
from .norm import RMSNorm
from .recompute import recompute_
from .rope import RopeScaling
from .router import Router

__all__ = [
    "MLP",
    "Attention",
    "CausalLM",
    "CausalLMOutput",
    "Experts",
    "FP8Linear",
    "HiddenDropout",
    "Linear",
    "MoE",
    "MoEConfig",
    "ModelConfig",
    "RMSNorm",
    "RopeScaling",
    "Router",
    "TokenLayout",
    "TransformerBlock",
    "VocabParallelEmbedding",
    "advance_fp8_",
    "document_ids_from_lengths",
    "generate",
    "init_",
    "linear_cross_entropy",
    "project",
    "recompute_",
    "vocab_parallel_cross_entropy",
]
