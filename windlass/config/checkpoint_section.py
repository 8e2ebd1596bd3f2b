"""How checkpoints are written."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from windlass.config.config_section import ConfigSection, Positive
from windlass.config.key_status import accepted, honoured

_WRITER_REASON = "a detail of DeepSpeed's writers; files are safetensors"


def _to_upper(value: Any) -> Any:
    return value.upper() if isinstance(value, str) else value


TagValidation = Annotated[Literal["IGNORE", "WARN", "FAIL"], BeforeValidator(_to_upper)]
WriterType = Annotated[Literal["MOCK", "PYTHON", "FAST"], BeforeValidator(_to_upper)]
WriterRanks = Annotated[Literal["REPLICA", "SOCKET", "MACHINE"], BeforeValidator(_to_upper)]


class CheckpointWriterConfig(ConfigSection):
    """DeepSpeed's choice among its checkpoint writers."""

    type: WriterType = accepted("FAST", _WRITER_REASON)
    decoupled: bool = accepted(False, _WRITER_REASON)
    io_buffer_size: Positive = accepted(67_108_864, _WRITER_REASON)
    io_buffer_double: bool = accepted(True, _WRITER_REASON)
    io_multiplier: Positive = accepted(1, _WRITER_REASON)
    show_statistics: bool = accepted(False, _WRITER_REASON)
    data_parallel: WriterRanks | None = accepted(None, _WRITER_REASON)


class ParallelWrite(ConfigSection):
    """Which ranks write."""

    pipeline_stage: bool = accepted(False, "every rank writes its own cut, so stages of a pipeline would too")


class CheckpointConfig(ConfigSection):
    """Saving and loading."""

    format: Literal["windlass", "deepspeed"] = honoured("windlass", windlass_only=True)
    """`deepspeed`: beside its own files a save writes those that DeepSpeed writes, for tools that read them."""
    async_save: bool = honoured(False, windlass_only=True)
    """`save_checkpoint` returns as soon as a copy is taken and writes while training goes on, unless the
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
    keep_last: Positive | None = honoured(None, windlass_only=True)
    """How many finished checkpoints to keep: older ones that this run wrote, or named global_stepN, go after a save."""
    checkpoint_serialization: bool = accepted(True, _WRITER_REASON)
    writer: CheckpointWriterConfig | None = accepted(None, _WRITER_REASON)
