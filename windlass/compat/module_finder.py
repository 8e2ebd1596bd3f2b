"""Modules that are made from the table: `deepspeed` and everything below it.

[Note: one module for one name] Clients hold on to modules and replace functions in them (`partition_parameters`), so
a module of the stand-in is made once, lies in `sys.modules`, and what is set in it stays. A name is looked up in the
table when it is first asked for: importing `deepspeed` imports little.
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
    """A module whose names come from the table."""

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
        self.__dict__[name] = value
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        # Importing a submodule puts it here; a function of the same name (`z3_leaf_module`) is what scripts want here.
        full = f"{self.__name__}.{name}"
        if name in _live(self.__name__):
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

    def __dir__(self) -> list[str]:
        return sorted({*self.__dict__, *names_below(self.__name__)})


def _live(module: str) -> Mapping[str, Callable[[Any], None]]:
    """Setters of the names that are looked up at each use (see [Note: live names])."""
    home = sys.modules.get(STAND_IN_NAMES[module].target) if is_whole_module(module) else None
    found: Mapping[str, Callable[[Any], None]] = getattr(home, "LIVE", {})
    return found


def _missing_name_message(module: str, name: str) -> str:
    if name.startswith("__"):
        return f"module {module!r} has no attribute {name!r}"
    return (
        f"module {module!r} has no attribute {name!r}: windlass stands in for DeepSpeed here and has no such name; "
        "what it has is listed in docs/compat.md"
    )


class StandInFinder(MetaPathFinder, Loader):
    """Finds the modules below `deepspeed`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """A spec for what the table knows as a module; None for anything else."""
        if not fullname.startswith(f"{ROOT_PACKAGE}.") or not is_module(fullname):
            return None
        spec = ModuleSpec(fullname, self, origin="windlass.compat", is_package=self.is_package(fullname))
        if spec.submodule_search_locations is not None:  # scripts list the folder of a package
            spec.submodule_search_locations.append(_FOLDER)
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """An empty module whose names come later."""
        entry = STAND_IN_NAMES.get(spec.name)
        return StandInModule(
            spec.name, f"`{spec.name}`, as windlass stands in for it." if entry is None else entry.note
        )

    def exec_module(self, module: ModuleType) -> None:
        """Names that a `from x import *` takes, and those of the module that does the work, if there is one."""
        if is_whole_module(module.__name__):
            home = importlib.import_module(STAND_IN_NAMES[module.__name__].target)
            public = getattr(home, "__all__", [name for name in vars(home) if not name.startswith("_")])
            own = [
                name for name in public if f"{module.__name__}.{name}" not in STAND_IN_NAMES
            ]  # a row of its own goes before
            module.__dict__.update({name: getattr(home, name) for name in own})
        module.__dict__["__all__"] = sorted(
            {name for name in names_below(module.__name__) if not name.startswith("_")}
            | {name for name in vars(module) if not name.startswith("_")}
        )

    def get_code(self, fullname: str) -> CodeType | None:
        """For `python -m`: what runs the `main` of the module that does the work.

        Raises:
            ImportError: it has none.
        """
        home = STAND_IN_NAMES[fullname].target if is_whole_module(fullname) else ""
        if not home or not callable(getattr(importlib.import_module(home), "main", None)):
            raise ImportError(f"{fullname} is no program: windlass stands in for DeepSpeed here (docs/compat.md)")
        return compile(f"import sys\nfrom {home} import main\nsys.exit(main())", home, "exec")

    def is_package(self, fullname: str) -> bool:
        """Whether there are modules below it: what is none can be run by `python -m`."""
        return any(is_module(f"{fullname}.{name}") for name in names_below(fullname))


def install_finder(name: str) -> None:
    """Make the module `name`, which is being imported, the root of the stand-in."""
    if not any(isinstance(finder, StandInFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, StandInFinder())
    sys.modules[name].__class__ = StandInModule
