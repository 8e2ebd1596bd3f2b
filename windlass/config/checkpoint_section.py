"""The `checkpoint` section: options of saving and loading checkpoints."""

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
    """Choice among DeepSpeed's checkpoint writers."""

    type: WriterType = accepted("FAST", _WRITER_REASON)
    decoupled: bool = accepted(False, _WRITER_REASON)
    io_buffer_size: Positive = accepted(67_108_864, _WRITER_REASON)
    io_buffer_double: bool = accepted(True, _WRITER_REASON)
    io_multiplier: Positive = accepted(1, _WRITER_REASON)
    show_statistics: bool = accepted(False, _WRITER_REASON)
    data_parallel: WriterRanks | None = accepted(None, _WRITER_REASON)


class ParallelWrite(ConfigSection):
    """Choice of the ranks that write checkpoint files."""

    pipeline_stage: bool = accepted(False, "every rank writes its own shard, so pipeline stages do so too")


class CheckpointConfig(ConfigSection):
    """Options of saving and loading checkpoints."""

    format: Literal["windlass", "deepspeed"] = honoured("windlass", windlass_only=True)
    """`deepspeed`: write DeepSpeed's checkpoint files beside windlass's own, for tools that read them."""
    async_save: bool = honoured(False, windlass_only=True)
    """`save_checkpoint` returns after copying the state, and a thread writes the files during training, unless the
    call has `blocking=True`."""
    tag_validation: TagValidation = honoured("WARN")
    """Reaction to ranks that save under different tags: `WARN` uses rank 0's tag and logs a warning, `IGNORE` uses it
    silently, `FAIL` raises."""
    load_universal: bool = honoured(False)
    """Load, if `load_checkpoint` is called without a tag, the tag that the file `latest_universal` names, if there is
    such a file. `ds_to_universal` writes the file."""
    use_node_local_storage: bool = honoured(False)
    """Write the whole checkpoint on every node, for nodes whose directory is on a local disk. Nodes that share the
    directory write the checkpoint once."""
    parallel_write: ParallelWrite = honoured(ParallelWrite)
    """Choice of the ranks that write checkpoint files."""
    keep_last: Positive | None = honoured(None, windlass_only=True)
    """Number of finished checkpoints to keep. A save deletes older ones that this run wrote or that are named
    global_stepN."""
    checkpoint_serialization: bool = accepted(True, _WRITER_REASON)
    writer: CheckpointWriterConfig | None = accepted(None, _WRITER_REASON)
