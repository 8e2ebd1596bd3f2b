"""What the ranks of a verification are told to do."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

RESULT = "verdict.json"


@dataclass(frozen=True)
class VerificationJob:
    """One verification on one number of ranks: of a script, or of a model that is named.

    Attributes:
        folder: where rank 0 leaves its verdict, and whoever fails its reason.
        steps: optimizer steps to compare.
        config: goes before the script's own; a path or base64.
        script: what follows `python`: a path and its arguments.
        model: a Hugging Face configuration or directory, `hub:NAME`, or `package.module:function`.
        batch: `ROWSxLENGTH` of generated tokens, or `package.module:function`.
        alone: let a second copy train on its own, and tell how far it drifts.
        seed: of initial weights and generated batches.
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
        """The verdict's file."""
        return Path(self.folder, RESULT)

    @property
    def failure_path(self) -> Path:
        """The file in which the first rank that fails leaves its reason."""
        return Path(self.folder, "failure")

    def write(self) -> Path:
        """Put it into its folder; returns the file."""
        path = Path(self.folder, "order.json")
        path.write_text(json.dumps(asdict(self)))
        return path

    @classmethod
    def read(cls, path: str | Path) -> VerificationJob:
        """What `write` wrote."""
        return cls(**json.loads(Path(path).read_text()))
