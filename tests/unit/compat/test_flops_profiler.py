"""Tests of DeepSpeed's FlopsProfiler and get_model_profile."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from windlass.base.errors import ModelError
from windlass.compat.config_sections import DeepSpeedFlopsProfilerConfig
from windlass.compat.flops_profiler import FlopsProfiler, get_model_profile


def net() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.Flatten(), nn.Linear(4 * 36, 10))


CONV, LINEAR = 2 * 2 * 4 * 36 * 27, 2 * 2 * 144 * 10


def test_profile_of_a_shape(capsys: pytest.CaptureFixture[str]) -> None:
    model = net().train()
    model[2].eval()
    flops, macs, params = get_model_profile(model, (2, 3, 8, 8), as_string=False)
    assert (flops, macs, params) == (CONV + LINEAR, (CONV + LINEAR) // 2, 108 + 1450)
    assert [module.training for module in model.modules()] == [True, True, True, False]
    assert not model._forward_hooks and not model[0]._forward_pre_hooks
    assert "(0): Conv2d(" in capsys.readouterr().out
    assert get_model_profile(model, (2, 3, 8, 8), print_profile=False) == ("21.31 K", "10.66 KMACs", "1.56 K")
    assert capsys.readouterr().out == ""


def test_inputs_ignored_modules_and_file(tmp_path: Path) -> None:
    file = tmp_path / "new" / "report.txt"
    found = get_model_profile(
        net(),
        args=[torch.ones(2, 3, 8, 8)],
        as_string=False,
        ignore_modules=[nn.Conv2d],
        output_file=str(file),
        detailed=False,
    )
    assert found[0] == LINEAR and "Aggregated Profile" in file.read_text() and "(0): Conv2d(" not in file.read_text()
    assert get_model_profile(net(), kwargs={"input": torch.ones(1, 3, 8, 8)}, print_profile=False, as_string=False)[
        0
    ] == ((CONV + LINEAR) // 2)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "there are no inputs"),
        ({"input_shape": [1, 3]}, "give a tuple of sizes"),
        ({"input_shape": (1, 3), "mode": "train"}, 'write "forward" or "generate"'),
        ({"input_shape": (1, 3), "mode": "generate"}, "has no method generate"),
        ({"args": torch.ones(1, 3, 8, 8)}, "args is a tensor"),
    ],
)
def test_bad_arguments(arguments: dict[str, object], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        get_model_profile(net(), **arguments)  # type: ignore[arg-type]


def test_start_stop_and_end(capsys: pytest.CaptureFixture[str]) -> None:
    model, x = net(), torch.ones(2, 3, 8, 8)
    profiler = FlopsProfiler(model)
    with pytest.raises(ModelError, match="call start_profile"):
        profiler.get_total_flops()
    profiler.start_profile()
    model(x).sum().backward()
    assert profiler.get_total_macs() == (CONV + LINEAR) // 2  # before stop_profile
    profiler.reset_profile()
    model(x).sum().backward()
    profiler.stop_profile()
    model(x)
    assert profiler.get_total_flops() == CONV + LINEAR and profiler.get_total_params(as_string=True) == "1.56 K"
    assert (profiler.flops, profiler.macs, profiler.params) == (
        profiler.get_total_flops(),
        profiler.get_total_macs(),
        profiler.get_total_params(),
    )
    assert profiler.get_total_duration() > 0 and profiler.get_total_duration(as_string=True).endswith("s")
    assert profiler.profile.root.backward == CONV + 2 * LINEAR
    profiler.print_model_profile(profile_step=3)
    profiler.print_model_aggregated_profile(module_depth=1, top_modules=2)
    printed = capsys.readouterr().out
    assert "Profile Summary at step 3:" in printed and "Top 2 modules" in printed
    assert not profiler.is_expert_tensor_parallelism_enabled()
    profiler.end_profile()
    assert not profiler.started


def test_section_of_a_whole_configuration() -> None:
    section = DeepSpeedFlopsProfilerConfig({"flops_profiler": {"enabled": True, "top_modules": 3}})
    assert section.enabled and section.top_modules == 3 and section.profile_step == 1
    section.profile_step = 7
    assert section.profile_step == 7
    assert not DeepSpeedFlopsProfilerConfig({}).enabled
