"""Leaf modules of stage 3: marks that scripts set and ask for. windlass gathers what runs, and needs none."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from windlass.base.log import logger


def z3_leaf_module(model: nn.Module) -> bool:
    """Whether a module is marked."""
    return bool(getattr(model, "_z3_leaf", False))


def z3_leaf_parameter(model: nn.Parameter) -> bool:
    """Whether a parameter says that it belongs to a marked module."""
    return hasattr(model, "ds_z3_leaf_module")


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """The marked modules of a model."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Mark one module, or take its mark."""
    model._z3_leaf = flag  # type: ignore[assignment]


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type[nn.Module] | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark every module of these classes, which may be given by name, with their module's or without.

    Raises:
        ValueError: there is none, and `raise_if_not_found`.
        AssertionError: something is neither a class nor a name.
    """
    return _mark_classes(model, leaf_module_classes, True, raise_if_not_found)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type[nn.Module] | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Take the mark from every module of these classes.

    Raises:
        ValueError, AssertionError: as `set_z3_leaf_modules`.
    """
    return _mark_classes(model, leaf_module_classes, False, raise_if_not_found)


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Mark modules by their names in `named_modules`: those found, and the names that are nobody's.

    Raises:
        ValueError: a name is nobody's, and `raise_if_not_found`.
    """
    by_name = dict(model.named_modules())
    missing = [name for name in module_names if name not in by_name]
    _raise_if_missing("named", missing, model, raise_if_not_found)
    return _mark((by_name[name] for name in module_names if name in by_name), flag), missing


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Mark modules by how their names in `named_modules` end: those found, and the endings that are nobody's.

    Raises:
        ValueError: an ending is nobody's, and `raise_if_not_found`.
    """
    by_name = dict(model.named_modules())
    missing = [suffix for suffix in module_name_suffixes if not any(name.endswith(suffix) for name in by_name)]
    _raise_if_missing("whose name ends with", missing, model, raise_if_not_found)
    found = {
        id(module): module
        for suffix in module_name_suffixes
        for name, module in by_name.items()
        if name.endswith(suffix)
    }
    return _mark(found.values(), flag), missing


def apply_zero_leaf_module_config(model: nn.Module, leaf_cfg: Any) -> list[nn.Module]:
    """Mark the modules that a section `leaf_module` names by class, name or suffix, and return them.

    Names that fit no module are logged where the section differs from the default.
    """
    if leaf_cfg is None:
        return []
    found = set_z3_leaf_modules(model, leaf_cfg.classes, raise_if_not_found=False)
    by_name, unknown = set_z3_leaf_modules_by_name(model, leaf_cfg.names, raise_if_not_found=False)
    by_suffix, unmatched = set_z3_leaf_modules_by_suffix(model, leaf_cfg.name_suffixes, raise_if_not_found=False)
    if unknown or unmatched:
        logger.warning("zero_optimization.leaf_module: no module fits %s", ", ".join([*unknown, *unmatched]))
    return list({id(module): module for module in [*found, *by_name, *by_suffix]}.values())


def _mark_classes(model: nn.Module, classes: Sequence[type | str], flag: bool, strict: bool) -> list[nn.Module]:
    wrong = [entry for entry in classes if not isinstance(entry, type | str)]
    assert not wrong, f"leaf_module_classes holds {wrong[0]!r}; write classes, or their names"
    kinds = tuple(entry for entry in classes if isinstance(entry, type))
    names = {entry for entry in classes if isinstance(entry, str)}
    found = []
    for module in model.modules():
        cls = type(module)
        if isinstance(module, kinds) or names & {cls.__name__, f"{cls.__module__}.{cls.__qualname__}"}:
            found.append(module)
    if not found and strict:
        raise ValueError(f"no module of {list(classes)} in {type(model).__name__}; it has {_class_names(model)}")
    return _mark(found, flag)


def _mark(modules: Iterable[nn.Module], flag: bool) -> list[nn.Module]:
    marked = list(modules)
    for module in marked:
        set_z3_leaf_module(module, flag)
    return marked


def _raise_if_missing(how: str, missing: list[str], model: nn.Module, strict: bool) -> None:
    if missing and strict:
        raise ValueError(f"no module {how} {', '.join(map(repr, missing))} in {type(model).__name__}")


def _class_names(model: nn.Module) -> str:
    return ", ".join(sorted({type(module).__name__ for module in model.modules()}))
