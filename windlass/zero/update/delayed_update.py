"""Optimizer update on a background thread, during the next forward and backward.

[Note: delayed update] With `offload_optimizer.delayed_update`, a step passes its gradient to a background thread and
returns. The next step, or `finish_update`, writes the result to the parameters. So each gradient belongs to parameters
that are one update old. With w[-1] = w[0], the initial weights,

    w[t + 1] = w[t] - update(gradient(w[t - 1]))

(Ren et al., "ZeRO-Offload", arXiv:2101.06840, section 5.2: one-step delayed parameter update). Norm, clipping,
overflow and hyper-parameters of a step are not delayed: they are those at the call of `step`. Delayed updates need
additional memory for:

- a second gradient: the update reads the gradient of its step while the next one arrives
  (`GradientSlot.spare_storage`);
- separate master weights: parameters never serve as their own master weights, even if dtype and tier are equal
  (`MasterWeights`);
- new parameters in the param_dtype until the next step publishes them (`UpdateChunk.lowered_params`), unless the
  master weights are in memory in that dtype.

Between `start` and `wait`, only the thread uses master weights, optimizer states and their disk records. Other code
uses only the parameters and the next gradient. Code that reads master weights or states first calls
`ShardedModel.wait_for_update`. Code that needs parameters and master weights of the same step, or sets either, first
calls `ShardedModel.finish_update`, which is collective.
"""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Callable, Iterator

import torch

from windlass.base.errors import ModelError, UpdateError
from windlass.storage.slot import Slot, Tier
from windlass.zero.core.gradient_slot import GradientSlot
from windlass.zero.core.unit import Unit
from windlass.zero.update.master_weights import MasterWeights
from windlass.zero.update.update_chunk import UpdateChunk


class DelayedUpdate:
    """Background update of one model: at most one at a time.

    Args:
        slots: gradients of the trainable units. The caller may append to the list.
        masters: master weights to update.
        units: all units of the model.
        device: device of the model.
        tier: tier of the spare gradient of a slot whose reduced gradient is on the device.
        make: makes a slot from name, number of elements, dtype and tier.
        dtype: dtype of the gradients.

    Attributes:
        seconds: duration of the last finished update on its thread.
        waited: part of `seconds` during which `wait` blocked its caller.
    """

    def __init__(
        self,
        slots: list[GradientSlot],
        masters: MasterWeights,
        units: list[Unit],
        device: torch.device,
        tier: Tier,
        make: Callable[[str, int, torch.dtype, Tier], Slot],
        dtype: torch.dtype,
    ) -> None:
        self._slots, self._masters, self._units, self._device = slots, masters, units, device
        self._tier, self._make, self._dtype = tier, make, dtype
        for slot in slots:
            self.allocate_spare(slot)
        # One thread for all updates: every new thread that computes would start its own team of OpenMP threads.
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="windlass-update")
        self._running: concurrent.futures.Future[list[list[UpdateChunk]]] | None = None
        self.seconds = self.waited = self._took = self._waits = 0.0

    def allocate_spare(self, slot: GradientSlot) -> None:
        """Allocate the second storage of a slot, for the gradient that an update uses."""
        spare_tier = slot.storage.tier if slot.storage is not None else self._tier
        numel = slot.unit.state_stop - slot.unit.state_start
        slot.spare_storage = self._make(
            f"gradient of {slot.unit.names[0]}, passed to the delayed update", numel, self._dtype, spare_tier
        )
        slot.spare_storage.set_content_description(slot.names_in)

    @property
    def in_progress(self) -> bool:
        """True from `start` to `finish`. Equal on all ranks."""
        return self._running is not None

    def start(self, batches: Iterator[list[UpdateChunk]]) -> None:
        """Move the gradients of this step to their spare storage, and start the update on the thread.

        Args:
            batches: performs the update while it is iterated; yields each batch of chunks once it is updated.
        """
        assert self._running is None
        # The next backward overwrites the gradients, so wait for the copies here, after all were started.
        for moving in [slot.hand_over() for slot in self._slots]:
            moving.wait()
        self._waits = 0.0
        self._running = self._thread.submit(self._update, batches)

    def wait(self) -> None:
        """Wait until the thread has finished the update or failed. Then other code may read master weights and states.

        An error of the update is not raised here: see `local_error`.
        """
        if self._running is not None and not self._running.done():
            begin = time.perf_counter()
            concurrent.futures.wait([self._running])
            self._waits += time.perf_counter() - begin

    def local_error(self) -> Exception | None:
        """Return the reason why this rank cannot use the result of the update; None if it can. Call `wait` first.

        Returns:
            UpdateError if the update raised, ModelError if a parameter was changed in place since `start`.
        """
        assert self._running is not None
        if (error := self._running.exception()) is not None:
            update_error = UpdateError(
                "the delayed update of the step before failed, so only some master weights are updated: "
                f"{type(error).__name__}: {error}; load the last checkpoint, and set "
                "offload_optimizer.delayed_update to false to see the error where it arises"
            )
            update_error.__cause__ = error
            return update_error
        if (name := self._masters.first_edited(self._units)) is not None:
            return ModelError(
                f"{name!r} was changed in place during its update (offload_optimizer.delayed_update), which "
                "overwrites the change; call engine.finish_update() first, then change it"
            )
        return None

    def finish(self, *, use: bool) -> list[list[UpdateChunk]]:
        """End the update. Call `wait` first.

        Args:
            use: False drops the new parameters, because the update failed on some rank.

        Returns:
            The updated chunks by batch, for `MasterWeights.write_back`; empty if not `use`.
        """
        running, self._running = self._running, None
        assert running is not None
        self.seconds, self.waited = self._took, min(self._took, self._waits)
        for slot in self._slots:
            slot.handed_over = None  # `slot.stepped` is the gradient of the current step again
        if use:
            return running.result()
        for chunk in self._masters.chunks:
            chunk.lowered_params = None
        return []

    def close(self) -> None:
        """Wait for the update in progress, if any, and end the thread."""
        self._thread.shutdown()

    def _update(self, batches: Iterator[list[UpdateChunk]]) -> list[list[UpdateChunk]]:
        begin = time.perf_counter()
        if self._device.type == "cuda":
            # The current device is per thread, and page-locked memory is allocated for the current device.
            torch.cuda.set_device(self._device)
        done = []
        with torch.no_grad():  # grad mode is per thread, too
            for batch in batches:
                for chunk in batch:
                    # Copy now: master weights on NVMe leave memory when the next batch is requested.
                    self._masters.keep_lowered_params(chunk)
                done.append(batch)
        self._took = time.perf_counter() - begin
        return done
