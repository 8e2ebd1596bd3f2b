"""Modules that every rank of the pool imports at its start; fork servers import them once.

Nothing here may start a thread, because a fork copies no threads.
"""

from __future__ import annotations

import contextlib
import gc

gc.disable()  # garbage collection would take a fifth of the time of the imports

import torch  # noqa: E402
import torch._dynamo  # noqa: E402  (as every optimizer does)
import torch.distributed  # noqa: E402, F401

import windlass  # noqa: E402

with contextlib.suppress(ImportError):  # tests that need transformers skip without it
    import transformers.models.llama.modeling_llama  # noqa: F401
windlass.initialize  # noqa: B018  (a lazy attribute: this access imports it)
gc.freeze()
gc.enable()
