"""Tasks of one optimizer step on the representatives of all pipeline stages.

[Note: representative ranks] Ranks of one pipeline stage do the same work at the same time, so one rank with its links
stands for all of them ([Note: folded links]). A step on 16,384 devices has as many tasks as a step on `pp` devices.
"""

from __future__ import annotations

from dataclasses import replace

from windlass.parallel.pipeline.pipeline_action import Action, ActionKind
from windlass.parallel.pipeline.pipeline_schedules import build_schedule
from windlass.parallel.pipeline.schedule_simulation import list_dependencies
from windlass.simulate.cluster import Cluster
from windlass.simulate.collective_cost import CollectiveCosts, RankPattern
from windlass.simulate.event_loop import EventLoop, LinkKey, SimulatedTask
from windlass.simulate.layer_work import Segment
from windlass.simulate.model_blocks import ModelChunk, SimulatedBlock, build_chunks, rank_sizes
from windlass.simulate.step_lanes import RankLanes
from windlass.simulate.step_workload import StepWork
from windlass.simulate.zero_lanes import ZeroLanes

_FLOAT, _COUNT = 4, 8  # bytes of one loss (float32), and of one count of rows for an expert (int64)
_MANY_LAYERS = 3000  # layers times micro-batches; above this, blocking collectives are merged
_TP, _SP, _EP = RankPattern(("tp",)), RankPattern(("sp",)), RankPattern(("ep",))


class StageTasks:
    """Tasks of one pipeline stage, or of the full model without a pipeline."""

    def __init__(self, work: StepWork, tasks: StepTasks, stage: int) -> None:
        self.work, self.stage, grid = work, stage, work.grid
        costs = tasks.costs
        self.lanes = RankLanes(grid.rank(pp=stage), costs, tasks.loop, tasks.rates, coarse=tasks.coarse)
        self.chunks, units = build_chunks(work, costs.cluster.device, stage)
        self.zero = ZeroLanes(work, self.lanes, self.chunks, units)
        self._sizes = rank_sizes(work)
        degree = work.volumes.ulysses_degree or grid.sp
        self._heads = RankPattern(("sp",), block=degree)
        self._ring = RankPattern(("sp",), stride=degree)
        self._degree, self._rounds = degree, grid.sp // degree
        self._passed: SimulatedTask | None = None  # ring attention's last message; it overlaps with the computation

    @property
    def activation_bytes(self) -> int:
        """Bytes of one activation between layers."""
        return self.work.rank_tokens * self.work.shape.hidden * self.work.style.itemsize

    def chunk_of(self, number: int) -> ModelChunk:
        """Return this stage's chunk `number`; chunks are numbered over all stages."""
        return self.chunks[number // self.work.grid.pp]

    def forward(self, chunk: ModelChunk) -> SimulatedTask | None:
        """Add the forward of a chunk for one micro-batch."""
        self.zero.begin_forward()
        for block in chunk.blocks:
            self.zero.use(chunk, block, backward=False)
            self._run(block, block.forward, backward=False)
            self.zero.release(block)
            self._save_input(block)
        if self.work.volumes.tp_sequence_norms and chunk.has_layers:
            self._over_tp("all_gather", self.activation_bytes, "output")
        return self.lanes.flush()

    def backward(self, chunk: ModelChunk, *, part: ActionKind, is_last_micro: bool) -> SimulatedTask | None:
        """Add the backward of a chunk for one micro-batch, or the half of the backward that `part` selects."""
        order = chunk.backward_order
        if not order:  # the chunk and all chunks before it are frozen
            self.zero.end_chunk_backward()
            return self.lanes.flush()
        self.zero.use(chunk, order[0], backward=True)
        for block, following in zip(order, [*order[1:], None], strict=True):
            if part is not ActionKind.BACKWARD_WEIGHT:
                self._load_input(block)
                if block.again:
                    self._run(block, block.again, backward=False)
            segments = block.backward
            if part is ActionKind.BACKWARD_INPUT:
                segments = [_half(one) for one in segments]
            elif part is ActionKind.BACKWARD_WEIGHT:
                segments = [_half(one, products_only=True) for one in segments]
            if part is ActionKind.BACKWARD_WEIGHT:
                for segment in segments:
                    self.lanes.compute(f"weights of {block.name}", segment)
            else:
                self._run(block, segments, backward=True)
            if part is not ActionKind.BACKWARD_INPUT:
                self.zero.end_block_backward(block, is_last_micro=is_last_micro)
            # The gradient of this block's input reaches the preceding block before this block's backward ends. So the
            # preceding block unshards its units first. Only the head's backward ends earlier: its input is a slice.
            if block.kind == "head":
                self.zero.release(block)
            if following is not None:
                self.zero.use(chunk, following, backward=True)
            if block.kind != "head":
                self.zero.release(block, in_use=following)
        if part is not ActionKind.BACKWARD_INPUT:
            self.zero.end_chunk_backward()
        passes = chunk.follows_trained or not chunk.number and len(order) == len(chunk.blocks)
        if self.work.volumes.tp_sequence_norms and chunk.has_layers and passes and part in _INPUTS:
            self._over_tp("all_gather", self.activation_bytes, "gradient of the input")
        return self.lanes.flush()

    def _run(self, block: SimulatedBlock, segments: list[Segment], *, backward: bool) -> None:
        name = f"{'backward' if backward else 'forward'} {block.name}"
        selective = self.work.style.checkpointing == "selective" and segments is block.again
        for segment in segments:
            if selective:
                self.lanes.compute(name, segment)
                continue
            self._before(segment, block, backward=backward)
            self._compute(name, segment, block, backward=backward)
            # A recomputation ends at the last tensor that the backward needs, before the block's output is
            # reduce-scattered.
            ends_before = segments is block.again and segment.name == "feed-forward"
            self._after(segment, block, backward=backward, scatters=not ends_before)

    def _compute(self, name: str, segment: Segment, block: SimulatedBlock, *, backward: bool) -> None:
        """Compute a segment, in parts if the all-reduce of its output overlaps with its computation."""
        parts = self.work.tp_chunks
        chunked = not backward and segment.name in ("attention output", "feed-forward") and self.work.grid.tp > 1
        if parts == 1 or not chunked or self.work.volumes.tp_sequence_norms:
            self.lanes.compute(name, segment)
            return
        for number in range(parts):
            self.lanes.compute(name, _scaled(segment, 1 / parts))
            computed, nbytes = self.lanes.flush(), self._part_bytes(number)
            task = self.lanes.collective(
                "tp", "all_reduce", nbytes, _TP, label=block.name, after=[computed],
                counted={"all_reduce": 2 * nbytes * (self.work.grid.tp - 1) // self.work.grid.tp},
            )  # fmt: skip
            self.lanes.block_on(task if number == parts - 1 else None)

    def _part_bytes(self, number: int) -> int:
        parts, whole = self.work.tp_chunks, self.activation_bytes
        return whole // parts + (whole % parts if number == parts - 1 else 0)

    def _before(self, segment: Segment, block: SimulatedBlock, *, backward: bool) -> None:
        if segment.name == "attention":
            self._exchange_heads(block, gathers=True, outputs=backward)
            self._pass_keys(block, backward=backward)
        elif segment.name == "feed-forward":
            self._exchange_tokens(block, counts=not backward)
        if self.work.volumes.tp_sequence_norms:
            gathers = ("feed-forward", "attention output") if backward else ("attention inputs", "feed-forward inputs")
            if segment.name in gathers:
                self._over_tp("all_gather", self.activation_bytes, block.name)

    def _after(self, segment: Segment, block: SimulatedBlock, *, backward: bool, scatters: bool) -> None:
        if segment.name == "attention":
            if self._passed is not None:
                self.lanes.flush()
                self.lanes.block_on(self._passed)
                self._passed = None
            self._exchange_heads(block, gathers=False, outputs=not backward)
        elif segment.name == "feed-forward":
            self._exchange_tokens(block, counts=False)
        ends = ("feed-forward", "attention inputs") if backward else ("attention output", "feed-forward")
        experts = segment.name == "feed-forward" and self.work.shape.experts > 0
        if segment.name in ends and (scatters or not experts):
            # Experts read and return the tokens of all ranks along tp.
            if self.work.volumes.tp_sequence_norms and not experts:
                if scatters:
                    self._over_tp("reduce_scatter", self.activation_bytes, block.name)
            elif backward or self.work.tp_chunks == 1:
                self._over_tp("all_reduce", self.activation_bytes, block.name)
        if segment.name == "feed-forward inputs" and backward and self.work.shape.top_k:
            self._over_tp("all_reduce", _FLOAT * self._sizes.tokens * self.work.shape.top_k, f"router of {block.name}")
        if segment.name == "embedding" and not backward:
            self._over_tp("all_reduce", self.activation_bytes, "embedding")
        if segment.name == "head":
            if backward:
                self._over_tp("all_reduce", self.activation_bytes, "head")
            else:
                for _ in range(3):
                    self._over_tp("all_reduce", _FLOAT * self._sizes.tokens, "loss")
            self._sum_losses()

    def _over_tp(self, operation: str, nbytes: int, label: str) -> None:
        tp = self.work.grid.tp
        if tp == 1:
            return
        received = nbytes * (tp - 1) // tp * (2 if operation == "all_reduce" else 1)
        self.lanes.blocking("tp", operation, nbytes, _TP, label=label, counted={operation: received})

    def _sum_losses(self) -> None:
        """Add the all-reduce of losses and token counts over sequence-parallel ranks, in forward and backward."""
        sp = self.work.grid.sp
        if sp > 1:
            received = 2 * 2 * _FLOAT * (sp - 1) // sp
            self.lanes.blocking("sp", "all_reduce", 2 * _FLOAT, _SP, label="losses", counted={"all_reduce": received})

    def _exchange_heads(self, block: SimulatedBlock, *, gathers: bool, outputs: bool) -> None:
        """Add an all-to-all of Ulysses: queries, keys and values before the attention, outputs after it, or their
        gradients.

        Args:
            gathers: The rank receives the other ranks' tokens for its heads; else its tokens for the others' heads.
        """
        if self._degree == 1:
            return
        work, sizes = self.work, self._sizes
        kept = max(1, -(-sizes.kv_heads // self._degree))
        seen = work.samples * -(-work.length // self._rounds)
        rows = seen - sizes.tokens if gathers else sizes.tokens * (self._degree - 1)
        others = rows * work.shape.resolved_head_dim * work.style.itemsize
        received = others * (sizes.attention_heads + (0 if outputs else 2 * kept))
        whole = received * self._degree / (self._degree - 1)
        self.lanes.blocking("sp", "all_to_all", whole, self._heads, label=block.name, counted={"all_to_all": received})

    def _pass_keys(self, block: SimulatedBlock, *, backward: bool) -> None:
        """Pass keys and values around the ring during the attention; in backward also their gradients, in float32."""
        if self._rounds == 1:
            return
        work, sizes = self.work, self._sizes
        seen = work.samples * -(-work.length // self._rounds)
        elements = 2 * seen * max(1, -(-sizes.kv_heads // self._degree)) * work.shape.resolved_head_dim
        received = (self._rounds - 1) * work.style.itemsize * elements
        if backward:
            received += self._rounds * max(work.style.itemsize, _FLOAT) * elements
        before, steps = self.lanes.flush(), self._rounds - 1
        task = self.lanes.collective(
            "sp", "pass_on", received / steps, self._ring, label=block.name, after=[before],
            counted={"pass_on": received},
        )  # fmt: skip
        for _ in range(steps - 1):
            task = self.lanes.collective("sp", "pass_on", received / steps, self._ring, label=block.name, after=[task])
        self._passed = task

    def _exchange_tokens(self, block: SimulatedBlock, *, counts: bool) -> None:
        """Send tokens to their experts, or back."""
        work, ep = self.work, self.work.grid.ep
        if ep == 1 or block.kind != "layer":
            return
        nbytes = self._sizes.rows * work.shape.hidden * work.style.itemsize
        received = nbytes * (ep - 1) // ep
        if counts:
            received += (ep - 1) * -(-work.shape.experts // ep) * _COUNT
        self.lanes.blocking("ep", "all_to_all", nbytes, _EP, label=block.name, counted={"all_to_all": received})

    def _save_input(self, block: SimulatedBlock) -> None:
        self._move_input(block, saves=True)

    def _load_input(self, block: SimulatedBlock) -> None:
        self._move_input(block, saves=False)

    def _move_input(self, block: SimulatedBlock, *, saves: bool) -> None:
        tier, cluster = self.work.offloading.activations, self.lanes.costs.cluster
        host, ranks = cluster.host, cluster.ranks_on_host(self.work.grid.world)
        if tier == "device" or block.kind != "layer" or host.host_link is None:
            return
        link, rate = ("device to host" if saves else "host to device"), host.host_link.usable
        task: SimulatedTask | None = self.lanes.flush()
        if tier == "nvme" and not saves:
            rate_of_disk = host.disk_read / ranks
            task = self.lanes.transfer("disk read", rate_of_disk, self.activation_bytes, block.name, "disk", [task])
        task = self.lanes.transfer(link, rate, self.activation_bytes, f"input of {block.name}", "host", [task])
        if tier == "nvme" and saves:
            rate_of_disk = host.disk_write / ranks
            self.lanes.transfer("disk write", rate_of_disk, self.activation_bytes, block.name, "disk", [task])
        if not saves:
            self.lanes.block_on(task)


def _half(segment: Segment, *, products_only: bool = False) -> Segment:
    """Return one half of a split backward.

    It has half of each matrix product, and all other operations unless `products_only`.
    """
    kept = [
        replace(one.scaled(0.5), launches=max(1, one.launches // 2)) if one.kind == "product" else one
        for one in segment.operations
        if one.kind == "product" or not products_only
    ]
    return Segment(segment.name, tuple(kept))


def _scaled(segment: Segment, factor: float) -> Segment:
    return Segment(
        segment.name,
        tuple(one.scaled(factor) for one in segment.operations),
    )


class StepTasks:
    """Simulation of one step: builds all tasks, and runs them.

    Args:
        coarse: Merge blocking collectives, see `RankLanes.blocking`; None: only if layers times micro-batches exceed
            `_MANY_LAYERS`.
    """

    def __init__(self, work: StepWork, cluster: Cluster, *, coarse: bool | None = None) -> None:
        self.work = work
        self.rates: dict[LinkKey, float] = {}
        self.loop = EventLoop(self.rates)
        self.costs = CollectiveCosts(cluster, work.grid)
        many = work.volumes.micro_batches * work.shape.layers > _MANY_LAYERS
        self.coarse = many if coarse is None else coarse
        self.stages = [StageTasks(work, self, stage) for stage in range(work.grid.pp)]
        chunks = [self.stages[number % work.grid.pp].chunk_of(number) for number in range(work.chunks)]
        follows = not any(chunk.is_trained for chunk in chunks)  # a frozen model is simulated like a trained one
        for chunk in chunks:
            chunk.follows_trained = follows
            follows = follows or chunk.is_trained

    def run(self) -> float:
        """Build and run all tasks; return the time of the step in seconds."""
        if self.work.grid.pp > 1:
            self._add_pipeline()
        else:
            self._add_micro_batches(self.stages[0])
        for stage in self.stages:
            stage.zero.update()
        return self.loop.run()

    def _add_micro_batches(self, stage: StageTasks) -> None:
        micros = self.work.volumes.micro_batches
        for backward in (False, True):
            stage.zero.record(stage.chunks[0], backward=backward)
        for micro in range(micros):
            stage.forward(stage.chunks[0])
            stage.backward(stage.chunks[0], part=ActionKind.BACKWARD, is_last_micro=micro == micros - 1)

    def _add_pipeline(self) -> None:
        work = self.work
        pp, micros = work.grid.pp, work.volumes.micro_batches
        schedule = build_schedule(work.schedule, pp, micros, work.volumes.virtual_stages)
        split = any(action.kind is ActionKind.BACKWARD_INPUT for order in schedule for action in order)
        left = [
            {c.number: sum(a.stage == c.number and a.kind in _WEIGHTS for a in order) for c in stage.chunks}
            for stage, order in zip(self.stages, schedule, strict=True)
        ]
        for stage, order in zip(self.stages, schedule, strict=True):
            for action in order:
                stage.zero.record(stage.chunk_of(action.stage), backward=action.kind is not ActionKind.FORWARD)
        sent: dict[Action, SimulatedTask | None] = {}
        at = [0] * pp
        moved = True
        while moved:
            moved = False
            for rank, order in enumerate(schedule):
                while at[rank] < len(order):
                    action = order[at[rank]]
                    before = list_dependencies(action, work.chunks, split)
                    if any(one not in sent for one in before):
                        break
                    self._add_computation(action, before, sent, left[rank])
                    at[rank] += 1
                    moved = True
        self._broadcast_loss()

    def _add_computation(
        self, action: Action, before: list[Action], sent: dict[Action, SimulatedTask | None], left: dict[int, int]
    ) -> None:
        stage = self.stages[action.stage % self.work.grid.pp]
        for one in before:
            if one.stage != action.stage:
                stage.lanes.block_on(sent[one])
        chunk = stage.chunk_of(action.stage)
        if action.kind is ActionKind.FORWARD:
            task, target = stage.forward(chunk), action.stage + 1
        else:
            if action.kind in _WEIGHTS:
                left[action.stage] -= 1
            task, target = (
                stage.backward(chunk, part=action.kind, is_last_micro=not left[action.stage]),
                action.stage - 1,
            )
        sends = action.kind is not ActionKind.BACKWARD_WEIGHT and 0 <= target < self.work.chunks
        sends = sends and (action.kind is ActionKind.FORWARD or chunk.follows_trained)
        # On a CPU, messages share a stream with the computation: send this one before the sender's next action.
        sent[action] = self._send(action, target, task) if sends else None

    def _send(self, action: Action, target: int, after: SimulatedTask | None) -> SimulatedTask | None:
        """Send an activation, or its gradient, from the chunk of `action` to chunk `target`."""
        work, pp = self.work, self.work.grid.pp
        sender, receiver = self.stages[action.stage % pp], self.stages[target % pp]
        nbytes = sender.activation_bytes
        if work.shape.has_router_loss:
            layers = sum(work.chunk_layers(chunk) for chunk in range(max(action.stage, target)))
            nbytes += work.rank_tokens * work.style.itemsize * work.shape.experts * layers
        forward = action.kind is ActionKind.FORWARD
        receiver.lanes.moved["pp"]["activations" if forward else "gradients"] += nbytes
        cost = self.costs.send(sender.lanes.rank, receiver.lanes.rank, nbytes)
        label = f"send {'activation' if forward else 'gradient'} {action.micro_batch}"
        return sender.lanes.phases(cost, label, "pipeline", f"send {target}", [after], nbytes)

    def _broadcast_loss(self) -> None:
        last = self.stages[-1].lanes
        for stage in self.stages[:-1]:
            stage.lanes.moved["pp"]["broadcast"] += _FLOAT
        last.collective(
            "pipeline", "broadcast", _FLOAT, RankPattern(("pp",)), label="loss", after=[last.flush()], stream="loss"
        )


_WEIGHTS = (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT)
_INPUTS = (ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT)
