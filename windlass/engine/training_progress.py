"""Training progress: counts of micro-batches, steps and samples, and the accumulation boundary."""

from __future__ import annotations

from dataclasses import dataclass

from windlass.config import BatchSizes


@dataclass
class TrainingProgress:
    """Counters of one engine. A step is an optimizer step; skipped steps count too."""

    batch: BatchSizes
    micro_steps: int = 0
    global_steps: int = 0
    global_samples: int = 0
    skipped_steps: int = 0
    boundary_override: bool | None = None  # the caller's override of the boundary, until the caller changes it
    managed_gradient_accumulation: bool = True  # False: every call of `step` ends a step
    is_stepping: bool = False  # True while `step` runs
    backward_count: int = 0  # backwards since the last step, if `managed_gradient_accumulation` is False
    open_micro_batches: int = 0  # calls of `step` since the last one that ended a step
    last_step_applied: bool = False  # True if the last call of `step` updated the parameters

    def is_at_boundary(self) -> bool:
        """Return True if the current micro-batch is known to be the last of its step."""
        return self.would_end_step() and (self.managed_gradient_accumulation or self.is_stepping)

    def would_end_step(self) -> bool:
        """Return True if a call of `step` would end a step now."""
        if not self.managed_gradient_accumulation:
            return True
        if self.boundary_override is not None:
            return self.boundary_override
        return (self.micro_steps + 1) % self.batch.accumulation == 0

    @property
    def is_step_started(self) -> bool:
        """True if micro-batches of an unfinished step were counted."""
        # `micro_steps` does not give this: a caller that sets the boundary may call `step` once for all micro-batches.
        return self.open_micro_batches > 0

    def end_micro_batch(self) -> None:
        """Count the end of a call of `step`, also of a failed call, which has dropped the gradients of its step."""
        self.open_micro_batches = 0 if self.would_end_step() else self.open_micro_batches + 1
        self.micro_steps += 1

    def record_step(self, *, applied: bool) -> None:
        """Count the end of an optimizer step."""
        self.global_steps += 1
        if self.managed_gradient_accumulation:
            self.global_samples += self.batch.train
        else:
            self.global_samples += self.batch.train // self.batch.accumulation * self.backward_count
            self.backward_count = 0
        self.last_step_applied = applied
        self.skipped_steps += not applied

    def state_dict(self) -> dict[str, int]:
        """Return the counters as plain numbers."""
        return {
            "micro_steps": self.micro_steps,
            "global_steps": self.global_steps,
            "global_samples": self.global_samples,
            "skipped_steps": self.skipped_steps,
        }

    def load_state_dict(self, state: dict[str, int], accumulation: int | None = None) -> None:
        """Restore the counters from `state_dict()`. No step counts as started then, because gradients are not saved.

        Args:
            accumulation: micro-batches per step at the save, if known. If this number differs now, `micro_steps` is
                converted as if all steps had had the current number.
        """
        for name in self.state_dict():
            setattr(self, name, int(state[name]))
        self.open_micro_batches = 0
        if accumulation is not None and self.managed_gradient_accumulation:
            self.micro_steps = self.micro_steps // accumulation * self.batch.accumulation
