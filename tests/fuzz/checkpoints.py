"""Small checkpoints of windlass and DeepSpeed, their readers, and the allowed results of readers."""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import windlass
from tests.deepspeed_checkpoint_writer import Trained
from tests.fuzz.mutations import Reader, as_text
from windlass.base.errors import WindlassError
from windlass.checkpoint import FlatShard, SavedState, read_full, read_plain, save
from windlass.checkpoint.checkpoint_listing import list_checkpoints
from windlass.checkpoint.safetensors_export import export_safetensors
from windlass.checkpoint.safetensors_file import TensorFileWriter
from windlass.checkpoint.stored_checkpoint import StoredCheckpoint
from windlass.compat.checkpoint.consolidated import get_fp32_state_dict_from_zero_checkpoint
from windlass.compat.checkpoint.to_windlass import convert_to_windlass

SHAPES = {"up.weight": (4, 6), "up.bias": (4,), "head": (3, 2, 2), "scale": (), "none": (0, 3)}


def net() -> torch.nn.Module:
    """Return a plain model with parameters of the shapes in `SHAPES`."""
    model = torch.nn.Module()
    model.up = torch.nn.Linear(6, 4)
    for name in ("head", "scale", "none"):
        setattr(model, name, torch.nn.Parameter(torch.zeros(SHAPES[name])))
    return model


def save_windlass(directory: Path) -> None:
    """Save a checkpoint with everything that an engine stores, and one tensor in boxes that are not flat ranges."""
    torch.manual_seed(0)
    values = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    shards = [FlatShard(f"param/{name}", shape, 0, values[name].view(-1)) for name, shape in SHAPES.items()]
    moments = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    shards += [FlatShard(f"state/{n}/exp_avg", shape, 0, moments[n].view(-1)) for n, shape in SHAPES.items()]
    steps = {f"state/{name}/step": torch.tensor(3.0) for name in SHAPES}
    plain = {
        "engine": {"micro_steps": 6, "global_steps": 3, "global_samples": 24, "skipped_steps": 1},
        "layout": {"stage": 2, "ranks": 1, "axes": {"tp": 1}, "accumulation": 2},
        "fingerprint": None,
        "states": {name: {"exp_avg": "pieces float32", "step": "whole float32", "eta": "value"} for name in SHAPES},
        "values": {name: {"eta": 0.5} for name in SHAPES},
        "spans": {"up.weight": [(0, 24)]},
        "groups": [{"parameters": list(SHAPES), "values": {"lr": 0.1, "betas": (0.9, 0.99), "fused": None}}],
        "loss_scale": {"scale": 1024.0, "good_steps": 2, "hysteresis_left": 1},
        "schedule": {"last_batch_iteration": 3},
        "data": {"epoch": 0, "consumed": 24},
        "trainable_only": False,
        "tied": {"alias": "up.weight"},
        "dtypes": {"up.bias": "bfloat16"},
        "absent": [],
        "frozen": ["none"],
        "base": {"none": "0123456789abcdef"},
        "buffers": True,
        "averages": {"ema": {"decay": 0.9, "updates": 3}},
        "extra": {"up._extra_state": {"kept": {1, 2}}},
        "client": {"epoch": 1, 5: (1.0, b"x"), "array": torch.arange(3), "dtype": torch.bfloat16},
    }
    state = SavedState(shards, {"buffer/seen": torch.arange(4), **steps}, plain, {"random": torch.arange(8.0)})
    path = save(directory, "t", state)
    _in_columns(path, "param/up.weight", values["up.weight"])


def _in_columns(path: Path, name: str, value: torch.Tensor) -> None:
    """Store one tensor in its own file as two boxes of columns."""
    from windlass.checkpoint.safetensors_file import TensorEntry

    half = value.shape[1] // 2
    parts = {f"{name}@0,{at}": value[:, at : at + half].contiguous() for at in (0, half)}
    file_name = "rank_00001.safetensors"
    entries = {entry: TensorEntry(part.dtype, tuple(part.shape)) for entry, part in parts.items()}
    with TensorFileWriter(path / file_name, entries) as file:
        sums = {entry: file.write(entry, part) for entry, part in parts.items()}
    fields = json.loads((path / "checkpoint.json").read_text())
    fields["files"][file_name] = (path / file_name).stat().st_size
    fields["tensors"][name]["chunks"] = [
        {
            "offsets": [0, at],
            "sizes": [value.shape[0], half],
            "file": file_name,
            "entry": f"{name}@0,{at}",
            "crc32": sums[f"{name}@0,{at}"],
        }
        for at in (0, half)
    ]
    (path / "checkpoint.json").write_bytes(index_text(fields))


def index_text(fields: Any) -> bytes:
    """Return the text of an index with a correct checksum."""
    if not isinstance(fields, dict):
        return as_text(fields).encode()
    body = as_text({key: value for key, value in fields.items() if key != "crc32"})[:-1]
    return f'{body},\n"crc32": "{zlib.crc32(body.encode()):08x}"}}\n'.encode()


def trained() -> Trained:
    """Return the state of a DeepSpeed run."""
    torch.manual_seed(0)
    masters = {"up.weight": torch.randn(4, 6), "up.bias": torch.randn(4), "head": torch.randn(3, 2, 2)}
    module = {name: value.bfloat16() for name, value in masters.items()}
    module |= {"base": torch.randn(7).bfloat16(), "seen": torch.arange(4)}
    return Trained(
        module=module,
        buffers=["seen"],
        tied={},
        masters=masters,
        groups=[["up.weight", "head"], ["up.bias"]],
        moments={name: {"exp_avg": torch.randn_like(value)} for name, value in masters.items()},
        step=4.0,
        hyper=[{"lr": 0.1, "betas": (0.9, 0.99)}, {"lr": 0.2}],
        steps=4,
        samples=8,
        client={"epoch": 3, "note": "text", "kinds": {"a"}},
    )


def readers(directory: Path, out: Path) -> dict[str, Reader]:
    """Return all checkpoint readers that need one process, by name. Each returns tensors by name, or an empty dict."""

    def exported() -> dict[str, torch.Tensor]:
        from safetensors.torch import load_file

        shutil.rmtree(out, ignore_errors=True)
        export_safetensors(directory, out)
        return dict(load_file(out / "model.safetensors"))

    def converted() -> dict[str, torch.Tensor]:
        shutil.rmtree(out, ignore_errors=True)
        return dict(read_full(convert_to_windlass(directory / "t", out / "t").parent, "t"))

    def plain() -> dict[str, torch.Tensor]:
        result = windlass.read_checkpoint(directory)
        model = net()
        result.optimizer_state_dict(model, torch.optim.AdamW(model.parameters()))
        return {name: value for name, value in result.model_state_dict().items() if isinstance(value, torch.Tensor)}

    def spans() -> dict[str, torch.Tensor]:
        with StoredCheckpoint(directory) as stored:
            for name in stored.names():
                numel = stored.meta_tensor(name).numel()
                list(stored.iter_span(name, numel // 3, numel))
                list(stored.iter_parts(name, 5))
        return {}

    def listed() -> dict[str, torch.Tensor]:
        list_checkpoints(directory, verify=True)
        return {}

    def outline() -> dict[str, torch.Tensor]:
        read_plain(directory)
        StoredCheckpoint(directory).outline()
        return {}

    return {
        "read_full": lambda: dict(read_full(directory)),
        "outline": outline,
        "export": exported,
        "to_windlass": converted,
        "plain": plain,
        "zero_to_fp32": lambda: get_fp32_state_dict_from_zero_checkpoint(directory),
        "spans": spans,
        "catalogue": listed,
    }


def seeds_of(readers: dict[str, Reader]) -> dict[str, list[torch.Tensor]]:
    """Return the results of each reader on unchanged files."""
    results = {}
    for name, read in readers.items():
        try:
            results[name] = list(read().values())
        except WindlassError as error:
            raise AssertionError(f"{name} does not read the seed: {error}") from error
    return results


def one_of(seeds: dict[str, list[torch.Tensor]]) -> Callable[[str, Any], str]:
    """Return a check that accepts only values of the unchanged files, under any name.

    The index chooses the dtype of a tensor, so values of any reader are accepted after a cast to the returned dtype.
    """
    known = [item for values in seeds.values() for item in values]

    def vouched(name: str, value: dict[str, torch.Tensor]) -> str:
        for key, tensor in value.items():
            like = [item for item in known if item.shape == tensor.shape and item.is_complex() == tensor.is_complex()]
            if tensor.numel() and not any(torch.equal(item.to(tensor.dtype), tensor) for item in like):
                return f"gives {key!r} values that nobody wrote"
        return ""

    return vouched
