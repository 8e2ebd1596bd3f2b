"""Tests of the accelerator object for scripts: the interface is complete, and its figures are measured ones."""

from __future__ import annotations

import inspect
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from windlass.base.errors import ConfigError, ModelError
from windlass.compat.accelerator import get_accelerator, real_accelerator, set_accelerator
from windlass.compat.accelerator.abstract_accelerator import DeepSpeedAccelerator
from windlass.compat.accelerator.cpu_accelerator import CPU_Accelerator
from windlass.compat.accelerator.cuda_accelerator import CUDA_Accelerator
from windlass.compat.module_finder import StandInFinder
from windlass.compat.not_built import NotBuiltError

# methods of the abstract class of DeepSpeed 0.19.8
NAMES = """
is_synchronized_device use_host_timers resolves_data_dependency handles_memory_backpressure device_name device
set_device current_device current_device_name device_count synchronize random set_rng_state get_rng_state manual_seed
manual_seed_all initial_seed default_generator Stream stream current_stream default_stream Event empty_cache
memory_allocated max_memory_allocated reset_max_memory_allocated memory_cached max_memory_cached
reset_max_memory_cached memory_stats reset_peak_memory_stats memory_reserved max_memory_reserved total_memory
available_memory is_bf16_supported is_fp16_supported is_fp64_supported supported_dtypes is_available range_push
range_pop lazy_call communication_backend_name is_triton_supported prefer_triton_grouped_mm
is_current_stream_capturing create_graph capture_to_graph replay_graph BFloat16Tensor ByteTensor DoubleTensor
FloatTensor HalfTensor IntTensor LongTensor register_host_memory unregister_host_memory pin_memory_alignment
pin_memory pin_empty pin_empty_like is_pinned unpin_memory on_accelerator op_builder_dir create_op_builder
get_op_builder build_extension export_envs visible_devices_envs set_visible_devices_envs get_compile_backend
set_compile_backend supports_nvtx_domain
""".split()  # noqa: SIM905


@pytest.fixture(autouse=True)
def _chosen_anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    set_accelerator(None)
    yield
    set_accelerator(None)


@pytest.mark.parametrize("cls", [CPU_Accelerator, CUDA_Accelerator])
def test_every_name_of_the_interface_is_there(cls: type[DeepSpeedAccelerator]) -> None:
    assert [name for name in NAMES if not hasattr(cls, name)] == []
    assert not inspect.isabstract(cls)


def test_cpu_accelerator_methods() -> None:
    host = CPU_Accelerator()
    assert (host._name, host.communication_backend_name()) == ("cpu", "gloo")
    assert host.device_name() == host.device_name("0") == host.current_device_name() == "cpu"
    assert host.use_host_timers() and host.device_count() >= 1 and host.is_available()
    assert host.on_accelerator(torch.zeros(1)) and not host.on_accelerator(torch.zeros(1, device="meta"))
    tensor = torch.arange(3.0)
    assert host.pin_memory(tensor) is tensor
    assert host.pin_empty(2, 3, dtype=torch.int8).shape == host.pin_empty((2, 3), dtype=torch.int8).shape == (2, 3)
    with pytest.raises(ValueError, match="host memory"):
        host.pin_empty(2, dtype=torch.int8, device="meta")
    assert host.FloatTensor([1, 2]).tolist() == [1.0, 2.0] and host.LongTensor(4).shape == (4,)
    assert host.HalfTensor(2, 2).dtype == torch.float16
    for shape in ((), (torch.Size([2, 3]),), (torch.Size([]),), (2, 3)):
        assert host.FloatTensor(*shape).shape == torch.FloatTensor(*shape).shape, shape
    with host.stream(host.current_stream()):
        host.range_push("here")
        host.range_pop()
    assert host.lazy_call(lambda: 5) == 5


def test_memory_figures_are_per_process() -> None:
    host = CPU_Accelerator()
    before = host.memory_allocated()
    assert 0 < before <= host.total_memory() and 0 < host.available_memory() <= host.total_memory()
    held = mmap.mmap(-1, 32 << 20)  # new pages: malloc could reuse memory of earlier tests
    held.write(b"x" * (32 << 20))
    assert host.memory_allocated() - before >= 24 << 20
    held.close()
    peak = host.max_memory_allocated()
    assert peak >= before + (24 << 20)
    assert host.memory_stats()["allocated_bytes.all.peak"] == peak
    host.reset_peak_memory_stats()
    assert host.max_memory_allocated() < peak


def test_seeds_and_states() -> None:
    host = CPU_Accelerator()
    kept = host.get_rng_state()
    host.manual_seed(7)
    first = torch.rand(2)
    assert host.initial_seed() == 7
    host.manual_seed_all(7)
    assert torch.equal(torch.rand(2), first)
    host.set_rng_state(kept)


def test_visible_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    environment: dict[str, str] = {}
    CPU_Accelerator().set_visible_devices_envs(environment, [1, 3])
    assert environment == {"CUDA_VISIBLE_DEVICES": "1,3"}
    monkeypatch.setenv("LOCAL_SIZE", "3")
    assert CPU_Accelerator().device_count() == 3


def test_cuda_names_exist_without_cuda() -> None:
    cuda = CUDA_Accelerator()
    assert (cuda.device_name(), cuda.device_name(1), cuda.device_name("2")) == ("cuda", "cuda:1", "cuda:2")
    assert cuda.communication_backend_name() == "nccl" and not cuda.use_host_timers()
    assert cuda.visible_devices_envs() == ["CUDA_VISIBLE_DEVICES"] and "NCCL" in cuda.export_envs()


def test_accelerator_is_detected_and_can_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    assert get_accelerator() is get_accelerator()
    assert get_accelerator()._name == ("cuda" if torch.cuda.is_available() else "cpu")
    assert real_accelerator.is_current_accelerator_supported()
    own = CPU_Accelerator()
    set_accelerator(own)
    assert get_accelerator() is own
    with pytest.raises(TypeError, match="accel_obj is a str"):
        set_accelerator("cpu")  # type: ignore[arg-type]
    set_accelerator(None)
    monkeypatch.setitem(os.environ, "DS_ACCELERATOR", "npu")
    with pytest.raises(ConfigError, match="DS_ACCELERATOR is 'npu'"):
        get_accelerator()


@pytest.mark.slow  # imports torch._dynamo
def test_compile_backend_is_checked() -> None:
    host = CPU_Accelerator()
    host.set_compile_backend("eager")
    assert host.get_compile_backend() == "eager"
    with pytest.raises(ValueError, match="'nothing' is unknown"):
        host.set_compile_backend("nothing")


def test_builders() -> None:
    host = CPU_Accelerator()
    assert host.get_op_builder("CPUAdamBuilder").NAME == "cpu_adam"
    assert hasattr(host.create_op_builder("AsyncIOBuilder").load(), "aio_handle")
    unknown = host.create_op_builder("NoSuchBuilder")
    assert not unknown.is_compatible()
    with pytest.raises(NotBuiltError, match="GDSBuilder.load: GPUDirect Storage is not used"):
        host.create_op_builder("GDSBuilder").load()
    utils = host.create_op_builder("UtilsBuilder").load()
    assert utils.flatten([torch.ones(2), torch.zeros(2, 2)]).tolist() == [1, 1, 0, 0, 0, 0]
    typed = [torch.zeros(3, 2, dtype=dtype) for dtype in (torch.bfloat16, torch.int64, torch.bool)]
    for one, found in zip(typed, utils.cast_to_byte_tensor(typed), strict=True):
        assert found.dtype is torch.uint8 and found.shape == (6 * one.itemsize,) and found.data_ptr() == one.data_ptr()
    assert utils.cast_to_byte_tensor(typed[0]).shape == (12,)
    with pytest.raises(ModelError, match=r"shape \(2, 3\) and strides \(1, 2\) is not contiguous"):
        utils.cast_to_byte_tensor(typed[0].t())


def test_the_folder_of_the_package_has_a_file_for_each_accelerator() -> None:
    """Scripts list the package's folder to find accelerators, and `StandInFinder` finds each module there."""
    spec = StandInFinder().find_spec("deepspeed.accelerator")
    assert spec is not None and spec.submodule_search_locations is not None
    files = {file.stem for file in Path(spec.submodule_search_locations[0]).glob("*_accelerator.py")}
    assert files == {"abstract_accelerator", "real_accelerator", "cpu_accelerator", "cuda_accelerator"}
    assert all(StandInFinder().find_spec(f"deepspeed.accelerator.{name}") is not None for name in files)
    other = StandInFinder().find_spec("deepspeed.runtime")
    assert other is not None and other.submodule_search_locations is not None
    assert [file.name for file in Path(other.submodule_search_locations[0]).glob("*.py")] == ["__init__.py"]
