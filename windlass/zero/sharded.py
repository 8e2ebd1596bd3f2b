"""A model whose parameters, gradients and optimizer state are kept as one policy says: built, stepped, undone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING
from weakref import finalize, ref

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from windlass.base.errors import ModelError, StorageError, UpdateError
from windlass.base.log import logger
from windlass.base.memory import Ledger, arena
from windlass.base.pending import Pending
from windlass.comm.groups import Group
from windlass.comm.mesh import Mesh
from windlass.comm.transport import Transport
from windlass.optim.elementwise import is_elementwise, prefer_fused, state_bytes
from windlass.storage.slot import Home
from windlass.storage.space import page_up
from windlass.storage.tier import DiskTier
from windlass.storage.transfer import Extent
from windlass.zero import parameter_properties, registry
from windlass.zero.access import Released, mark_present, put_data, put_grad
from windlass.zero.agreement import Agreement
from windlass.zero.alike import check_alike, check_units
from windlass.zero.chunk import Chunk, pipelined
from windlass.zero.construct import Builder, check_devices, effective, make_units
from windlass.zero.delayed import Delayed
from windlass.zero.family import families_of
from windlass.zero.foresight import Foresight
from windlass.zero.generation import Generation, attach_generation
from windlass.zero.gradient_slot import GradientSlot
from windlass.zero.gradients import Gradients
from windlass.zero.health import Health
from windlass.zero.hooks import attach_block, attach_gradients, attach_model
from windlass.zero.landing import Landing
from windlass.zero.masters import Masters
from windlass.zero.norm import clip_coefficient
from windlass.zero.order import Order
from windlass.zero.parking import Parking
from windlass.zero.partition import Block, plan_units
from windlass.zero.runtime import Runtime
from windlass.zero.script_gradients import ScriptGradients
from windlass.zero.settings import Outcome, Settings
from windlass.zero.unit import Presence, Unit, sharers
from windlass.zero.update import ElementwiseUpdate, check_parameters
from windlass.zero.whole import WholeUpdate

if TYPE_CHECKING:
    from windlass.zero.average import ExponentialMovingAverage


_WIDENED = 1 << 26  # elements of master weights that are widened at a time, 512 MiB with their gradient


class ShardedModel:
    """Owns the units of one model from `initialize` to `destroy`.

    Args:
        model: built whole, the same architecture on every rank; rank 0's values count.
        optimizer: over the model's parameters, or None (evaluation).
        settings: see there.
        mesh: all ranks, and which of them share what.
        device: where the model shall be.
        trains: there will be gradients; else everything counts as frozen.

    Raises:
        ModelError: a parameter can't be handled, the optimizer's are not the model's, or ranks have different models.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        settings: Settings,
        mesh: Mesh,
        device: torch.device,
        *,
        trains: bool,
    ) -> None:
        check_devices(model, device)
        check_alike(model, optimizer, mesh.dense.data)
        if optimizer is not None:
            check_parameters(optimizer, model)
            if settings.delayed and not is_elementwise(optimizer):
                raise ModelError(
                    f"offload_optimizer.delayed_update with {type(optimizer).__name__}, which needs whole parameters, "
                    "and so other ranks in the middle of an update: set delayed_update to false, or use an elementwise "
                    "optimizer (Adam, AdamW, Lion, SGD, Adagrad, ...)"
                )
        self.model, self.settings, self.mesh, self.device, self.trains = model, settings, mesh, device, trains
        policy = self.policy = settings.policy
        late = settings.delayed and optimizer is not None
        homes = self.homes = effective(settings.homes, device, delayed=late)
        self.ledger = Ledger()
        self.families = families_of(mesh, settings, homes, device)
        blocks, plans = plan_units(model, settings.rules)
        if mesh.experts is not mesh.dense:
            check_units(plans, mesh.dense.data)
        self.units = make_units(plans, settings, homes, mesh, self.families, trains=trains)
        self._builder = Builder(model, settings, homes, self.families, device, self.ledger)
        self.make_slot = self._builder.slot
        self.averages: dict[str, ExponentialMovingAverage] = {}
        trainable = [unit for unit in self.units if unit.trainable]
        self.order = Order(self.units, hoists=settings.ahead > 0)
        self.gradients = Gradients(
            trainable,
            policy,
            self.order,
            accumulate=settings.accumulate,
            wire=settings.wire,
            lowered_wire=settings.lowered_wire,
            overlap=settings.overlap,
            before=settings.before,
            after=settings.after,
            contiguous=settings.contiguous,
            landing=Landing(
                settings.accumulate,
                device,
                self.ledger,
                lambda slot: homes.gradient if slot.unit.state_home is not Home.DEVICE else Home.DEVICE,
                self._builder.slot,
            ),
        )
        self.health = Health(homes.disk, homes.staging, mesh.world, device)
        whole = optimizer is not None and not is_elementwise(optimizer)
        at_once = min(settings.sub_group, pipelined(self.slots))
        if not whole:  # else ranks take part in each other's batches, which must be the same on all
            at_once = min(at_once, homes.at_once)
        if settings.widens:
            at_once = min(at_once, _WIDENED)
        self.masters = Masters(
            self.slots,
            1 << 62 if whole else at_once,
            homes,
            device,
            self.ledger,
            self.health,
            lambda dtype: state_bytes(optimizer, settings.state or dtype) if optimizer is not None and not whole else 0,
            dtype=settings.master,
            state_dtype=settings.state,
            delayed=late,
        )
        try:
            self.reserve("initialize cannot begin")
        except BaseException:
            _close(mesh, self.ledger, homes.disk)
            raise
        for unit, span in self._builder.fill(self.units, plans, self.gradients):
            self.masters.make(unit, span)
            del span  # or it would live while the next unit is filled
        dense = self.families[0]
        if dense.group.size > 1 and (trainable or any(unit.frees for unit in self.units)):
            self.order.agree_on(dense.transport.board())
        self.parking = Parking(self.units, self.slots, self.masters, device, self.ledger)
        foresight = Foresight(settings.ahead, self._live(), settings.reuse, homes.read_ahead)
        self.runtime = Runtime(self.units, blocks, foresight, self.order)
        self.runtime.reduces = lambda: bool(self.slots) and self.gradients.syncing()
        self.health.passing = self._passing
        self.gradients.landed = self._landed
        self.runtime.on_backward_end.append(self.gradients.end_backward)
        if homes.param is Home.NVME:
            self.runtime.held = lambda among: self.health.check(
                "parameters could not be gathered", loses=self._under_way(), among=among
            )
        self.update: ElementwiseUpdate | WholeUpdate | None = None
        self.delayed: Delayed | None = None
        if optimizer is not None:
            self._use_optimizer(optimizer, at_once)
        if late:
            dtype, make = settings.accumulate, self._builder.slot
            self.delayed = Delayed(self.slots, self.masters, self.units, device, homes.gradient, make, dtype)
        self._handles: list[RemovableHandle | Generation] = []
        self._watched: set[int] = set()  # ids of parameters whose gradients are taken
        self.destroyed = False
        self._closer = finalize(self, _close, mesh, self.ledger, homes.disk)
        self.health.check("initialize could not put the model on disk", loses=True)
        self._attach(blocks)
        self.agreement = Agreement(
            self.gradients, self.units, policy, mesh, dense.transport.traffic, device, self.health.bad_here
        )
        self.steps_next: Callable[[], bool] = lambda: False  # whether a step follows the backward that runs
        self.loss_scale: Callable[[], float] = lambda: 1.0  # what is in the gradients now
        # told the norm and the clip coefficient of a step, with reduced gradients in place; on all ranks
        self.before_update: Callable[[float, float], None] = lambda norm, clip: None
        self.masters.remember_versions(self.units)
        self.script_gradients = ScriptGradients(self.gradients)
        self._consumed = False  # the last step consumed gradients, and no backward came since
        registry.register(self)
        self._forget_properties = parameter_properties.install(self)

    def reserve(self, what: str) -> None:
        """Take all the space on disk that this rank will need, before anything moves there. Collective.

        Args:
            what: said where there is too little.

        Raises:
            StorageError: a rank finds too little; on all ranks.
        """
        disk, homes = self.homes.disk, self.homes
        if disk is None:
            return
        sizes = [n for unit in self.units for n in self.masters.on_disk(unit)]
        for unit in self.units:
            if unit.released and unit.home is Home.NVME:
                sizes.append(unit.layout.padded // unit.family.group.size * unit.dtype.itemsize)
            if unit.trainable and unit.state_home is not Home.DEVICE and homes.gradient is Home.NVME:
                nbytes = (unit.state_stop - unit.state_start) * self.settings.accumulate.itemsize
                sizes += [nbytes, nbytes] if self.settings.delayed else [nbytes]
        disk.reserve(sum(page_up(nbytes) for nbytes in sizes))
        self.health.check(what, then="nothing was changed")

    def _passing(self) -> set[Extent]:
        extents = (place.extent for slot in self.slots for place in (slot.rests, slot.spare) if place is not None)
        return {extent for extent in extents if extent is not None}

    def discard(self) -> None:
        """Forget what this rank keeps on disk, where some of it was lost: a load is about to write all of it anew."""
        self.gradients.reset()
        for unit in self.units:
            if unit.rests is not None:
                unit.rests.discard()
        for slot in self.slots:
            for place in (slot.rests, slot.spare):
                if place is not None:
                    place.discard()
        self.masters.residence.discard()
        self.health.forget()

    def after_forward(self) -> None:
        """The outermost forward ended: whatever it read from disk was read. Collective where parameters rest there,
        over the ranks that gather them together.

        Raises:
            StorageError: it was not, on some rank; on all ranks. Where parameters are cut over fewer than all, the next
                step raises that.
        """
        if self.homes.param is not Home.NVME:
            return
        try:
            self._look()
        except StorageError:
            self._read_again()
            raise

    def _look(self) -> None:
        what = "this forward could not read parameters, and its results are wrong"
        if (
            self.families[0].group.size < self.mesh.world.size
        ):  # ranks of another group may be elsewhere, or have no forward at all
            if self.health.bad_here():
                logger.error("%s; the next step is refused on all ranks", what)
            return
        if self.order.alone:
            self.health.check(what, loses=self._under_way())
            return
        self.order.bad = lambda: self.health.bad_here() > 0
        self.order.told = lambda: self.health.tell(what, loses=self._under_way())
        self.order.look()

    def _read_again(self) -> None:
        """What was brought from disk, or is on its way from there, may be NaN: whoever needs it reads it anew."""
        self.runtime.release_all()
        for unit in self.units:
            if unit.rests is not None:
                unit.rests.forget()
        self.masters.residence.forget_ahead()
        self.health.forget()

    @property
    def transport(self) -> Transport:
        """That of dense parameters."""
        return self.families[0].transport

    @property
    def slots(self) -> list[GradientSlot]:
        """The gradients of the trainable units, in model order."""
        return self.gradients.slots

    def _use_optimizer(self, optimizer: torch.optim.Optimizer, at_once: int) -> None:
        prefer_fused(optimizer)
        if is_elementwise(optimizer):
            self.update = ElementwiseUpdate(optimizer, self.masters, at_once)
        else:
            self.update = WholeUpdate(
                optimizer,
                self.masters.chunks,
                self.masters.residence,
                self.families,
                self.mesh.axes,
                whole=not self.policy.state,
                sub_group=at_once,
            )

        self.masters.residence.name_of = self._name_of_tenant
        self._refuse_codes()

    def _name_of_tenant(self, chunk: Chunk, tenant: nn.Parameter) -> str:
        assert self.update is not None
        return next((one.name for one in self.update.tenancies(chunk.unit) if one.tenant is tenant), "?")

    def _refuse_codes(self) -> None:
        """Codes of 8 bits are in blocks of what is stepped: of a part by elementwise rules, else of the whole, which
        each step would have to decode, put together and code again."""
        assert self.update is not None
        if isinstance(self.update, ElementwiseUpdate):
            return
        coded = {number for number, kept in self.update.formats().items() if any(one.coded for one in kept.values())}
        for unit in self.units if coded else ():
            for name, parameter, placement in zip(unit.names, unit.parameters, unit.placements, strict=True):
                if id(parameter) in coded and not placement.whole:
                    raise ModelError(
                        f"{type(self.update.optimizer).__name__} steps whole parameters with states of 8 bits, and "
                        f"{name!r} is cut over {', '.join(sorted(placement.cut))}: its states would be rounded once "
                        'more at each step; write state_dtype "bf16" or "fp32", or leave that axis at 1'
                    )

    def step(
        self,
        limit: float,
        scale: float,
        *,
        skip_overflow: bool,
        flags: list[float] | None = None,
        delay: bool = False,
        repeats: bool = True,
    ) -> Outcome:
        """Reduce what is left, agree on the norm, update, and bring the new parameters to where they are used.

        Collective.

        Args:
            limit: clip the gradient to this norm; 0: do not.
            scale: the loss scale that is in the gradients.
            skip_overflow: expect gradients that are not finite now and then, and do not look for whose they are.
            flags: numbers that are added up over ranks on the way.
            delay: only start the update, where the settings allow that; the next step, or `finish_update`, brings it.
            repeats: a step right after another, without a backward on any rank, is accepted and changes nothing.

        Raises:
            ModelError: there is no optimizer, a parameter had no gradient and the settings say that it must have
            one, ranks dropped different gradients, or there was no backward since the last step.
            UpdateError: the update of the step before failed on some rank; this step's gradient is dropped.
        """
        if self.update is None:
            raise ModelError("there is no optimizer to step: pass one to initialize, or name one in the configuration")
        self.health.refuse("a step")
        self.order.meet("a step")
        trouble = self._await_result()
        lost = self.masters.take_lost_edit(self.units)
        none_since = float(self._consumed and not self.gradients.backwards)
        retries = float(self.health.unchanged)
        verdict = self.agreement.reach(
            [float(trouble is not None), *(flags or []), none_since, float(lost != ""), retries]
        )
        self.order.new_step()
        failures = verdict.flags.pop()  # of disks and updates
        retries, lost_edits, none_since = (verdict.flags.pop() for _ in range(3))
        if retries == self.mesh.world.size:  # no rank's optimizer changed anything before it raised
            self.health.forget_update()
        elif failures + retries > 0:
            self.forget_gradients()
            self._drop_result()
            try:
                self.health.tell("this step was not made, and its gradients are dropped")
            finally:
                self._read_again()
        self.runtime.release_all()  # what stayed after an evaluation holds the old values
        self._finish_result(trouble, verdict.flags.pop(0))
        if verdict.diverged:
            try:
                self.agreement.refuse_diverged()
            finally:
                self.forget_gradients()
        if lost_edits:
            lost = self.agreement.first_name(lost)
            self.forget_gradients()
            raise ModelError(
                f"{lost!r} was changed in place while its values were "
                "gathered for a forward or backward, and the change went with them (stage 3): change it inside `with "
                "windlass.zero.GatheredParameters([parameter], modifier_rank=0)`, or take a stage below 3. This step "
                "was not made"
            )
        if none_since == self.mesh.world.size and not repeats:
            self._consumed = False
            raise ModelError(
                "step() without a backward since the last step, on any rank: a step consumes its gradients, so there "
                "is none to step again as plain PyTorch would. Call backward again, or leave out the second step"
            )
        norm = verdict.norm / scale
        if not verdict.finite and (skip_overflow or (bad := self.agreement.first_bad())):
            self.forget_gradients()
            return Outcome(norm, applied=False, clip=1.0, flags=verdict.flags, bad="" if skip_overflow else bad)
        if not self.settings.ignore_unused:
            self.agreement.refuse_unused(verdict.used)
        self.gradients.spread()
        self.take_back()
        clip = clip_coefficient(norm, limit)
        self.before_update(norm, clip)
        used = {slot.unit.index: flags for slot, flags in zip(self.slots, verdict.used, strict=True)}
        try:
            batches = _stepped(self.update.run(used, scale / clip))
        except Exception as error:  # a hook before the step; the other ranks update
            batches = _raised(error)
        if delay and self.delayed is not None:
            self.masters.take_all_edits(self.units)
            self.delayed.start(batches)
        else:
            self._put_to_use(batches)
        self.forget_gradients()
        self._consumed = True
        return Outcome(norm, applied=True, clip=clip, flags=verdict.flags)

    def await_update(self) -> None:
        """Master weights and optimizer states are those after the last step when this returns; parameters may be those
        before it."""
        if self.delayed is not None:
            self.delayed.wait()

    def finish_update(self) -> None:
        """All is as after the last step when this returns, parameters too. Collective, between a step and the next
        forward, where an update is under way.

        Raises:
            UpdateError: it failed on some rank.
        """
        if self.delayed is None or not self.delayed.under_way:
            return
        self.order.meet("the end of a delayed update")
        trouble = self._await_result()
        failed = torch.tensor([float(trouble is not None)], dtype=torch.float64, device=self.device)
        if self.mesh.world.size > 1:  # which also says that no peer computes with the old parameters any more
            dist.all_reduce(failed, group=self.mesh.world.process_group)
        self._finish_result(trouble, failed.item())

    def unwatched(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters whose gradients nobody takes, by name: those that were frozen when the model was laid out."""
        for unit in self.units:
            for name, parameter in zip(unit.names, unit.parameters, strict=True):
                if id(parameter) not in self._watched:
                    yield name, parameter

    def trains_all(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Whether all of `parameters` that need a gradient have memory for it."""
        return all(id(p) in self._watched or not p.requires_grad for p in parameters)

    def take_back(self) -> None:
        """Parameters that were given other memory since the last step (`p.data = ...`, `module.to(...)`) go back to
        their places, with the values that they have now."""
        for unit in self.units:
            if not unit.released:
                unit.take_back()

    def expose(self, place: registry.Place) -> None:
        """A script reads `.data` of a parameter, through which it may change values."""
        self.masters.expose(place.unit, place.index, late=self._under_way())

    def forget_gradients(self) -> None:
        """Drop the gradients of this step, and whatever is gathered for graphs that are gone."""
        self.gradients.reset()
        self.agreement.forget()
        self.runtime.release_all()

    @contextmanager
    def editing(self, units: list[Unit], *, apart: bool = False) -> Iterator[None]:
        """Inside, masters, optimizer states and (of what is not trained) cuts of `units` may be set; afterwards the
        parameters are renewed from them. Collective.

        Args:
            apart: over the ranks that hold the same experts, whose units they are; others may have none to set.
        """
        trained = [unit for unit in units if self.masters.of(unit)]
        among = sharers(units) if apart else None
        with self.renewing(units, apart=apart), self.masters.at_hand(trained, changes=True, among=among):
            yield
            _wait([self.masters.write_back(chunk) for unit in trained for chunk in self.masters.of(unit)])

    @contextmanager
    def renewing(self, units: list[Unit], *, apart: bool = False) -> Iterator[None]:
        """As `editing`, but whoever is inside brings to hand what it sets, and writes it back itself. Collective."""
        self.order.meet("a change of parameters or states", apart=apart)
        self.finish_update()
        for group in self._groups_of([unit for unit in units if unit.buffer.parts]):
            dist.barrier(group=group.process_group)  # a peer may be in its backward still, and read them there
        yield
        trained = [unit for unit in units if self.masters.of(unit)]
        self._bring(trained)
        for unit in units:
            if unit.released and unit not in trained:
                unit.updated()
        _renew(units)
        self.masters.remember_versions(units)

    def destroy(self, *, keeps_mesh: bool = False) -> None:
        """Give the plain model back: whole parameters of its own, no hooks. Collective at stage 3, and where an update
        is under way, which is finished first. Idempotent.

        Args:
            keeps_mesh: leave its groups open, for another layout over them.
        """
        if not self._handles and not self.units:
            return
        try:
            self.finish_update()
        finally:
            self._undo(keeps_mesh)

    def _undo(self, keeps_mesh: bool) -> None:
        self.destroyed = True
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self.delayed is not None:
            self.delayed.close()
        self.parking.bring_back()
        self.order.meet("destroy")
        self.gradients.finish()
        for unit in self.units:
            self.order.gather_now(unit)
            unit.await_present()
            for parameter, view in zip(unit.parameters, unit.views(), strict=True):
                if isinstance(parameter, Released):
                    mark_present(parameter)
                put_data(parameter, view.clone())
                put_grad(parameter, None)
            unit.adopt = None
        registry.unregister(self)
        self._forget_properties()
        self._tell_what_is_lost()
        self.units = []
        for family in self.families:
            if family.group.size > 1:  # peers may still read what goes away with this
                dist.barrier(group=family.group.process_group)
        if keeps_mesh:
            self._closer.detach()
            _close(None, self.ledger, self.homes.disk)
        else:
            self._closer()

    def _groups_of(self, units: list[Unit]) -> list[Group]:
        """The groups of more than one rank that any of these units is cut over, in one order on all ranks."""
        wanted = {id(unit.family) for unit in units}
        return [family.group for family in self.families if id(family) in wanted and family.group.size > 1]

    def _tell_what_is_lost(self) -> None:
        """The model is given back, and not all of its parameters are what they should be: nobody shall miss that."""
        if self.homes.staging is not None:
            self.homes.staging.settle()
        lost = self.health.lost
        if lost:
            logger.error("the model that destroy() gives back has parameters of no single step: %s", lost)
        try:
            self.health.check("the model that destroy() gives back is not whole", then="what was not read is NaN")
        except StorageError as error:
            if not lost:
                logger.error("%s", error)

    def compilable(self) -> list[nn.Module]:
        """Modules whose forward no hook of ours interrupts: the innermost blocks, or the model where nothing is
        released."""
        if not any(unit.released for unit in self.units):
            return [self.model]
        of_blocks = {id(block.module): block.module for block in self._blocks if block.module is not self.model}
        return [
            module
            for module in of_blocks.values()
            if not any(id(inner) in of_blocks for inner in module.modules() if inner is not module)
        ]

    def _attach(self, blocks: list[Block]) -> None:
        self._blocks = blocks
        self.watch_gradients()
        if any(unit.released for unit in self.units):
            for block in blocks:
                self._handles += attach_block(block, self.runtime)
            self._handles += attach_generation(self.model, self)
        self._handles += attach_model(self.model, self.runtime)

    def watch_gradients(self) -> None:
        """Take the gradients of all parameters that are to be trained, from now on."""
        places, parameters = [], []
        for number, slot in enumerate(self.slots):
            for index, parameter in enumerate(slot.unit.parameters):
                if parameter.requires_grad and id(parameter) not in self._watched:
                    self._watched.add(id(parameter))
                    places.append((number, index))
                    parameters.append(parameter)

        # torch holds these hooks where Python's garbage collector can't see them: one that held the model would keep it
        # (and its memory) for ever
        runtime, gradients = ref(self.runtime), ref(self.gradients)

        def arrived(which: int) -> None:
            now, then = runtime(), gradients()
            if now is not None and then is not None:
                now.note_backward()
                then.arrive(*places[which])

        self._handles += attach_gradients(parameters, arrived)

    def _landed(self, slot: GradientSlot) -> None:
        """A reduced gradient is on its way home: what its step needs from disk sets out too."""
        if self.steps_next() and not self._under_way():
            self.masters.read_ahead(slot.unit)

    def _live(self) -> int:
        """Elements that may be present at once: what the settings say, or half of what is left of a budget."""
        place, largest = arena(), max((unit.dtype.itemsize for unit in self.units), default=4)
        if place is None or self.homes.param is Home.DEVICE:
            return self.settings.live
        return min(self.settings.live, (place.budget - place.used) // (2 * largest))

    # a step

    def _await_result(self) -> Exception | None:
        """Wait for the update under way, if there is one: why this rank can't use it, if so."""
        if self.delayed is None or not self.delayed.under_way:
            return None
        self.delayed.wait()
        self.take_back()
        return self.delayed.trouble()

    def _under_way(self) -> bool:
        return self.delayed is not None and self.delayed.under_way

    def _drop_result(self) -> None:
        """A disk failed, maybe in the update under way: nothing can be made of that. Collective.

        Raises:
            StorageError: there was one.
        """
        if self.delayed is not None and self.delayed.under_way:
            self.delayed.finish(use=False)
            self.health.tell("a delayed update was made in part", loses=True)

    def _finish_result(self, trouble: Exception | None, failed: float) -> None:
        """Use what the update under way made, unless it failed on any rank.

        Args:
            trouble: of this rank.
            failed: number of ranks that have some.
        """
        if self.delayed is None or not self.delayed.under_way:
            return
        batches = self.delayed.finish(use=not failed)
        if not failed:
            self._put_to_use(batches)
            return
        self.forget_gradients()
        raise trouble or UpdateError(
            f"the delayed update of the step before can't be used, for a reason that {failed:.0f} of the other ranks "
            "says; master weights no longer fit the parameters, so load the last checkpoint"
        )

    def _put_to_use(self, batches: Iterable[list[Chunk]]) -> None:
        """Bring the new parameters of updated chunks to where they are used. Collective."""
        updated: dict[int, Unit] = {}
        written: list[Pending] = []
        failed: Exception | None = None
        try:
            for batch in batches:
                _wait(written)
                for chunk in batch:
                    updated[chunk.unit.index] = chunk.unit
                    written.append(self.masters.write_back(chunk, keep=True))
        except Exception as error:  # the others wait for the new parameters, and hear of it at the next step
            failed = self.health.broken = error
            # ranks that update the same elements may have come to different ones
            self.health.unchanged = not updated and bool(self.policy.state or self.mesh.world.size == 1)
            updated = {slot.unit.index: slot.unit for slot in self.slots if slot.holds}
        finally:  # where a step fails half-way, too, what was updated arrives
            _wait(written)
        try:  # of its last writes, which go on in the next forward, the next check hears
            self.health.check("this step was made in part", loses=True)
        except (StorageError, UpdateError):
            self.forget_gradients()
            raise
        units = [updated[index] for index in sorted(updated, reverse=True)]  # in one order on all ranks
        self._bring(units)
        _renew(units)
        for unit in units:
            torch.autograd.graph.increment_version(unit.parameters)
        self.masters.remember_versions(self.units)
        if failed is not None:
            self.forget_gradients()
            raise failed

    def _bring(self, units: list[Unit]) -> None:
        """Offer the updated cuts; parameters that are never released are whole again when this returns."""
        pending = []
        for unit in units:
            if unit.released:
                unit.updated()
            elif self.policy.state:
                unit.transport.publish(unit.buffer)
        for unit in units:
            if not unit.released and self.policy.state:
                pending.append(unit.transport.gather(unit.buffer, elements=unit.numel))
        for one in pending:
            one.wait()
        for unit in units:  # the caller may change parameters in place, which no peer must read then
            if not unit.released and self.policy.state:
                unit.transport.settle(unit.buffer)


def _stepped(batches: Iterable[list[Chunk]]) -> Iterator[list[Chunk]]:
    """Of each batch the chunks that had a gradient, as long as it is at hand."""
    for batch in batches:
        yield [chunk for chunk in batch if chunk.gradient is not None]


def _raised(error: Exception) -> Iterator[list[Chunk]]:
    """No batch: the update raised before the first."""
    yield from ()
    raise error


def _renew(units: list[Unit]) -> None:
    """What is whole of `units` has old values: let it go, and gather it again where somebody uses it."""
    for unit in units:
        if unit.frees and unit.presence is not Presence.RELEASED:
            unit.let_go(stale=True)
            if unit.users:
                unit.await_present()


def _wait(written: list[Pending]) -> None:
    for pending in written:
        pending.wait()
    written.clear()


def _close(mesh: Mesh | None, ledger: Ledger, disk: DiskTier | None) -> None:
    """What does not go away with the memory of a model."""
    if disk is not None:
        disk.close()
    ledger.close()
    if mesh is not None:
        mesh.close_with_model()
