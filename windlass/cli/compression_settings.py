"""Options of `windlass compress`, checked against each other before anything is read or written."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from windlass.base.dtypes import parse_dtype
from windlass.base.errors import ConfigError
from windlass.cli.compression_distillation import DistillationSettings, parse_losses
from windlass.cli.compression_figures import choose_method, format_name
from windlass.compress.compression_budget import CompressionBudget, parse_budget, parse_shares
from windlass.compress.gguf_model import is_gguf_file
from windlass.compress.post_training import NEEDS_TEXT, has_zero
from windlass.compress.sparse_pruning import parse_pattern

_FEW_BITS = ("int1", "int2", "ternary", "binary")
WIDE, LKD = "wide", "lkd"
# options that the stages before the rounding depend on
_BEFORE_ROUNDING = (
    *("prune", "importance", "data", "text_field", "sequences", "length", "head", "force"),
    *("distill_loss", "steps", "rows", "rate"),
)
_OF_BUDGET = ("budget", "method", "lkd_steps", "activations", "rotate")


@dataclass(frozen=True)
class CompressionSettings:
    """Options of `windlass compress`, documented in its help.

    Raises:
        ConfigError: an option cannot be parsed, or options contradict each other.

    Attributes:
        limits: the budget; None: no budget.
        shares: share or number of units to remove, by kind of unit.
        format: format of all layers; None if a budget chooses formats, or weights stay unquantized.
    """

    source: Path
    out: Path
    weights: str | None
    group: int | None
    method: str
    lkd_steps: int | None
    activations: str
    budget: str | None
    prune: str | None
    importance: str
    sparsity: str | None
    sparsity_method: str
    distill: Path | None
    distill_loss: str | None
    steps: int | None
    rows: int
    rate: float
    data: tuple[str, ...]
    text_field: str
    sequences: int
    length: int
    rotate: bool
    wide_dtype: str | None
    head: bool
    measure: bool
    force: bool
    overwrite: bool
    trust_remote_code: bool
    limits: CompressionBudget | None = field(init=False, default=None)
    shares: dict[str, float] = field(init=False, default_factory=dict)
    format: str | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        found: dict[str, Any] = {"shares": parse_shares(self.prune) if self.prune is not None else {}}
        if self.budget is not None:
            found["limits"] = parse_budget(self.budget)
        for name, value in found.items():
            object.__setattr__(self, name, value)
        object.__setattr__(self, "format", self._format())
        self._check_distillation()
        self._check_text()
        self._check_learning()

    @property
    def wide_torch_dtype(self) -> torch.dtype | None:
        """Dtype of tensors that stay unquantized; None: that of the model."""
        return None if self.wide_dtype is None else parse_dtype(self.wide_dtype)

    @property
    def is_trained(self) -> bool:
        """True if the codes of the layers are trained; see [Note: trained codes]."""
        return self.distill is not None and self.format is not None and self.method == "auto"

    @property
    def distillation(self) -> DistillationSettings | None:
        """Settings of the training against a teacher; None without a teacher."""
        if self.distill is None:
            return None
        return DistillationSettings(
            teacher=self.distill,
            steps=self.steps or 0,
            rows=self.rows,
            rate=self.rate,
            losses=parse_losses(self.distill_loss),
            format=self.format if self.is_trained else None,
            head=self.head,
        )

    def before_rounding(self) -> dict[str, Any]:
        """Return the options on which the stages before rounding depend, as JSON data."""
        found: dict[str, Any] = {name: getattr(self, name) for name in _BEFORE_ROUNDING}
        return {**found, "trained": self.format if self.is_trained else None, "teacher": str(self.distill)}

    @property
    def budget_folder(self) -> str:
        """Name of the workspace folder for results that depend on the budget. Another budget has another folder, so
        that the results of the stages before rounding are reused."""
        values = [getattr(self, name) for name in _OF_BUDGET]
        return f"budget-{hashlib.sha256(json.dumps(values).encode()).hexdigest()[:12]}"

    def given(self) -> dict[str, str]:
        """Return the options as text, for the report."""
        hidden = ("limits", "shares", "format")
        return {
            name: str(value) for name, value in asdict(self).items() if name not in hidden and value not in (None, ())
        }

    def _format(self) -> str | None:
        if self.sparsity is not None:
            parse_pattern(self.sparsity)
            if self.limits is not None:
                raise ConfigError(
                    "budget (--budget) measures formats of weights that are not sparse; leave sparsity (--sparsity) "
                    "out, or choose the format with weights (--weights)"
                )
        if self.limits is not None:
            if self.weights is not None or self.group is not None:
                raise ConfigError("budget (--budget) chooses the formats; leave weights (--weights) and --group out")
            if self.wide_dtype is not None:
                raise ConfigError(
                    "budget (--budget) counts tensors in the dtype of the model; leave wide-dtype (--wide-dtype) out, "
                    "or give the model in that dtype"
                )
            if not self.data:
                raise ConfigError("budget (--budget) needs a calibration text; give some with --data")
            return None
        if self.weights == WIDE or self.sparsity is not None and self.weights is None:
            if not self.shares and self.sparsity is None and self.distill is None:
                raise ConfigError(
                    "weights (--weights) stay unquantized and nothing is pruned; give --prune, --sparsity or --distill"
                )
            self._check_unrounded()
            return None
        name = format_name(self.weights or "int4", self.group)
        if self.sparsity is not None and not has_zero(name):
            raise ConfigError(
                f"sparsity (--sparsity) removes weights, and weights (--weights) is {name!r}, which has no code for 0; "
                "choose another format"
            )
        choose_method(self.method, name, has_text=bool(self.data))  # refuses methods that the format lacks
        if name.startswith(_FEW_BITS) and not self.force and (self.distill is None or self.method != "auto"):
            raise ConfigError(
                f"weights (--weights) is {name!r}: rounding a trained model to so few bits without training it again "
                "makes it answer badly; use int3 or int4, train it with --distill, or --force"
            )
        return name

    def _check_unrounded(self) -> None:
        """Refuse options of rounding that have no effect on weights that stay unquantized."""
        methods = ("auto",) if self.sparsity is None else ("auto", "rtn")
        for name, value, is_used in (
            ("method", self.method, self.method in methods),
            ("group", self.group, self.group is None),
            ("activations", self.activations, self.activations != "int8"),
            ("rotate", self.rotate, not self.rotate or self.sparsity is not None),
            ("wide-dtype", self.wide_dtype, self.wide_dtype is None or self.sparsity is not None),
        ):
            if not is_used:
                raise ConfigError(
                    f"{name} (--{name}) is {value!r}, which has no effect on unquantized weights; leave it out, or "
                    "round the result in a second run"
                )

    def check_ranks(self, ranks: int) -> None:
        """Refuse stages that run in one process only.

        Raises:
            ConfigError: an option adds such a stage, or the source is a GGUF file.
        """
        for name, value in (
            ("distill", self.distill),
            ("method", LKD if self.method == LKD else None),
        ):
            if value is not None:
                raise ConfigError(
                    f"{name} (--{name}) is {str(value)!r}, which runs in one process, and {ranks} ranks run; round "
                    "over ranks in a second run, or start the command without ranks"
                )
        if is_gguf_file(self.source):
            raise ConfigError(
                f"{self.source} is a GGUF file, which one process unpacks; start the command without ranks"
            )

    def _check_learning(self) -> None:
        """Refuse options that change weights before their codes are learned."""
        if self.method != LKD:
            if self.lkd_steps is not None:
                raise ConfigError(f"lkd_steps (--lkd-steps) is {self.lkd_steps}, which needs --method lkd")
            return
        changed = {"rotate": self.rotate, "activations": self.activations == "int8", "sparsity": self.sparsity}
        name = next((name for name, value in changed.items() if value), None)
        if name is not None:
            raise ConfigError(
                f"{name} (--{name}) changes weights before --method lkd learns their codes; leave it out, or choose "
                "--method gptq"
            )

    def _check_text(self) -> None:
        """Refuse methods that need a text, if there is none."""
        if self.data:
            return
        for name, value, needs, instead in (
            ("method", self.method, self.method in (*NEEDS_TEXT, LKD), "choose --method hqq or rtn"),
            ("activations", self.activations, self.activations == "int8", "leave it out"),
            (
                "sparsity-method",
                self.sparsity_method,
                self.sparsity is not None and self.sparsity_method in ("sparsegpt", "wanda"),
                "choose --sparsity-method magnitude",
            ),
        ):
            if needs:
                raise ConfigError(
                    f"{name} (--{name}) is {value!r}, which needs a calibration text; give some with --data, or "
                    f"{instead}"
                )

    def _check_distillation(self) -> None:
        parse_losses(self.distill_loss)
        if self.distill is None:
            if self.steps is not None or self.distill_loss is not None:
                raise ConfigError("steps (--steps) and --distill-loss train against a teacher; give --distill TEACHER")
            return
        if self.steps is None:
            raise ConfigError("distill (--distill) needs steps (--steps), the number of optimizer steps")
        if not self.data:
            raise ConfigError("distill (--distill) needs text to train on; give some with --data")
        if self.sparsity is not None:
            raise ConfigError(
                "distill (--distill) trains before sparsity (--sparsity) would remove weights; train sparse weights "
                "with compression_training.sparse_pruning, or leave one of them out"
            )
        changed = "rotate" if self.rotate else "activations" if self.activations == "int8" else None
        if changed is not None and self.is_trained:
            raise ConfigError(
                f"{changed} (--{changed}) changes weights after --distill has trained their codes; choose "
                "--method rtn or gptq, which round the trained model, or leave it out"
            )
