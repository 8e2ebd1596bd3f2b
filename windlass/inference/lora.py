"""LoRA adapters of a served model: several in one batch, each for the rows of its sequences.

[Note: adapters of rows] The tokens of all sequences of a step are the rows of one matrix. While a batch with adapters
runs, the forward of each target layer is wrapped: it computes the layer's output, and then adds `x @ a.T @ b.T` to the
rows of each adapter (Chen et al. 2023, Punica). Outside of these batches the module is unchanged, so it can be trained.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from windlass.base.errors import ModelError, RequestError
from windlass.comm.mesh_axis import MeshAxis
from windlass.inference.lora_files import LowRankWeight, read_lora
from windlass.inference.lora_shards import LayerShard, find_layer_shard
from windlass.inference.model_forward import CausalForward, find_device
from windlass.inference.packed_modules import can_pack
from windlass.inference.step_batch import StepBatch
from windlass.kernels.packed_gemm import pack_weight, packed_linear

Rows = slice | torch.Tensor
RowGroups = list[tuple[str, Rows]]

_PROBE_TOKENS, _PROBE_ROWS = 7, 2


class LoraLayer:
    """Product with the two low-rank matrices that an adapter has for one layer, or with this rank's part of them.

    Args:
        axis: ranks over which `x @ a.T` is summed; None: this rank has all input features.
        packs: use packed products, with rows that do not depend on each other; see [Note: batch-invariant products].
    """

    def __init__(self, weight: LowRankWeight, device: torch.device, axis: MeshAxis | None, *, packs: bool) -> None:
        self._axis = axis
        self._products: list[Callable[[torch.Tensor], torch.Tensor]] = [
            _packed_product(side) if packs else _plain_product(side.to(device)) for side in (weight.a, weight.b)
        ]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the change of the layer's output for `x` `[rows, in_features]`: `[rows, out_features]`, float32.

        Collective over `axis`.
        """
        down, up = self._products
        low = down(x.float())
        if self._axis is not None:
            self._axis.all_reduce(low)
        return up(low)


def _packed_product(matrix: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    panels = pack_weight(matrix, "fp32")
    return lambda x: packed_linear(x, panels)


def _plain_product(matrix: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: nn.functional.linear(x, matrix)


class LoraAdapters:
    """Adapters of one model by name.

    Args:
        model: the served module, on one device.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._device = find_device(model)
        self._packs = can_pack(model)
        self._adapters: dict[str, dict[str, LoraLayer]] = {}
        self._salts: dict[str, bytes] = {}
        self._serials = itertools.count()
        self._modules = dict(model.named_modules(remove_duplicate=False))
        self._first_paths = {module: path for path, module in model.named_modules()}
        self._tokens: RowGroups = []
        self._logits: RowGroups = []
        self._counts = (0, 0)

    @property
    def names(self) -> list[str]:
        """Names of the loaded adapters."""
        return list(self._adapters)

    def add(self, name: str, directory: str | Path) -> None:
        """Load an adapter of peft.

        Raises:
            ModelError: the adapter cannot be read, or does not fit the model. Nothing has changed.
            RequestError: the name is empty, or an adapter of this name is loaded.
        """
        self.add_weights(name, self.read(name, directory))

    def read(self, name: str, directory: str | Path) -> dict[str, LowRankWeight]:
        """Read an adapter without adding it.

        Raises:
            ModelError: the adapter cannot be read.
            RequestError: the name is empty, or an adapter of this name is loaded.
        """
        if not isinstance(name, str) or not name:
            raise RequestError(f"the name of an adapter is {name!r}; write a non-empty text", parameter="lora_name")
        if name in self._adapters:
            raise RequestError(f"an adapter {name!r} is loaded already; remove it first", parameter="lora_name")
        return read_lora(name, directory)

    def add_weights(self, name: str, weights: Mapping[str, LowRankWeight]) -> None:
        """Add an adapter that was read. Collective over the ranks of a sharded model; an error is raised on all ranks.

        Raises:
            ModelError: the adapter does not fit the model. Nothing has changed.
        """
        weights = self._by_first_path(name, weights)
        shards = {path: self._find_shard(name, path, weight) for path, weight in weights.items()}
        self._check_rows(name, weights)
        self._adapters[name] = {
            path: LoraLayer(shard.part_of(weights[path]), self._device, shard.axis, packs=self._packs)
            for path, shard in shards.items()
        }
        # a later adapter of the same name gives other keys and values, so it gets another salt
        self._salts[name] = hashlib.blake2b(f"{next(self._serials)}/{name}".encode(), digest_size=16).digest()

    def remove(self, name: str) -> None:
        """Unload an adapter.

        Raises:
            RequestError: no adapter has this name.
        """
        self.check_name(name)
        del self._adapters[name], self._salts[name]

    def check_name(self, name: str) -> None:
        """Raise a RequestError if there is no adapter of this name."""
        if name not in self._adapters:
            raise RequestError(
                f"there is no adapter {name!r}; loaded are {', '.join(self._adapters) or 'none'}", parameter="lora_name"
            )

    def cache_salt(self, name: str) -> bytes:
        """Return bytes that separate the prefix cache of this adapter from those of others."""
        return self._salts[name]

    @contextmanager
    def active(self, batch: StepBatch) -> Iterator[None]:
        """Apply the adapters of a flat batch inside the `with` block."""
        if not any(batch.adapters):
            yield
            return
        starts = batch.query_start.tolist()
        owner = torch.repeat_interleave(torch.arange(len(batch.adapters)), batch.query_start.diff().long().cpu())
        by_name: dict[str, list[int]] = {}
        for number, name in enumerate(batch.adapters):
            if name is not None:
                by_name.setdefault(name, []).append(number)
        self._counts = (starts[-1], len(batch.logit_rows))
        logit_owner = owner[batch.logit_rows.cpu()]
        self._tokens = [(name, _rows_of(owner, numbers, self._device)) for name, numbers in by_name.items()]
        self._logits = [(name, _rows_of(logit_owner, numbers, self._device)) for name, numbers in by_name.items()]
        with self._wrapped(by_name):
            yield

    @contextmanager
    def active_for_all(self, name: str | None) -> Iterator[None]:
        """Apply one adapter to all rows inside the `with` block."""
        if name is None:
            yield
            return
        self._counts = (0, 0)
        self._tokens = [(name, slice(None))]
        with self._wrapped([name]):
            yield

    @contextmanager
    def _wrapped(self, names: Any) -> Iterator[None]:
        """Replace the forward of the target layers of the named adapters."""
        paths = dict.fromkeys(path for name in names for path in self._adapters[name])
        before: list[tuple[nn.Module, Any]] = []
        try:
            for path in paths:
                module = self._modules[path]
                before.append((module, module.__dict__.get("forward")))
                module.__dict__["forward"] = self._wrap(path, module.forward)
            yield
        finally:
            for module, forward in before:
                if forward is None:
                    del module.__dict__["forward"]
                else:
                    module.__dict__["forward"] = forward

    def _wrap(self, path: str, forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def with_adapters(*inputs: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
            out, x = forward(*inputs, **named), _input_of(inputs, named)
            rows, flat = x.reshape(-1, x.shape[-1]), out.view(-1, out.shape[-1])
            for name, chosen in self._groups_for(path, len(rows)):
                layer = self._adapters[name].get(path)
                if layer is None:
                    continue
                if isinstance(chosen, slice):
                    flat[chosen].add_(layer(rows[chosen]))
                else:
                    flat[chosen] = (flat[chosen] + layer(rows[chosen])).to(flat.dtype)
            return out

        return with_adapters

    def _groups_for(self, path: str, rows: int) -> RowGroups:
        tokens, logits = self._counts
        if tokens in (0, rows):
            return self._tokens
        if rows == logits:
            return self._logits  # the output head computes only the rows that need logits
        raise ModelError(
            f"{path} computed {rows} of {tokens} tokens, and adapters of such layers are not served; merge the "
            "adapter into the model"
        )

    def _by_first_path(self, name: str, weights: Mapping[str, LowRankWeight]) -> dict[str, LowRankWeight]:
        """Return the weights by the first path of each module; a file may have those of a shared module twice."""
        found: dict[str, LowRankWeight] = {}
        for path, weight in weights.items():
            module = self._modules.get(path)
            first = path if module is None else self._first_paths[module]
            other = found.setdefault(first, weight)
            if other is not weight and not (torch.equal(other.a, weight.a) and torch.equal(other.b, weight.b)):
                raise ModelError(
                    f"adapter {name!r} has other weights for {path} than for {first}, which is the same module of "
                    f"{type(self._model).__name__}; save the adapter of this model again"
                )
        return found

    def _find_shard(self, name: str, path: str, weight: LowRankWeight) -> LayerShard:
        """Return this rank's part of a target layer."""
        module = self._modules.get(path)
        shard = None if module is None else find_layer_shard(path, module)
        kind = type(self._model).__name__
        if shard is None:
            found = "has no such module" if module is None else f"has a {type(module).__name__} there"
            raise ModelError(
                f"adapter {name!r} changes {path}, and {kind} {found}; give an adapter of linear layers of this model"
            )
        given, sizes = (weight.a.shape[1], weight.b.shape[0]), (shard.in_features, shard.out_features)
        if sizes != given:
            raise ModelError(
                f"adapter {name!r} changes {path} from {given[0]} to {given[1]} features, and the layer of {kind} has "
                f"{sizes[0]} and {sizes[1]}; it was trained for another model"
            )
        return shard

    def _check_rows(self, name: str, paths: Any) -> None:
        """Run a few tokens to check that each target layer computes all of these tokens, or all that need logits."""
        seen: dict[str, set[int]] = {path: set() for path in paths}

        def record(path: str) -> Callable[..., None]:
            def note(module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
                x = _input_of(inputs, named)
                seen[path].add(x.numel() // x.shape[-1])

            return note

        handles = [self._modules[path].register_forward_pre_hook(record(path), with_kwargs=True) for path in paths]
        ids = torch.arange(_PROBE_TOKENS, device=self._device) % 3
        try:
            with torch.inference_mode():
                CausalForward(self._model)(ids, None, ids[:_PROBE_ROWS])
        finally:
            for handle in handles:
                handle.remove()
        for path, counts in seen.items():
            if not counts or counts - {_PROBE_TOKENS, _PROBE_ROWS}:
                raise ModelError(
                    f"adapter {name!r} changes {path}, which computes only some tokens (an expert); merge it by peft's "
                    "merge_and_unload and serve the result"
                )


def _input_of(inputs: tuple[torch.Tensor, ...], named: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the input of a linear layer, which models may pass as a keyword argument."""
    return inputs[0] if inputs else next(iter(named.values()))


def _rows_of(owner: torch.Tensor, numbers: Sequence[int], device: torch.device) -> Rows:
    """Return the rows of the sequences with the indices `numbers`, as a slice if the rows are consecutive."""
    rows = torch.isin(owner, torch.tensor(numbers)).nonzero()[:, 0]
    if len(rows) == 0:
        return slice(0, 0)
    first, last = int(rows[0]), int(rows[-1])
    if last - first + 1 == len(rows):
        return slice(first, last + 1)
    return rows.to(device)
