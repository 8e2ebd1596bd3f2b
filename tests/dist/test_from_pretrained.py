"""Tests of pretrained models sharded while loading: values equal a plain load, and each rank reads only its bytes."""

from __future__ import annotations

import json
import os
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.dist.harness import RankError, run_ranks
from tests.dist.test_sharded_init import fresh_ranks, full_values, hugging_face, shard_at_once

transformers = pytest.importorskip("transformers")

NAMES = ["llama", "gpt2", "bert", "t5", "qwen_moe"]


def auto(name: str) -> Any:
    """Return the class that loads the tiny model `name`."""
    import transformers as t

    return {"bert": t.AutoModelForMaskedLM, "t5": t.AutoModelForSeq2SeqLM}.get(name, t.AutoModelForCausalLM)


def save(name: str, directory: Path, shards: int = 1) -> Path:
    """Save a tiny model with transformers."""
    torch.manual_seed(4)
    model = hugging_face(name)
    size = sum(p.numel() * 4 for p in model.parameters())
    model.save_pretrained(directory, max_shard_size=max(1, size // shards) if shards > 1 else "5GB")
    return directory


def drop(directory: Path, word: str) -> None:
    """Remove every tensor with `word` in its name from the file."""
    from safetensors.torch import load_file, save_file

    state = load_file(directory / "model.safetensors")
    kept = {name: tensor for name, tensor in state.items() if word not in name}
    assert len(kept) < len(state)
    save_file(kept, directory / "model.safetensors", metadata={"format": "pt"})


@contextmanager
def counted() -> Any:
    """Count the bytes read with preadv, by file."""
    before, bytes_read = os.preadv, Counter[str]()

    def preadv(descriptor: int, buffers: Any, offset: int, *more: Any) -> int:
        count = before(descriptor, buffers, offset, *more)
        bytes_read[os.readlink(f"/proc/self/fd/{descriptor}")] += count
        return count

    os.preadv = preadv
    try:
        yield bytes_read
    finally:
        os.preadv = before


def differences(name: str, directory: str, how: str, **kwargs: Any) -> dict[str, Any]:
    """Return the differences between a sharded and a plain load, and the bytes read.

    The ranks of the sharded load have different seeds.
    """
    import windlass

    rank = torch.distributed.get_rank()
    torch.manual_seed(6)
    plain = auto(name).from_pretrained(directory, **kwargs)
    torch.manual_seed(6 + rank)
    with shard_at_once(), counted() as read:
        if how == "ours":
            model = windlass.from_pretrained(auto(name), directory, config=None, **kwargs)
        else:
            with windlass.zero.Init():
                model = auto(name).from_pretrained(directory, **kwargs)
    actual, expected = full_values(model), dict(plain.named_parameters(remove_duplicate=False))
    text = [] if list(actual) == list(expected) else [f"names {list(actual)}"]
    for key, value in expected.items():
        if actual[key].dtype != value.dtype or not torch.equal(actual[key], value):
            text.append(f"{key} differs")
    for key, buffer in plain.named_buffers():
        if not torch.equal(dict(model.named_buffers())[key], buffer):
            text.append(f"buffer {key} differs")
    ties = {id(p) for p in model.parameters()}
    if len(ties) != len(list(plain.parameters())) or model.training != plain.training:
        text.append("tied otherwise")
    flags = {key: p.requires_grad for key, p in model.named_parameters()}
    text += [key for key, p in plain.named_parameters() if p.requires_grad != flags[key]]
    return {"said": text, "read": sum(read.values()), "size": sum(p.numel() * 4 for p in plain.parameters())}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("ranks", "how"), [(1, "ours"), (2, "ours"), (3, "theirs")])
def test_loaded_values_equal_a_plain_load(name: str, ranks: int, how: str, tmp_path: Path) -> None:
    directory = save(name, tmp_path, shards=3 if ranks > 1 else 1)
    for seen in run_ranks(differences, ranks, name, str(directory), how, timeout=120):
        assert not seen["said"]


def tie_later(directory: str) -> list[str]:
    """Return the names of parameters that differ from a plain load after `tie_weights` outside of the context."""
    import windlass

    plain = auto("bert").from_pretrained(directory)
    with shard_at_once(), windlass.zero.Init():
        model = auto("bert").from_pretrained(directory)
    model.tie_weights()
    found = full_values(model)
    return [key for key, value in plain.named_parameters() if not torch.equal(found[key], value)]


def test_heads_with_a_bias_are_tied_outside_of_the_context(tmp_path: Path) -> None:
    assert run_ranks(tie_later, 2, str(save("bert", tmp_path))) == [[], []]


def test_each_rank_reads_only_its_bytes(tmp_path: Path) -> None:
    directory = save("llama", tmp_path)
    seen = run_ranks(differences, 3, "llama", str(directory), "ours")
    total = sum(entry["read"] for entry in seen)
    assert total == seen[0]["size"]
    for item in seen:
        assert item["read"] == pytest.approx(item["size"] / 3, rel=0.02)


def test_conversion_reads_each_byte_once(tmp_path: Path) -> None:
    directory = save("qwen_moe", tmp_path)
    seen = run_ranks(differences, 2, "qwen_moe", str(directory), "ours")
    assert sum(item["read"] for item in seen) == seen[0]["size"]


@pytest.mark.parametrize(
    ("name", "word"), [("llama", "lm_head"), ("llama", "down_proj"), ("bert", "dense"), ("gpt2", "mlp")]
)
def test_missing_keys_are_initialized_as_in_a_plain_load(name: str, word: str, tmp_path: Path) -> None:
    directory = save(name, tmp_path)
    drop(directory, word)
    for seen in run_ranks(differences, 2, name, str(directory), "ours"):
        assert not seen["said"]


def narrow(name: str, directory: str) -> dict[str, Any]:
    return differences(name, directory, "ours", dtype=torch.bfloat16)


def test_dtypes_are_converted_as_in_a_plain_load(tmp_path: Path) -> None:
    directory = save("qwen_moe", tmp_path)
    for seen in run_ranks(narrow, 2, "qwen_moe", str(directory)):
        assert not seen["said"]


# --------------------------------------------------------------------------------------------------------- broken input


def load(directory: str) -> None:
    import windlass

    windlass.from_pretrained(auto("llama"), directory)


def widen(directory: Path) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"intermediate_size": 28}))


def shorten(directory: Path) -> None:
    with (directory / "model.safetensors").open("r+b") as file:
        file.truncate(file.seek(0, 2) - 10)


def lose_a_shard(directory: Path) -> None:
    next(directory.glob("model-*.safetensors")).unlink()


def garble(directory: Path) -> None:
    (directory / "model.safetensors").write_bytes(b"\xff" * 100)


BROKEN = {
    "another shape": (widen, 1, "down_proj.*28"),
    "cut short": (shorten, 1, "model.safetensors is truncated"),
    "no shard": (lose_a_shard, 3, r"model-\d+.*is missing"),
    "garbage": (garble, 1, "not a safetensors file"),
    "no config": (lambda d: (d / "config.json").unlink(), 1, "no config.json"),
}


@pytest.mark.parametrize("how", BROKEN)
def test_broken_files_are_named(how: str, tmp_path: Path) -> None:
    break_it, shards, words = BROKEN[how]
    break_it(save("llama", tmp_path, shards))
    with pytest.raises(RankError, match=words) as raised:
        run_ranks(load, 2, str(tmp_path))
    assert "CheckpointError" in raised.value.kinds


def test_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="nowhere") as raised:
        run_ranks(load, 1, str(tmp_path / "nowhere"))
    assert "CheckpointError" in raised.value.kinds


# -------------------------------------------------------------------------------------------------- training and memory


def trained(directory: str, sharded: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    import windlass
    from windlass.zero.core.sharded_parameter import ShardedParameter

    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 3},
    }
    if sharded:
        model = windlass.from_pretrained(auto("gpt2"), directory, config=config)
        assert isinstance(model.transformer.wte.weight, ShardedParameter)
    else:
        model = auto("gpt2").from_pretrained(directory)
    engine = windlass.initialize(model=model, config=config)[0]
    ids = torch.arange(16).view(2, 8) + torch.distributed.get_rank()
    losses = []
    for _ in range(3):
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
    values = {name: windlass.zero.full_param(p).detach() for name, p in engine.module.named_parameters()}
    engine.destroy()
    return losses, values


def test_training_equals_that_of_a_plain_load(tmp_path: Path, transport: str) -> None:
    directory = str(save("gpt2", tmp_path))
    whole_run = run_ranks(trained, 2, directory, False, transport=transport)
    for (losses, values), (expected, requested) in zip(
        run_ranks(trained, 2, directory, True, transport=transport), whole_run, strict=True
    ):
        assert losses == expected
        assert all(torch.equal(values[name], requested[name]) for name in requested)


def peak_of_load(directory: str) -> dict[str, float]:
    """Return peak increases of proportional memory in the load and up to `initialize`, and parameter sizes, in MB."""
    import windlass
    from windlass.cli.benches.memory_sampler import MemorySampler

    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    nn.Linear(2, 2)
    import transformers.models.llama.modeling_llama  # noqa: F401

    small = Path(directory).parent / "small"
    windlass.from_pretrained(auto("llama"), str(small), config=config)  # imports happen once, outside the measurement
    torch.distributed.barrier()
    watch = MemorySampler(torch.device("cpu"))
    model = windlass.from_pretrained(auto("llama"), directory, config=config)
    loaded = watch.peak_bytes()
    engine = windlass.initialize(model=model, config=config)[0]
    peak = watch.stop()
    sizes = [p.numel() * 4 for p in model.parameters()]
    unit = max(sum(p.numel() * 4 for p in layer.parameters()) for layer in model.model.layers)
    engine.destroy()
    return {
        "loaded": loaded / 1e6, "peak": peak / 1e6, "model": sum(sizes) / 1e6, "largest": max(sizes) / 1e6,
        "unit": unit / 1e6,
    }  # fmt: skip


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="proportional memory is Linux's")
def test_memory_grows_by_one_shard_and_two_tensors(tmp_path: Path) -> None:
    import transformers as t

    save("llama", tmp_path / "small")
    config = t.LlamaConfig(
        vocab_size=4000, hidden_size=512, intermediate_size=1400, num_hidden_layers=7, num_attention_heads=8
    )
    t.LlamaForCausalLM(config).save_pretrained(tmp_path / "large")
    ranks = 3
    for seen in fresh_ranks(peak_of_load, ranks, str(tmp_path / "large"), transport="gloo"):
        allowed = seen["model"] / ranks + max(2 * seen["largest"], seen["unit"])
        assert seen["loaded"] <= allowed, seen
        assert seen["peak"] <= allowed, seen
        assert seen["peak"] > 0.9 * seen["model"] / ranks, seen  # the sampler measures the model's memory
