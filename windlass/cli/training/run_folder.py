"""Layout of the folder of a `windlass train` run, for other commands."""

from __future__ import annotations

from pathlib import Path

PLAN_FILE = "run.json"
CHECKPOINT_FOLDER, EXPORT_FOLDER, TOKENIZER_FOLDER = "checkpoint", "hf", "tokenizer"


def checkpoint_directory_of(directory: Path) -> Path:
    """Return the checkpoint directory of a run if `directory` is the output folder of `windlass train`, else
    `directory`."""
    inner = directory / CHECKPOINT_FOLDER
    return inner if (directory / PLAN_FILE).is_file() and inner.is_dir() else directory


def export_directory_of(directory: Path) -> Path:
    """Return the directory of the exported model if `directory` is the output folder of `windlass train`, else
    `directory`."""
    inner = directory / EXPORT_FOLDER
    return inner if (directory / PLAN_FILE).is_file() and inner.is_dir() else directory


def model_file_folders(checkpoint: Path) -> tuple[Path, ...]:
    """Return the folders with the model's configuration and tokenizer, of the run that wrote `checkpoint`; none if it
    was not written by `windlass train`."""
    here = checkpoint.absolute()
    for inner in (here, here.parent):  # `checkpoint` is the folder of all checkpoints, or one in it
        if inner.name == CHECKPOINT_FOLDER and (inner.parent / PLAN_FILE).is_file():
            return (inner.parent / EXPORT_FOLDER, inner.parent / TOKENIZER_FOLDER)
    return ()
