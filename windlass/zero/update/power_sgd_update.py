"""Update of `PowerSGD` at stage 0.

[Note: low-rank gradients] After `start_step` steps, gradients stay on their ranks ([Note: local gradients]). The mean
gradient of a matrix is approximated by P Q^T, where P and Q have few columns. Each rank multiplies the sum of its
gradient and error by the orthonormalized Q of the previous step; the products are summed over ranks and orthonormalized
to P. Each rank then multiplies the transpose of its gradient plus error by P; the mean of these products over ranks is
the new Q (one step of subspace iteration, warm-started). Both messages are sums, so two all-reduces of thin matrices
suffice at any number of ranks. Vectors, and matrices that would hardly shrink, are summed in full with the first
message. The approximation replaces the reduced gradient, and the rule of SGD steps the master weights. A matrix that is
sharded over tensor-parallel ranks is compressed as separate matrices, one for each part.

Source: Vogels et al., arXiv:1905.13727, algorithm 1; `torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook`
computes the same.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar
from zlib import crc32

import torch

from windlass.optim.one_bit_adam import count_step, is_frozen
from windlass.optim.power_sgd import thin_columns
from windlass.zero.update.compressed_messages import UnitMessage, add_errors
from windlass.zero.update.compressed_phase import WORKER_ERROR, CompressedPhase
from windlass.zero.update.elementwise_update import ElementwiseUpdate
from windlass.zero.update.rank_state import RankState
from windlass.zero.update.update_chunk import UpdateChunk
from windlass.zero.update.update_protocol import UpdateContext

WARM_START = "warm_start"
OPERATION = "compressed_all_reduce"


@dataclass(frozen=True)
class _Matrix:
    """Gradient of one parameter in a step.

    Attributes:
        gradient: `[rows, columns]`, a view of the message.
        error: `[rows, columns]`, the part of earlier gradients of this rank that its messages left out.
        thin: `[columns, r]`: Q, where r is the number of columns of P and Q.
    """

    gradient: torch.Tensor
    error: torch.Tensor
    thin: torch.Tensor


class PowerSGDUpdate(ElementwiseUpdate):
    """Update of `PowerSGD`; see [Note: low-rank gradients].

    States in addition to SGD's, for each rank and from the first compressed step on: `worker_error`, and `warm_start`,
    whose first elements are Q, equal on all data-parallel ranks.
    """

    reduces_itself: ClassVar[bool] = True

    def __init__(self, optimizer: torch.optim.Optimizer, context: UpdateContext) -> None:
        super().__init__(optimizer, context)
        self._phase = CompressedPhase(
            optimizer, context, self.chunks, self.rank_state_keys(optimizer, context.shards_states)
        )
        self._traffic = context.dp_groups[0].transport.traffic
        if self.takes_local_gradients:
            self._phase.begin()

    @classmethod
    def rank_state_keys(cls, optimizer: torch.optim.Optimizer, shards_states: bool) -> tuple[str, ...]:
        """See `Update.rank_state_keys`."""
        return (WORKER_ERROR, WARM_START)

    @property
    def takes_local_gradients(self) -> bool:
        """True after `start_step` steps."""
        return is_frozen(self.optimizer, "start_step")

    def run(self, used: dict[int, list[bool]], divisor: float) -> Iterator[list[UpdateChunk]]:
        """See `Update.run`. Collective after `start_step` steps."""
        if not self.takes_local_gradients:
            return self._counted(super().run(used, divisor))
        groups = {id(p): group for group in self.optimizer.param_groups for p in group["params"]}
        return self._counted(self._run_compressed(used, divisor, groups, super().run(used, 1.0)))

    def _counted(self, batches: Iterator[list[UpdateChunk]]) -> Iterator[list[UpdateChunk]]:
        yield from batches
        count_step(self.optimizer)

    def _run_compressed(
        self,
        used: dict[int, list[bool]],
        divisor: float,
        groups: dict[int, dict[str, Any]],
        batches: Iterator[list[UpdateChunk]],
    ) -> Iterator[list[UpdateChunk]]:
        for messages in self._phase.local_messages(used, divisor, groups, weighted=False):
            if self._phase.group.size > 1:
                self._average(messages, groups)
            else:  # one rank sends no message: only add errors that a checkpoint of several ranks may contain
                add_errors(messages, [self._phase.state(WORKER_ERROR, one.unit) for one in messages])
        yield from batches  # the update reads the approximations in the gradient slots

    @torch.no_grad()
    def _average(self, messages: list[UnitMessage], groups: dict[int, dict[str, Any]]) -> None:
        """Replace local gradients by their mean, approximated for matrices that P and Q make smaller. Collective."""
        size, matrices, whole = self._phase.group.size, list[_Matrix](), list[torch.Tensor]()
        for message in messages:
            for index in (index for index, chosen in enumerate(message.chosen) if chosen):
                matrix = self._matrix(message, index, groups)
                if matrix is None:
                    whole.append(message.unit.parameter_view(message.flat, index).view(-1))
                else:
                    matrices.append(matrix)
        for one in matrices:
            one.gradient.add_(one.error)
            one.error.copy_(one.gradient)
        products = [one.gradient @ _orthonormal(one.thin) for one in matrices]
        self._sum([*(one.view(-1) for one in products), *whole])
        products = [_orthonormal(one) for one in products]
        thin = [one.gradient.t() @ product for one, product in zip(matrices, products, strict=True)]
        self._sum([one.view(-1) for one in thin])
        for one, product, sums in zip(matrices, products, thin, strict=True):
            one.thin.copy_(sums.div_(size))
            torch.mm(product, one.thin.t(), out=one.gradient)
            one.error.sub_(one.gradient)
        for vector in whole:
            vector.div_(size)

    def _matrix(self, message: UnitMessage, index: int, groups: dict[int, dict[str, Any]]) -> _Matrix | None:
        """Return gradient, error and Q of a parameter as matrices; None if its gradient is sent in full."""
        unit = message.unit
        shape = unit.shapes[index]
        rank = thin_columns(shape, groups[id(unit.parameters[index])])
        if not rank:
            return None
        rows, columns = shape[0], shape.numel() // shape[0]
        error, warm = (self._phase.state(key, unit) for key in (WORKER_ERROR, WARM_START))
        thin = unit.parameter_view(warm, index).view(-1)[: columns * rank].view(columns, rank)
        if not thin.any():
            # The seed is the name's hash, so Q is equal on all data-parallel ranks and on replicas along other axes.
            draw = torch.Generator().manual_seed(crc32(unit.names[index].encode()))
            thin.copy_(torch.randn(columns, rank, generator=draw))
        return _Matrix(
            unit.parameter_view(message.flat, index).view(rows, columns),
            unit.parameter_view(error, index).view(rows, columns),
            thin,
        )

    def _sum(self, tensors: list[torch.Tensor]) -> None:
        """Sum tensors over ranks in place, as one message. Collective."""
        if not tensors:
            return
        group = self._phase.group
        message = torch.cat(tensors)
        group.all_reduce(message)
        self._traffic.add(OPERATION, 0, 2 * (group.size - 1) * message.numel() * message.itemsize // group.size)
        for tensor, values in zip(tensors, message.split([one.numel() for one in tensors]), strict=True):
            tensor.copy_(values)

    def rank_states(self) -> Iterator[RankState]:
        """See `Update.rank_states`. Empty before the first compressed step."""
        return self._phase.rank_states()

    def forget_unsent(self) -> None:
        """See `Update.forget_unsent`."""
        self._phase.forget_unsent()

    def open_rank_states(self, saved: Collection[str]) -> frozenset[str]:
        """See `Update.open_rank_states`."""
        return self._phase.open_rank_states(saved)


def _orthonormal(matrix: torch.Tensor) -> torch.Tensor:
    """Return an orthonormal basis of the columns of `[n, rank]`, equal on all ranks for equal columns."""
    basis: torch.Tensor = torch.linalg.qr(matrix)[0]
    return basis
