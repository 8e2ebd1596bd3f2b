"""Tests of the training or evaluation mode of modules inside and after `evaluating`."""

from __future__ import annotations

from torch import nn

from windlass.base.module_modes import evaluating


class CountingModule(nn.Module):
    calls = 0

    def train(self, mode: bool = True) -> nn.Module:
        self.calls += 1
        return super().train(mode)


def test_each_module_gets_its_own_mode_back() -> None:
    model = CountingModule()
    model.first, model.frozen = nn.Dropout(), nn.Dropout().eval()
    with evaluating(model):
        assert not any(module.training for module in model.modules())
    assert model.training and model.first.training and not model.frozen.training
    model.eval().first.train()
    with evaluating(model):
        assert not model.first.training
    assert not model.training and model.first.training


def test_a_model_in_eval_mode_is_left_alone() -> None:
    model = CountingModule().eval()
    calls = model.calls
    with evaluating(model):
        pass
    assert model.calls == calls and not model.training
