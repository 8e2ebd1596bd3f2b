"""Tests of initial shards, of deferred tensors from files, and of the patch of transformers."""

from __future__ import annotations

import errno
import gc
import inspect
import os
import struct
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import windlass
from windlass.base.errors import CheckpointError, ConfigError
from windlass.zero.core.sharded_parameter import ShardedParameter
from windlass.zero.sharded_init import from_pretrained_patch, initial_shard
from windlass.zero.sharded_init.deferred import DeferredTensor
from windlass.zero.sharded_init.init_tier import ShardFile
from windlass.zero.sharded_init.weight_files import deferred_from_files, header


@given(st.integers(0, 1000), st.integers(1, 9))
def test_shards_partition_a_parameter_and_the_first_is_largest(numel: int, count: int) -> None:
    spans = [initial_shard.span(numel, index, count) for index in range(count)]
    assert spans[0][0] == 0 and spans[-1][1] == numel
    assert all(a[1] == b[0] for a, b in zip(spans, spans[1:], strict=False))
    assert all(0 <= stop - start <= spans[0][1] for start, stop in spans)


@given(st.permutations(range(4)), st.lists(st.integers(0, 3), min_size=4, max_size=4), st.booleans())
def test_memory_order_and_strides_round_trip(order: list[int], sizes: list[int], gaps: bool) -> None:
    tensor = torch.arange(float(torch.tensor(sizes).prod())).view(sizes).permute(order)
    tensor = tensor[..., ::2] if gaps else tensor
    flat = initial_shard.flat_of(tensor)
    assert initial_shard.is_dense(tensor) or gaps
    stride = tensor.stride() if initial_shard.is_dense(tensor) else tensor.contiguous().stride()
    assert torch.equal(flat.as_strided(tensor.shape, stride), tensor)
    assert initial_shard.is_row_major(tensor.shape, tensor.stride()) == tensor.is_contiguous()


def test_initial_shard_is_freed_with_its_parameter() -> None:
    class Kept:
        def load(self) -> torch.Tensor:
            return torch.zeros(2)

    group: Any = type("Alone", (), {"size": 1, "index": 0, "ranks": (0,)})()
    parameter = nn.Parameter(torch.zeros(2))
    birth = initial_shard.ShardedInit("Linear.weight", parameter.detach(), group, lambda cut: Kept())
    birth.shard = torch.zeros(2)
    before = len(initial_shard._sharded_inits)
    initial_shard.shard_parameter(parameter, birth)
    assert (
        isinstance(parameter, ShardedParameter)
        and initial_shard.find(parameter) is birth
        and len(initial_shard._sharded_inits) == before + 1
    )
    del parameter
    gc.collect()
    assert len(initial_shard._sharded_inits) == before


def test_shard_file_reuses_the_space_of_freed_shards(tmp_path: Path) -> None:
    file = ShardFile(tmp_path / "new")
    first, second = file.put(torch.arange(5)), file.put(torch.arange(3.0))
    assert torch.equal(first.load(), torch.arange(5)) and torch.equal(second.load(), torch.arange(3.0))
    end = file._end
    del first
    third = file.put(torch.arange(5) + 1)
    assert file._end == end and torch.equal(third.load(), torch.arange(5) + 1)
    assert torch.equal(second.load(), torch.arange(3.0)) and not list((tmp_path / "new").iterdir())
    assert file.put(torch.empty(0)).load().numel() == 0


def test_a_shard_that_cannot_be_read_names_its_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shard = ShardFile(tmp_path).put(torch.arange(5))

    def fail(*arguments: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(CheckpointError, match=f"shard of 40 bytes.*{tmp_path}.*Input/output error; .*nvme_path"):
        shard.load()


def test_unusable_path_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(ConfigError, match="nvme_path.*taken"):
        ShardFile(tmp_path / "taken")


# ---------------------------------------------------------------------------------------------------------------- files


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    from safetensors.torch import save_file

    state = {
        "a": torch.randn(3, 4),
        "b": torch.randn(5).bfloat16(),
        "c": torch.arange(6).view(2, 3),
        "d": torch.tensor(2.0),
        "e": torch.empty(0, 3),
        "f": torch.tensor([True, False]),
    }
    save_file(state, tmp_path / "one.safetensors")
    return tmp_path / "one.safetensors", state


def test_byte_ranges_of_a_file_are_those_of_its_tensors(saved: tuple[Path, dict[str, torch.Tensor]]) -> None:
    path, state = saved
    for name, (shape, source) in header(path).items():
        assert shape == tuple(state[name].shape) and source.dtype == state[name].dtype
        flat = state[name].reshape(-1)
        for start in range(flat.numel() + 1):
            assert torch.equal(source.read(start, flat.numel()), flat[start:])
            assert torch.equal(source.read(0, start), flat[:start])


def test_deferred_tensor_supports_casts_views_and_joins(saved: tuple[Path, dict[str, torch.Tensor]]) -> None:
    path, state = saved
    first, second = deferred_from_files([path], computes=True), deferred_from_files([path], computes=False)
    passed = first["a"][...].detach().to(device="cpu", dtype=torch.float64)
    assert isinstance(passed, DeferredTensor) and passed.dtype == torch.float64 and passed.source is not None
    assert isinstance(nn.Parameter(first["a"]), nn.Parameter)
    rounded = first["a"].to(dtype=torch.float16).to(dtype=torch.float32)
    assert isinstance(rounded, DeferredTensor) and rounded.source is not None
    assert torch.equal(rounded.source.read(0, 12), state["a"].half().float().view(-1))
    for made in (first, second):
        joined = torch.cat([made["a"], made["a"].t().reshape(3, 4) * 2]).chunk(2, dim=0)[1]
        assert isinstance(joined, DeferredTensor) and joined.shape == (3, 4) and joined.source is None
        expected = state["a"].t().reshape(3, 4) * 2
        assert (joined.computed is None) is (made is second)
        assert joined.computed is None or torch.equal(joined.computed, expected)


def _patched(path: Path, text: bytes) -> Path:
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"\0" * 16)
    return path


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}', "damaged"),
        (b'{"a": {"dtype": "F32", "shape": [9], "data_offsets": [0, 36]}}', "truncated"),
        (b'{"a": {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}}', "F99"),
        (b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [8, 4]}}', "damaged"),
        (b'{"a": 3}', "its entry for tensor 'a' is 3"),
        (b"[]", "not a safetensors"),
        (b"nonsense", "not a safetensors"),
    ],
)
def test_damaged_header_is_refused_by_name(text: bytes, words: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=words):
        header(_patched(tmp_path / "bad.safetensors", text))


def test_file_truncated_after_its_header_was_read_is_refused_by_name(
    saved: tuple[Path, dict[str, torch.Tensor]],
) -> None:
    path, _ = saved
    result = header(path)
    with path.open("r+b") as file:
        file.truncate(file.seek(0, 2) - 40)
    with pytest.raises(CheckpointError, match="ends inside"):
        for shape, source in result.values():
            source.read(0, torch.Size(shape).numel())


# ----------------------------------------------------------------------------------------------------------------- Init


def test_init_accepts_deepspeed_arguments() -> None:
    expected = """module data_parallel_group mem_efficient_linear remote_device pin_memory config_dict_or_path config
    enabled dtype mpu zero_param_parallel_group zero_quantized_weights zero_quantized_nontrainable_weights
    sequence_data_parallel_group param_swapper tensor_overrides"""
    assert " ".join(inspect.signature(windlass.zero.Init).parameters) == " ".join(expected.split())


def test_patched_transformers_names_exist_and_are_restored() -> None:
    """The patched names exist in transformers and are restored. A new version that changes them must fail here."""
    modeling: Any = pytest.importorskip(from_pretrained_patch.MODULE)
    model = modeling.PreTrainedModel
    detection, loader, missing = (
        from_pretrained_patch.DETECTION,
        from_pretrained_patch.LOADER,
        from_pretrained_patch.MISSING,
    )

    def now() -> list[Any]:
        return [getattr(modeling, detection), model.__dict__[loader], model.__dict__[missing]]

    before = now()
    assert isinstance(before[1], staticmethod)
    names = list(inspect.signature(before[1].__func__).parameters)
    assert names[:4] == ["model", "state_dict", "checkpoint_files", "load_config"]
    assert not inspect.signature(before[0]).parameters
    assert list(inspect.signature(before[2]).parameters)[:2] == ["self", "missing_keys"]
    source = inspect.getsource(model.from_pretrained) + inspect.getsource(model.get_init_context)
    assert f"cls.{loader}(\n" in source and f"{detection}()" in source
    assert f".{missing}(" in inspect.getsource(model._finalize_model_loading)
    assert "in missing_keys - self." in inspect.getsource(before[2])
    replacement = from_pretrained_patch.FromPretrainedPatch(computes=True)
    replacement.install()
    assert all(a is not b for a, b in zip(now(), before, strict=True))
    replacement.undo()
    assert now() == before


def test_transformers_without_the_patched_names_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    modeling: Any = pytest.importorskip(from_pretrained_patch.MODULE)
    monkeypatch.delattr(modeling, from_pretrained_patch.DETECTION)
    with pytest.raises(ConfigError, match=from_pretrained_patch.DETECTION):
        from_pretrained_patch.FromPretrainedPatch(computes=True).install()


@pytest.mark.parametrize("kind", ["4.57", "5.0", "5.8"])
def test_each_transformers_version_has_its_patched_names(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each version of transformers is patched by its own names.

    The loader of transformers 5.0 does not return a tuple. 4.57 lacks one patched name, so loading a model raises.
    """

    class Info:
        mismatched_keys: tuple[str, ...] = ()

    def load(model: Any, state_dict: Any, files: Any, load_config: Any = None) -> Any:
        return Info() if kind == "5.0" else (Info(), {})

    class PreTrainedModel:
        _load_pretrained_model = staticmethod(load)

    if kind != "4.57":
        PreTrainedModel._move_missing_keys_from_meta_to_device = lambda self, missing: None  # type: ignore[attr-defined]
    before = dict(vars(PreTrainedModel))
    package: Any = ModuleType("transformers")
    package.__version__ = f"{kind}.1"
    module: Any = ModuleType("transformers.modeling_utils")
    module.PreTrainedModel, module.is_deepspeed_zero3_enabled = PreTrainedModel, lambda: True
    monkeypatch.setitem(sys.modules, "transformers", package)
    monkeypatch.setitem(sys.modules, "transformers.modeling_utils", module)
    replacement = from_pretrained_patch.FromPretrainedPatch(computes=True)
    replacement.install()
    assert module.is_deepspeed_zero3_enabled() is False
    if kind == "4.57":
        with pytest.raises(ConfigError, match=r"transformers 4\.57\.1 has no .*install transformers 5"):
            PreTrainedModel._load_pretrained_model("model", None, None)
    else:
        found: Any = PreTrainedModel._load_pretrained_model("model", None, None, None)
        assert isinstance(found, Info if kind == "5.0" else tuple)
    replacement.undo()
    assert dict(vars(PreTrainedModel)) == before and module.is_deepspeed_zero3_enabled() is True
