"""Refusal of `save_pretrained` for models with packed layers, whose files no library could load."""

from __future__ import annotations

import functools
import sys
from typing import Any

from windlass.base.errors import ModelError
from windlass.kernels.packed_linear import PackedMatrix


def refuse_packed_saves() -> None:
    """Make `save_pretrained` of transformers raise a ModelError for models with packed layers. Idempotent.

    transformers would write the bytes of packed layers under names that it ignores when it loads them, and fill the
    layers with random values. Adapters are saved as before.
    """
    modeling = sys.modules.get("transformers.modeling_utils")
    if modeling is None:  # transformers is not imported, so it has made no model
        return
    write = modeling.PreTrainedModel.save_pretrained
    if getattr(write, "refuses_packed", False):
        return

    @functools.wraps(write)
    def save_pretrained(self: Any, *args: Any, **kwargs: Any) -> Any:
        packed = next((name for name, one in self.named_modules() if isinstance(one, PackedMatrix)), None)
        if packed is not None and not getattr(self, "_hf_peft_config_loaded", False):
            raise ModelError(
                f"save_pretrained would write layer {packed!r} of this {type(self).__name__} as packed bytes, which "
                "from_pretrained cannot load; copy the directory of packed weights that it was loaded from, write one "
                "with windlass compress, or replace each PackedLinear by its to_linear() and save then"
            )
        return write(self, *args, **kwargs)

    save_pretrained.refuses_packed = True  # type: ignore[attr-defined]
    modeling.PreTrainedModel.save_pretrained = save_pretrained
