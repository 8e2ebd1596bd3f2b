"""Tests that native code checks addresses.

Memory that is missing or overlaps other memory is refused by name before it is accessed.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.kernels.rule_cases import RULES
from windlass.base.errors import CheckpointError, ModelError, StorageError
from windlass.checkpoint.safetensors_file import tensor_bytes
from windlass.compat.aio_handle import aio_handle
from windlass.kernels import keyed_sum
from windlass.kernels.kernel_dispatch import apply_updates, list_kernel_paths
from windlass.kernels.update_tensors import UpdateTensors
from windlass.storage import DiskTier
from windlass.storage.staging_memory import aligned_buffer

native = pytest.mark.skipif(len(list_kernel_paths()) == 1, reason="no native module was built")
WORD = 0x10000  # an address that is not mapped


def freed(numel: int, dtype: torch.dtype = torch.float32, left: int = 0) -> torch.Tensor:
    tensor = torch.zeros(numel, dtype=dtype)
    tensor.untyped_storage().resize_(left)
    return tensor


def tensors(numel: int = 1000) -> dict[str, Any]:
    return {
        "parameter": torch.zeros(numel),
        "gradient": torch.zeros(numel),
        "states": (torch.zeros(numel), torch.zeros(numel)),
        "low_precision_copy": torch.zeros(numel, dtype=torch.bfloat16),
    }


@pytest.mark.parametrize("left", [0, 64])
@pytest.mark.parametrize("which", ["parameter", "gradient", "states", "low_precision_copy", "scales"])
@pytest.mark.parametrize("path", [list_kernel_paths()[0], "reference"])
def test_an_update_refuses_freed_storage(which: str, left: int, path: str) -> None:
    given = tensors()
    if which == "states":
        given["states"] = (given["states"][0], freed(1000, left=left))
    elif which == "scales":
        given["states"] = (torch.zeros(1000, dtype=torch.uint8),) * 2
        given["scales"] = (torch.zeros(4), freed(4, left=left // 8))
    else:
        given[which] = freed(1000, given[which].dtype, left)
    with pytest.raises(ModelError, match=r"(1|lowered copy|parameter|gradient) .*storage was freed or resized"):
        apply_updates(RULES["adamw"](1), [UpdateTensors(**given)], path=path)


@native
def test_update_refuses_overlapping_outputs() -> None:
    flat = torch.zeros(4000)
    for changed in (
        {"parameter": flat[:1000], "gradient": flat[500:1500]},
        {"parameter": flat[:1000], "states": (flat[999:1999], torch.zeros(1000))},
        {"states": (flat[:1000], flat[:1000])},
        {"low_precision_copy": flat.view(torch.bfloat16)[:1000], "states": (flat[:1000], torch.zeros(1000))},
    ):
        before = flat.clone()
        with pytest.raises(ModelError, match="nothing was updated: the .* of piece 0 .* share memory"):
            apply_updates(RULES["adamw"](1), [UpdateTensors(**{**tensors(), **changed})])  # type: ignore[arg-type]
        assert torch.equal(before, flat)
    with pytest.raises(ModelError, match="piece 0 and the parameter of piece 1|piece 1 and the parameter of piece 0"):
        both = [UpdateTensors(**{**tensors(), "parameter": flat[at : at + 1000]}) for at in (0, 998)]
        apply_updates(RULES["adamw"](1), both)
    shared = torch.ones(1000)  # gradients may be shared, because they are only read
    apply_updates(RULES["adamw"](1), [UpdateTensors(**{**tensors(), "gradient": shared}) for _ in range(2)])


def _update(**changed: Any) -> Callable[[], object]:
    module = importlib.import_module("windlass.kernels._optimizers")
    memory = torch.zeros(64)
    at = memory.data_ptr()
    given: dict[str, Any] = {
        "instruction_set": module.instruction_sets()[0],
        "rule": 1,
        "flags": 0,
        "numbers": [0.0] * 6,
        "formats": (0, 0, 0, 4),
        "addresses": [(16, at, at + 64, 0, at + 128, 0, 0, 0, 0, 0)],
        "divisor": 1.0,
        "seed": 0,
        "threads": 1,
    }
    return lambda: (module.update(**{**given, **changed}), memory)


def _engine(**changed: int) -> Callable[[], object]:
    disk = importlib.import_module("windlass.kernels._disk")
    given = {"at_once": 1, "largest": 4096, "alignment": 1}

    def make() -> None:
        file = os.open(os.devnull, os.O_RDWR)
        try:
            disk.Threads([file], *{**given, **changed}.values())
        finally:
            os.close(file)

    return make


def _submit(*span: int) -> Callable[[], object]:
    disk = importlib.import_module("windlass.kernels._disk")

    def send() -> None:
        file = os.open(os.devnull, os.O_RDWR)
        engine = disk.Threads([file], 1, 8192, 1)
        try:
            engine.submit(True, [span])
        finally:
            engine.close()
            os.close(file)

    return send


def _hash(*arguments: int) -> Callable[[], object]:
    return lambda: importlib.import_module("windlass.kernels._hashes").keyed_sum(*arguments)


def _some(what: str) -> list[Any]:
    """Return calls of the native module `what` with invalid arguments, or none if the modules were not built."""
    if len(list_kernel_paths()) == 1:
        return []
    memory = aligned_buffer(8192)[0]
    at = memory.data_ptr()
    calls = {
        "update": [
            _update(addresses=[(16, 0, WORD, 0, WORD, 0, 0, 0, 0, 0)]),
            _update(addresses=[(16, WORD, 0, 0, WORD, 0, 0, 0, 0, 0)]),
            _update(addresses=[(16, WORD, WORD + 99, 0, 0, 0, 0, 0, 0, 0)]),
            _update(addresses=[((1 << 64) - 1, WORD, WORD, 0, WORD, 0, 0, 0, 0, 0)]),
            _update(formats=(0, 0, 3, 4)),
            _update(formats=(0, 0, 0, 1)),
            _update(formats=(9, 0, 0, 4)),
            _update(rule=17),
            _update(rule=-1),
            _update(numbers=[]),
            _update(threads=0),
            _update(threads=-3),
            _update(instruction_set="MMX"),
        ],
        "hash": [
            _hash(0, 4, 100, 0, 0, 1),
            _hash(at, 3, 100, 0, 0, 1),
            _hash(at, 4, -1, 0, 0, 1),
            _hash(at, 4, 100, -5000, 0, 1),
        ],
        "disk": [
            _engine(at_once=0),
            _engine(alignment=0),
            _engine(largest=0),
            _engine(largest=1 << 40),
            _submit(1, 0, at, 4096, 0),
            _submit(0, 0, 0, 4096, 0),
            _submit(0, 0, at, 0, 0),
            _submit(0, 0, at, 1 << 20, 0),
            _submit(0, (1 << 64) - 1, at, 4096, 0),
            _submit(0, 0, at, 100, at),
        ],
    }[what]
    return [pytest.param(call, memory, id=f"{what}-{number}") for number, call in enumerate(calls)]


@native
@pytest.mark.parametrize(("call", "memory"), [*_some("update"), *_some("hash"), *_some("disk")])
def test_native_entry_refuses_inaccessible_memory(call: Callable[[], object], memory: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"\w+ \w+ \w+"):
        call()


def test_valid_arguments_pass() -> None:
    if len(list_kernel_paths()) > 1:
        _update()()
        _submit(0, 0, aligned_buffer(8192)[0].data_ptr(), 8192, 0)()
    words = torch.arange(5000)
    assert keyed_sum(words, 0, 1) == keyed_sum(words[:77], 0, 1) + keyed_sum(words[77:], 77, 1)


def test_hash_refuses_freed_storage_and_other_dtypes() -> None:
    for words, start, text in (
        (freed(100, torch.int64), 0, "freed"),
        (torch.zeros(8), 0, "float32"),
        (torch.zeros(8, dtype=torch.int64), -4096, "-4096"),
    ):
        with pytest.raises(ModelError, match=text):
            keyed_sum(words, start, 0)


def test_files_refuse_freed_storage(tmp_path: Path) -> None:
    with DiskTier([tmp_path]) as tier:
        extent = tier.allocate(8192, "moments")
        for move in (tier.write, tier.read):
            with pytest.raises(StorageError, match="moments .* freed or resized"):
                move(extent, 0, freed(2048))
    for act in ("sync_pwrite", "sync_pread"):
        with pytest.raises(StorageError, match="freed or resized"):
            getattr(aio_handle(), act)(freed(2048), str(tmp_path / "file"))
    with pytest.raises(CheckpointError, match=r"shape \[2048\].*freed or resized"):
        tensor_bytes(freed(2048))
