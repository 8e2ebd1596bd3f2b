"""Accuracy lost by rounding one group of layers to one weight format, measured for every group and format.

[Note: measured sensitivity] One group of layers with a common input is rounded, and the Kullback-Leibler divergence of
the model's next-token distributions from those of the unquantized model is measured on calibration text. Hidden states
before each block are stored, so that a measurement runs the model from the group's block on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from windlass.base.log import logger
from windlass.compress.integer_grid import IntegerGrid, clipped_grid, is_integer_format
from windlass.compress.layer_importance import find_layer_list
from windlass.compress.model_directory import shared_parameters
from windlass.compress.split_experts import SplitExperts
from windlass.kernels.weight_format import get_weight_format

_LEAST_TOKENS, _MOST_TOKENS = 64, 2048
_LIMIT_ROUNDS = 3
# Time of one measurement, relative to a full forward: half of the blocks run on average, plus the divergence.
_PASS_SHARE = 0.8
_MOST_BYTES = 512 << 20  # limit in bytes for the log-probabilities of the unquantized model
_CLIP_STRIDE = 5  # stride of the clip search; coarse, to compare formats only: the final rounding searches again


@dataclass(frozen=True)
class InputGroup:
    """Linear layers that receive the same input tensor, or the layers of all experts of a module with inputs of one
    kind.

    Attributes:
        names: names of the layers.
        block: number of the block that contains the layers; -1: no block does, and a measurement runs the full model.
        share: share of the layers that one token passes; below 1 for experts.
    """

    names: tuple[str, ...]
    block: int
    share: float = 1.0


def rounded_weight(weight: Tensor, name: str, grid: IntegerGrid | None = None) -> Tensor:
    """Return a weight in float32, rounded as method `rtn` does, but with a coarser search of the clipping range.

    Args:
        grid: integer grid of an earlier search; None: search for it.
    """
    form = get_weight_format(name)
    if not is_integer_format(form):
        return form.unpack(form.pack(weight)).float()
    if grid is None:
        grid = _searched_grid(weight, name)
    return grid.values(grid.codes(weight.float()))


def _searched_grid(weight: Tensor, name: str) -> IntegerGrid:
    return clipped_grid(get_weight_format(name), weight.float(), stride=_CLIP_STRIDE)


def sample_tokens(model: Any, batches: Sequence[Tensor]) -> list[Tensor]:
    """Return the first rows of a calibration text for a measurement, few enough for their log-probabilities to fit in
    memory."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    vocabulary = 1 if head is None else int(head.weight.shape[0])
    return _first_tokens(batches, min(_MOST_TOKENS, max(_MOST_BYTES // (4 * vocabulary), _LEAST_TOKENS)))


def mean_nats(model: Any, rows: Sequence[Tensor]) -> float:
    """Return the loss of a causal language model in nats per token."""
    with torch.no_grad():
        losses = [float(model(row, labels=row, use_cache=False).loss) * (row.shape[1] - 1) for row in rows]
    return sum(losses) / max(sum(row.shape[1] - 1 for row in rows), 1)


def _first_tokens(batches: Sequence[Tensor], tokens: int) -> list[Tensor]:
    kept: list[Tensor] = []
    for batch in batches:
        for row in batch:
            if tokens > 0:
                kept.append(row[None, : max(min(len(row), tokens), 2)])
                tokens -= len(row)
    return kept


def join_experts(model: Any, groups: Sequence[InputGroup]) -> list[InputGroup]:
    """Return groups in which all experts of a module have one format for their gate and up layers, and one for their
    down layers. One measurement for each expert would take too long, and other programs need equal formats."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    chosen = getattr(text, "num_experts_per_tok", None)
    modules = {name: one for name, one in model.named_modules() if isinstance(one, SplitExperts)}
    joined: dict[object, list[str]] = {}
    shares: dict[object, float] = {}
    for group in groups:
        owner = next((name for name in modules if group.names[0].startswith(f"{name}.")), None)
        key: object = group if owner is None else (owner, group.names[0].endswith("down_proj"))
        joined.setdefault(key, []).extend(group.names)
        if owner is not None and isinstance(chosen, int):
            shares[key] = min(chosen / modules[owner].num_experts, 1.0)
    blocks = {name: group.block for group in groups for name in group.names}
    return [InputGroup(tuple(names), blocks[names[0]], shares.get(key, 1.0)) for key, names in joined.items()]


class SensitivityMeter:
    """Meter of the change of one model's predictions when layers are rounded; see [Note: measured sensitivity].

    Args:
        model: causal language model in memory, in float32.
        batches: token ids `[rows, length]`.
        head: measure the output head too.
    """

    def __init__(self, model: Any, batches: Sequence[Tensor], *, head: bool = False) -> None:
        self.model = model.eval()
        self._prefix = find_layer_list(model)
        self._batches = list(batches)
        output = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
        self._linear = {
            name: module
            for name, module in model.named_modules()
            if type(module) is nn.Linear and (module is not output or head)
        }
        # grids by layer and format; a grid takes a few percent of the memory of the weight
        self._grids: dict[tuple[str, str], IntegerGrid] = {}
        self._hidden: list[list[Tensor]] = []
        self._returns_tuple = False
        self._shared = shared_parameters(model)
        self.groups = self._find_groups()
        self.seconds = 0.0
        self._prepare()
        if not self._continues():
            logger.debug("blocks %s need more than hidden states; each measurement runs the whole model", self._prefix)
            self.groups = [replace(group, block=-1) for group in self.groups]

    @property
    def tokens(self) -> int:
        """Number of tokens in a measurement."""
        return sum(batch.numel() for batch in self._batches)

    def limit_time(self, formats: int, seconds: float) -> None:
        """Reduce the number of tokens, to 64 at the fewest, so that measuring all groups in `formats` formats takes
        about `seconds`."""
        for _ in range(_LIMIT_ROUNDS):  # repeated, because time falls more slowly than the number of tokens
            needed = _PASS_SHARE * self.seconds * formats * len(self.groups)
            tokens = max(int(self.tokens * seconds / max(needed, 1e-9)), _LEAST_TOKENS)
            if tokens >= self.tokens:
                return
            self._batches = _first_tokens(self._batches, tokens)
            self._prepare()

    def _find_groups(self) -> list[InputGroup]:
        calls: list[tuple[str, Tensor]] = []
        handles = [
            module.register_forward_pre_hook(lambda module, given, name=name: calls.append((name, given[0])))
            for name, module in self._linear.items()
        ]
        try:
            self._run(self._batches[0][:1])
        finally:
            for handle in handles:
                handle.remove()
        found: list[tuple[Tensor, list[str]]] = []
        seen: set[str] = set()
        for name, value in calls:
            if name in seen:
                continue
            seen.add(name)
            known = next((names for tensor, names in found if tensor is value), None)
            if known is None:
                found.append((value, [name]))
            else:
                known.append(name)
        # a layer that no token reached is a separate group
        lists = [names for _, names in found] + [[name] for name in self._linear if name not in seen]
        groups = [InputGroup(tuple(names), self._block_of(names[0])) for names in lists]
        return join_experts(self.model, groups)

    def _block_of(self, name: str) -> int:
        rest = name.removeprefix(f"{self._prefix}.")
        # several blocks may use a tied weight, so the full model must run
        alone = rest != name and id(self._linear[name].weight) not in self._shared
        return int(rest.partition(".")[0]) if alone else -1

    def _continues(self) -> bool:
        """Return True if a forward can begin at any block: the blocks before it pass on only hidden states."""
        last = len(self._layers()) - 1
        for number in {min(1, last), last} - {0}:
            try:
                with self._from_block(number) as set_batch:
                    set_batch(0)
                    found = self._run(self._batches[0]).log_softmax(-1)
            except (KeyError, IndexError, TypeError, ValueError, RuntimeError):  # the error depends on the model
                return False
            if not torch.allclose(found, self._wide[0], rtol=1e-3, atol=1e-4):
                return False
        return True

    def _prepare(self) -> None:
        """Run the unquantized model. Store the hidden states before each block, the log-probabilities and the time."""
        layers = self._layers()
        self._hidden = [[] for _ in layers]

        def before(number: int) -> Callable[..., None]:
            def hook(module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
                self._hidden[number].append((inputs[0] if inputs else named["hidden_states"]).detach())

            return hook

        def after(module: nn.Module, inputs: Any, output: Any) -> None:
            self._returns_tuple = isinstance(output, tuple)

        handles: list[Any] = [
            layer.register_forward_pre_hook(before(number), with_kwargs=True) for number, layer in enumerate(layers)
        ]
        handles.append(layers[0].register_forward_hook(after))
        start = time.perf_counter()
        try:
            self._wide = [self._run(batch).log_softmax(-1) for batch in self._batches]
        finally:
            for handle in handles:
                handle.remove()
        self.seconds = time.perf_counter() - start

    def _run(self, batch: Tensor) -> Tensor:
        with torch.no_grad():
            logits: Tensor = self.model(batch, use_cache=False).logits.float()
        return logits

    def _layers(self) -> nn.ModuleList:
        found = self.model.get_submodule(self._prefix)
        assert isinstance(found, nn.ModuleList)
        return found

    def divergence(self, formats: Mapping[str, str | None], from_block: int = -1) -> float:
        """Return the divergence in nats per token with some layers rounded.

        Args:
            formats: formats of layers by name; None: unquantized.
            from_block: first block with a rounded layer; -1: run the full model.
        """
        with self._rounded(formats), self._from_block(from_block) as set_batch:
            return self._mean_divergence(set_batch)

    def _mean_divergence(self, set_batch: Callable[[int], None]) -> float:
        nats, rows = 0.0, 0
        for number, (batch, wide) in enumerate(zip(self._batches, self._wide, strict=True)):
            set_batch(number)
            found = self._run(batch).log_softmax(-1)
            nats += float((wide.exp() * (wide - found)).sum(dtype=torch.float64))
            rows += batch.numel()
        return max(nats / rows, 0.0)

    def sensitivities(
        self, formats: Sequence[str], progress: Callable[[int, int], None] = lambda done, total: None
    ) -> list[dict[str, float]]:
        """Return, for each of `groups`, the divergence by format."""
        found: list[dict[str, float]] = []
        total = len(self.groups) * len(formats)
        for group in self.groups:
            losses: dict[str, float] = {}
            for name in formats:
                losses[name] = self.divergence(dict.fromkeys(group.names, name), group.block)
                progress(len(found) * len(formats) + len(losses), total)
            found.append(losses)
        return found

    def _rounded_weight(self, layer: str, weight: Tensor, name: str) -> Tensor:
        grid = None
        if is_integer_format(name):
            grid = self._grids.get((layer, name))
            if grid is None:
                grid = self._grids[layer, name] = _searched_grid(weight, name)
        return rounded_weight(weight, name, grid)

    @contextmanager
    def _rounded(self, formats: Mapping[str, str | None]) -> Iterator[None]:
        before = {name: self._linear[name].weight.data for name, form in formats.items() if form is not None}
        try:
            for name, form in formats.items():
                if form is not None:
                    self._linear[name].weight.data = self._rounded_weight(name, before[name], form)
            yield
        finally:
            for name, weight in before.items():
                self._linear[name].weight.data = weight

    @contextmanager
    def _from_block(self, number: int) -> Iterator[Callable[[int], None]]:
        """Start forwards at block `number`, from the stored hidden states. Yield a function that selects the batch by
        its number."""
        if number < 1:
            yield lambda batch: None
            return
        layers = self._layers()
        before = list(layers)
        place = [0]

        def hook(module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
            hidden = self._hidden[number][place[0]]
            return ((hidden, *inputs[1:]), named) if inputs else (inputs, {**named, "hidden_states": hidden})

        handle = layers[number].register_forward_pre_hook(hook, with_kwargs=True)
        try:
            for skipped in range(number):
                layers[skipped] = _PassedLayer(before[skipped], self._returns_tuple)
            yield lambda batch: place.__setitem__(0, batch)
        finally:
            handle.remove()
            for skipped in range(number):
                layers[skipped] = before[skipped]


class _PassedLayer(nn.Module):
    """Stand-in for a skipped layer: returns its input."""

    def __init__(self, layer: nn.Module, returns_tuple: bool) -> None:
        super().__init__()
        self.__dict__["_layer"], self.__dict__["_returns_tuple"] = layer, returns_tuple  # not a submodule

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_layer"], name)  # e.g. the attention type, which the model reads

    def forward(self, hidden_states: Tensor, *positional: Any, **named: Any) -> Any:
        return (hidden_states,) if self.__dict__["_returns_tuple"] else hidden_states
