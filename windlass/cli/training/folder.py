"""The folder of a `windlass train` run, as other commands find their way in it."""

from __future__ import annotations

from pathlib import Path

RUN = "run.json"
CHECKPOINTS, EXPORTED, TOKENIZER = "checkpoint", "hf", "tokenizer"


def checkpoints_of(directory: Path) -> Path:
    """Return the checkpoint directory of a run where `directory` is OUT of `windlass train`, else `directory`."""
    inner = directory / CHECKPOINTS
    return inner if (directory / RUN).is_file() and inner.is_dir() else directory


def exported_of(directory: Path) -> Path:
    """Return the exported model of a run where `directory` is OUT of `windlass train`, else `directory`."""
    inner = directory / EXPORTED
    return inner if (directory / RUN).is_file() and inner.is_dir() else directory


def companions_of(checkpoint: Path) -> tuple[Path, ...]:
    """Return the folders of the same run that hold the model's configuration and tokenizer; none outside a run."""
    here = checkpoint.absolute()
    for inner in (here, here.parent):  # a directory of checkpoints, or one of them
        if inner.name == CHECKPOINTS and (inner.parent / RUN).is_file():
            return (inner.parent / EXPORTED, inner.parent / TOKENIZER)
    return ()
