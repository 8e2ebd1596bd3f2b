"""Linear layers of a served model, replaced by products of packed weights while the engine runs it.

[Note: joined products] Query, key and value projections have the same input, as have gate and up. A probe records which
layers get the same tensor in consecutive calls. Their weights are packed as one matrix: the first layer of the group
computes the product for all, and the others return their part of it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from windlass.base.log import logger
from windlass.compress.conv1d_layers import make_linear
from windlass.compress.split_experts import SplitExperts
from windlass.inference.model_forward import find_device
from windlass.inference.step_recording import get_recorder
from windlass.kernels.coded_formats import CodedWeightFormat
from windlass.kernels.inference_path import get_inference_path
from windlass.kernels.mapped_bytes import drop_pages, find_pages, record_mapped_parameters
from windlass.kernels.ordered_formats import ORDER, OrderedWeightFormat, inner_tensors
from windlass.kernels.packed_experts import PackedExperts
from windlass.kernels.packed_gemm import (
    PackedPanels,
    join_packed,
    narrow_input_dtype,
    pack_panels,
    pack_weight,
    packed_linear,
    panel_rows,
)
from windlass.kernels.packed_linear import PackedLinear, pack_linear_layers
from windlass.kernels.panel_memory import joined_panels, share_parameters
from windlass.kernels.weight_format import JoinableFormat, WeightFormat, get_weight_format
from windlass.parallel.placement import get_placement, has_placement, set_placement

_LEAST_FEATURES = 16  # smaller layers gain nothing
_NUMBER = re.compile(r"\d+")
_PACKABLE_DTYPES = (torch.float32, torch.bfloat16)
_ROW_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_ROUNDED = {torch.int8: "int8", torch.bfloat16: "bf16"}  # value of `activations` that rounds inputs to this dtype


@dataclass(eq=False)
class LinearGroup:
    """Linear layers with weights that are packed as one matrix.

    Attributes:
        modules: modules in the order of their calls.
        bias: concatenated biases; None: the layers have none.
        order: order in which the panels have the input features, see [Note: ordered features]; None: that of the input.
    """

    modules: list[nn.Module]
    panels: PackedPanels
    bias: torch.Tensor | None
    sizes: list[int]
    order: torch.Tensor | None = None
    _input: torch.Tensor | None = None
    _outputs: tuple[torch.Tensor, ...] = ()

    def first(self, input: torch.Tensor) -> torch.Tensor:  # nn.Linear's argument name: models may pass it by name
        """Compute all outputs, and return that of the first layer."""
        out = self._multiply(input)
        if len(self.sizes) == 1:
            return out
        self._input, self._outputs = input, out.split(self.sizes, dim=-1)
        return self._outputs[0]

    def later(self, place: int, x: torch.Tensor) -> torch.Tensor:
        """Return the output of layer `place` from the product that `first` stored, or from a new one if `x` differs."""
        outputs = self._outputs
        if self._input is not x:
            outputs = self._multiply(x).split(self.sizes, dim=-1)
        elif place == len(self.sizes) - 1:
            self._input, self._outputs = None, ()  # frees the memory of the step
        return outputs[place]

    def _multiply(self, x: torch.Tensor) -> torch.Tensor:
        if self.order is not None:
            x = x.index_select(-1, self.order)
        recorder = get_recorder()
        if recorder is None:
            return packed_linear(x, self.panels, self.bias)
        x = x.contiguous()
        with recorder.paused():
            out = packed_linear(x, self.panels, self.bias)
        recorder.add_native("linear", (self.panels, self.bias), [x], out)
        return out

    def forwards(self) -> list[Callable[[torch.Tensor], torch.Tensor]]:
        """Return the replacement of each layer's forward."""
        rest = [_bind_later(self, place) for place in range(1, len(self.sizes))]
        return [self.first, *rest]


def _bind_later(group: LinearGroup, place: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def later(input: torch.Tensor) -> torch.Tensor:
        return group.later(place, input)

    return later


@dataclass(eq=False)
class ExpertGroup:
    """Experts of a layer, whose packed weights are multiplied in one call; see [Note: packed experts].

    Attributes:
        products: for each expert, gate with up, and down.
    """

    module: SplitExperts
    products: list[tuple[LinearGroup, LinearGroup]]

    def __post_init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        """Use the panels that the groups have now."""
        self.experts = PackedExperts([(up.panels, down.panels) for up, down in self.products], self.module.gate)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the weighted sum of the chosen experts' outputs, as `SplitExperts.forward` does."""
        recorder = get_recorder()
        if recorder is None or self.experts.native(hidden_states.dtype) is None:
            return self.experts(hidden_states, top_k_index, top_k_weights)
        inputs = [hidden_states.contiguous(), top_k_index.contiguous(), top_k_weights.contiguous()]
        with recorder.paused():
            out = self.experts(*inputs)
        recorder.add_native("experts", self.experts, inputs, out)
        return out


@dataclass(eq=False)
class PanelTable:
    """Embedding that shares its weight with a packed layer, and reads its rows from that layer's panels."""

    module: nn.Module
    panels: torch.Tensor
    dtype: torch.dtype
    features: int

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the rows of token ids."""
        return panel_rows(self.panels, input, self.dtype, self.features)


class PackedModules:
    """Packed weights of all linear layers of a model.

    Args:
        groups: all layers that are replaced.
        permanent: True: the layers stay replaced; False: they are replaced only inside of `active`.
        weight_format, activations: as for `pack_modules`.
        tables: embeddings that look up rows of a packed weight.
        experts: modules whose layers are in `groups`, and are multiplied in one call.
    """

    def __init__(
        self,
        groups: Sequence[LinearGroup],
        *,
        permanent: bool = False,
        tables: Sequence[PanelTable] = (),
        experts: Sequence[ExpertGroup] = (),
        weight_format: str | None = None,
        activations: str = "auto",
    ) -> None:
        self.groups, self._permanent = list(groups), permanent
        self._weight_format, self._activations = weight_format, activations
        self._forwards: list[tuple[nn.Module, Callable[..., torch.Tensor]]]
        self._forwards = [pair for group in self.groups for pair in zip(group.modules, group.forwards(), strict=True)]
        self._forwards += [(table.module, table.forward) for table in tables]
        self._forwards += [(one.module, one.forward) for one in experts]
        self._experts = list(experts)
        if permanent:
            self._replace()
        logger.debug("%d layers read the weights of %d packed products", len(self._forwards), len(self.groups))

    @property
    def nbytes(self) -> int:
        """Bytes of all packed weights in memory."""
        return sum(group.panels.nbytes for group in self.groups)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Replace the forward of the layers inside the `with` block."""
        if self._permanent:
            yield
            return
        self._replace()
        try:
            yield
        finally:
            for module, _ in self._forwards:
                del module.__dict__["forward"]

    def refresh(self) -> None:
        """Pack the weights of the layers again, if the layers still have them."""
        for group in () if self._permanent else self.groups:
            packed = pack_group(group.modules, self._weight_format, self._activations)
            group.panels, group.bias = packed.panels, packed.bias
        for one in () if self._permanent else self._experts:
            one.renew()

    def begin_forward(self) -> None:
        """Prepare for the next forward of the model; do nothing for weights in memory."""

    def without_values(self) -> AbstractContextManager[None]:
        """Allow undefined weights inside the `with` block, for forwards with results that do not matter. Weights in
        memory keep their values.
        """
        return nullcontext()

    def close(self) -> None:
        """Close files and threads of the packed weights; there are none here."""

    def _replace(self) -> None:
        for module, forward in self._forwards:
            module.__dict__["forward"] = forward


def pack_modules(
    model: nn.Module,
    probe: Callable[[], Any],
    *,
    weight_format: str | None = None,
    activations: str = "auto",
    frees_weights: bool = False,
) -> PackedModules:
    """Pack the weights of all linear layers of a model.

    Args:
        model: model on the CPU, in float32 or bfloat16.
        probe: function that runs a forward, in which layers with the same input are found.
        weight_format: registered name; None: the dtype of the weights. Layers that are packed already keep their
            format.
        activations: "int8" and "bf16" round inputs of integer weights and of bf16 weights; "float" rounds none. "auto"
            rounds inputs of weights below 8 bits, because the rounding of these weights is far coarser, and inputs of
            8-bit layers if the model's files request it.
        frees_weights: True: free each weight as soon as it is packed, if no other layer uses it, and leave the layers
            replaced.
    """
    groups = []
    tables: list[PanelTable] = []
    for module in model.modules():
        if isinstance(module, PackedLinear):
            module.free_panels()  # panels of earlier forwards would stay in memory in addition to the packed ones
    if frees_weights:
        record_mapped_parameters(model.parameters())
    found = find_groups(model, probe, weight_format)
    for parameter in model.parameters():
        drop_pages(parameter)  # the probe has read these pages
    # Weights that the layers keep are packed again when they change, one after the other: joined panels would stay in
    # memory until the last of a chunk is packed.
    with joined_panels() if frees_weights else nullcontext():
        for modules in found:
            group = pack_group(modules, weight_format, activations)
            groups.append(group)
            if frees_weights:
                tables += _share_panels(model, group)
                free_weights(modules)
    packed = PackedModules(
        groups,
        permanent=frees_weights,
        tables=tables,
        experts=_find_experts(model, groups),
        weight_format=weight_format,
        activations=activations,
    )
    if frees_weights:
        share_parameters(model.parameters())
    return packed


def _find_experts(model: nn.Module, groups: Sequence[LinearGroup]) -> list[ExpertGroup]:
    """Return the experts whose layers have one group for gate and up and one for down, without biases and orders."""
    of_module = {module: group for group in groups for module in group.modules}

    def find(*modules: nn.Module) -> LinearGroup | None:
        group = of_module.get(modules[0])
        plain = group is not None and group.bias is None and group.order is None
        return group if plain and group is not None and group.modules == list(modules) else None

    found = []
    for module in model.modules():
        if isinstance(module, SplitExperts):
            layers = module.experts()
            pairs = [(find(one["gate_proj"], one["up_proj"]), find(one["down_proj"])) for one in layers]
            products = [(up, down) for up, down in pairs if up is not None and down is not None]
            if len(products) == len(pairs):
                found.append(ExpertGroup(module, products))
    return found


def _share_panels(model: nn.Module, group: LinearGroup) -> list[PanelTable]:
    """Let embeddings that share the mapped weight of a layer look up its panels, and free their weight.

    Otherwise each lookup would read pages of the mapped file into memory, sixteen at a time, in addition to the panels.
    """
    weight, panels = group.modules[0]._parameters.get("weight"), group.panels.row_panels()
    if len(group.modules) > 1 or panels is None or weight is None or find_pages(weight) is None:
        return []
    users = [module for module in model.modules() if type(module) is nn.Embedding and module.weight is weight]
    if weight.dtype != _ROW_DTYPES[group.panels.format.name] or any(one.max_norm is not None for one in users):
        return []
    free_weights(users)
    return [PanelTable(module, panels, weight.dtype, group.panels.in_features) for module in users]


def free_weights(modules: Sequence[nn.Module]) -> None:
    """Replace parameters that were packed, other than biases, by parameters without memory."""
    for module in modules:
        for name in [name for name, _ in module.named_parameters() if name != "bias"]:
            weight = module.get_parameter(name)
            freed = nn.Parameter(torch.empty_like(weight.detach(), device="meta"), requires_grad=False)
            if has_placement(weight):
                set_placement(freed, get_placement(weight))
            module.register_parameter(name, freed)


def pack_group(modules: list[nn.Module], weight_format: str | None, activations: str = "auto") -> LinearGroup:
    """Pack the weights of layers that have the same input as one matrix."""
    sizes = [_matrix_kind(module)[0] for module in modules]
    packed = [module for module in modules if isinstance(module, PackedLinear)]
    order: torch.Tensor | None = None
    if packed:
        for one in packed:
            one.free_panels()  # panels that the probe made
        form = packed[0].format
        tensors = join_packed(form, [module.packed() for module in packed])
        if isinstance(form, OrderedWeightFormat):
            order, tensors, form = tensors[ORDER], inner_tensors(tensors), form.inner
        stated = all(module.rounds_inputs for module in packed)
        features = (sum(sizes), packed[0].in_features)
        panels = pack_panels(tensors, form, features, quantize_inputs=_quantizes(form, activations, stated))
    else:
        weights = [_matrix(module) for module in modules]
        form = get_weight_format(weight_format or ("bf16" if weights[0].dtype == torch.bfloat16 else "fp32"))
        joined = weights[0] if len(weights) == 1 else torch.cat(weights)
        pages = find_pages(modules[0].get_parameter("weight")) if len(modules) == 1 else None
        panels = pack_weight(joined, form, quantize_inputs=_quantizes(form, activations), pages=pages)
        for module in modules:
            drop_pages(module.get_parameter("weight"))  # the weight may stay, e.g. for an embedding that shares it
    return LinearGroup(modules, panels, join_biases(modules, sizes), sizes, order)


def join_biases(modules: Sequence[nn.Module], sizes: Sequence[int]) -> torch.Tensor | None:
    """Return the bias of a joined product, float32; None if no layer has one."""
    biases = [getattr(module, "bias", None) for module in modules]
    if all(bias is None for bias in biases):
        return None
    return torch.cat(
        [
            torch.zeros(size, dtype=torch.float32) if bias is None else bias.detach().float()
            for bias, size in zip(biases, sizes, strict=True)
        ]
    )


def _quantizes(form: WeightFormat, activations: str, stated: bool = False) -> bool:
    """Return True if inputs are rounded.

    Args:
        stated: True if the files of the layers request rounded inputs; only `auto` depends on this.
    """
    narrow = narrow_input_dtype(form)
    if activations == "auto":
        return stated and narrow == torch.int8 or isinstance(form, CodedWeightFormat) and form.bits < 8
    return narrow is not None and activations == _ROUNDED[narrow]


def pack_layers(model: nn.Module, weight_format: str, *, without_head: bool = False) -> None:
    """Replace all `nn.Linear` and `Conv1D` layers of a model by `PackedLinear`, in place.

    Args:
        without_head: do not pack the layer that computes logits. Tensor parallelism can shard it only if it is not
            packed.
    """
    find_head = getattr(model, "get_output_embeddings", None) if without_head else None
    head = None if find_head is None else find_head()
    make_linear(model)
    pack_linear_layers(model, weight_format, lambda name: head is None or model.get_submodule(name) is not head)


def can_pack(model: nn.Module) -> bool:
    """Return True if native products can use the weights: they are on a CPU, and the native kernels are loaded."""
    return find_device(model).type == "cpu" and get_inference_path().module is not None


def _is_packable(module: nn.Module) -> bool:
    if type(module) is PackedLinear:
        return "forward" not in module.__dict__
    return _has_packable_kind(module) and module.get_parameter("weight").dtype in _PACKABLE_DTYPES


def _has_packable_kind(module: nn.Module) -> bool:
    """Return True for a linear layer with torch's or transformers' own forward, and enough features."""
    kind, weight = type(module), module._parameters.get("weight")  # None e.g. with torch.nn.utils.prune
    known = kind is nn.Linear or (kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils")
    return known and weight is not None and "forward" not in module.__dict__ and min(weight.shape) >= _LEAST_FEATURES


def find_other_dtype(model: nn.Module) -> tuple[str, torch.dtype] | None:
    """Return the name and dtype of a linear weight that could be packed in another dtype; None: there is none."""
    for name, module in model.named_modules():
        if _has_packable_kind(module) and (dtype := module.get_parameter("weight").dtype) not in _PACKABLE_DTYPES:
            return f"{name}.weight", dtype
    return None


def _matrix(module: nn.Module) -> torch.Tensor:
    """Return the weight `[out_features, in_features]`."""
    weight = module.get_parameter("weight").detach()
    return weight if type(module) is nn.Linear else weight.t().contiguous()


def find_groups(model: nn.Module, probe: Callable[[], Any], weight_format: str | None) -> list[list[nn.Module]]:
    """Return groups of layers of one format that got the same tensor object in consecutive calls, in call order.

    Gate and up of an expert in `SplitExperts` are a group, even if no token reached the expert. Three kinds of layers
    are each a group of one: a layer that runs more than once in a forward, another expert that did not run, and a layer
    with a format that joins no matrices. Any other layer that did not run is in no group.

    Args:
        weight_format: format for layers that are not packed yet; None: the dtype of the weights.
    """
    requested = None if weight_format is None else get_weight_format(weight_format)

    def is_joinable(module: nn.Module) -> bool:
        form = module.format if isinstance(module, PackedLinear) else requested
        return form is None or isinstance(form, JoinableFormat)

    calls: list[tuple[nn.Module, torch.Tensor]] = []

    def note(module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        calls.append((module, inputs[0] if inputs else next(iter(named.values()))))

    handles = [
        module.register_forward_pre_hook(note, with_kwargs=True) for module in model.modules() if _is_packable(module)
    ]
    try:
        probe()
    finally:
        for handle in handles:
            handle.remove()
    times: dict[nn.Module, int] = {}
    for module, _ in calls:
        times[module] = times.get(module, 0) + 1
    groups: list[list[nn.Module]] = []
    previous: torch.Tensor | None = None
    for module, x in calls:
        once = times[module] == 1 and is_joinable(module)
        like = groups and _matrix_kind(groups[-1][-1])[1:] == _matrix_kind(module)[1:]
        if once and x is previous and like and times[groups[-1][-1]] == 1:
            groups[-1].append(module)
        elif not any(module in group for group in groups):
            groups.append([module])
        previous = x
    unreached = _find_unreached(model, set(times))
    gates = {
        layers["gate_proj"]: layers["up_proj"]
        for one in model.modules()
        if isinstance(one, SplitExperts)
        for layers in one.experts()
    }
    for module in unreached:
        up = gates.get(module)
        like = up is not None and up in unreached and _matrix_kind(module)[1:] == _matrix_kind(up)[1:]
        if up is not None and like and is_joinable(module):
            groups.append([module, up])
        elif not any(module in group for group in groups):
            groups.append([module])
    return groups


def _find_unreached(model: nn.Module, called: set[nn.Module]) -> list[nn.Module]:
    """Return experts that no token of the probe reached: layers with names that differ from names of called layers only
    in numbers. Other uncalled layers are left out, because the code of the model may read their weights.
    """
    names = {module: _NUMBER.sub("*", name) for name, module in model.named_modules()}
    forms = {names[module] for module in called}
    return [module for module in names if module not in called and names[module] in forms and _is_packable(module)]


def _matrix_kind(module: nn.Module) -> tuple[int, int, str]:
    """Return output features, input features, and the format or dtype of a layer."""
    if isinstance(module, PackedLinear):
        return module.out_features, module.in_features, module.format.name
    weight = _matrix(module)
    return weight.shape[0], weight.shape[1], str(weight.dtype)
