"""ZeRO++ in one process: quantized weights, reductions in two hops and their error feedback, and steps of SGD."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tests import oracle
from tests.dist.test_compressed_lists import decoded
from tests.models import Place, Specimen
from windlass.comm.codec import get_codec
from windlass.zero.core.unit_layout import UnitLayout

LR = 0.05

Layouts = Sequence[tuple[list[str], UnitLayout]]


class TwoHops:
    """Reductions of the units of a model over simulated ranks, with LoCo's algorithm 1 (arXiv:2407.04480) in both hops.

    The collector of a shard in a node is the rank with the position of the shard's owner. It receives the parts of its
    node, encoded by the inner codec, and sends their sum to the owner, encoded by the outer codec. Ranks never encode
    values for themselves, and sums are in rank order.

    Attributes:
        errors: error feedback `[padded]` by rank and unit.
    """

    def __init__(self, zero: dict[str, Any], layouts: Layouts, ranks: int, node: int) -> None:
        self.ranks, self.node, self._layouts = ranks, node, layouts
        self._inside = get_codec(zero.get("zero_quantized_gradients_codec", "int8"))
        self._across = get_codec(zero.get("zero_quantized_gradients_codec_across", "int4"))
        self._loco = zero.get("zeropp_loco_param")
        self.errors = [[torch.zeros(layout.padded) for _, layout in layouts] for _ in range(ranks)]

    def mean(self, unit: int, flats: list[torch.Tensor], reductions: int) -> torch.Tensor:
        """Return the mean over ranks of `flats`, a flat gradient of each rank, after this number of reductions."""
        mean = torch.empty(self._layouts[unit][1].padded)
        parts = [flat / self.ranks for flat in flats]  # a power of two: exact
        resets = self._loco is not None and reductions and reductions % self._loco.get("reset_T", 1024) == 0
        if resets:
            for errors in self.errors:
                errors[unit].zero_()
        for owner in range(self.ranks):
            span = slice(*self._layouts[unit][1].shard_range(owner, self.ranks))
            total = torch.zeros(mean[span].shape)
            for first in range(0, self.ranks, self.node):
                collector = first + owner % self.node
                node_sum = torch.zeros_like(total)
                for rank in range(first, first + self.node):
                    part = parts[rank][span]
                    node_sum += part if rank == collector else self._sent(self._inside, rank, unit, span, part)
                total += node_sum if collector == owner else self._sent(self._across, collector, unit, span, node_sum)
            mean[span] = total
        return mean

    def _sent(self, codec: Any, rank: int, unit: int, span: slice, part: torch.Tensor) -> torch.Tensor:
        """Return the decoded message of a rank, and update the rank's errors."""
        if self._loco is None:
            return decoded(codec, part.clone())
        error, beta = self.errors[rank][unit][span], self._loco.get("err_beta", 0.8)
        compensated = part + error
        message = decoded(codec, compensated)
        error.copy_(((compensated - message) * (1 - beta)).add_(error, alpha=beta))
        return message


class ZeroppSimulation:
    """Training of a specimen with ZeRO++ in one process, one micro-batch a step.

    Attributes:
        params: exact master weights by name, of all parameters.
        gathered: the values with which the last step computed.
        losses: losses by step and rank.
    """

    def __init__(self, subject: Specimen, zero: dict[str, Any], layouts: Layouts, ranks: int, node: int) -> None:
        self._subject, self._zero, self._layouts = subject, zero, layouts
        self.hops = TwoHops(zero, layouts, ranks, node)
        self._model = oracle.build(subject)
        self.params = {name: parameter.detach().clone() for name, parameter in self._model.named_parameters()}
        self.gathered: dict[str, torch.Tensor] = {}
        self.losses: list[list[float]] = []

    def run(self, steps: int) -> None:
        for step in range(steps):
            self._gather()
            flats = [self._local(step, rank) for rank in range(self.hops.ranks)]
            for unit, (names, layout) in enumerate(self._layouts):
                if not self._is_trainable(names):
                    continue
                if self._zero.get("zero_quantized_gradients"):
                    mean = self.hops.mean(unit, [of_rank[unit] for of_rank in flats], step)
                else:
                    mean = torch.zeros(layout.padded)
                    for of_rank in flats:
                        mean += of_rank[unit] / self.hops.ranks
                for name, offset in zip(names, layout.offsets, strict=True):
                    value = self.params[name]
                    value.add_(mean[offset:][: value.numel()].view_as(value), alpha=-LR)

    def _is_trainable(self, names: list[str]) -> bool:
        return self._model.get_parameter(names[0]).requires_grad

    def _gather(self) -> None:
        """Give the model the values that a forward gathers: each shard is one message."""
        codec = get_codec(self._zero.get("zero_quantized_weights_codec", "int8"))
        for names, layout in self._layouts:
            flat = torch.zeros(layout.padded)
            for name, offset in zip(names, layout.offsets, strict=True):
                flat[offset:][: self.params[name].numel()] = self.params[name].view(-1)
            keys = ["zero_quantized_weights"]
            if not self._is_trainable(names):
                keys.append("zero_quantized_nontrainable_weights")
            if any(map(self._zero.get, keys)):
                for shard in flat.view(self.hops.ranks, -1):
                    shard.copy_(decoded(codec, shard.clone()))
            for name, offset in zip(names, layout.offsets, strict=True):
                parameter = self._model.get_parameter(name)
                parameter.data.copy_(flat[offset:][: parameter.numel()].view_as(parameter))
                self.gathered[name] = parameter.detach().clone()

    def _local(self, step: int, rank: int) -> list[torch.Tensor]:
        """Return a rank's flat gradient of each unit, and note its loss."""
        batch = self._subject.batch(Place(step, 0, rank))
        loss = self._subject.train(self._model, batch, lambda loss, **_: loss.backward())
        if not rank:
            self.losses.append([])
        self.losses[-1].append(float(loss))
        return local_gradients(self._model, self._layouts)


def local_gradients(model: torch.nn.Module, layouts: Layouts) -> list[torch.Tensor]:
    """Return the flat gradient of each unit, and set the gradients of the model to None."""
    flats = []
    for names, layout in layouts:
        flat = torch.zeros(layout.padded)
        for name, offset in zip(names, layout.offsets, strict=True):
            parameter = model.get_parameter(name)
            if parameter.grad is not None:
                flat[offset:][: parameter.numel()] = parameter.grad.view(-1)
            parameter.grad = None
        flats.append(flat)
    return flats
