"""Checkpoints: a training state as named tensors cut over ranks, in safetensors and JSON.

In reading order: fragment (a flat range as boxes), state (what is saved), plain (numbers, strings, lists as JSON),
directory (names on disk, `latest`, temporary name and rename), draft (what is being written), index
(`checkpoint.json`), checksum, tensor_file (one safetensors file), rank_file (what a rank writes, at once or from a
copy), agree (one error for all ranks), shards, open_files, sources and storage (what is read, storage under
`torch.distributed.checkpoint`), transfer (the two calls into it), save, background (a save while training goes on),
load, retention (which former ones go), engine_data (the schema of what an engine saves beside tensors). In one
process: keys, bag, unpickle, zip_records, torch_file (a file of `torch.save`, without executing it), deepspeed_cuts,
deepspeed_plain and deepspeed_files (others' files as an index), stored (one checkpoint, tensor by tensor), read,
streamed_file and export (Hugging Face's files), plain_torch, catalogue (what lies in a directory); fingerprint (a hash
of tensors in any cut). For others: pickled and torch_file_writer (a file for `torch.load`, streamed), deepspeed_flat,
deepspeed_told and deepspeed_out (DeepSpeed's files beside ours), consolidated_files, consolidated and scripts
(`zero_to_fp32`), to_windlass (`ds_to_universal`), clones.
"""

from windlass.checkpoint.checkpoint_directory import list_tags, read_latest
from windlass.checkpoint.checkpoint_load import load
from windlass.checkpoint.checkpoint_save import save
from windlass.checkpoint.checkpoint_state import FlatShard, LazyFlatTensor, LazyStorage, LoadedState, SavedState
from windlass.checkpoint.read import read_full, read_meta_tensors, read_plain
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
    "read_meta_tensors",
    "read_plain",
    "save",
    "list_tags",
]
