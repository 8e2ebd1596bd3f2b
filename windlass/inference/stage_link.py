"""Forward of a model with layers on several ranks: each rank runs its stage and sends hidden states to the next one.

[Note: stages from the last rank] Rank 0 of a model is its leader, and has the last stage: logits are computed where
tokens are sampled. So only hidden states, and token ids, which every rank needs, are sent between ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from windlass.base.errors import ModelError
from windlass.comm.mesh_axis import MeshAxis
from windlass.comm.point_to_point import start_exchange, wait_for_transfers
from windlass.inference.model_forward import CausalForward, find_device
from windlass.parallel.pipeline import PipelineSequential, apply_pipeline_parallel, get_pipeline_stages
from windlass.parallel.pipeline.staged_model import StagedModel

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_LINK_ATTRIBUTE = "_windlass_stage_link"
_MAX_DIMENSIONS = 6


class StageLink:
    """This rank's stage of a model, and its neighbours along the mesh axis pp.

    Args:
        model: model that was split in place.
        stages: stages of `model`, one on each rank.
        axis: mesh axis pp; the index of a rank is the number of its stage.

    Attributes:
        received_form: size of the last dimension, and index of the dtype in `_DTYPES`, of the hidden states that
            arrived last.
    """

    def __init__(self, model: nn.Module, stages: StagedModel, axis: MeshAxis) -> None:
        self.model, self.axis = model, axis
        self._stages = stages
        self._device = find_device(model)
        # for each send in flight: its transfers, and the tensor, which must stay alive
        self._sends: deque[tuple[list[Any], torch.Tensor]] = deque()
        self.received_form = (0, 0)

    @property
    def is_last(self) -> bool:
        """True on the rank that computes the model's output."""
        return self.axis.index == self.axis.size - 1

    def run(
        self, call: Callable[..., Any], arguments: Mapping[str, Any], shape: tuple[int, ...] | None, dtype: torch.dtype
    ) -> Any:
        """Receive hidden states, run this rank's stage, and send the result on. Collective over the stages.

        Args:
            call: function that calls the model, or a module of it that contains the layers.
            arguments: keyword arguments of `call`, equal on all stages.
            shape: shape of hidden states; None: the sender sends shape and dtype before them.
            dtype: dtype of hidden states, if `shape` is given.

        Returns:
            The return value of `call` on the last stage, None on others.
        """
        hidden = None
        stage = self.axis.index
        if stage:
            hidden = self._receive(shape, dtype)
        output = self._stages.run_stage_forward(call, stage, hidden, arguments)
        if self.is_last:
            return output
        self._send(output, with_shape=shape is None)
        return None

    def agree(self, value: torch.Tensor) -> torch.Tensor:
        """Return the last stage's int64 tensor on all stages. Collective over the stages."""
        return self.axis.group.broadcast(value, self.axis.size - 1)

    def drop_transfers(self) -> None:
        """Drop transfers that are not finished."""
        self._sends.clear()

    def _receive(self, shape: tuple[int, ...] | None, dtype: torch.dtype) -> torch.Tensor:
        source = self.axis.index - 1
        if shape is None:
            header = self.axis.group.receive(torch.zeros(_MAX_DIMENSIONS + 2, dtype=torch.long), source).tolist()
            dtype, shape = _DTYPES[header[0]], tuple(header[2 : 2 + header[1]])
        hidden = torch.empty(shape, dtype=dtype, device=self._device)
        wait_for_transfers(start_exchange(self.axis.group, (), [(source, hidden.view(-1))]))
        self.received_form = hidden.shape[-1], _DTYPES.index(dtype)
        return hidden

    def _send(self, hidden: torch.Tensor, *, with_shape: bool) -> None:
        target = self.axis.index + 1
        if with_shape:
            header = torch.zeros(_MAX_DIMENSIONS + 2, dtype=torch.long)
            header[0], header[1] = _DTYPES.index(hidden.dtype), hidden.dim()
            header[2 : 2 + hidden.dim()] = torch.tensor(hidden.shape)
            self.axis.group.send(header, target)
        sent = hidden.detach().contiguous()
        self._sends.append((start_exchange(self.axis.group, [(target, sent.view(-1))], ()), sent))
        # at most one step for each stage is in flight, so if there are more sends, the oldest was received already
        while len(self._sends) > self.axis.size:
            wait_for_transfers(self._sends.popleft()[0])


class StageForward:
    """Forward of this rank's stage, with the interface of `CausalForward`.

    Construction and calls are collective over the stages. Stages before the last return zeros of the logits' shape,
    which take no memory.

    Raises:
        ModelError: the model's forward takes no `input_ids`.
    """

    def __init__(self, link: StageLink) -> None:
        self.model = link.model
        self._link = link
        self._plain = CausalForward(link.model)
        if "input_ids" not in self._plain.accepts:
            raise ModelError(f"{type(link.model).__name__}.forward takes no input_ids, which pp needs; use tp")
        self._vocabulary = 0
        self._width, self._dtype = 0, torch.float32
        self._agree()

    @property
    def takes_positions(self) -> bool:
        """See `CausalForward`."""
        return self._plain.takes_positions

    def __call__(self, token_ids: torch.Tensor, positions: torch.Tensor | None, rows: torch.Tensor) -> torch.Tensor:
        """Return the logits of `rows`; see `CausalForward`."""
        arguments = self._make_arguments(token_ids, positions, rows)
        shape = (1, len(token_ids), self._width)
        output = self._link.run(self.model, arguments, shape, self._dtype)
        if self._link.is_last:
            return self._plain.select_logits(output, len(token_ids), rows)
        return torch.zeros((), device=token_ids.device).expand(len(rows), self._vocabulary)

    def _make_arguments(
        self, token_ids: torch.Tensor, positions: torch.Tensor | None, rows: torch.Tensor
    ) -> dict[str, Any]:
        return {"input_ids": token_ids[None], **self._plain.make_arguments(token_ids, positions, rows)}

    def _agree(self) -> None:
        """Run one token through all stages, so that each rank gets the vocabulary size, and the width and dtype of
        hidden states."""
        one = torch.zeros(1, dtype=torch.long, device=find_device(self.model))
        facts = torch.zeros(3, dtype=torch.long)
        with torch.inference_mode():
            output = self._link.run(self.model, self._make_arguments(one, None, one), None, torch.float32)
            if self._link.is_last:
                vocabulary = self._plain.select_logits(output, 1, one).shape[-1]
                facts = torch.tensor([vocabulary, *self._link.received_form])
        facts = self._link.agree(facts)
        self._vocabulary, self._width, self._dtype = int(facts[0]), int(facts[1]), _DTYPES[int(facts[2])]


def split_for_inference(model: nn.Module, axis: MeshAxis) -> None:
    """Keep this rank's stage of a model, in place: its layers, and on the first or last stage the modules before or
    after all layers.

    Args:
        model: model with values, or on the meta device.
        axis: the mesh axis pp.

    Raises:
        ConfigError: there are fewer layers than stages.
        ModelError: the model cannot be split, or is a `PipelineSequential`.
    """
    _refuse_pipeline_module(model)
    apply_pipeline_parallel(model, axis)


def open_stage_link(model: nn.Module, axis: MeshAxis | None) -> StageLink | None:
    """Return the link over `axis` of a model that was split; None if `axis` is None or the model was not split.

    Raises:
        ModelError: the model is a `PipelineSequential`, and `axis` is not None.
    """
    if axis is None:
        return None
    _refuse_pipeline_module(model)  # before the ranks broadcast the model's values
    stages = get_pipeline_stages(model)
    if not isinstance(stages, StagedModel):
        return None
    found = get_stage_link(model)
    if found is None or found.axis is not axis:
        found = StageLink(model, stages, axis)
        setattr(model, _LINK_ATTRIBUTE, found)
    return found


def _refuse_pipeline_module(model: nn.Module) -> None:
    if isinstance(model, PipelineSequential):
        raise ModelError(f"{type(model).__name__} is a pipeline module already; pass a plain model, which pp splits")


def get_stage_link(model: nn.Module) -> StageLink | None:
    """Return the link that `open_stage_link` made last; None if there is none."""
    found = getattr(model, _LINK_ATTRIBUTE, None)
    return found if isinstance(found, StageLink) else None
