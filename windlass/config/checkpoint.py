"""How checkpoints are written."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from windlass.config.section import Positive, Section
from windlass.config.verdict import accepted, honoured

_WRITER = "a detail of DeepSpeed's writers; files are safetensors"


def _upper(value: Any) -> Any:
    return value.upper() if isinstance(value, str) else value


TagValidation = Annotated[Literal["IGNORE", "WARN", "FAIL"], BeforeValidator(_upper)]
WriterType = Annotated[Literal["MOCK", "PYTHON", "FAST"], BeforeValidator(_upper)]
WriterRanks = Annotated[Literal["REPLICA", "SOCKET", "MACHINE"], BeforeValidator(_upper)]


class Writer(Section):
    """DeepSpeed's choice among its checkpoint writers."""

    type: WriterType = accepted("FAST", _WRITER)
    decoupled: bool = accepted(False, _WRITER)
    io_buffer_size: Positive = accepted(67_108_864, _WRITER)
    io_buffer_double: bool = accepted(True, _WRITER)
    io_multiplier: Positive = accepted(1, _WRITER)
    show_statistics: bool = accepted(False, _WRITER)
    data_parallel: WriterRanks | None = accepted(None, _WRITER)


class ParallelWrite(Section):
    """Which ranks write."""

    pipeline_stage: bool = accepted(False, "every rank writes its own cut, so stages of a pipeline would too")


class Checkpoint(Section):
    """Saving and loading."""

    format: Literal["windlass", "deepspeed"] = honoured("windlass", native=True)
    """`deepspeed`: beside its own files a save writes those that DeepSpeed writes, for tools that read them."""
    asynchronous: bool = honoured(False, also=("async",), native=True)
    """Also `async`: `save_checkpoint` returns as soon as a copy is taken and writes while training goes on, unless the
    call says `blocking=True`."""
    tag_validation: TagValidation = honoured("WARN")
    """Of ranks that save under different tags: `WARN` takes rank 0's and says so, `IGNORE` takes it, `FAIL` raises."""
    load_universal: bool = honoured(False)
    """Load the tag that `latest_universal` names, where there is such a file: what `ds_to_universal` made."""
    use_node_local_storage: bool = honoured(False)
    """Nodes may have disks of their own: the directory of each node gets the whole checkpoint, so that every node can
    load it. Nodes that share the directory write it once."""
    parallel_write: ParallelWrite = honoured(ParallelWrite)
    """Which ranks write."""
    keep_last: Positive | None = honoured(None, native=True)
    """How many finished checkpoints to keep: older ones that this run wrote, or named global_stepN, go after a save."""
    checkpoint_serialization: bool = accepted(True, _WRITER)
    writer: Writer | None = accepted(None, _WRITER)
