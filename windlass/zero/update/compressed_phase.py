"""Compressed steps of an optimizer: exchange of local values with the owners of elements, with error feedback."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from windlass.base.log import logger
from windlass.comm.rank_group import RankGroup
from windlass.zero.core.unit import Unit
from windlass.zero.update.compressed_messages import (
    Batch,
    CompressedMessages,
    UnitMessage,
    batches_of,
    in_flight,
    in_kinds,
    owner_rows,
)
from windlass.zero.update.optimizer_step_session import run_pre_step_hooks
from windlass.zero.update.rank_state import OwnedRankState, RankState, RelayRule, StoredRankState, mean_of_ranks
from windlass.zero.update.rank_state_memory import RankStateMemory
from windlass.zero.update.update_chunk import UpdateChunk
from windlass.zero.update.update_protocol import UpdateContext

CODEC, FINE_CODEC = "sign", "fine_sign"
WORKER_ERROR, SERVER_ERROR, LOCAL_CHANGE, SUMMED = "worker_error", "server_error", "local_change", "summed"
_UNSENT = (WORKER_ERROR, SERVER_ERROR, LOCAL_CHANGE, SUMMED)

Options = dict[int, dict[str, Any]]
"""Hyper-parameters by id of the parameter."""
Fragments = Callable[[Unit], Iterable[tuple[int, int, torch.Tensor, float]]]
"""Returns fragments of a unit's parameters: parameter index, first element, flat values and a factor for them."""


def error_keys(shards_states: bool) -> tuple[str, ...]:
    """Return the names of the error-feedback states: of senders and owners at stage 0, else of senders alone."""
    return (WORKER_ERROR,) if shards_states else (WORKER_ERROR, SERVER_ERROR)


class CompressedPhase:
    """Exchanges and per-rank states of an update with compressed steps.

    Args:
        chunks: chunks of the update. The caller may append to the list.
        keys: names of the per-rank states.
        codec: registered name of the codec of messages; None: `sign` at stage 0; at stages 1 and 2 `fine_sign`, with
            smaller blocks, because messages contain gradients there, whose magnitudes vary more than those of momenta.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        context: UpdateContext,
        chunks: list[UpdateChunk],
        keys: tuple[str, ...],
        codec: str | None = None,
    ) -> None:
        self._optimizer, self._chunks, self.shards = optimizer, chunks, context.shards_states
        codec = codec or (FINE_CODEC if self.shards else CODEC)
        self._messages = CompressedMessages(context.dp_groups[0], codec, context.timeout)
        self._keys = keys
        self._memory = RankStateMemory(context.make_slot)
        self._held: tuple[str, ...] = ()
        for unit in {chunk.unit.index: chunk.unit for chunk in chunks}.values():
            for key in keys:
                self._memory.open(key, unit, self._numel(key, unit))

    @property
    def group(self) -> RankGroup:
        """The data-parallel ranks."""
        return self._messages.group

    def use_group(self, group: RankGroup) -> None:
        """See `CompressedMessages.use_group`."""
        self._messages.use_group(group)

    def use_codec(self, codec: str) -> None:
        """See `CompressedMessages.use_codec`."""
        self._messages.use_codec(codec)

    def set_key(self, key: str, *, kept: bool) -> None:
        """Add the per-rank state `key`, with zeros, if `kept`, else remove it. No effect if nothing changes."""
        if kept == (key in self._keys):
            return
        self._keys = (*self._keys, key) if kept else tuple(one for one in self._keys if one != key)
        self._held = self._keys if self._held else ()
        self._memory.drop(key)

    def begin(self) -> None:
        """Begin to save all per-rank states in checkpoints."""
        self._held = self._keys

    def state(self, key: str, unit: Unit) -> torch.Tensor:
        """Return a per-rank state of a unit in float32, zeros at first.

        Its shape is `[padded]`, or for `SERVER_ERROR` `[span]`: the elements that this rank owns.

        At stages 1 and 2, where states may be offloaded, call `fetch` and `put` instead.
        """
        return self._memory.tensor(key, unit, self._numel(key, unit))

    def fetch(self, key: str, unit: Unit) -> torch.Tensor:
        """Return a per-rank state as `state` does, from any tier. Pass it to `put` after a change."""
        return self._memory.fetch(key, unit, self._numel(key, unit))

    def put(self, key: str, unit: Unit, values: torch.Tensor) -> None:
        """Start to store a state that `fetch` returned. `values` must not change afterwards."""
        self._memory.put(key, unit, values)

    def _numel(self, key: str, unit: Unit) -> int:
        start, stop = self._owned_range(unit) if key == SERVER_ERROR else (0, unit.layout.padded)
        return stop - start

    def _owned_range(self, unit: Unit) -> tuple[int, int]:
        """Return the range of elements of a unit that this rank owns; see [Note: owners of elements]."""
        return unit.layout.shard_range(self.group.index, self.group.size)

    def forget(self, *keys: str) -> None:
        """Reset per-rank states to zero."""
        for key in keys:
            self._memory.zero(key)

    def forget_unsent(self) -> None:
        """Reset error feedback, local changes and sums of local gradients to zero."""
        self.forget(*_UNSENT)

    def options(self) -> Options:
        """Run the pre-step hooks of the optimizer, and return the hyper-parameters."""
        run_pre_step_hooks(self._optimizer)
        options: Options = {}
        for group in self._optimizer.param_groups:
            given = {key: value for key, value in group.items() if key != "params"}
            options |= {id(parameter): given for parameter in group["params"]}
        return options

    @torch.no_grad()
    def local_messages(
        self,
        used: dict[int, list[bool]],
        divisor: float,
        options: Options,
        *,
        weighted: bool = True,
        fetched: Sequence[str] = (WORKER_ERROR,),
    ) -> Iterator[Batch]:
        """Yield the local gradients of each batch of units, divided by `divisor`, as messages of one exchange.

        When the next batch is requested, this rank's span of each message becomes the reduced shard of the unit's
        gradient slot, as a view: the update reads the result of the exchange there.

        Args:
            used, divisor: see `Update.run`.
            weighted: also multiply the gradients by `1 - beta1`.
            fetched: names of the states that the caller fetches for each batch. They are prefetched.
        """
        self.begin()
        slots = {chunk.unit.index: chunk.slot for chunk in self._chunks if chunk.slot.has_reduced}
        batches = list(batches_of(in_kinds([slots[index].unit for index in sorted(slots, reverse=True)])))
        self._memory.wait()
        for number, units in enumerate(batches):
            for ahead in batches[number : number + 2]:
                for key in fetched:
                    self._memory.prefetch(key, ahead)
            messages = []
            for unit in units:
                flat = slots[unit.index].read().float()
                chosen = [
                    flag and id(parameter) in options
                    for flag, parameter in zip(used[unit.index], unit.parameters, strict=True)
                ]
                for index, parameter in enumerate(unit.parameters):
                    if chosen[index]:
                        beta = options[id(parameter)]["betas"][0] if weighted else 0.0
                        factor = (1 - beta) / divisor
                        if factor != 1.0:
                            unit.parameter_view(flat, index).mul_(factor)
                messages.append(UnitMessage(unit, flat, chosen))
            yield messages
            for message in messages:
                slots[message.unit.index].shard = message.unit.local_span(message.flat)

    def exchange(self, batches: Iterable[Batch], fragments: Fragments | None = None) -> Iterator[Batch]:
        """Replace local values by their mean, on all ranks at stage 0, else on the owners. Collective.

        Yield each batch when it has its result, while later batches are in flight ([Note: messages in flight]).

        Args:
            fragments: returns values to add to this rank's values before the exchange; None: nothing is added.
        """
        averaged = in_flight((messages, self.start_average(messages, fragments)) for messages in batches)
        if self.shards:
            return averaged
        return in_flight((messages, self.start_answer(messages)) for messages in averaged)

    def start_exchange(self, batches: Iterable[Batch]) -> PendingExchange:
        """Start an exchange at stage 0 without waiting for messages. All of them are in flight at once, so they must
        not share memory. Collective.
        """
        return PendingExchange(self, batches)

    @torch.no_grad()
    def start_answer(self, messages: Batch) -> Callable[[], None]:
        """Start to send the means of this rank's elements to all ranks, at stage 0. Collective. Return a function that
        waits for the means of all owners.
        """
        return self._messages.start_send(messages, [self.state(SERVER_ERROR, one.unit) for one in messages])

    @torch.no_grad()
    def start_average(self, messages: Batch, fragments: Fragments | None = None) -> Callable[[], None]:
        """Start to average local values on the owners of elements. Collective. Return a function that waits for the
        means and stores the error feedback.

        Args:
            fragments: see `exchange`.
        """
        for message in messages if fragments is not None else ():
            assert fragments is not None
            for index, start, values, factor in fragments(message.unit):
                if message.chosen[index]:
                    place = message.unit.layout.offsets[index] + start
                    message.flat.narrow(0, place, values.numel()).add_(values, alpha=factor)
        errors = [self.fetch(WORKER_ERROR, one.unit) for one in messages]
        wait = self._messages.start_average(messages, errors)

        def finish() -> None:
            wait()
            for message, error in zip(messages, errors, strict=True):
                self.put(WORKER_ERROR, message.unit, error)

        return finish

    @torch.no_grad()
    def send_changes(self, units: list[Unit], changes: dict[int, torch.Tensor]) -> None:
        """Send this rank's changes to all ranks, and add all ranks' decoded changes to the parameters. Collective.

        Args:
            changes: new values of this rank's span minus the parameters, by unit index. Entries that are sent are
                removed. A missing entry (this rank's update failed) is sent as zeros, because other ranks wait for it.
        """
        batches = (self._changes_of(batch, changes) for batch in batches_of(in_kinds(units)))
        for messages in in_flight((batch, self._messages.start_send(batch)) for batch in batches):
            for message in messages:
                for rank in range(self.group.size):
                    values = message.views(message.unit.full, rank, self.group.size)
                    moves = message.views(message.flat, rank, self.group.size)
                    for value, move in zip(values, moves, strict=True):
                        value.add_(move) if value.dtype == move.dtype else value.copy_(value.float().add_(move))

    def _changes_of(self, units: list[Unit], changes: dict[int, torch.Tensor]) -> Batch:
        trained, messages = {id(p) for group in self._optimizer.param_groups for p in group["params"]}, []
        for unit in units:
            flat = torch.zeros(unit.layout.padded, dtype=torch.float32, device=unit.full.device)
            change = changes.pop(unit.index, None)
            if change is not None:
                unit.local_span(flat).copy_(change)
            messages.append(UnitMessage(unit, flat, [id(p) in trained for p in unit.parameters]))
        return messages

    def rank_states(self) -> Iterator[RankState]:
        """See `Update.rank_states`. Empty before `begin`, unless a checkpoint with per-rank states was loaded."""
        trained = {id(p) for group in self._optimizer.param_groups for p in group["params"]}
        units = {chunk.unit.index: chunk.unit for chunk in self._chunks}
        for key in self._held:
            for unit in units.values():
                for index, parameter in enumerate(unit.parameters):
                    if id(parameter) in trained and unit.layout.numels[index]:
                        if key == SERVER_ERROR:
                            yield self._owned_state(unit, index)
                        elif self._memory.is_offloaded(unit):
                            yield self._stored_state(key, unit, index)
                        else:
                            values = unit.parameter_view(self.state(key, unit), index).view(-1)
                            yield RankState(unit, index, key, values, mean_of_ranks, tier=unit.state_tier)

    def _owned_state(self, unit: Unit, index: int) -> OwnedRankState:
        """Return the error feedback that this rank stores as owner of elements of a parameter."""
        span = self.state(SERVER_ERROR, unit)
        pieces = [piece for piece in unit.layout.pieces(*self._owned_range(unit)) if piece.index == index]
        owned = tuple((piece.start, span.narrow(0, piece.offset, piece.numel)) for piece in pieces)
        values = span.new_zeros(unit.layout.numels[index])
        for start, part in owned:
            values[start : start + part.numel()] = part
        relay: RelayRule = partial(owner_rows, unit, index)
        return OwnedRankState(unit, index, SERVER_ERROR, values, relay, follows_owners=True, owned=owned)

    def _stored_state(self, key: str, unit: Unit, index: int) -> StoredRankState:
        """Return an offloaded state of a parameter."""
        start, numel = unit.layout.offsets[index], unit.layout.numels[index]
        self._memory.open(key, unit, self._numel(key, unit))
        return StoredRankState(
            unit,
            index,
            key,
            torch.empty(numel, dtype=torch.float32, device="meta"),
            mean_of_ranks,
            tier=unit.state_tier,
            memory=self._memory,
            start=start,
        )

    def open_rank_states(self, saved: Collection[str]) -> frozenset[str]:
        """See `Update.open_rank_states`. A checkpoint from before the first compressed step has no such states."""
        self._memory.drop()
        self._held = tuple(key for key in self._keys if key in saved)
        return frozenset(saved) - set(self._keys)


def warn_of_late_parameter(name: str) -> None:
    """Log a warning that a parameter had its first gradient after the variance was frozen."""
    logger.warning(
        f"{name!r} had no gradient in the steps before the freeze, so its variance is 0 and it is not trained; "
        "unfreeze it before freeze_step, or continue with AdamW"
    )


class PendingExchange:
    """Exchange at stage 0 whose transfers run while the ranks compute. Its messages receive the result.

    All ranks call the methods in the same order with respect to other transfers. Construction is collective.
    """

    def __init__(self, phase: CompressedPhase, batches: Iterable[Batch]) -> None:
        self._phase, self._answers = phase, False
        self._waits = [(messages, phase.start_average(messages)) for messages in batches]

    @torch.no_grad()
    def answer(self) -> None:
        """Wait for the messages to this rank, and start to send their means. Collective."""
        if not self._answers:
            self._answers, waits, self._waits = True, self._waits, []
            for messages, wait in waits:
                wait()
                self._waits.append((messages, self._phase.start_answer(messages)))

    @torch.no_grad()
    def finish(self) -> None:
        """Wait for the means of all owners. Collective."""
        self.answer()
        for _, wait in self._waits:
            wait()
        self._waits = []
