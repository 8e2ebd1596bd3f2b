"""Rounding of trained weights to a weight format, in each forward and at the end of training.

[Note: trained scales] While weights are trained, the scale of a group with 2 or 3 bits, without zero points, is its
root mean square times a constant, which minimizes the rounding error of normally distributed weights. The formats' own
rule uses the largest weight instead: that scale would be too wide, and would jump from one training step to the next.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from windlass.base.errors import WeightFormatError
from windlass.compress.compressed_layers import CompressedLinear
from windlass.kernels.coded_formats import SCALE_DTYPE, CodedWeightFormat, GroupCodes, IntegerWeightFormat
from windlass.kernels.packed_linear import PackedLinear, names_of_modules
from windlass.kernels.weight_format import PackedWeight, WeightFormat, get_weight_format

# scale for each number of bits, relative to the root mean square: minimizes the squared error of normal weights
_STEPS = {2: 1.05, 3: 0.60}


def format_values(form: WeightFormat, weight: Tensor) -> Tensor:
    """Return a weight `[rows, ...]` rounded to a format, float32 of the same shape; see [Note: trained scales]."""
    wide = weight.detach().float().flatten(1)
    if not isinstance(form, CodedWeightFormat):
        return form.unpack(form.pack(wide)).float().view(weight.shape)
    coded = _codes(form, wide)
    size = form.group or wide.shape[1]
    scale, zero = coded.scale.float(), form.zero if coded.zero is None else coded.zero.float()
    spread = scale.repeat_interleave(size, 1)[:, : wide.shape[1]]
    low = zero.repeat_interleave(size, 1)[:, : wide.shape[1]] if isinstance(zero, Tensor) else zero
    return ((coded.codes.float() - low) * spread).view(weight.shape)


def pack_values(form: WeightFormat, weight: Tensor) -> PackedWeight:
    """Pack a trained matrix, so that its values are those of `format_values`."""
    wide = weight.detach().float().flatten(1)
    return form.pack_codes(_codes(form, wide)) if isinstance(form, CodedWeightFormat) else form.pack(wide)


def pack_trained_layers(model: nn.Module) -> list[str]:
    """Replace the linear layers that were trained with `weight_format` by packed ones, in place, each under all of its
    names. Call it before `redundancy_clean`, on a model that is not sharded.

    Returns:
        First name of each packed layer.

    Raises:
        WeightFormatError: a layer has masks too, which no format stores.
    """
    found = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, CompressedLinear)
        and module.compression.weight is not None
        and module.compression.weight.form is not None
    ]
    all_names = names_of_modules(model)
    for name, module in found:
        rounding = module.compression.weight
        assert rounding is not None and rounding.form is not None
        if module.compression.prunings:
            raise WeightFormatError(
                f"layer {name!r} is rounded to {rounding.form} and pruned; use redundancy_clean, which writes plain "
                "weights"
            )
        form, bias = get_weight_format(rounding.form), module.bias
        packed = PackedLinear(module.in_features, module.out_features, bias is not None, weight_format=form)
        packed.set_packed(pack_values(form, module.weight))
        if bias is not None:
            packed.bias = nn.Parameter(bias.detach().clone(), requires_grad=bias.requires_grad)
        for one in all_names[id(module)]:
            model.set_submodule(one, packed.train(module.training))
    return [name for name, _ in found]


def _codes(form: CodedWeightFormat, wide: Tensor) -> GroupCodes:
    step = _STEPS.get(form.bits) if isinstance(form, IntegerWeightFormat) and not form.has_zeros else None
    if step is None:
        return form.quantize(wide)
    groups, sizes = form.group_weights(wide)
    spread = (groups.square().sum(2) / sizes.to(torch.float32)).sqrt()
    scale = (step * spread).to(SCALE_DTYPE)
    divisor = torch.where(scale > 0, scale, torch.ones_like(scale)).float().unsqueeze(2)
    codes = ((groups / divisor).round_() + form.zero).clamp_(0, 2**form.bits - 1)
    return GroupCodes(codes.flatten(1)[:, : wide.shape[1]].to(torch.uint8), scale)
