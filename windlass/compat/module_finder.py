"""Import hook that creates `deepspeed` and its submodules from the stand-in's table of names.

[Note: one module for one name] Clients keep references to modules and replace functions in them
(`partition_parameters`). Therefore each stand-in module is created once, stays in `sys.modules`, and keeps what is
assigned to it. Names are resolved through the table at first access, so that importing `deepspeed` imports little.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from windlass.compat.stand_in_names import STAND_IN_NAMES, is_module, is_whole_module, names_below

ROOT_PACKAGE = "deepspeed"
_FOLDER = str(Path(__file__).parent / "path" / ROOT_PACKAGE)


class StandInModule(ModuleType):
    """Module whose attributes are resolved through the table of names."""

    def __getattr__(self, name: str) -> Any:
        full = f"{self.__name__}.{name}"
        entry = STAND_IN_NAMES.get(full)
        if entry is not None and not is_whole_module(full):
            value: Any = entry.resolve(full)
        elif is_module(full):
            value = importlib.import_module(full)
        elif is_whole_module(self.__name__) and not name.startswith("__"):
            value = getattr(importlib.import_module(STAND_IN_NAMES[self.__name__].target), name)
            if name in _live(self.__name__):
                return value
        else:
            raise AttributeError(_missing_name_message(self.__name__, name))
        self.__dict__[name] = value  # later accesses skip __getattr__
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        # Importing a submodule assigns it to its parent. If the table has a function of the same name
        # (`z3_leaf_module`), the function must win, because scripts expect it.
        full = f"{self.__name__}.{name}"
        if name in _live(self.__name__):
            self.__dict__.setdefault("_values_before", {}).setdefault(name, getattr(self, name))
            _live(self.__name__)[name](value)
            return
        if (
            isinstance(value, StandInModule)
            and value.__name__ == full
            and full in STAND_IN_NAMES
            and not is_whole_module(full)
        ):
            value = STAND_IN_NAMES[full].resolve(full)
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        before = self.__dict__.get("_values_before", {})
        if name in before:  # pytest's monkeypatch restores a name that was not in `__dict__` by deleting it
            _live(self.__name__)[name](before.pop(name))
            return
        super().__delattr__(name)

    def __dir__(self) -> list[str]:
        return sorted({*self.__dict__, *names_below(self.__name__)})


def _live(module: str) -> Mapping[str, Callable[[Any], None]]:
    """Return `{name: setter}` of the names whose value is looked up at each access (see [Note: live names])."""
    target_module = sys.modules.get(STAND_IN_NAMES[module].target) if is_whole_module(module) else None
    found: Mapping[str, Callable[[Any], None]] = getattr(target_module, "LIVE", {})
    return found


def _missing_name_message(module: str, name: str) -> str:
    if name.startswith("__"):
        return f"module {module!r} has no attribute {name!r}"
    return (
        f"module {module!r} has no attribute {name!r}: windlass stands in for DeepSpeed here and has no such name; "
        "see docs/compat.md for the names that exist"
    )


def _folder_of(package: str) -> str:
    """Return the folder in which scripts list the module files of `package`; the root package's folder if none.

    Python never imports from this folder, because this finder comes first and finds every module of the folder.
    """
    own = Path(__file__).parent / package.rpartition(".")[2]
    modules = [file.stem for file in own.glob("*.py") if file.stem != "__init__"]
    return str(own) if modules and all(is_module(f"{package}.{name}") for name in modules) else _FOLDER


class StandInFinder(MetaPathFinder, Loader):
    """Import finder and loader of the modules below `deepspeed`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec for a name that the table lists as a module; None for any other name."""
        if not fullname.startswith(f"{ROOT_PACKAGE}.") or not is_module(fullname):
            return None
        spec = ModuleSpec(fullname, self, origin="windlass.compat", is_package=self.is_package(fullname))
        if spec.submodule_search_locations is not None:  # scripts list the folder of a package
            spec.submodule_search_locations.append(_folder_of(fullname))
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Create an empty module; `exec_module` and attribute access fill it."""
        entry = STAND_IN_NAMES.get(spec.name)
        return StandInModule(
            spec.name, f"Module `{spec.name}` of the windlass stand-in." if entry is None else entry.note
        )

    def exec_module(self, module: ModuleType) -> None:
        """Set `__all__`, and copy the names of the windlass module that implements this module, if there is one."""
        if is_whole_module(module.__name__):
            target_module = importlib.import_module(STAND_IN_NAMES[module.__name__].target)
            public = getattr(
                target_module, "__all__", [name for name in vars(target_module) if not name.startswith("_")]
            )
            # A table entry for a single name takes precedence.
            own = [name for name in public if f"{module.__name__}.{name}" not in STAND_IN_NAMES]
            module.__dict__.update({name: getattr(target_module, name) for name in own})
        module.__dict__["__all__"] = sorted(
            {name for name in names_below(module.__name__) if not name.startswith("_")}
            | {name for name in vars(module) if not name.startswith("_")}
        )

    def get_code(self, fullname: str) -> CodeType | None:
        """Return code for `python -m` that runs `main` of the implementing windlass module.

        Raises:
            ImportError: there is no such `main`.
        """
        target_module = STAND_IN_NAMES[fullname].target if is_whole_module(fullname) else ""
        if not target_module or not callable(getattr(importlib.import_module(target_module), "main", None)):
            raise ImportError(
                f"{fullname} is not a program of windlass, which stands in for DeepSpeed; see docs/compat.md"
            )
        return compile(f"import sys\nfrom {target_module} import main\nsys.exit(main())", target_module, "exec")

    def is_package(self, fullname: str) -> bool:
        """Return True if the name has submodules. A module without submodules can be run by `python -m`."""
        return any(is_module(f"{fullname}.{name}") for name in names_below(fullname))


def install_finder(name: str) -> None:
    """Make the module `name`, which is being imported, the root of the stand-in."""
    if not any(isinstance(finder, StandInFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, StandInFinder())
    sys.modules[name].__class__ = StandInModule
