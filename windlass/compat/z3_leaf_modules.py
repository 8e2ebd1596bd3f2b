"""Leaf-module marks of stage 3, which scripts set and read. windlass does not need the marks: it gathers modules as
they run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from windlass.base.log import logger


def z3_leaf_module(model: nn.Module) -> bool:
    """Return True if a module is marked as a leaf."""
    return bool(getattr(model, "_z3_leaf", False))


def z3_leaf_parameter(model: nn.Parameter) -> bool:
    """Return True if a parameter has the attribute `ds_z3_leaf_module`."""
    return hasattr(model, "ds_z3_leaf_module")


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """Return the marked modules of a model."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Mark or unmark one module."""
    model._z3_leaf = flag  # type: ignore[assignment]


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type[nn.Module] | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark and return every module of these classes, given as classes or as plain or module-qualified names.

    Raises:
        ValueError: no module matches, and `raise_if_not_found` is set.
        AssertionError: an item is neither a class nor a string.
    """
    return _mark_classes(model, leaf_module_classes, True, raise_if_not_found)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type[nn.Module] | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Unmark and return every module of these classes.

    Raises:
        ValueError, AssertionError: see `set_z3_leaf_modules`.
    """
    return _mark_classes(model, leaf_module_classes, False, raise_if_not_found)


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Mark (or unmark, `flag` False) modules by their names in `named_modules`.

    Return the modules found and the names not found.

    Raises:
        ValueError: a name is not found, and `raise_if_not_found` is set.
    """
    by_name = dict(model.named_modules())
    missing = [name for name in module_names if name not in by_name]
    _raise_if_missing("named", missing, model, raise_if_not_found)
    return _mark((by_name[name] for name in module_names if name in by_name), flag), missing


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Mark (or unmark, `flag` False) modules by suffixes of their names in `named_modules`.

    Return the modules found and the suffixes not found.

    Raises:
        ValueError: a suffix is not found, and `raise_if_not_found` is set.
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
    """Mark the modules that a section `leaf_module` lists by class, name or suffix, and return them.

    Names and suffixes that match no module are logged; classes that match none are not.
    """
    if leaf_cfg is None:
        return []
    found = set_z3_leaf_modules(model, leaf_cfg.classes, raise_if_not_found=False)
    by_name, unknown = set_z3_leaf_modules_by_name(model, leaf_cfg.names, raise_if_not_found=False)
    by_suffix, unmatched = set_z3_leaf_modules_by_suffix(model, leaf_cfg.name_suffixes, raise_if_not_found=False)
    if unknown or unmatched:
        logger.warning(
            "zero_optimization.leaf_module: no module matches %s; remove these entries",
            ", ".join([*unknown, *unmatched]),
        )
    return list({id(module): module for module in [*found, *by_name, *by_suffix]}.values())


def mark_fine_grained_modules(model: nn.Module, threshold: int) -> list[nn.Module]:
    """Mark the outermost modules with at most `threshold` parameter elements per module in them, and return them.

    This is the meaning of `stage3_module_granularity_threshold`. The number of modules in a module includes
    the module itself, but no modules without parameters and no containers such as `nn.ModuleList`. Containers and
    modules without children are not marked.
    """
    found: list[nn.Module] = []

    def visit(module: nn.Module) -> None:
        inside = [one for one in module.modules() if next(one.parameters(), None) is not None and not _contains(one)]
        if not inside:
            return
        numel = sum(parameter.numel() for parameter in module.parameters())
        if any(True for _ in module.children()) and not _contains(module) and numel // len(inside) <= threshold:
            found.append(module)
            return
        for child in module.children():
            visit(child)

    visit(model)
    return _mark(found, True)


def _contains(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential)


def _mark_classes(model: nn.Module, classes: Sequence[type | str], flag: bool, strict: bool) -> list[nn.Module]:
    wrong = [entry for entry in classes if not isinstance(entry, type | str)]
    assert not wrong, f"leaf_module_classes holds {wrong[0]!r}; use classes, or their names"
    kinds = tuple(entry for entry in classes if isinstance(entry, type))
    names = {entry for entry in classes if isinstance(entry, str)}
    found = []
    for module in model.modules():
        cls = type(module)
        if isinstance(module, kinds) or names & {cls.__name__, f"{cls.__module__}.{cls.__qualname__}"}:
            found.append(module)
    if not found and strict:
        raise ValueError(
            f"no module of {list(classes)} in {type(model).__name__}; use classes among {_class_names(model)}"
        )
    return _mark(found, flag)


def _mark(modules: Iterable[nn.Module], flag: bool) -> list[nn.Module]:
    marked = list(modules)
    for module in marked:
        set_z3_leaf_module(module, flag)
    return marked


def _raise_if_missing(how: str, missing: list[str], model: nn.Module, strict: bool) -> None:
    if missing and strict:
        raise ValueError(
            f"no module {how} {', '.join(map(repr, missing))} in {type(model).__name__}; see named_modules()"
        )


def _class_names(model: nn.Module) -> str:
    return ", ".join(sorted({type(module).__name__ for module in model.modules()}))
