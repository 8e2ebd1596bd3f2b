"""Tensors of a model's files under the names that the model gives them.

[Note: checkpoint names] transformers 5 renames and joins tensors while it loads: `embed_out.weight` of GPT-NeoX becomes
`lm_head.weight`, and the matrices of all experts become one. `CheckpointNames` applies the same rules of the model's
class to a directory, one tensor of the model at a time.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from windlass.base.errors import ModelError
from windlass.compress.split_experts import SplitExperts, can_split, split_name, stacked_names

ReadTensor = Callable[[str], torch.Tensor]


@dataclass
class ConvertedTensors:
    """Group of tensors in the files, which are joined or split together to tensors of the model.

    Attributes:
        name: name of the first tensor of the model.
        sources: names in the files, in the order of the conversion.
    """

    name: str
    sources: list[str] = field(default_factory=list)
    patterns: list[str] = field(default_factory=list)
    converter: Any = None


class CheckpointNames:
    """Assignment of the tensors of files to those of a model; see [Note: checkpoint names].

    Args:
        model: model on any device; its values are not read.
        sources: names in the files.

    Attributes:
        renamed: names in the model by name in the files, for tensors whose values stay unchanged.
        converted: tensors of the files that are joined or split, by the name of the first tensor of the model.
        unknown: names in the files that the model lacks.
        source_of: inverse of `renamed`.
    """

    def __init__(self, model: nn.Module, sources: Iterable[str]) -> None:
        self._model = model
        self.renamed: dict[str, str] = {}
        self.converted: dict[str, ConvertedTensors] = {}
        self.unknown: list[str] = []
        known = set(model.state_dict())
        rules = _Rules(model, known)
        for source in sorted(sources, key=rules.order):
            name, pattern = rules.rename(source)
            if name not in known:
                self.unknown.append(source)
            elif pattern is None:
                self.renamed[source] = name
            else:
                entry = self.converted.setdefault(name, ConvertedTensors(name, converter=rules.converters[pattern]))
                entry.sources.append(source)
                entry.patterns.append(pattern)
        self._rules = rules
        self.source_of = {name: source for source, name in self.renamed.items()}

    def module_of(self, layer: str) -> str | None:
        """Return the model's name of a layer, given the layer's name in the files; None if the layer's weight is not a
        single tensor of the model."""
        if f"{layer}.weight" in self.renamed:
            return self.renamed[f"{layer}.weight"].removesuffix(".weight")
        name, pattern = self._rules.rename(f"{layer}.weight")
        return name.removesuffix(".weight") if pattern is None and name.endswith(".weight") else None

    def split_experts(self, layers: Collection[str] | None = None) -> None:
        """Replace stacked experts of the model by linear layers for each tensor of the files; see [Note: split
        experts].

        Args:
            layers: names in the files; only modules that contain one of these layers are replaced. None: all that can
                be replaced.
        """
        for module_name, module in list(self._model.named_modules()):
            entries = [self.converted.get(name) for name in stacked_names(module_name)]
            if None in entries or not can_split(module):
                continue
            found = {
                source: split_name(entry.name, source, pattern, entry.converter)
                for entry in entries
                if entry is not None
                for source, pattern in zip(entry.sources, entry.patterns, strict=True)
            }
            wanted = layers is None or any(source.removesuffix(".weight") in layers for source in found)
            if not wanted or None in found.values() or len(set(found.values())) < len(found):
                continue
            self._model.set_submodule(module_name, SplitExperts(module))
            for name in stacked_names(module_name):
                del self.converted[name]
            self.renamed |= {source: name for source, name in found.items() if name is not None}
        self.source_of = {name: source for source, name in self.renamed.items()}

    def convert(self, entry: ConvertedTensors, read: ReadTensor) -> dict[str, torch.Tensor]:
        """Return the tensors of the model that an entry of `converted` becomes.

        Raises:
            ModelError: the tensors do not fit together.
        """
        converter = copy.deepcopy(entry.converter)
        for source, pattern in zip(entry.sources, entry.patterns, strict=True):
            converter.add_tensor(entry.name, source, pattern, read(source))
        try:
            found = converter.convert(entry.name, model=self._model, config=getattr(self._model, "config", None))
        except (ValueError, RuntimeError, KeyError, IndexError) as error:
            raise ModelError(
                f"{len(entry.sources)} tensors like {entry.sources[0]!r} do not become {entry.name!r}: {error}; copy "
                "the model again"
            ) from error
        return {name: value[0] if isinstance(value, list) else value for name, value in found.items()}


class _Rules:
    """transformers' rules that convert the names of one model; empty if the model has none."""

    def __init__(self, model: nn.Module, known: set[str]) -> None:
        self._known, self.converters = dict.fromkeys(known, True), dict[str, Any]()
        self._prefix = getattr(model, "base_model_prefix", None)
        self.order: Callable[[str], Any] = lambda name: name
        self._loading: Any = None
        self._renamings: list[Any] = []
        self._converters: list[Any] = []
        if not hasattr(model, "base_model_prefix"):
            return
        try:
            from transformers import conversion_mapping, core_model_loading
        except ImportError:
            return  # transformers 4 keeps the names of the files
        self._loading, self.order = core_model_loading, core_model_loading.dot_natural_key
        rules = conversion_mapping.get_model_conversion_mapping(model)
        self._renamings = [rule for rule in rules if isinstance(rule, core_model_loading.WeightRenaming)]
        self._converters = [rule for rule in rules if isinstance(rule, core_model_loading.WeightConverter)]
        self.converters = {pattern: rule for rule in self._converters for pattern in rule.source_patterns}

    def rename(self, source: str) -> tuple[str, str | None]:
        """Return the name in the model; and the pattern of the converter of the values, None if they stay unchanged."""
        if self._loading is None:
            return source, None
        known, rename = self._known, self._loading.rename_source_key
        name, pattern = rename(source, self._renamings, self._converters, self._prefix, known)
        if name not in known:
            plain, _ = rename(source, [], [], self._prefix, known)
            if plain in known:
                return plain, None
        return name, pattern
