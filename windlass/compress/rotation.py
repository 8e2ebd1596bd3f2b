"""Rotations of the hidden states and of the values of each head, folded into the weights (the first two kinds of
QuaRot).

[Note: rotated hidden states] An RMS norm without weight commutes with an orthogonal `R`. So the weight of each norm is
multiplied into the layers that read it, embeddings and layers that write hidden states are rotated, `W_out <- R^T
W_out`, and layers that read them rotate back, `W_in <- W_in R`. The function stays the same; outliers of single
features are spread over all of them (Ashkboos et al. 2024, https://arxiv.org/abs/2404.00456). Attention adds up the
values of positions, which commutes with a rotation `S` of the features of a head: the values become `S^T v`, and the
columns `W` of the output layer that read a head become `W S`.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from windlass.base.errors import ModelError
from windlass.compress.low_rank_config import RANKS_ENTRY
from windlass.compress.model_directory import ModelDirectory, TensorPlace

_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")  # families with pre-norm RMS blocks and the layer names below
_READERS = {
    "q_proj": "input_layernorm",
    "k_proj": "input_layernorm",
    "v_proj": "input_layernorm",
    "gate_proj": "post_attention_layernorm",
    "up_proj": "post_attention_layernorm",
}
_WRITERS = ("o_proj", "down_proj")
_EMBEDDING, _NORM, _HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
_LAYER = re.compile(r"(model\.layers\.\d+)\.(?:.*\.)?([a-z0-9_]+)\.(weight|bias)")


class RotatedDirectory(ModelDirectory):
    """View of a model's directory with rotated hidden states. Its tensors are computed when they are read.

    See [Note: rotated hidden states]. A head that shares the embedding becomes a separate tensor, since the weight of
    the last norm is multiplied into the head but not into the embedding.

    Raises:
        ModelError: the model type is not llama, mistral, qwen2 or qwen3, a tensor is missing, layers are factorized, or
            the model is not a causal language model.
    """

    def __init__(self, source: ModelDirectory, seed: int = 0) -> None:
        kind = source.config.get("model_type")
        if kind not in _FAMILIES or _EMBEDDING not in source.places or _NORM not in source.places:
            raise ModelError(
                f"{source.path} is of type {kind!r}, whose hidden states are not rotated; rotation supports "
                f"{', '.join(_FAMILIES)}"
            )
        if source.config.get(RANKS_ENTRY):
            raise ModelError(
                f"{source.path} has layers in two factors ({RANKS_ENTRY} in its config.json), which rotation does not "
                "support: leave out rotate"
            )
        other = next((name for name in source.places if not name.startswith("model.") and name != _HEAD), None)
        # A causal language model ignores other tensors, such as a value head.
        is_causal = any(str(one).endswith("ForCausalLM") for one in source.config.get("architectures") or ())
        if other is not None and not is_causal:
            raise ModelError(
                f"{source.path} has the tensor {other!r}, e.g. of a classifier, which would read rotated hidden "
                "states; rotation supports causal language models: leave out rotate"
            )
        self.path, self.config = source.path, dict(source.config)
        self._source = source
        self.places = dict(source.places)
        self.config["tie_word_embeddings"] = False  # also if the files have a copy of the embedding as the head
        if _HEAD not in self.places:
            self.places[_HEAD] = replace(source.places[_EMBEDDING])
        hidden = source.places[_EMBEDDING].shape[1]
        self._rotation = random_hadamard(hidden, seed)
        size = source.config.get("head_dim") or hidden // source.config["num_attention_heads"]
        self._head_rotation = random_hadamard(int(size), seed + 1)

    def read(self, name: str) -> Tensor:
        """Return a rotated tensor, in the dtype that it has in the file.

        Raises:
            ModelError: no tensor has this name, or it cannot be read.
        """
        place: TensorPlace | None = self.places.get(name)
        tensor = self._source.read(_EMBEDDING if name == _HEAD and name not in self._source.places else name)
        return self._rotate(name, tensor).to(tensor.dtype if place is None else place.dtype)

    def can_map(self, name: str) -> bool:
        """Return False: the file has the tensor before the rotation."""
        return False

    def _rotate(self, name: str, tensor: Tensor) -> Tensor:
        rotation = self._rotation
        if name == _EMBEDDING:
            return (tensor.double() @ rotation).float()
        if name == _HEAD:
            return (tensor.double() * self._source.read(_NORM).double() @ rotation).float()
        if name == _NORM:
            return torch.ones_like(tensor)
        found = _LAYER.fullmatch(name)
        if found is None:
            return tensor
        prefix, leaf, part = found.groups()
        if leaf in _READERS.values():
            return torch.ones_like(tensor)
        if leaf in _READERS and part == "weight":
            norm = self._source.read(f"{prefix}.{_READERS[leaf]}.weight").double()
            wide = tensor.double() * norm @ rotation
            return (self._rotate_heads(wide.t()).t() if leaf == "v_proj" else wide).float()
        if leaf == "v_proj" and part == "bias":
            return self._rotate_heads(tensor.double()[None])[0].float()
        if leaf in _WRITERS and part == "weight":
            wide = tensor.double()
            return (rotation.t() @ (self._rotate_heads(wide) if leaf == "o_proj" else wide)).float()
        if leaf in _WRITERS:
            return (tensor.double() @ rotation).float()
        return tensor

    def _rotate_heads(self, rows: Tensor) -> Tensor:
        """Return `[rows, heads * size]` features with the features of each head rotated."""
        size = len(self._head_rotation)
        rotated: Tensor = rows.unflatten(1, (-1, size)) @ self._head_rotation
        return rotated.flatten(1)


def untie_head(model: Any) -> None:
    """Give the output head of a model a copy of the weight that it shares with the embedding, in place, as in the
    directory of the rotated model."""
    head = model.get_output_embeddings()
    if head is not None and head.weight is model.get_input_embeddings().weight:
        head.weight = nn.Parameter(head.weight.detach().clone())
        model.config.tie_word_embeddings = False


def random_hadamard(size: int, seed: int = 0) -> Tensor:
    """Return a random orthogonal matrix, float64: a Hadamard matrix with random signs of its rows.

    For a size of a power of two times an odd number above 1, the matrix is the Kronecker product of a random orthogonal
    matrix of the odd size and a Hadamard matrix.
    """
    generator = torch.Generator().manual_seed(seed)
    power = size & -size
    hadamard = torch.ones(1, 1, dtype=torch.float64)
    while len(hadamard) < power:
        hadamard = torch.cat([torch.cat([hadamard, hadamard], 1), torch.cat([hadamard, -hadamard], 1)])
    hadamard = hadamard / power**0.5
    odd = size // power
    if odd > 1:
        square = torch.randn(odd, odd, generator=generator, dtype=torch.float64)
        hadamard = torch.kron(torch.linalg.qr(square).Q.contiguous(), hadamard)
    signs = torch.randint(0, 2, (size, 1), generator=generator).double() * 2 - 1
    return hadamard * signs
