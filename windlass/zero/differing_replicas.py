"""Parameters that differ from the master weights for some steps, e.g. because ranks take local steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from windlass.base.errors import ModelError
from windlass.base.pending import Pending
from windlass.zero.core.gradient_slot import GradientSlot
from windlass.zero.core.unit import Unit
from windlass.zero.update.master_weights import MasterWeights
from windlass.zero.update.update_protocol import Update


@dataclass(frozen=True)
class DifferingReplicasCallbacks:
    """Callables of the model that change its parameters.

    Attributes:
        recapture: Makes parameters views of their units again, with their current values, after a script gave them
            other memory.
        gather: Is called with units whose parameters were set to the master weights, and passes the new values on to
            the other ranks. Collective.
    """

    recapture: Callable[[], None]
    gather: Callable[[list[Unit]], None]


class DifferingReplicas:
    """Weights with which ranks train while these differ from the master weights.

    [Note: replicas that differ] After some updates, e.g. local steps between two synchronizations, parameters are not
    copies of the master weights. A change of a parameter by a script would then be lost, or reach the master weights of
    one rank together with that rank's local steps. So a change is refused on all ranks, at the next step or
    `finish_update`, and undone. Where ranks take local steps (stage 0), every rank has all master weights: an
    evaluation computes with them, without a message, and the next training forward computes with the local weights
    again.

    Args:
        update: the model's update; None without an optimizer.
        masters: the master weights.
        slots: gradients of the trainable units; those of units that are unfrozen later are appended.

    Attributes:
        differ: True while parameters may differ from the master weights. Equal on all ranks.
    """

    def __init__(
        self,
        update: Update | None,
        masters: MasterWeights,
        slots: list[GradientSlot],
        callbacks: DifferingReplicasCallbacks,
    ) -> None:
        self._update, self._masters, self._slots = update, masters, slots
        self._callbacks = callbacks
        self.differ = self._has_common_weights = False

    def publish(self, units: list[Unit]) -> None:
        """Let the update write the result of a step to the parameters. Collective, unless ranks take local steps."""
        assert self._update is not None
        self.differ, self._has_common_weights = True, False
        self._update.publish(units)

    def equalize(self) -> None:
        """Copy the master weights to the parameters of all ranks, once transfers in flight have ended. Collective."""
        if self._update is not None:
            self._update.finish_transfers()
        self._write_master_weights()
        self._callbacks.gather(self._units)
        self.differ = self._has_common_weights = False
        self._accept_weights()

    def show_common_weights(self) -> None:
        """Set the parameters to the master weights, which are equal on all ranks, for an evaluation. Not collective.

        Does nothing unless ranks take local steps.

        Raises:
            ModelError: a parameter was changed in place while replicas differed. The change was undone.
        """
        if self.differ and not self._has_common_weights and self.keeps_local_weights:
            edited = self.refused_edit()
            self._write_master_weights()
            self._has_common_weights = True
            self._accept_weights()
            if edited:  # the master weights have overwritten the edit, so the next step cannot detect and refuse it
                raise self.edit_error(edited)

    def show_local_weights(self) -> None:
        """Set the parameters to the values with which this rank trains. Not collective.

        Does nothing unless ranks take local steps.
        """
        if self.differ:
            self.restore_local_weights()
        elif self.keeps_local_weights:  # after `finish_update` or a load, a script may change parameters
            self._callbacks.recapture()
            self._masters.copy_all_edits(self._units)
            self.publish(self._units)
            self._accept_weights()

    def restore_local_weights(self) -> None:
        """Set parameters that have the common master weights to this rank's local weights."""
        if self._has_common_weights and not self.refused_edit():  # an edit stays until the next step refuses it
            self.publish(self._units)
            self._accept_weights()

    def refused_edit(self) -> str:
        """Return the name of a parameter that was changed in place while replicas differ; empty if there is none."""
        if not self.differ:
            return ""
        self._callbacks.recapture()
        return self._masters.first_edited(self._units) or ""

    def edit_error(self, name: str, consequence: str = "") -> ModelError:
        """Return the error for a refused change, which was undone."""
        optimizer = type(self._update.optimizer).__name__ if self._update is not None else ""
        return ModelError(
            f"{name!r} was changed in place while parameters differ from the master weights ({optimizer} between two "
            f"synchronizations). The change was undone{consequence}: call engine.finish_update() on all ranks first, "
            "then change it on all ranks, or inside `with windlass.zero.GatheredParameters([parameter], "
            "modifier_rank=0)`"
        )

    @property
    def _units(self) -> list[Unit]:
        return [slot.unit for slot in self._slots]

    @property
    def keeps_local_weights(self) -> bool:
        """True if ranks may train with weights of their own between two synchronizations."""
        return self._update is not None and self._update.keeps_local_weights

    def _write_master_weights(self) -> None:
        for unit in self._units:
            with self._masters.resident([unit], changes=True):
                written: list[Pending] = [self._masters.write_back(chunk) for chunk in self._masters.chunks_of(unit)]
                for one in written:
                    one.wait()

    def _accept_weights(self) -> None:
        """Increment the parameters' versions, so that backwards through earlier graphs raise.

        Edits are detected from now on.
        """
        for unit in self._units:
            torch.autograd.graph.increment_version(unit.parameters)
        self._masters.remember_versions(self._units)
        self._masters.follow_edits(self._units, refuses=self.differ)
