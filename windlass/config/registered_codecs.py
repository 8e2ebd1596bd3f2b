"""Names of the codecs that keys of the configuration may choose.

`windlass.comm.codec.register_codec` adds a name here. The names are not in `windlass.comm`, because `windlass.config`
is a lower layer and does not import torch. `windlass check` runs no user code, so it accepts the built-in names alone.
"""

from __future__ import annotations

from collections.abc import KeysView
from typing import Annotated

from pydantic import AfterValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

_needs_error_feedback: dict[str, bool] = {
    **dict.fromkeys(("identity", "bf16", "fp8", "int8", "int4"), False),
    **dict.fromkeys(("sign", "fine_sign", "topk", "lowrank"), True),
}


def add_codec(name: str, *, needs_error_feedback: bool) -> None:
    """Add a codec. The caller checks that the name is free, or that an equal codec is registered again."""
    _needs_error_feedback[name] = needs_error_feedback


def codec_names() -> KeysView[str]:
    """Return a view of the names of all codecs, which will include codecs that are registered later."""
    return _needs_error_feedback.keys()


def quantizing_codec_names() -> list[str]:
    """Return the names of the codecs that need no error feedback, sorted."""
    return sorted(name for name, needs in _needs_error_feedback.items() if not needs)


def _require_quantizing(name: str) -> str:
    if name not in _needs_error_feedback:
        reason = "input should be the name of a registered codec"
    elif _needs_error_feedback[name]:
        reason = (
            "input should be a codec that needs no error feedback (weights are sent without it, and that of gradients, "
            "zeropp_loco_param, decays)"
        )
    else:
        return name
    names = ", ".join(quantizing_codec_names())
    raise PydanticCustomError(
        "codec",
        "{reason}: {names}, or one that windlass.comm.codec.register_codec added",
        {"reason": reason, "names": names},
    )


QuantizingCodec = Annotated[
    str,
    AfterValidator(_require_quantizing),
    WithJsonSchema({"anyOf": [{"type": "string", "enum": quantizing_codec_names()}, {"type": "string"}]}),
]
"""Name of a codec of ZeRO++'s messages. Editors offer the built-in names and accept others."""
