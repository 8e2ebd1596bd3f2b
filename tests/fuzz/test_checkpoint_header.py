"""Fuzz tests of safetensors files, of windlass checkpoints and of a hub's models."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.fuzz.checkpoints import index_text, one_of, readers, save_windlass, seeds_of
from tests.fuzz.mutations import BYTES, as_text, fuzz, other_values
from windlass.zero.sharded_init.weight_files import header


def _changed(draw: random.Random, good: bytes) -> bytes:
    """Return a file with another header or with other bytes."""
    length = 8 + int.from_bytes(good[:8], "little")
    if draw.randrange(3):
        text = as_text(other_values(draw, json.loads(good[8:length]))).encode()
        return len(text).to_bytes(8, "little") + text + good[length:]
    return draw.choice(BYTES)(draw, good)


def test_every_reader_of_a_data_file(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    save_windlass(directory)
    index = directory / "t" / "checkpoint.json"
    fields = json.loads(index.read_bytes())
    files = sorted((directory / "t").glob("*.safetensors"))
    goods = [path.read_bytes() for path in files]
    rest = sum(item.stat().st_size for item in directory.rglob("*") if item.is_file())
    all_readers = readers(directory, tmp_path / "out")
    seeds = seeds_of(all_readers)

    def make(draw: random.Random) -> tuple[int, bytes]:
        for path, good in zip(files, goods, strict=True):
            path.write_bytes(good)
        number = draw.randrange(len(files))
        case = _changed(draw, goods[number])
        files[number].write_bytes(case)
        # correct sizes, as an attacker who knows the format would write
        sizes = {path.name: path.stat().st_size for path in files}
        index.write_bytes(index_text({**fields, "files": sizes}))
        return len(case) + rest, case

    fuzz(0.25, make, all_readers, one_of(seeds), tmp_path.parent / "header.case")
    shutil.rmtree(tmp_path)


def test_the_reader_of_a_hubs_files(tmp_path: Path) -> None:
    """Hub files have no checksums. Each tensor must have the bytes of its shape, inside the file."""
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.randn(3, 4), "b": torch.arange(5), "c": torch.zeros(0, 2)}, path, {"format": "pt"})
    good = path.read_bytes()

    def make(draw: random.Random) -> tuple[int, bytes]:
        case = _changed(draw, good)
        path.write_bytes(case)
        return len(case), case

    def read() -> Any:
        return [(shape, source.read(0, torch.Size(shape).numel())) for shape, source in header(path).values()]

    def vouched(name: str, value: Any) -> str:
        wrong = any(flat.numel() != torch.Size(shape).numel() for shape, flat in value)
        return "gives a tensor of another size" if wrong else ""

    fuzz(0.05, make, {"from_pretrained": read}, vouched, tmp_path.parent / "hub.case")
