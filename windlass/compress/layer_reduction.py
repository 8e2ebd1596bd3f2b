"""Initialization of a smaller model from layers of a larger one, by DeepSpeed's section `layer_reduction`."""

from __future__ import annotations

from torch import nn

from windlass.base.errors import ConfigError
from windlass.config.compression_section import LayerReduction

_WHERE = "compression_training.layer_reduction"


def copy_teacher_layers(student: nn.Module, teacher: nn.Module, section: LayerReduction) -> None:
    """Copy layers of a teacher into a model with fewer: `teacher_layer[i]` under `module_name_prefix` becomes layer
    `i`, and modules of `other_module_name` are copied with all parameters and buffers.

    Raises:
        ConfigError: the section lacks a key; `teacher_layer` has another number of layers than `keep_number_layer` or
            the model; or a module is missing or has other parameters than its source.
    """
    if section.module_name_prefix is None or section.teacher_layer is None:
        raise ConfigError(f"{_WHERE} needs module_name_prefix and teacher_layer; write both")
    if section.keep_number_layer not in (None, len(section.teacher_layer)):
        raise ConfigError(
            f"{_WHERE}.keep_number_layer is {section.keep_number_layer}, but teacher_layer names "
            f"{len(section.teacher_layer)} layers; write as many"
        )
    prefix = section.module_name_prefix
    pairs = [(f"{prefix}.{new}", f"{prefix}.{old}") for new, old in enumerate(section.teacher_layer)]
    pairs += [(name, name) for name in section.other_module_name or ()]
    layers = _submodule(student, prefix)
    if isinstance(layers, nn.ModuleList) and len(layers) != len(section.teacher_layer):
        raise ConfigError(
            f"the model has {len(layers)} layers under {prefix!r}, but {_WHERE}.teacher_layer names "
            f"{len(section.teacher_layer)}; build the smaller model with as many"
        )
    for new, old in pairs:
        target, source = _submodule(student, new), _submodule(teacher, old)
        try:
            target.load_state_dict(source.state_dict())
        except RuntimeError as error:
            raise ConfigError(f"{_WHERE}: {new!r} does not fit the teacher's {old!r}: {error}") from error


def _submodule(model: nn.Module, name: str) -> nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError as error:
        raise ConfigError(
            f"{_WHERE}: {type(model).__name__} has no module {name!r}; correct module_name_prefix, teacher_layer or "
            "other_module_name"
        ) from error
