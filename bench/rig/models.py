"""The models that the benchmark of parallelism trains, their batches, and their shapes for formulas."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from windlass.parallel.model_shape import ModelShape, from_transformers


@dataclass(frozen=True)
class Sizes:
    """Size of a Llama in fp32, or of a Mixtral if there are experts.

    Attributes:
        hidden: width.
        layers: blocks.
        heads: of queries, and as many of keys and values unless `kv_heads` says otherwise.
        intermediate: width inside a feed-forward network, or inside one expert.
        vocabulary: number of tokens.
        experts: of a layer; 0: one feed-forward network.
        chosen: experts that a token goes to.
    """

    hidden: int
    layers: int
    heads: int
    intermediate: int
    vocabulary: int
    kv_heads: int = 0
    experts: int = 0
    chosen: int = 0

    def plain(self) -> dict[str, Any]:
        """Arguments of the transformers configuration."""
        found = {
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads or self.heads,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": 1 << 16,
            "tie_word_embeddings": False,
            "use_cache": False,
        }
        if self.experts:
            found |= {"num_local_experts": self.experts, "num_experts_per_tok": self.chosen, "sliding_window": None}
        return found

    def shape(self) -> ModelShape:
        """For formulas."""
        return from_transformers(self.plain())


def build(sizes: Sizes) -> Any:
    """The model, whole, with the same values wherever it is made."""
    import torch
    import transformers

    torch.manual_seed(0)
    if sizes.experts:
        return transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes.plain()))
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes.plain()))


def samples(vocabulary: int, count: int, length: int, seed: int) -> Any:
    """`[count, length]` tokens."""
    import torch

    return torch.randint(0, vocabulary, (count, length), generator=torch.Generator().manual_seed(seed))
