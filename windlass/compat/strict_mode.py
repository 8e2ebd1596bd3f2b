"""Switch that makes the stand-in as restrictive as DeepSpeed, to find out whether a script also runs there.

[Note: strict mode] The stand-in allows what windlass can do and DeepSpeed cannot. With `WINDLASS_DEEPSPEED_STRICT=1`
it also has DeepSpeed's limits:

- A sharded parameter of stage 3 has the shape `(0,)` to scripts, outside of a forward, a backward and a gather.
- `loss.backward()` raises at stage 0, where only `engine.backward(loss)` works in DeepSpeed.
- `zero.Init()` without a configuration and a dtype constructs parameters in fp16 (bf16 without hardware for fp16).
- `deepspeed.linear.Init` makes bf16 layers.
- `torch.nn.functional.linear` is replaced at stage 3, unless `memory_efficient_linear` is false.
"""

from __future__ import annotations

import os

VARIABLE = "WINDLASS_DEEPSPEED_STRICT"


def is_strict() -> bool:
    """Return True if the environment sets the switch."""
    return os.environ.get(VARIABLE, "0") not in ("", "0")
