"""Sizes of a transformer that determine its computation and communication."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from windlass.base.bounded_input import parse_int
from windlass.base.bounded_json import parse_json
from windlass.base.errors import ConfigError


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder of equal layers: attention, and a feed-forward network or experts. Biases and learned position
    embeddings, which are small, are left out.

    Attributes:
        hidden: width of an activation.
        layers: number of layers.
        heads: query heads.
        vocabulary: rows of the embedding, and of the head.
        kv_heads: key and value heads; 0: equal to `heads`.
        head_dim: width of a head; 0: hidden / heads.
        intermediate: inner width of the feed-forward network, or of one expert; 0: 4 x hidden.
        gated: True if the feed-forward network has three matrices (gate, up, down), False if it has two.
        tied: True if the head shares the weight of the embedding.
        experts: experts of a layer; 0: one feed-forward network.
        top_k: experts per token.
        has_router_loss: True if there is a load-balancing loss over the routers of all layers.

    Raises:
        ConfigError: a size is below 1, `top_k` is out of range, or `head_dim` is 0 and `heads` does not divide
            `hidden`.
    """

    hidden: int
    layers: int
    heads: int
    vocabulary: int
    kv_heads: int = 0
    head_dim: int = 0
    intermediate: int = 0
    gated: bool = True
    tied: bool = False
    experts: int = 0
    top_k: int = 0
    has_router_loss: bool = False

    def __post_init__(self) -> None:
        for name in ("hidden", "layers", "heads", "vocabulary"):
            if getattr(self, name) < 1:
                raise ConfigError(f"a model's {name} is {getattr(self, name)}; it must be at least 1")
        if not self.head_dim and self.hidden % self.heads:
            raise ConfigError(f"hidden {self.hidden} is not a multiple of heads {self.heads}; set head_dim")
        if self.experts and not 0 < self.top_k <= self.experts:
            raise ConfigError(
                f"top_k = {self.top_k} of {self.experts} experts; it must be between 1 and the number of experts"
            )

    @property
    def resolved_head_dim(self) -> int:
        """Width of a head, with the default applied."""
        return self.head_dim or self.hidden // self.heads

    @property
    def resolved_kv_heads(self) -> int:
        """Number of key and value heads, with the default applied."""
        return self.kv_heads or self.heads

    @property
    def attention_numel(self) -> int:
        """Elements of a layer's four attention matrices."""
        return 2 * self.hidden * self.resolved_head_dim * (self.heads + self.resolved_kv_heads)

    @property
    def feed_forward_numel(self) -> int:
        """Elements of a feed-forward network, or of one expert."""
        return (3 if self.gated else 2) * self.hidden * (self.intermediate or 4 * self.hidden)

    @property
    def replicated_numel(self) -> int:
        """Elements of a layer that no axis shards: two norms, and the router if there are experts."""
        return 2 * self.hidden + self.experts * self.hidden

    @property
    def layer_numel(self) -> int:
        """Elements of a layer."""
        return self.attention_numel + self.replicated_numel + self.feed_forward_numel * (self.experts or 1)

    @property
    def embedding_numel(self) -> int:
        """Elements of the embedding. The head has as many unless it is tied."""
        return self.vocabulary * self.hidden

    @property
    def numel(self) -> int:
        """Elements of the full model."""
        return self.layers * self.layer_numel + self.embedding_numel * (1 if self.tied else 2) + self.hidden


_LLAMA = ModelShape(hidden=4096, layers=32, heads=32, vocabulary=32_000, intermediate=11_008)
_GATED = ("silu", "swish", "swiglu", "gelu_pytorch_tanh")
_EXPERTS_OF_A_TOKEN = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_k",
    "moe_topk",
    "moe_top_k",
    "top_k_experts",
)
_TWO_MATRICES = ("bloom", "falcon", "gpt_bigcode", "mpt", "starcoder2")
"""Model types whose feed-forward network has two matrices, although their configuration looks like a gated one."""
PRESETS = {
    "7b": _LLAMA,
    "70b": ModelShape(hidden=8192, layers=80, heads=64, kv_heads=8, vocabulary=128_256, intermediate=28_672),
    "8x7b": ModelShape(
        hidden=4096, layers=32, heads=32, kv_heads=8, vocabulary=32_000, intermediate=14_336, experts=8, top_k=2
    ),
}
"""Shapes of well-known models: Llama 2 7B, Llama 3 70B, Mixtral 8x7B."""


def parse_model_shape(text: str) -> ModelShape:
    """Parse a preset name, a `config.json` of transformers (or its folder), or `hidden=4096,layers=32,...`.

    Raises:
        ConfigError: the text is none of these, or a size is missing.
    """
    if text in PRESETS:
        return PRESETS[text]
    if "=" in text:
        return _from_key_values(text)
    path = Path(text)
    path = path / "config.json" if path.is_dir() else path
    try:
        return from_transformers(parse_json(path.read_bytes()))
    except (OSError, ValueError, TypeError, AttributeError, OverflowError) as error:
        names = ", ".join(PRESETS)
        raise ConfigError(
            f"{text} is not a model shape: write {names}, a config.json of transformers, or hidden=4096,layers=32,"
            f"heads=32,vocabulary=32000 ({error})"
        ) from None


def from_transformers(config: Mapping[str, Any]) -> ModelShape:
    """Read the shape from a configuration of transformers. The key names of its common model families are accepted.

    Raises:
        ConfigError: the configuration lacks a size, or has an encoder and a decoder.
    """

    def first(*names: str, default: int | None = None) -> int:
        found = next((config[name] for name in names if config.get(name)), default)
        if found is None:
            raise ConfigError(
                f"the model's configuration has none of {', '.join(names)}, so its shape is unknown; add one"
            )
        return int(found)

    if config.get("is_encoder_decoder"):
        raise ConfigError(
            f"{config.get('model_type', 'the model')} has an encoder and a decoder, and only the sizes of a decoder "
            "are known; give those of a decoder with as many parameters: hidden=512,layers=12,heads=8,vocabulary=32000"
        )
    experts = first("num_local_experts", "n_routed_experts", "num_experts", "moe_num_experts", default=0)
    own = ("moe_intermediate_size", "intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size")
    activation = str(config.get("hidden_act", config.get("activation_function", "silu")))
    # Falcon and GPT-BigCode have one key and value head by default.
    one_key_head = bool(config.get("multi_query")) and not config.get("new_decoder_architecture")
    return ModelShape(
        hidden=first("hidden_size", "n_embd", "d_model"),
        layers=first("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
        heads=first("num_attention_heads", "n_head", "n_heads"),
        vocabulary=first("vocab_size"),
        kv_heads=1 if one_key_head else first("num_key_value_heads", "num_kv_heads", default=0),
        head_dim=first("head_dim", default=0),
        intermediate=first(*(own if experts else own[1:]), default=0),
        gated=activation in _GATED and config.get("model_type") not in _TWO_MATRICES,
        tied=bool(config.get("tie_word_embeddings", True)),
        experts=experts,
        top_k=first(*_EXPERTS_OF_A_TOKEN) if experts else 0,
        has_router_loss=bool(experts and config.get("output_router_logits")),
    )


def _from_key_values(text: str) -> ModelShape:
    kinds = {field.name: field for field in fields(ModelShape)}
    found: dict[str, Any] = {}
    for word in text.split(","):
        name, _, value = word.partition("=")
        if name not in kinds or (parse_int(value) or -1) < 0 and value != "0":
            raise ConfigError(f"{word!r} in a model shape is not NAME=NUMBER; names are {', '.join(kinds)}")
        found[name] = bool(int(value)) if isinstance(kinds[name].default, bool) else int(value)
    missing = [name for name in ("hidden", "layers", "heads", "vocabulary") if name not in found]
    if missing:
        raise ConfigError(f"the model shape {text!r} lacks {', '.join(missing)}; add them as NAME=NUMBER")
    return ModelShape(**found)
