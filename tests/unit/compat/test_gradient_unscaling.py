"""Tests of `unscale_and_clip_grads`."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from windlass.compat.gradient_unscaling import GradientUnscaling
from windlass.compat.not_built import NotBuiltError


@pytest.mark.parametrize("max_norm", [0.0, 1.0, 100.0])
def test_gradients_are_unscaled_and_clipped_as_torch_does(max_norm: float) -> None:
    given = [torch.tensor([3.0, 4.0]), torch.tensor([12.0])]
    expected = [torch.nn.Parameter(torch.zeros_like(one)) for one in given]
    for parameter, gradient in zip(expected, given, strict=True):
        parameter.grad = gradient / 8
    norm = torch.stack([one.norm() for one in given]).norm()
    if max_norm:
        torch.nn.utils.clip_grad_norm_(expected, max_norm)
    unscale = GradientUnscaling(SimpleNamespace(loss_scale=8.0, clip_grad=max_norm), takes_gradients=True)
    nested = [[given[0]], given[1]]
    scale = unscale(nested, norm, apply_scale=False)
    assert given[1].item() == 12.0
    assert unscale(nested, norm) == unscale(grad_groups_flat=[], total_norm=norm) == scale
    for one, parameter in zip(given, expected, strict=True):
        torch.testing.assert_close(one, parameter.grad)


def test_unfused_optimizer_returns_the_factor_alone() -> None:
    unscale = GradientUnscaling(SimpleNamespace(loss_scale=2.0, clip_grad=1.0), takes_gradients=False)
    assert unscale(4.0, False) == unscale(4.0, apply_scale=False) == pytest.approx(4.0)
    with pytest.raises(NotBuiltError, match="apply_scale=False"):
        unscale(4.0)
