"""Checkpoints: training state as named tensors, sharded over ranks, in safetensors files and a JSON index.

`checkpoint_state`, `plain_data` and `stored_objects` define what is saved; `checkpoint_save`, `staging_checkpoint`,
`rank_file` and `async_save` write it; `checkpoint_index` is the schema of `checkpoint.json`; `checkpoint_load`,
`stored_checkpoint` and `chunk_reader` read it; `checkpoint_ranks` raises one error on all ranks. `foreign_formats`
registers the formats of other libraries, and `safetensors_export` writes full weights for them.
"""

from windlass.checkpoint.checkpoint_directory import list_tags, read_latest
from windlass.checkpoint.checkpoint_load import load
from windlass.checkpoint.checkpoint_save import save
from windlass.checkpoint.checkpoint_state import FlatShard, LazyFlatTensor, LazyStorage, LoadedState, SavedState
from windlass.checkpoint.stored_checkpoint import read_full, read_plain
from windlass.checkpoint.torch_state_dicts import PlainCheckpoint, read_checkpoint

__all__ = [
    "FlatShard",
    "LoadedState",
    "PlainCheckpoint",
    "LazyStorage",
    "LazyFlatTensor",
    "SavedState",
    "load",
    "read_checkpoint",
    "read_full",
    "read_latest",
    "read_plain",
    "save",
    "list_tags",
]
