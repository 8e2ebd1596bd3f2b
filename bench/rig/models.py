"""Models of the parallelism benchmark, their batches, and their shapes for formulas."""

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
        heads: query heads, and as many key and value heads unless `kv_heads` is set.
        intermediate: width inside a feed-forward network, or inside one expert.
        vocabulary: number of tokens.
        experts: experts per layer; 0: one feed-forward network.
        chosen: experts per token.
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
        """Return the arguments of the transformers configuration."""
        results = {
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
            results |= {"num_local_experts": self.experts, "num_experts_per_tok": self.chosen, "sliding_window": None}
        return results

    def shape(self) -> ModelShape:
        """Return the shape for formulas."""
        return from_transformers(self.plain())


def build(sizes: Sizes) -> Any:
    """Return the full model, with the same values in every process."""
    import torch
    import transformers

    torch.manual_seed(0)
    if sizes.experts:
        return transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes.plain()))
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes.plain()))


def samples(vocabulary: int, count: int, length: int, seed: int) -> Any:
    """Return `[count, length]` tokens."""
    import torch

    return torch.randint(0, vocabulary, (count, length), generator=torch.Generator().manual_seed(seed))
