"""Dtype that a module of lightning reports while its parameters are in fp16."""

from __future__ import annotations

from typing import Any

from torch import nn


def announce_half(module: nn.Module) -> None:
    """Call `half` of a lightning module without its casts, so that `module.dtype` becomes `torch.float16`.

    lightning's modules record the dtype in `half`, which DeepSpeed calls. The engine has already cast the parameters,
    from values of full precision. Other modules are left as they are.
    """
    if not any(kind.__name__ == "_DeviceDtypeModuleMixin" for kind in type(module).__mro__):
        return
    missing = object()
    before = vars(module).get("_apply", missing)

    def skip_cast(*args: Any, **kwargs: Any) -> nn.Module:
        return module

    vars(module)["_apply"] = skip_cast
    try:
        module.half()
    finally:
        del vars(module)["_apply"]
        if before is not missing:
            vars(module)["_apply"] = before
