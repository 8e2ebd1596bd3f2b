"""Forward of a calibration text through a model whose blocks are in memory one at a time."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from windlass.base.errors import ModelError
from windlass.comm.rank_group import RankGroup
from windlass.compress.checkpoint_names import CheckpointNames
from windlass.compress.model_directory import ModelDirectory, build_empty

ReadTensor = Callable[[str], Tensor]
BlockArguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments of a block's call after the hidden states, by position and by name."""
_COLUMNS = 256  # width of a column block of a symmetric product


class _Stopped(Exception):  # noqa: N818  ends a forward, and is not an error
    """Exception that ends a forward early."""


def _stop(*_: Any) -> None:
    raise _Stopped


@dataclass
class InputStatistics:
    """Sums over the inputs of a linear layer.

    Attributes:
        hessian: sum of `x x^T`, float64 `[features, features]`.
        largest, total: largest magnitude (float32) and sum of magnitudes (float64) of each feature, `[features]`.
        rows: number of input vectors.
    """

    hessian: Tensor
    largest: Tensor
    total: Tensor
    rows: int = 0

    @classmethod
    def of(cls, features: int, device: torch.device | str = "cpu") -> InputStatistics:
        zeros = torch.zeros(features, device=device)
        return cls(torch.zeros(features, features, dtype=torch.float64, device=device), zeros, zeros.double())

    def add(self, inputs: Tensor) -> None:
        """Add the inputs `[..., features]` of one call. Products are summed in float32 within a call, and in float64
        over calls."""
        rows = inputs.reshape(-1, inputs.shape[-1]).float()
        if not len(rows):  # an expert without tokens
            return
        self.hessian += symmetric_product(rows)
        self.largest = torch.maximum(self.largest, rows.abs().amax(0))
        self.total = self.total + rows.abs().sum(0, dtype=torch.float64)
        self.rows += len(rows)

    def reduce(self, group: RankGroup) -> None:
        """Sum the statistics over the ranks of a group, and take the maximum of `largest`, in place. Collective."""
        group.all_reduce(self.hessian)
        group.all_reduce(self.total)
        group.all_reduce(self.largest, dist.ReduceOp.MAX)
        rows = group.all_reduce(torch.tensor([self.rows]))
        self.rows = int(rows)

    def drop_last_bits(self) -> None:
        """Remove differences in the last bits that come from the order of the sums over batches and ranks."""
        self.hessian = self.hessian.float().double()
        self.total = self.total.float().double()

    @property
    def mean(self) -> Tensor:
        """Mean magnitude of each feature."""
        return (self.total / max(self.rows, 1)).float()


def symmetric_product(rows: Tensor) -> Tensor:
    """Return `rows^T rows`, with the products of each pair of column blocks computed once."""
    features = rows.shape[1]
    product = rows.new_empty(features, features)
    for start in range(0, features, _COLUMNS):
        stop = min(start + _COLUMNS, features)
        torch.mm(rows[:, start:stop].t(), rows[:, start:], out=product[start:stop, start:])
        product[stop:, start:stop] = product[start:stop, stop:].t()
    return product


@dataclass
class LayerGroup:
    """Linear layers of a block that receive the same input tensor, in the order of their calls.

    Attributes:
        names: names in the block.
        producer: name of the module whose output is this tensor, if its weight is 1-dimensional, e.g. a norm; None:
            there is no such module, or it differs between forwards.
    """

    names: list[str]
    producer: str | None = None


def _merge_groups(known: list[LayerGroup], others: Sequence[LayerGroup]) -> None:
    """Merge the groups of another forward into `known`, in place. A group that shares a layer with a group of `known`
    is merged into that group; any other group is inserted after its predecessor in the other forward."""
    place = 0
    for other in others:
        names = [name for name in other.names if not any(name in group.names for group in known)]
        if len(names) == len(other.names):
            known.insert(place, LayerGroup(names, other.producer))
            place += 1
            continue
        place, group = next((n, group) for n, group in enumerate(known) if not set(group.names).isdisjoint(other.names))
        group.names += names
        group.producer = group.producer if group.producer == other.producer else None
        place += 1


@dataclass
class CalibratedBlock:
    """Block with its weights in memory, and the calibration text's hidden states at its input.

    Attributes:
        prefix: name of the block in the model.
        hidden: hidden states of each batch.
        calls: other arguments of the block for each batch, by position and by name.
        group: ranks that calibrate together; None: this rank alone.
        places: name in the model of each of the block's tensors, by its name in the files.
        shared: names in the model of tied parameters.
    """

    prefix: str
    module: nn.Module
    hidden: Sequence[Tensor]
    calls: Sequence[BlockArguments]
    group: RankGroup | None = None
    places: Mapping[str, str] = field(default_factory=dict)
    shared: Collection[str] = ()

    def is_shared(self, module: nn.Module) -> bool:
        """Return True if a parameter of a module of the block is tied to a parameter of another module."""
        name = next(name for name, one in self.module.named_modules() if one is module)
        return any(f"{self.prefix}.{name}.{leaf}" in self.shared for leaf, _ in module.named_parameters(recurse=False))

    def layer(self, name: str) -> str:
        """Return the name that a layer of the block has in the files."""
        whole = f"{self.prefix}.{name}"
        return next((s.removesuffix(".weight") for s, one in self.places.items() if one == f"{whole}.weight"), whole)

    def run(self, batch: int) -> Tensor:
        """Return the hidden states of a batch after the block."""
        positional, arguments = self.calls[batch]
        out = self.module(self.hidden[batch], *positional, **arguments)
        found: Tensor = out[0] if isinstance(out, tuple) else out
        return found

    def groups(self) -> list[LayerGroup]:
        """Return the linear layers that the text reaches on any rank, grouped by their input. Collective.

        Batches are run until all layers were called, since a batch may leave out layers of experts.
        """
        linear = {name: module for name, module in self.module.named_modules() if type(module) is nn.Linear}
        found: list[LayerGroup] = []
        for batch in range(len(self.hidden)):
            _merge_groups(found, self._groups_of(batch, linear))
            if sum(len(group.names) for group in found) == len(linear):
                break
        if self.group is None:
            return found
        merged: list[LayerGroup] = []
        for of_rank in self.group.all_gather_object(found):
            _merge_groups(merged, of_rank)
        return merged

    def _groups_of(self, batch: int, linear: Mapping[str, nn.Module]) -> list[LayerGroup]:
        """Return the linear layers that the forward of a batch calls, grouped by their input."""
        calls: list[tuple[str, Tensor]] = []
        outputs: list[tuple[str, Tensor]] = []

        def called(name: str) -> Callable[..., None]:
            return lambda module, inputs: calls.append((name, inputs[0]))

        def made(name: str) -> Callable[..., None]:
            return lambda module, inputs, output: outputs.append((name, output))

        handles: list[Any] = [module.register_forward_pre_hook(called(name)) for name, module in linear.items()]
        for name, module in self.module.named_modules():
            weight = getattr(module, "weight", None)
            if isinstance(weight, Tensor) and weight.dim() == 1 and not list(module.children()):
                handles.append(module.register_forward_hook(made(name)))
        try:
            self.run(batch)
        finally:
            for handle in handles:
                handle.remove()
        groups: list[tuple[Tensor, LayerGroup]] = []
        for name, input in calls:
            if any(name in group.names for _, group in groups):
                continue  # called more than once
            known = next((group for tensor, group in groups if tensor is input), None)
            if known is not None:
                known.names.append(name)
                continue
            source = next((source for source, output in outputs if output is input), None)
            groups.append((input, LayerGroup([name], source)))
        return [group for _, group in groups]

    def statistics(self, names: Sequence[str], *, tokens: int | None = None) -> dict[str, InputStatistics]:
        """Return the sums over the inputs of layers, on all ranks of the group. Collective.

        Args:
            names: layers, one of each `LayerGroup`. A forward ends when all of them were called.
            tokens: approximate number of tokens to run, over all ranks; None: all.
        """
        ranks = 1 if self.group is None else self.group.size
        rows = self.hidden[0].shape[:-1].numel() * ranks
        count = len(self.hidden) if tokens is None else min(max(-(-tokens // rows), 1), len(self.hidden))
        found = {name: InputStatistics.of(self.linear(name).in_features) for name in names}
        left: set[str] = set()  # layers that the forward has not called yet; experts may be called in any order

        def called(name: str) -> Callable[..., None]:
            def hook(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
                found[name].add(inputs[0])
                left.discard(name)
                if not left:
                    raise _Stopped

            return hook

        handles = [self.linear(name).register_forward_pre_hook(called(name)) for name in names]
        try:
            for batch in range(count):
                left |= found.keys()
                with contextlib.suppress(_Stopped):
                    self.run(batch)
        finally:
            for handle in handles:
                handle.remove()
        for one in found.values():
            if self.group is not None:
                one.reduce(self.group)
            one.drop_last_bits()
        return found

    def linear(self, name: str) -> nn.Linear:
        """Return a linear layer by its name in the block."""
        module = self.module.get_submodule(name)
        assert isinstance(module, nn.Linear)
        return module


@dataclass
class BlockCalibration:
    """Model of a directory, and the hidden states of a calibration text before the model's next block.

    Args:
        directory: directory of the model.
        batches: token ids `[rows, length]` of this rank's share of the text, all of one shape.
        group: ranks that calibrate together; None: this rank alone.

    Raises:
        ModelError: there are no batches, they are not token ids of one shape, or the model has no list of blocks with
            linear layers.
    """

    directory: ModelDirectory
    batches: Sequence[Tensor]
    trust_remote_code: bool = False
    group: RankGroup | None = None
    model: nn.Module = field(init=False)
    prefix: str = field(init=False)
    _hidden: list[Tensor] = field(init=False, default_factory=list)
    _calls: list[list[BlockArguments]] = field(init=False, default_factory=list)  # arguments by batch and block
    _names: CheckpointNames = field(init=False)
    _tied: dict[str, list[str]] = field(init=False)

    def __post_init__(self) -> None:
        check_batches(self.batches)
        self.model = build_empty(self.directory, trust_remote_code=self.trust_remote_code).eval()
        self.prefix = find_blocks(self.model)
        self._names = CheckpointNames(self.model, self.directory.places)
        self._names.split_experts()
        users: dict[int, list[str]] = {}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            users.setdefault(id(parameter), []).append(name)
        self._tied = {name: names for names in users.values() if len(names) > 1 for name in names}

    @property
    def blocks(self) -> nn.ModuleList:
        found = self.model.get_submodule(self.prefix)
        assert isinstance(found, nn.ModuleList)
        return found

    def start(self) -> None:
        """Compute the hidden states before the first block, and the other arguments of each block.

        Raises:
            ModelError: the model is not a chain of blocks that pass on only hidden states, or a batch has ids or
                positions that the model lacks.
        """
        with torch.no_grad():
            names, head = self._names.source_of, self._head_names()
            loaded: list[str] = []
            for name in sorted(names):
                users = [one for one in self._users(name) if not one.startswith(f"{self.prefix}.")]
                if set(users) <= head or not _has_parameter(self.model, name):
                    continue
                value = self.directory.read(names[name]).float()
                for one in users:
                    _set(self.model, one, value)
                loaded += users
            self._load_block(0, self.directory.read)
            self._record_calls()
            for name in loaded:  # the blocks do not need these parameters
                _free(self.model, name)

    def block(self, number: int, read: ReadTensor) -> CalibratedBlock:
        """Load a block in float32, and return it. `read` returns a tensor, given its name in the files.

        Raises:
            ModelError: the files lack a parameter of the block.
        """
        self._load_block(number, read)
        calls = [of_batch[number] for of_batch in self._calls]
        prefix = f"{self.prefix}.{number}"
        places = {source: name for source, name in self._names.renamed.items() if name.startswith(f"{prefix}.")}
        return CalibratedBlock(prefix, self.blocks[number], self._hidden, calls, self.group, places, self._tied)

    def advance(self, block: CalibratedBlock) -> None:
        """Replace the hidden states by those after the block, and free its weights."""
        with torch.no_grad():
            self._hidden = [block.run(batch) for batch in range(len(self._hidden))]
        for name, _ in list(block.module.named_parameters()):
            _free(block.module, name)

    def block_tensors(self, number: int) -> list[str]:
        """Return the names that the tensors of a block have in the files."""
        prefix = f"{self.prefix}.{number}."
        found = {source for source, name in self._names.renamed.items() if name.startswith(prefix)}
        for name, entry in self._names.converted.items():
            found |= set(entry.sources) if name.startswith(prefix) else set()
        return [source for source in self.directory.places if source in found]

    @property
    def _head(self) -> nn.Module | None:
        found: nn.Module | None = getattr(self.model, "get_output_embeddings", lambda: None)()
        return found

    def _head_names(self) -> set[str]:
        names = {name for name, module in self.model.named_modules() if module is self._head}
        return {f"{name}.{part}" for name in names for part in ("weight", "bias")}

    def _unfilled(self) -> list[nn.Module]:
        """Return modules outside of the blocks. A forward is stopped when it calls one of them.

        These are the head, and modules without weights in the files, e.g. the layers before the head of a language
        model if the files are those of a classifier.
        """
        return [
            module
            for module in self.model.modules()
            if module is self._head or any(one.is_meta for one in module.parameters(recurse=False))
        ]

    def _load_block(self, number: int, read: ReadTensor) -> None:
        prefix = f"{self.prefix}.{number}."
        for source, name in self._names.renamed.items():
            if name.startswith(prefix):
                value = read(source).float()
                for one in self._users(name):
                    _set(self.model, one, value)
        for first, entry in self._names.converted.items():
            if first.startswith(prefix):
                for name, value in self._names.convert(entry, read).items():
                    _set(self.model, name, value.float())
        lacking = [name for name, value in self.blocks[number].named_parameters() if value.is_meta]
        if lacking:
            raise self._not_a_chain(f"block {number} has no {lacking[0]!r} of its own in the files")

    def _users(self, name: str) -> list[str]:
        """Return all names of a parameter in the model: several if it is tied."""
        return self._tied.get(name, [name])

    def _not_a_chain(self, reason: str) -> ModelError:
        return ModelError(
            f"{self.directory.path} does not run its blocks {self.prefix!r} one after the other on hidden states "
            f"only: {reason}; use method rtn or hqq, without smoothing"
        )

    def _record_calls(self) -> None:
        """Record the arguments of all blocks for each batch: run the embeddings, and stand-ins for the blocks.

        Arguments may depend on the tokens of a batch, e.g. embeddings for each layer, and a block may leave keys and
        values for later blocks in a dict. Tensors that are equal to those of the first batch are stored once.
        """
        blocks = list(self.blocks)
        rest: tuple[Any, ...] | None = None
        for number, batch in enumerate(self.batches):
            log = _CallLog(len(blocks), self._not_a_chain, runs_first=number == 0, rest=rest)
            for place, block in enumerate(blocks):
                self.blocks[place] = _BlockRecorder(block, log)
            stops = [module.register_forward_pre_hook(_stop) for module in self._unfilled()]
            try:
                self.model(batch, use_cache=False)
            except _Stopped:
                pass
            except IndexError as error:  # tables of tokens and positions raise it
                raise ModelError(
                    f"{self.directory.path} cannot run the calibration batch {number} of {len(batch)} rows of "
                    f"{batch.shape[1]} tokens with ids up to {int(batch.max())}: {error}; give ids below the size of "
                    "its vocabulary, and rows that are not longer than its positions"
                ) from error
            finally:
                for stop in stops:
                    stop.remove()
                for place, block in enumerate(blocks):
                    self.blocks[place] = block
            if len(log.calls) != len(blocks):
                raise self._not_a_chain(f"{len(log.calls)} of {len(blocks)} were called")
            assert log.first is not None
            rest = log.rest
            self._hidden.append(log.first)
            first = self._calls[0] if self._calls else log.calls
            self._calls.append([_share_call(call, other) for call, other in zip(log.calls, first, strict=True)])


def check_batches(batches: Sequence[Any]) -> None:
    """Check that a calibration text is tensors of token ids `[rows, length]` of one shape.

    Raises:
        ModelError: there are no batches, or a batch is something else.
    """
    for number, batch in enumerate(batches):
        kind = f"{batch.dtype} {tuple(batch.shape)}" if isinstance(batch, Tensor) else type(batch).__name__
        if not isinstance(batch, Tensor) or batch.dim() != 2 or batch.dtype not in (torch.int32, torch.int64):
            raise ModelError(
                f"calibration needs batches of token ids, int64 [rows, length], and batch {number} is {kind}; give ids"
            )
        if batch.shape != batches[0].shape or not batch.numel():
            raise ModelError(
                f"calibration needs batches of token ids of one shape, and batch {number} is {tuple(batch.shape)}, the "
                f"first one {tuple(batches[0].shape)}; cut or pad the text to rows of one length"
            )
    if not batches:
        raise ModelError("calibration needs batches of token ids of one shape; give some text")


def _share_call(call: BlockArguments, other: BlockArguments) -> BlockArguments:
    named = {name: _share_equal(value, other[1].get(name)) for name, value in call[1].items()}
    return _share_equal(call[0], other[0]), named


def _share_equal(value: Any, other: Any) -> Any:
    """Return `value`, with each tensor that equals the tensor at the same place in `other` replaced by the latter."""
    if isinstance(value, Tensor):
        equal = isinstance(other, Tensor) and value.shape == other.shape and value.dtype == other.dtype
        return other if equal and torch.equal(value, other) else value
    if type(value) is tuple and type(other) is tuple and len(value) == len(other):
        return tuple(_share_equal(one, two) for one, two in zip(value, other, strict=True))
    return value


@dataclass
class _CallLog:
    """Calls of the blocks of a model in one forward.

    Attributes:
        count: number of blocks.
        error: function that returns the error for a model that is not a chain of blocks.
        runs_first: run the first block to record its outputs, and continue to the head to check that no block runs
            again.
        rest: outputs of the first block after the hidden states; None: the block returns a single tensor.
        calls: arguments of each call after the hidden states.
        first: hidden states before the first block.
    """

    count: int
    error: Callable[[str], ModelError]
    runs_first: bool
    rest: tuple[Any, ...] | None
    calls: list[BlockArguments] = field(default_factory=list)
    first: Tensor | None = None


class _BlockRecorder(nn.Module):
    """Stand-in for a block, which records its arguments and returns the hidden states unchanged."""

    def __init__(self, block: nn.Module, log: _CallLog) -> None:
        super().__init__()
        # do not register a submodule, so that parameter names do not change
        self.__dict__["_block"], self.__dict__["_log"] = block, log

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_block"], name)  # a model may read attributes of a block, e.g. its type

    def forward(self, *positional: Any, **arguments: Any) -> Any:
        log: _CallLog = self.__dict__["_log"]
        block = self.__dict__["_block"]
        first = next(iter(inspect.signature(block.forward).parameters))
        hidden = positional[0] if positional else arguments.pop(first, None)
        if not isinstance(hidden, Tensor) or "prev_attn_output" in (first, *arguments):  # e.g. a reversible layer
            raise log.error("a block takes other arguments")
        call = positional[1:], arguments
        if log.first is None:
            log.first = hidden.detach()
            if log.runs_first:  # the weights of the first block are in memory
                out = block(hidden, *call[0], **call[1])
                log.rest = out[1:] if isinstance(out, tuple) else None
        elif len(log.calls) == log.count:
            raise log.error("blocks run more than once")
        elif not torch.equal(hidden, log.first):
            raise log.error("hidden states change between two blocks")
        passed = [value for value in log.rest or () if isinstance(value, Tensor)]
        if any(value is one for value in _tensors(call) for one in passed):
            raise log.error("a block passes more to the next one")
        log.calls.append(call)
        if len(log.calls) == log.count and not log.runs_first:
            raise _Stopped
        return hidden if log.rest is None else (hidden, *log.rest)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list | dict):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _tensors(one)


def find_blocks(model: nn.Module) -> str:
    """Return the name of the list of a model's blocks: the longest one that has linear layers.

    Raises:
        ModelError: the model has no such list.
    """
    name = find_longest_list(model, lambda module: any(type(part) is nn.Linear for part in module.modules()))
    if name is None:
        raise ModelError(f"{type(model).__name__} has no list of blocks with linear layers; use method rtn or hqq")
    return name


def find_longest_list(model: nn.Module, accepts: Callable[[nn.ModuleList], bool]) -> str | None:
    """Return the name of the longest accepted list of modules that is not inside another accepted one; None if there is
    none.
    """
    found = [
        (len(module), name)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and accepts(module)
    ]
    outer = [(size, name) for size, name in found if not any(name.startswith(f"{other}.") for _, other in found)]
    return max(outer, key=lambda one: one[0])[1] if outer else None


def _has_parameter(model: nn.Module, name: str) -> bool:
    owner, _, leaf = name.rpartition(".")
    try:
        return leaf in model.get_submodule(owner)._parameters
    except AttributeError:
        return False


def _set(model: nn.Module, name: str, value: Tensor) -> None:
    owner, _, leaf = name.rpartition(".")
    module = model.get_submodule(owner)
    if leaf in module._buffers:
        module._buffers[leaf] = value
    else:
        module.register_parameter(leaf, nn.Parameter(value, requires_grad=False))


def _free(model: nn.Module, name: str) -> None:
    owner, _, leaf = name.rpartition(".")
    module = model.get_submodule(owner)
    parameter = module._parameters.get(leaf)
    if parameter is not None:
        _set(model, name, torch.empty_like(parameter, device="meta"))
