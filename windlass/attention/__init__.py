"""Attention backends: one attention function for all models, dispatched to the backend that is active in the call.

Reading order: mask_pattern, attention_mask (visible pairs of tokens); attention_backend, backend_registry,
active_backend (the interface); sdpa_backend, eager_backend (the backends of this package); attention_function (for
user-defined modules); mask_recognition, transformers_dispatch (for models of transformers).
"""

from __future__ import annotations

from windlass.attention.active_backend import checkpoint_context_fn as checkpoint_context_fn
from windlass.attention.active_backend import get_active_backend as get_active_backend
from windlass.attention.active_backend import use_backend as use_backend
from windlass.attention.attention_backend import AttentionBackend as AttentionBackend
from windlass.attention.attention_backend import HeadSlice as HeadSlice
from windlass.attention.attention_function import attention as attention
from windlass.attention.attention_function import bind_mask as bind_mask
from windlass.attention.attention_mask import AttentionMask as AttentionMask
from windlass.attention.backend_registry import backend_names as backend_names
from windlass.attention.backend_registry import get_backend as get_backend
from windlass.attention.backend_registry import register_backend as register_backend
from windlass.attention.mask_pattern import BIDIRECTIONAL as BIDIRECTIONAL
from windlass.attention.mask_pattern import CAUSAL as CAUSAL
from windlass.attention.mask_pattern import ChunkedMask as ChunkedMask
from windlass.attention.mask_pattern import MaskBand as MaskBand
from windlass.attention.mask_pattern import MaskPredicate as MaskPredicate
from windlass.attention.transformers_dispatch import install_attention as install_attention
