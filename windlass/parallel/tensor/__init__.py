"""Tensor parallelism: single layers are cut over ranks that compute the same samples.

What is cut, arithmetic and names alone; reading order: shares, heads; inner, linear_layers, plan, wishes, table,
experts_layout, declared, heads_found, fused, tracing, vocabulary; attention_shares, attention_parameters, chains,
build. How it computes: owned, cutting, draws, entrance, row_product, linear_cut; attention_cut, embedding_cut,
cross_entropy, head, experts_cut; sequence_cut, sequence_norms; apply. Beside it: whole, volume.
"""

from windlass.parallel.tensor.apply import apply_tensor_parallel
from windlass.parallel.tensor.build import build_plan
from windlass.parallel.tensor.cross_entropy import token_losses
from windlass.parallel.tensor.draws import agree, seed_tracker
from windlass.parallel.tensor.head import CutVocabulary, cut_logits, vocabulary_of
from windlass.parallel.tensor.plan import Cut, Plan, Style
from windlass.parallel.tensor.volume import step_bytes
from windlass.parallel.tensor.whole import assemble

__all__ = [
    "Cut",
    "CutVocabulary",
    "Plan",
    "Style",
    "agree",
    "apply_tensor_parallel",
    "assemble",
    "build_plan",
    "cut_logits",
    "seed_tracker",
    "step_bytes",
    "token_losses",
    "vocabulary_of",
]
