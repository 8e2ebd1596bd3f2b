"""Program that resolves DeepSpeed names with the compat layer on PYTHONPATH.

Reads lines of `name kind` and writes JSON with the result for each name.
"""

from __future__ import annotations

import importlib
import inspect
import json
import logging
import sys
from types import ModuleType
from typing import Any

from windlass.compat.not_built import NotBuiltError, _RefusedType


def resolve(name: str) -> dict[str, Any]:
    """Return the result of `from module import name` for a dotted name."""
    module, _, own = name.rpartition(".")
    try:
        value = _import(module, own) if module else importlib.import_module(name)
    except NotBuiltError as error:
        return {"state": "refused", "sentence": str(error)}
    except (ImportError, AttributeError) as error:
        return {"state": "absent", "sentence": str(error)}
    if type(value) is _RefusedType:
        return {"state": "refused", "sentence": _called(value)}
    return {"state": "there", "kinds": sorted(kinds(value))}


def _import(module: str, own: str) -> Any:
    """Return `own` of a module, or of a class or logger named `module`."""
    outer, _, inner = module.rpartition(".")
    try:
        home = importlib.import_module(module)
    except ModuleNotFoundError:
        home = _import(outer, inner)
    if not isinstance(home, ModuleType):
        return getattr(home, own)
    try:
        return getattr(home, own)
    except AttributeError:
        return importlib.import_module(f"{module}.{own}")


def _called(value: Any) -> str:
    try:
        value()
    except NotBuiltError as error:
        return str(error)
    return "was called, and did not refuse"


def kinds(value: Any) -> set[str]:
    """Return the kinds of a value, in the words of `tests/data/deepspeed_symbols.txt`."""
    tests = {
        "module": isinstance(value, ModuleType),
        "class": inspect.isclass(value),
        "function": callable(value) and not inspect.isclass(value),
        "int": isinstance(value, int),
        "str": isinstance(value, str),
        "list": isinstance(value, list),
        "logger": isinstance(value, logging.Logger),
        "none": value is None,
        "typing": type(value).__module__ in ("typing", "collections.abc") or value is Any,
        "member": type(value).__name__ in ("ZeroParamStatus", "OffloadDeviceEnum"),
    }
    return {kind for kind, true in tests.items() if true}


def habits() -> dict[str, bool]:
    """Return, for each common use of DeepSpeed's modules in scripts, True if it works."""
    import deepspeed
    import torch
    from deepspeed.utils import groups, z3_leaf_module
    from deepspeed.utils.z3_leaf_module import set_z3_leaf_modules

    layer = torch.nn.Linear(1, 1)
    set_z3_leaf_modules(layer, [torch.nn.Linear])
    groups.mpu = type("Unit", (), {"get_sequence_parallel_rank": staticmethod(lambda: 7)})()
    own = groups._get_sequence_parallel_rank()
    del groups.mpu
    star: dict[str, Any] = {}
    exec("from deepspeed.utils import *", star)
    return {
        "a function and a module share a name": z3_leaf_module(layer) and deepspeed.utils.z3_leaf_module(layer),
        "a unit that a script sets is asked": own == 7 and groups._get_sequence_parallel_rank() == 0,
        "what is torch's is torch's": deepspeed.torch is torch and deepspeed.json is json,
        "schedules are an attribute": "WarmupLR" in deepspeed.runtime.lr_schedules.VALID_LR_SCHEDULES,
        "a name is one object": deepspeed.ops.adam.FusedAdam
        is importlib.import_module("deepspeed.ops.adam.fused_adam").FusedAdam,
        "hasattr says no to what is refused": not hasattr(deepspeed.DeepSpeedTransformerLayer, "generate"),
        "a refused class can be derived from": isinstance(
            type("Mine", (deepspeed.DeepSpeedTransformerLayer,), {}), type
        ),
        "everything can be taken at once": "RepeatingLoader" in star and "safe_get_full_grad" in star,
        "a class is one, whatever module it is asked of": deepspeed.PipelineModule
        is importlib.import_module("deepspeed.runtime.pipe.module").PipelineModule,
        "ops that are there": deepspeed.ops.__compatible_ops__["async_io"],
    }


if __name__ == "__main__":
    print(json.dumps(habits()))
    names = [line.split()[0] for line in sys.stdin if line.strip() and not line.startswith("#")]
    print(json.dumps({name: resolve(name) for name in names}))
