"""Make models of ordinary modules tensor-parallel, by plan and in place."""

from .clip import clip_grad_norm_
from .convert import from_transformers, to_transformers
from .expert_parallel import ExpertSplit
from .explain import Explanation, explain
from .parallelize import parallelize
from .pretrained import from_pretrained
from .proof import Proof, prove
from .styles import FusedColwise, FusedEmbedding, FusedExperts, FusedRowwise, Replicated

__all__ = [
    "ExpertSplit",
    "Explanation",
    "FusedColwise",
    "FusedEmbedding",
    "FusedExperts",
    "FusedRowwise",
    "Proof",
    "Replicated",
    "clip_grad_norm_",
    "explain",
    "from_pretrained",
    "from_transformers",
    "parallelize",
    "prove",
    "to_transformers",
]
