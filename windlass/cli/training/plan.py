"""What one training run is to do, written down so that workers read it and `--resume` goes on with it."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from windlass.base.errors import CheckpointError

FORMAT_VERSION = 1


@dataclass(frozen=True)
class Plan:
    """The settings of a run, and where things lie in its folder."""

    out: str
    config: dict[str, Any]  # the ds_config, complete
    model: str  # "tiny", a Hugging Face config file or directory, or hub:NAME
    data: list[str]
    tokenizer: str
    nproc: int
    steps: int
    seq_len: int
    eval_every: int
    save_every: int
    seed: int
    prompt: str | None
    sample_tokens: int
    resume: bool = False
    format_version: int = FORMAT_VERSION

    @property
    def folder(self) -> Path:
        return Path(self.out)

    @property
    def tokens(self) -> Path:
        return self.folder / "tokens.bin"

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoint"

    @property
    def exported(self) -> Path:
        return self.folder / "hf"

    @property
    def picture(self) -> Path:
        return self.folder / "loss.png"

    @property
    def metrics(self) -> Path:
        return self.folder / "metrics.csv"

    @property
    def events(self) -> Path:
        return self.folder / "tensorboard"

    @property
    def result(self) -> Path:
        return self.folder / "result.json"

    @property
    def path(self) -> Path:
        return self.folder / "run.json"

    def write(self) -> None:
        """Puts the plan into its folder, whole or not at all."""
        write_text(self.path, json.dumps(asdict(self), indent=2) + "\n")


def read_plan(path: Path) -> Plan:
    """The plan of an earlier run.

    Raises:
        CheckpointError: none there, unreadable, or of another format version.
    """
    if not path.is_file():
        raise CheckpointError(f"nothing to resume: {path} does not exist; check --out, or leave out --resume")
    try:
        values = json.loads(path.read_text())
        version = values["format_version"]
        names = {field.name for field in fields(Plan)}
        if version == FORMAT_VERSION and set(values) == names:
            return Plan(**values)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"cannot read {path} ({error}); it is no run of `windlass train`") from error
    raise CheckpointError(
        f"{path} was written by another release (format version {version}, here {FORMAT_VERSION}); "
        "give all options anew with --overwrite"
    )


def write_text(path: Path, text: str) -> None:
    """Writes a small file under a temporary name first, so that no reader meets half of it."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        partial.write_text(text)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
