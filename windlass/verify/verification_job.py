"""Settings of a verification, passed to its ranks in a file."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

RESULT = "verdict.json"


@dataclass(frozen=True)
class VerificationJob:
    """Settings of one verification of a script or of a named model, on a fixed number of ranks.

    Attributes:
        folder: folder of the report, which rank 0 writes, and of the error of a rank that fails.
        steps: optimizer steps to compare.
        config: configuration that overrides the script's own; a path or base64. None: no override.
        script: arguments of `python`: a path and the script's arguments. Empty: verify `model`.
        model: a Hugging Face configuration or directory, `hub:NAME`, or `package.module:function`.
        batch: `ROWSxLENGTH` of generated tokens, or `package.module:function`. None: tokens of the default shape.
        seed: seed of initial weights and generated batches.
        independent_run: train a second copy independently, and report its drift.
        trust_remote_code: run Python files that come with the model.
    """

    folder: str
    steps: int
    config: str | None = None
    script: list[str] = field(default_factory=list)
    model: str | None = None
    batch: str | None = None
    seed: int = 0
    independent_run: bool = False
    trust_remote_code: bool = False

    @property
    def result_path(self) -> Path:
        """File of the report."""
        return Path(self.folder, RESULT)

    @property
    def failure_path(self) -> Path:
        """File in which the first rank that fails writes the reason."""
        return Path(self.folder, "failure")

    def write(self) -> Path:
        """Write the job into its folder and return the file."""
        path = Path(self.folder, "order.json")
        path.write_text(json.dumps(asdict(self)))
        return path

    @classmethod
    def read(cls, path: str | Path) -> VerificationJob:
        """Read a job that `write` wrote."""
        return cls(**json.loads(Path(path).read_text()))
