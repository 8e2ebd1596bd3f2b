"""What every rank of the pool has imported before it begins; servers from which ranks are forked import it once.

Nothing here may start a thread: a fork takes none along.
"""

from __future__ import annotations

import contextlib
import gc

gc.disable()  # a fifth of what imports take would go into looking for garbage among them

import torch  # noqa: E402
import torch._dynamo  # noqa: E402  (as every optimizer does)
import torch.distributed  # noqa: E402, F401

import windlass  # noqa: E402

with contextlib.suppress(ImportError):  # tests that need it say so
    import transformers.models.llama.modeling_llama  # noqa: F401
windlass.initialize  # noqa: B018  (imported when it is asked for)
gc.freeze()
gc.enable()
