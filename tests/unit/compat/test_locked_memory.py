"""Tests of host memory that `DS_PIN_MEMORY_BACKEND=native` locks, and of its names in the stand-in."""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from windlass.compat import locked_memory
from windlass.compat.accelerator.cpu_accelerator import CPU_Accelerator
from windlass.compat.module_finder import StandInFinder


def _locked_kib() -> int:
    line = next(one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith("VmLck"))
    return int(line.split()[1])


@pytest.fixture
def _native(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_PIN_MEMORY_BACKEND", "native")


@pytest.mark.usefixtures("_native")
def test_native_backend_locks_memory_until_it_is_unpinned_or_freed() -> None:
    accelerator, tensor, before = CPU_Accelerator(), torch.arange(2048.0).reshape(32, 64), _locked_kib()
    pinned = accelerator.pin_memory(tensor)
    assert torch.equal(pinned, tensor) and pinned.data_ptr() != tensor.data_ptr() and _locked_kib() == before + 8
    assert accelerator.is_pinned(pinned) and accelerator.is_pinned(pinned[3]) and pinned.ds_pinned  # type: ignore[attr-defined]
    assert not accelerator.is_pinned(tensor) and accelerator.unpin_memory(tensor) is False
    assert accelerator.unpin_memory(pinned) is True and _locked_kib() == before
    assert not accelerator.is_pinned(pinned) and torch.equal(pinned, tensor)
    view = accelerator.pin_memory(tensor, match_shape=False)[:3]
    assert view.shape == (3,) and accelerator.is_pinned(view) and _locked_kib() == before + 8
    del view
    gc.collect()
    assert _locked_kib() == before
    with torch.inference_mode():  # in this mode a view does not keep its base's Python object alive
        kept = accelerator.pin_memory(tensor)[1:]
    gc.collect()
    assert accelerator.is_pinned(kept) and accelerator.unpin_memory(kept) is True
    assert accelerator.pin_empty(4, 5, dtype=torch.bfloat16).shape == (4, 5)
    assert not accelerator.is_pinned(accelerator.pin_memory(torch.empty(0)))
    assert not accelerator.is_pinned(torch.zeros(2, device="meta"))
    with FakeTensorMode() as mode:
        assert not accelerator.is_pinned(mode.from_tensor(torch.zeros(2)))


@pytest.mark.usefixtures("_native")
def test_a_failed_lock_names_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locked_memory._libc, "mlock", lambda *_: -1, raising=False)
    with pytest.raises(locked_memory.MemoryLockError, match="4096 bytes of host memory .* `ulimit -l`"):
        CPU_Accelerator().pin_memory(torch.zeros(1024))


@pytest.fixture
def _stand_in() -> Iterator[None]:
    finder, known = StandInFinder(), set(sys.modules)
    sys.meta_path.insert(0, finder)
    yield
    sys.meta_path.remove(finder)
    for name in set(sys.modules) - known:
        if name.startswith("deepspeed."):
            del sys.modules[name]


@pytest.mark.usefixtures("_native", "_stand_in")
def test_a_script_replaces_the_builder_and_the_shared_allocator() -> None:
    """See [Note: live names]. Deleting an attribute restores the value from before the assignment."""
    names = importlib.import_module("windlass.compat.locked_memory")
    finder = StandInFinder()
    spec = finder.find_spec("deepspeed.utils.pin_memory")
    assert spec is not None
    module = finder.create_module(spec)
    finder.exec_module(module)
    before = module.get_active_native_pinned_memory()
    assert before is names._shared_native_pins is module._shared_native_pins
    module._shared_native_pins = None
    assert names._shared_native_pins is None and module.get_active_native_pinned_memory() is not before
    del module._shared_native_pins
    assert names._shared_native_pins is before

    class Failing:
        def load(self) -> None:
            raise RuntimeError("no compiler")

    module._shared_native_pins = None
    builders = finder.create_module(finder.find_spec("deepspeed.ops.op_builder"))  # type: ignore[arg-type]
    builders.PinMemoryBuilder = Failing  # type: ignore[attr-defined]
    sys.modules["deepspeed.ops.op_builder"] = builders
    with pytest.raises(RuntimeError, match="op pin_memory, which failed to load"):
        module.get_active_native_pinned_memory()
    del module._shared_native_pins
