"""Plan of one training run, written to its folder for the ranks and for `--resume`."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from windlass.base.atomic_file import write_atomically
from windlass.base.bounded_json import parse_json
from windlass.base.errors import CheckpointError
from windlass.base.text import one_line
from windlass.observe.run_record import RECORD_FILE

FORMAT_VERSION = 2


@dataclass(frozen=True)
class TrainingPlan:
    """Settings of a run, and the paths in its folder."""

    out: str
    config: dict[str, Any]  # the full ds_config
    model: str  # "tiny", "tiny-moe", a Hugging Face config file or directory, or hub:NAME
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
    trust_remote_code: bool = False  # set at each start of the run, never taken from an earlier start
    format_version: int = FORMAT_VERSION

    @property
    def folder(self) -> Path:
        return Path(self.out)

    @property
    def token_file(self) -> Path:
        return self.folder / "tokens.bin"

    @property
    def checkpoint_folder(self) -> Path:
        return self.folder / "checkpoint"

    @property
    def export_folder(self) -> Path:
        return self.folder / "hf"

    @property
    def loss_plot(self) -> Path:
        return self.folder / "loss.png"

    @property
    def metrics_file(self) -> Path:
        return self.folder / "metrics.csv"

    @property
    def tensorboard_folder(self) -> Path:
        return self.folder / "tensorboard"

    @property
    def record_file(self) -> Path:
        return self.folder / RECORD_FILE

    @property
    def result_file(self) -> Path:
        return self.folder / "result.json"

    @property
    def plan_file(self) -> Path:
        return self.folder / "run.json"

    def write(self) -> None:
        """Write the plan to the run's folder, atomically."""
        write_text(self.plan_file, json.dumps(asdict(self), indent=2) + "\n")


def read_plan(path: Path) -> TrainingPlan:
    """Read the plan of a run.

    Raises:
        CheckpointError: the plan is missing, cannot be read, or has another format version.
    """
    if not path.is_file():
        raise CheckpointError(f"nothing to resume: {path} does not exist; check --out, or leave out --resume")
    try:
        values = parse_json(path.read_bytes())
        version = values["format_version"]
        names = {field.name for field in fields(TrainingPlan)}
        if version == FORMAT_VERSION and set(values) == names:
            _check_types(values)
            return TrainingPlan(**values)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"cannot read {path} ({error}); give --out of a run of `windlass train`, or leave out --resume"
        ) from error
    raise CheckpointError(
        f"{path} was written by another release (format version {version}, here {FORMAT_VERSION}); "
        "give all options again with --overwrite"
    )


def _check_types(values: dict[str, Any]) -> None:
    """Raise TypeError for a field that does not have the type of the plan's field."""
    for name, kind in get_type_hints(TrainingPlan).items():
        allowed = get_args(kind) if get_origin(kind) is UnionType else (get_origin(kind) or kind,)
        value = values[name]
        if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
            raise TypeError(f"{name} is {one_line(repr(value), 60)}, a {type(value).__name__}")
    if not all(isinstance(one, str) for one in values["data"]):
        raise TypeError("data contains a value that is not a string")


def write_text(path: Path, text: str) -> None:
    """Write a small file atomically: under a temporary name first, then renamed."""
    write_atomically(path, text)
