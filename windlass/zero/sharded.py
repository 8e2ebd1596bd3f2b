"""A model whose parameters, gradients and optimizer state are kept as one policy says: built, stepped, undone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from weakref import finalize, ref

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from windlass.base.errors import ModelError
from windlass.comm.choose import choose_transport
from windlass.comm.groups import DataMesh
from windlass.comm.transport import Buffer, Need, Transport, Ways
from windlass.optim.elementwise import is_elementwise, prefer_fused
from windlass.zero import registry
from windlass.zero.access import Released, mark_present
from windlass.zero.foresight import Foresight
from windlass.zero.gradients import Gradients, Slot
from windlass.zero.hooks import attach_block, attach_gradients, attach_model
from windlass.zero.layout import Layout
from windlass.zero.norm import Verdict, agree, clip_coefficient
from windlass.zero.partition import Block, Plan, Rules, plan_units
from windlass.zero.policy import Policy
from windlass.zero.runtime import Runtime
from windlass.zero.unit import Presence, Unit
from windlass.zero.update import ElementwiseUpdate, check_parameters
from windlass.zero.whole import WholeUpdate


@dataclass(frozen=True)
class Settings:
    """Everything the core needs to know, in its own words; `initialize` fills it from the configuration.

    Attributes:
        compute: dtype that floating-point parameters are cast to; None: each keeps its own.
        accumulate, wire: dtypes of kept gradients and of their travel.
        before, after: factors of a gradient before and after the ranks' parts are added.
        ways: how transports send.
        contiguous: gradients leave `.grad` as they arrive; else when their unit is complete.
        ignore_unused: a parameter without gradient is left alone; else it is an error.
        sub_group: elements that are updated at once.
        ahead, live, reuse: see `Foresight`.
    """

    policy: Policy
    rules: Rules
    compute: torch.dtype | None
    accumulate: torch.dtype
    wire: torch.dtype
    before: float
    after: float
    overlap: bool
    ways: Ways
    contiguous: bool
    ignore_unused: bool
    sub_group: int
    ahead: int
    live: int
    reuse: int
    transport: str
    timeout: timedelta


@dataclass(frozen=True)
class Outcome:
    """What a step did.

    Attributes:
        norm: of the whole unclipped gradient, loss scale removed.
        applied: the parameters were updated. If not, the gradient was not finite and is dropped.
        clip: the factor that clipping came to.
        flags: sums over ranks of the caller's numbers.
        bad: the first parameter whose gradient is not finite, where that was looked for.
    """

    norm: float
    applied: bool
    clip: float
    flags: list[float]
    bad: str = ""


class ShardedModel:
    """Owns the units of one model from `initialize` to `destroy`.

    Args:
        model: built whole, the same architecture on every rank; rank 0's values count.
        optimizer: over the model's parameters, or None (evaluation).
        settings: see there.
        mesh: the data ranks.
        device: where the model shall be.
        trains: there will be gradients; else everything counts as frozen.

    Raises:
        ModelError: a parameter can't be handled, or the optimizer's are not the model's.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        settings: Settings,
        mesh: DataMesh,
        device: torch.device,
        *,
        trains: bool,
    ) -> None:
        _check_devices(model, device)
        if optimizer is not None:
            check_parameters(optimizer, model)
        self.model, self.settings, self.mesh, self.device, self.trains = model, settings, mesh, device, trains
        policy = self.policy = settings.policy
        self.group = mesh.shard if policy.state else mesh.data
        self.transport, self.transport_reason = choose_transport(
            settings.transport, self.group, device, ways=settings.ways, timeout=settings.timeout
        )
        regather = None
        if mesh.regather is not None and policy.param:
            regather, _ = choose_transport(
                self.transport.name, mesh.regather, device, ways=settings.ways, timeout=settings.timeout
            )
            regather.traffic = self.transport.traffic
        blocks, plans = plan_units(model, settings.rules)
        self.units = [self._unit(number, plan) for number, plan in enumerate(plans)]
        trainable = [unit for unit in self.units if unit.trainable]
        self.gradients = Gradients(
            trainable,
            policy,
            self.transport,
            accumulate=settings.accumulate,
            wire=settings.wire,
            overlap=settings.overlap,
            before=settings.before,
            after=settings.after,
            contiguous=settings.contiguous,
        )
        self._allocate(plans, regather)
        foresight = Foresight(settings.ahead, settings.live, settings.reuse)
        self.runtime = Runtime(self.units, blocks, foresight)
        self.runtime.on_backward_end.append(self.gradients.end_backward)
        self.update: ElementwiseUpdate | WholeUpdate | None = None
        if optimizer is not None:
            self.use_optimizer(optimizer)
        self._handles: list[RemovableHandle] = []
        self._closer = finalize(self, mesh.close)
        self._attach(blocks)
        self.loss_scale: Callable[[], float] = lambda: 1.0  # what is in the gradients now
        self._versions: dict[int, int] = {}
        self._remember_versions()
        self._learned = False
        registry.register(self)

    @property
    def slots(self) -> list[Slot]:
        """The gradients of the trainable units, in model order."""
        return self.gradients.slots

    def use_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Step with `optimizer` from now on."""
        prefer_fused(optimizer)
        sub_group = self.settings.sub_group
        if is_elementwise(optimizer):
            self.update = ElementwiseUpdate(optimizer, self.slots, sub_group)
        else:
            self.update = WholeUpdate(
                optimizer,
                self.slots,
                self.group,
                whole=not self.policy.state,
                sub_group=sub_group,
                traffic=self.transport.traffic,
            )

    def step(self, limit: float, scale: float, *, skip_overflow: bool, flags: list[float] | None = None) -> Outcome:
        """Reduce what is left, agree on the norm, update, and bring the new parameters to where they are used.

        Collective.

        Args:
            limit: clip the gradient to this norm; 0: do not.
            scale: the loss scale that is in the gradients.
            skip_overflow: expect gradients that are not finite now and then, and do not look for whose they are.
            flags: numbers that are added up over ranks on the way.

        Raises:
            ModelError: there is no optimizer, or a parameter had no gradient and the settings say that it must have
            one.
        """
        if self.update is None:
            raise ModelError("there is no optimizer to step: pass one to initialize, or name one in the configuration")
        verdict = self._agree(flags or [])
        norm = verdict.norm / scale
        if not verdict.finite and (skip_overflow or (bad := self.first_bad())):
            self.forget_gradients()
            return Outcome(norm, applied=False, clip=1.0, flags=verdict.flags, bad="" if skip_overflow else bad)
        if not self.settings.ignore_unused:
            self._refuse_unused(verdict.used)
        self.runtime.release_all()  # what stayed after an evaluation holds the old values
        self.gradients.spread()
        self.take_edits()
        clip = clip_coefficient(norm, limit)
        started = []
        for batch in self.update.run(verdict.used, scale / clip):
            for slot in batch:
                if slot.holds:
                    started.append(slot.unit)
                    self._write_back(slot.unit)
        self._bring(started)
        self.forget_gradients()
        for unit in started:
            torch.autograd.graph.increment_version(unit.parameters)
        self._remember_versions()
        return Outcome(norm, applied=True, clip=clip, flags=verdict.flags)

    def first_bad(self) -> str:
        """The first parameter in model order whose reduced gradient is not finite; empty if all are, and only the sum
        of their squares is not. Collective."""
        mine: list[str | None] = [None]
        for slot in self.slots:
            if slot.holds and slot.shard is not None:
                for piece in slot.unit.layout.pieces(slot.unit.state_start, slot.unit.state_stop):
                    part = slot.shard.narrow(0, piece.offset, piece.numel)
                    if not bool(torch.isfinite(part).all()):
                        mine.append(slot.unit.names[piece.index])
        found: list[list[str | None]] = [[]] * self.mesh.data.size
        dist.all_gather_object(found, mine, group=self.mesh.data.process_group)
        bad = {name for names in found for name in names}
        return next((name for unit in self.units for name in unit.names if name in bad), "")

    def forget_gradients(self) -> None:
        """Drop the gradients of this step, and whatever is gathered for graphs that are gone."""
        self.gradients.reset()
        self.runtime.release_all()

    def sum_replicas(self, shard: torch.Tensor) -> torch.Tensor:
        """Add the equal cuts of all replicas, in place. Collective over them."""
        if self.policy.state and self.mesh.replicate.size > 1:
            dist.all_reduce(shard, group=self.mesh.replicate.process_group)
        return shard

    def state_pieces(self, unit: Unit) -> Iterator[tuple[int, int, int, torch.Tensor]]:
        """This rank's pieces of a trainable unit's master weights: `(parameter, start, stop, flat tensor)`."""
        if unit.master is not None:
            for piece in unit.pieces():
                yield piece.index, piece.start, piece.stop, unit.master.narrow(0, piece.offset, piece.numel)

    def parameters_changed(self, units: list[Unit]) -> None:
        """The masters (or, frozen, the shards) of `units` were set from outside: renew the parameters. Collective."""
        trained = [unit for unit in units if unit.master is not None]
        for unit in trained:
            self._write_back(unit)
        self._bring(trained)
        for unit in units:
            if unit.released and unit.master is None:
                unit.updated()
            if unit.frees and unit.presence is not Presence.RELEASED:  # what is whole now has the old values
                unit.let_go(stale=True)
                if unit.users:
                    unit.await_present()
        self._remember_versions()

    def destroy(self) -> None:
        """Give the plain model back: whole parameters of its own, no hooks. Collective at stage 3. Idempotent."""
        if not self._handles and not self.units:
            return
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self.gradients.finish()
        for unit in self.units:
            unit.await_present()
            for parameter, view in zip(unit.parameters, unit.views(), strict=True):
                if isinstance(parameter, Released):
                    mark_present(parameter)
                parameter.data = view.clone()
                parameter.grad = None
            unit.adopt = None
        registry.unregister(self)
        self.units = []
        if self.group.size > 1:  # peers may still read what goes away with this
            dist.barrier(group=self.group.process_group)
        self._closer()

    # construction

    def _unit(self, number: int, plan: Plan) -> Unit:
        policy, floating = self.policy, plan.parameters[0].is_floating_point()
        compute = self.settings.compute if self.settings.compute is not None and floating else plan.dtype
        layout = Layout(tuple(p.numel() for p in plan.parameters), self.mesh.data.size)
        unit = Unit(number, plan, layout, compute, released=policy.param and not plan.kept)
        unit.trainable = unit.trainable and self.trains
        if policy.state:
            unit.state_start, unit.state_stop = layout.cut(self.group.index, self.group.size)
        return unit

    def _allocate(self, plans: list[Plan], regather: Transport | None) -> None:
        """Buffers for all units and gradients at once, then the values, unit by unit, from rank 0."""
        shared = [u for u in self.units if u.released or (u.trainable and self.policy.state)]
        needs: list[Need] = [unit.need(self.transport) for unit in shared] + self.gradients.needs()
        lanes = len(self.gradients.slots)
        buffers = self.transport.allocate(needs, self.device, lanes=lanes) if needs else []
        of_unit = {id(unit): buffer for unit, buffer in zip(shared, buffers, strict=False)}
        for unit, plan in zip(self.units, plans, strict=True):
            buffer = of_unit.get(id(unit))
            if buffer is None:
                buffer = Buffer(torch.zeros(unit.layout.padded, dtype=unit.dtype, device=self.device))
            elif unit.released and not buffer.common:
                buffer.local.untyped_storage().resize_(0)  # one unit whole at a time
            unit.bind(buffer, self.transport, regather)
            self._fill(unit, plan)
        self.gradients.bind(buffers[len(shared) :])

    def _fill(self, unit: Unit, plan: Plan) -> None:
        values = torch.zeros(unit.layout.padded, dtype=plan.dtype, device=self.device)
        if self.mesh.data.index == 0:
            for index, parameter in enumerate(unit.parameters):
                unit.parameter_view(values, index).copy_(parameter.detach())
        if self.mesh.data.size > 1 and values.numel():
            process_group = self.mesh.data.process_group
            dist.broadcast(values.view(torch.uint8), self.mesh.data.ranks[0], group=process_group)
        if unit.buffer.common:
            start, stop = unit.layout.cut(self.group.index, self.group.size)
            unit.shard.copy_(values[start:stop])
        else:
            unit.full.copy_(values)
        if unit.trainable:
            wide = unit.dtype in (torch.float32, torch.float64)
            if wide:
                unit.master = unit.shard if unit.released else unit.own_cut(unit.full)
            else:
                unit.master = (
                    unit.own_cut(values).float().clone()
                    if values.dtype != torch.float32
                    else (unit.own_cut(values).clone())
                )
        del values
        unit.settle_in()

    def _attach(self, blocks: list[Block]) -> None:
        places = []
        for number, slot in enumerate(self.slots):
            places += [(number, index) for index in range(len(slot.unit.parameters))]
        parameters = [self.slots[number].unit.parameters[index] for number, index in places]

        # torch holds these hooks where Python's garbage collector can't see them: one that held the model would keep it
        # (and its memory) for ever
        runtime, gradients = ref(self.runtime), ref(self.gradients)

        def arrived(which: int) -> None:
            now, then = runtime(), gradients()
            if now is not None and then is not None:
                now.note_backward()
                then.arrive(*places[which])

        self._handles += attach_gradients(parameters, arrived)
        if any(unit.released for unit in self.units):
            for block in blocks:
                self._handles += attach_block(block, self.runtime)
        self._handles += attach_model(self.model, self.runtime)

    # a step

    def _agree(self, flags: list[float]) -> Verdict:
        self.gradients.finish()
        traffic, data = self.transport.traffic, self.mesh.data
        count = self.group.size if self.policy.state else data.size

        def ask() -> Verdict:
            learn = not self._learned
            return agree(self.gradients, data, count, traffic, learn_order=learn, flags=flags)

        replicated = self.policy.state and self.mesh.replicate.size > 1
        verdict = ask()
        if any(verdict.unreduced):
            self.gradients.reduce_rest(verdict.unreduced)
        if replicated:
            for slot in self.slots:
                if slot.holds and slot.shard is not None:
                    self.sum_replicas(slot.shard)
                    slot.squares = None
                    traffic.add("replicate", 2 * slot.unit.numel // count, 0)
        if any(verdict.unreduced) or replicated:
            verdict = ask()
        self.gradients.learn(verdict.order if not self._learned else [], verdict.late)
        self._learned = True
        return verdict

    def _refuse_unused(self, used: list[list[bool]]) -> None:
        unused = [
            name
            for slot, flags in zip(self.slots, used, strict=True)
            for name, had in zip(slot.unit.names, flags, strict=True)
            if not had
        ]
        if unused:
            raise ModelError(
                f"{len(unused)} parameters had no gradient on any rank in this step, {unused[0]!r} first; freeze "
                f"them, use them "
                "in the loss, or set zero_optimization.ignore_unused_parameters to true"
            )

    def _write_back(self, unit: Unit) -> None:
        """Cast the masters into this rank's span of the parameters, where they are not the same memory."""
        master = unit.master
        assert master is not None
        target = unit.shard if unit.released else unit.own_cut(unit.full)
        if master.data_ptr() != target.data_ptr():
            target.copy_(master)

    def _bring(self, units: list[Unit]) -> None:
        """Offer the updated cuts; parameters that are never released are whole again when this returns."""
        pending = []
        for unit in units:
            if unit.released:
                unit.updated()
            elif self.policy.state:
                self.transport.publish(unit.buffer)
        for unit in units:
            if not unit.released and self.policy.state:
                pending.append(self.transport.gather(unit.buffer, elements=unit.numel))
        for one in pending:
            one.wait()

    def take_edits(self) -> None:
        """A parameter that was changed in place since the last step: its master follows, or the change would be
        lost."""
        for slot in self.slots:
            unit = slot.unit
            if unit.master is None or unit.released or unit.master.dtype == unit.dtype:
                continue
            for piece in unit.pieces():
                if unit.parameters[piece.index]._version != self._versions.get(id(unit.parameters[piece.index])):
                    source = unit.own_cut(unit.full).narrow(0, piece.offset, piece.numel)
                    unit.master.narrow(0, piece.offset, piece.numel).copy_(source)

    def _remember_versions(self) -> None:
        self._versions = {id(p): p._version for unit in self.units for p in unit.parameters}


def _check_devices(model: nn.Module, device: torch.device) -> None:
    for name, parameter in model.named_parameters():
        if parameter.device.type == "meta":
            raise ModelError(f"parameter {name!r} is on the meta device and has no values; load or initialise it first")
        if parameter.device.type not in ("cpu", device.type) or (
            parameter.device.type == device.type
            and None not in (parameter.device.index, device.index)
            and parameter.device.index != device.index
        ):
            raise ModelError(
                f"parameter {name!r} is on {parameter.device}, but this rank trains on {device}; move the model "
                f"there or "
                "leave it on the CPU"
            )
