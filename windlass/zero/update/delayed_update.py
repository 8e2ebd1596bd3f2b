"""An update that goes on while the next forward and backward run.

[Note: delayed update] With `offload_optimizer.delayed_update` a step hands its gradient to a thread of its own and
returns; what the thread made of it is brought to the parameters by the next step. So each gradient is that of the
parameters of one update before, and with w[0] = w[-1] the weights that training began with

    w[t + 1] = w[t] - update(gradient(w[t - 1]))

(Ren et al., "ZeRO-Offload", arXiv:2101.06840, section 5.2: one-step delayed parameter update). Everything else of a
step (norm, clipping, overflow, hyper-parameters) is of its own time. Three things are kept twice for it:

- gradients: the update reads those of its step while the next arrive (`GradientSlot.spare`);
- fp32 parameters that rest in host memory: elsewhere masters are other memory anyway (`Masters`);
- new parameters in the compute dtype, where they are no cast of masters at hand, until the next step brings them
  (`Chunk.lowered`).

Between `start` and `wait` masters, optimizer states and the disk records of both are the thread's, parameters and the
next gradient everybody else's. Whoever looks at the former from outside waits (`ShardedModel.await_update`); whoever
needs both to fit together, or sets them, finishes the update (`ShardedModel.finish_update`), which is collective.
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
    """The update under way of one model, if there is one.

    Args:
        slots: gradients of the trainable units.
        masters: what is updated.
        units: all of the model.
        device: where the model computes.
        home: of gradients handed over, where they arrive on the device.
        make: makes a slot: name, elements, dtype, home.
        dtype: of gradients.

    Attributes:
        seconds: that the last finished update took on its thread.
        waited: those of them in which a step, or whoever wanted its result, had to wait for it.
    """

    def __init__(
        self,
        slots: list[GradientSlot],
        masters: MasterWeights,
        units: list[Unit],
        device: torch.device,
        home: Tier,
        make: Callable[[str, int, torch.dtype, Tier], Slot],
        dtype: torch.dtype,
    ) -> None:
        self._slots, self._masters, self._units, self._device = slots, masters, units, device
        self._home, self._make, self._dtype = home, make, dtype
        for slot in slots:
            self.allocate_spare(slot)
        # one thread for good: each new one that computes would start a team of OpenMP threads
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="windlass-update")
        self._running: concurrent.futures.Future[list[list[UpdateChunk]]] | None = None
        self.seconds = self.waited = self._took = self._waits = 0.0

    def allocate_spare(self, slot: GradientSlot) -> None:
        """Make room for a gradient that is handed over."""
        rests = slot.storage.tier if slot.storage is not None else self._home
        numel = slot.unit.state_stop - slot.unit.state_start
        slot.spare_storage = self._make(f"gradient of {slot.unit.names[0]}, handed over", numel, self._dtype, rests)
        slot.spare_storage.set_content_description(slot.names_in)

    @property
    def in_progress(self) -> bool:
        """True while an update is started and not finished; equal on all ranks."""
        return self._running is not None

    def start(self, batches: Iterator[list[UpdateChunk]]) -> None:
        """Hand this step's gradients over and update on the thread.

        Args:
            batches: does the update, as it is asked for what was updated.
        """
        assert self._running is None
        for moving in [slot.hand_over() for slot in self._slots]:
            moving.wait()
        self._waits = 0.0
        self._running = self._thread.submit(self._update, batches)

    def wait(self) -> None:
        """Wait until the thread is through, well or not: then masters and states are those after the update."""
        if self._running is not None and not self._running.done():
            begin = time.perf_counter()
            concurrent.futures.wait([self._running])
            self._waits += time.perf_counter() - begin

    def local_error(self) -> Exception | None:
        """Why this rank can't bring its new parameters, after `wait`."""
        assert self._running is not None
        if (error := self._running.exception()) is not None:
            said = UpdateError(
                f"the delayed update of the step before failed, so some master weights are of before it and some of "
                f"after: {type(error).__name__}: {error}; load the last checkpoint, and set "
                f"offload_optimizer.delayed_update to false to see the error where it arises"
            )
            said.__cause__ = error
            return said
        if (name := self._masters.first_edited(self._units)) is not None:
            return ModelError(
                f"{name!r} was changed in place while an update of it was under way (offload_optimizer.delayed_update),"
                " which knew nothing of the change; call engine.finish_update() first, then change it"
            )
        return None

    def finish(self, *, use: bool) -> list[list[UpdateChunk]]:
        """End the update, after `wait`: the chunks whose new parameters are to be brought; none unless it is of use."""
        running, self._running = self._running, None
        assert running is not None
        self.seconds, self.waited = self._took, min(self._took, self._waits)
        for slot in self._slots:
            slot.handed_over = None
        if use:
            return running.result()
        for chunk in self._masters.chunks:
            chunk.lowered_params = None
        return []

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown()

    def _update(self, batches: Iterator[list[UpdateChunk]]) -> list[list[UpdateChunk]]:
        begin = time.perf_counter()
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # each thread has its own; page-locked memory belongs to one
        done = []
        with torch.no_grad():
            for batch in batches:
                for chunk in batch:
                    self._masters.keep_lowered_params(chunk)
                done.append(batch)
        self._took = time.perf_counter() - begin
        return done
