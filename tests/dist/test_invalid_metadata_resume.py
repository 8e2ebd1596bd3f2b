"""Tests that a checkpoint with an invalid value in its index raises before anything in the engine is overwritten."""

from __future__ import annotations

import json
import math
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.dist.harness import run_ranks
from tests.dist.test_partial_load import batch, engine_for, net, trained
from tests.fuzz.checkpoints import index_text
from windlass.base.errors import CheckpointError
from windlass.checkpoint.safetensors_file import TensorFile

NAN = {"$": ["float", "nan"]}
# key path in the index's plain data, its wrong value, and the name in the error
WRONG: list[tuple[tuple[Any, ...], Any, str]] = [
    (("engine", "global_steps"), -5, "engine.global_steps"),
    (("engine", "global_steps"), 10**30, "engine.global_steps"),
    (("engine", "micro_steps"), True, "engine.micro_steps"),
    (("engine", "global_samples"), 1.0, "engine.global_samples"),
    (("engine", "skipped_steps"), NAN, "engine.skipped_steps"),
    (("engine",), [], "engine"),
    (("engine", "micro_steps"), None, "engine.micro_steps"),
    (("layout", "accumulation"), 0, "layout.accumulation"),
    (("layout", "stage"), 7, "layout.stage"),
    (("layout",), None, "layout"),
    (("loss_scale", "scale"), NAN, "loss_scale.scale"),
    (("loss_scale", "scale"), -1.0, "loss_scale.scale"),
    (("loss_scale", "scale"), "1", "loss_scale.scale"),
    (("groups", 0, "values", "lr"), -0.1, "lr is -0.1"),
    (("groups", 0, "values", "lr"), NAN, "lr is nan"),
    (("groups", 0, "values", "lr"), "0.1", "'lr'"),
    (("groups", 0, "values", "betas"), ["", 0.95], "betas"),
    (("groups", 0, "values", "maximize"), 5, "'maximize'"),
    (("groups", 0, "values"), 5, "groups.0.values"),
    (("groups", 0, "parameters", 0), 5, "groups.0.parameters"),
    (("groups",), {}, "groups"),
    (("states", "layers.0.weight", "exp_avg"), "pieces", "states.layers.0.weight.exp_avg"),
    (("states", "layers.0.weight"), 3, "states.layers.0.weight"),
    (("schedule", "last_batch_iteration"), "x", "'last_batch_iteration' of the schedule"),
    (("schedule", "last_batch_iteration"), NAN, "'last_batch_iteration' of the schedule"),
    (("schedule",), {}, "last_batch_iteration"),
    (("schedule",), 5, "schedule"),
    (("tied",), {"a": 5}, "tied.a"),
    (("dtypes",), {"layers.0.weight": "load"}, "dtypes"),
    (("client",), 5, "client"),
    (("fingerprint",), {"parameters": "x", "states": None}, "fingerprint.parameters"),
    (("trainable_only",), "no", "trainable_only"),
    (("averages",), {"ema": {"decay": 0.5}}, "averages.ema.updates"),
    (("spans",), {"layers.0.weight": [[5, 2]]}, "spans"),
]
OWN: list[tuple[tuple[Any, ...], Any, str]] = [
    (("random", "torch"), None, "random states"),
    (("random", "python", 1, 3), "x", "random states"),
    (("random", "python"), [3, [], None], "random states"),
    (("random", "named"), [], "random states"),
    (("random",), 7, "random states"),
]


def _set(value: Any, where: tuple[Any, ...], new: Any) -> None:
    for key in where[:-1]:
        value = value[key]
    value[where[-1]] = new


def _all_of(engine: Any) -> list[Any]:
    values = [value.clone() for value in engine.full_state_dict().values()]
    place = [engine.progress.state_dict(), engine.fingerprint(), engine.lr_scheduler.state_dict()]
    return [*values, *place, [group["lr"] for group in engine._optimizer.param_groups], torch.get_rng_state()]


def _same(a: list[Any], b: list[Any]) -> bool:
    pairs = zip(a, b, strict=True)
    return all(torch.equal(item, other) if isinstance(item, torch.Tensor) else item == other for item, other in pairs)


def _other_count(index: Path, fields: dict[str, Any], name: str, value: float) -> None:
    """Write another value of a step count into the data file, and its checksum into `fields`."""
    (chunk,) = fields["tensors"][name]["chunks"]
    path = index.parent / chunk["file"]
    with TensorFile(path) as file:
        begin, end = file.byte_range(chunk["entry"])
    raw, data = struct.pack("<f", value), bytearray(path.read_bytes())
    data[begin:end] = raw
    path.write_bytes(data)
    chunk["crc32"] = zlib.crc32(raw)


def _forge(folder: str, stage: int) -> None:
    from windlass.optim.lr_warmups import WarmupLR

    engine = engine_for(net(), trained, stage, "cpu", folder)
    rank = dist.get_rank()
    engine.lr_scheduler = WarmupLR(engine._optimizer, warmup_max_lr=0.01)

    def step(number: int) -> None:
        engine.backward(engine(batch(number, rank)))
        engine.step()

    step(0)
    engine.save_checkpoint(folder, tag="t")
    step(1)
    path = Path(folder) / "t" / "checkpoint.json"
    good = path.read_bytes()
    before = _all_of(engine)
    cases = [("plain", *case) for case in WRONG] + [
        ("ranks", (0, *where), new, reported) for where, new, reported in OWN
    ]
    for part, where, new, text in cases:
        fields = json.loads(good)
        _set(fields[part], where, new)
        dist.barrier()
        if rank == 0:
            path.write_bytes(index_text(fields))
        dist.barrier()
        with pytest.raises(CheckpointError) as refused:
            engine.load_checkpoint(folder, tag="t")
        assert text in str(refused.value), f"{part} {where}: {refused.value}"
        assert _same(before, _all_of(engine)), f"{part} {where} = {new!r} was refused after something changed"
    count = "state/layers.0.weight/step"
    for wrong in (math.nan, math.inf, -5.0):
        if rank == 0:
            fields = json.loads(good)
            _other_count(path, fields, count, wrong)
            path.write_bytes(index_text(fields))
        dist.barrier()
        with pytest.raises(CheckpointError, match=f"{count!r} is {wrong}"):
            engine.load_checkpoint(folder, tag="t")
        assert _same(before, _all_of(engine)), f"a count of {wrong} was refused after something changed"
    dist.barrier()
    if rank == 0:
        _other_count(path, json.loads(good), count, 1.0)
        path.write_bytes(good)
    dist.barrier()
    engine.load_checkpoint(folder, tag="t")
    step(1)
    assert _same(before[:-1], _all_of(engine)[:-1])
    engine.destroy()


def test_nothing_changes_before_plain_data_is_validated(tmp_path: Path) -> None:
    run_ranks(_forge, 2, str(tmp_path), 3, timeout=300)
