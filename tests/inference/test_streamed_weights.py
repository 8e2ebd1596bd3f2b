"""Law: weights that are read from a file while the model runs give the tokens of weights in memory."""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import windlass
from tests.causal_models import VOCABULARY, build
from tests.inference.greedy_reference import answer_arrivals, assert_greedy, make_prompts
from windlass.base.errors import ConfigError, ModelError, StorageError
from windlass.inference import engine_factory
from windlass.inference.llm import LLM
from windlass.inference.paged_runner import PagedModelRunner
from windlass.inference.sampling_params import SamplingParams
from windlass.inference.step_cost import StepCost
from windlass.inference.streamed_modules import DiskUnits, StackedParameters, StreamedModules
from windlass.inference.weight_file import StoredUnit
from windlass.inference.weight_stream import WeightStream
from windlass.storage.extent_allocator import page_up

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=1)
SMALL = {"max_tokens_per_step": 16, "max_sequences": 6, "kv_cache_tokens": 320, "max_model_len": 32}


def saved(name: str, directory: Path, **changes: Any) -> Any:
    limit = {"gpt2": "n_positions"}.get(name, "max_position_embeddings")
    model = build(name, **({} if name == "bloom" else {limit: 96}), **changes).eval()
    model.save_pretrained(directory)
    return model


def streamed(directory: Path, **options: Any) -> LLM:
    return LLM(directory, skip_tokenizer_init=True, **{"weights_tier": "disk", **SMALL, **options})


def modules_of(llm: LLM) -> StreamedModules:
    found = llm.engine.runner._packed
    assert isinstance(found, StreamedModules)
    return found


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2", "mixtral", "qwen2_moe", "bloom"])
def test_families_generate_what_the_plain_model_does(name: str, tmp_path: Path) -> None:
    """The first load makes the file, the second uses it; gpt2 has tied weights, bloom its own cache."""
    model, written = saved(name, tmp_path), list[tuple[str, int]]()
    for tier in ("disk", "host"):
        with streamed(tmp_path, weights_tier=tier) as llm:
            outputs = llm.generate(make_prompts(8, VOCABULARY), GREEDY)
            assert isinstance(llm.engine.runner, PagedModelRunner) == (name != "bloom")
            parts = modules_of(llm)
            streams = [p for p in llm.engine.runner.model.parameters() if p.is_meta]
            assert streams and parts.stats.bytes_read > 0
            assert bool(parts.stacked) == (name in ("mixtral", "qwen2_moe"))
        assert_greedy(model, outputs)
        (file,) = tmp_path.glob("windlass-weights/*.weights")
        written.append((file.name, file.stat().st_mtime_ns))
    assert written[0] == written[1], "the second load writes no file"


def test_one_engine_with_preemption_prefixes_chunks_and_both_tiers(tmp_path: Path) -> None:
    """40 requests that arrive while others run, through a small KV cache whose blocks move to memory and disk."""
    from windlass.inference.step_cost import StepCost

    model = saved("llama", tmp_path / "model")
    prompts = make_prompts(40, VOCABULARY, 40, shared=18)
    options = {"max_tokens_per_step": 7, "kv_cache_tokens": 112, "max_model_len": 96, "check_at_load": False}
    with streamed(tmp_path / "model", **options, swap_bytes=4096, swap_directory=tmp_path) as llm:
        llm.engine._table._saved._cost = StepCost(100.0)
        outputs = answer_arrivals(llm.engine, prompts, GREEDY)
        stats, parts = llm.stats(), modules_of(llm)
        assert llm.engine.runner.program is not None, "the recorded step is replayed with streamed weights"
        # every forward has the same products, so each is read ahead
        assert parts.stats.mispredicted <= 1
    assert stats.prefix_cache_hits > 0 and stats.num_preemptions > 0
    assert_greedy(model, outputs)


@pytest.mark.parametrize("method", ["ngram", "draft"])
def test_drafts_are_checked_by_a_streamed_model(method: str, tmp_path: Path) -> None:
    model = saved("llama", tmp_path)
    settings = {"method": method, **({"model": str(tmp_path)} if method == "draft" else {})}
    repeating = [[5, 6, 7, 8] * 5, [9, 3] * 7]
    with streamed(tmp_path, speculative=settings) as llm:
        outputs = llm.generate([*repeating, *make_prompts(4, VOCABULARY)], GREEDY)
        assert llm.stats().accepted_draft_tokens > 0
    assert_greedy(model, outputs)


@pytest.mark.parametrize("weights", ["bf16", "int8"])
def test_formats_have_the_bits_of_packed_weights_in_memory(weights: str, tmp_path: Path) -> None:
    """The file has as many bytes as the packed weights in memory, up to padding to pages."""
    saved("llama", tmp_path, hidden_size=64, intermediate_size=96)
    prompts = make_prompts(6, VOCABULARY)
    with LLM(tmp_path, skip_tokenizer_init=True, weights=weights, **SMALL) as llm:
        wanted = llm.generate(prompts, GREEDY)
        resident_bytes = llm.engine.runner._packed.nbytes
    with streamed(tmp_path, weights=weights) as llm:
        found = llm.generate(prompts, GREEDY)
        parts = modules_of(llm)
        assert parts.nbytes == 0
        pages = 4096 * len(parts.index.units)
        assert resident_bytes <= parts.index.streamed_bytes <= resident_bytes + pages
    for one, other in zip(found, wanted, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        assert one.outputs[0].logprobs == other.outputs[0].logprobs


def test_weights_pass_through_the_stated_memory(tmp_path: Path) -> None:
    """Staging takes at most three of the largest weights or a quarter of all. No streamed weight is resident."""
    model = saved("llama", tmp_path, num_hidden_layers=12)
    with streamed(tmp_path) as llm:
        parts = modules_of(llm)
        sizes = [unit.nbytes for unit in parts.index.units]
        total = parts.index.streamed_bytes
        assert total > 3 * parts.staging_bytes
        assert parts.staging_bytes <= max(3 * max(sizes), page_up(total // 4))
        resident = sum(p.nbytes for p in llm.engine.runner.model.parameters() if not p.is_meta)
        rest = sum(p.nbytes for n, p in model.named_parameters() if "proj" not in n and n != "lm_head.weight")
        assert resident == rest
        before, steps = parts.stats.bytes_read, llm.stats().steps
        cost = llm.engine.cost
        assert 0 < cost.token_seconds < 1 and cost.weight_seconds > 0
        outputs = llm.generate(make_prompts(6, VOCABULARY), GREEDY)
        read, forwards = parts.stats.bytes_read - before, llm.stats().steps - steps
        # each forward reads each weight once; steps without logits leave out the head
        assert (forwards - 2) * (total - max(sizes)) <= read <= (forwards + 1) * total
    assert_greedy(model, outputs)
    for buffer in (max(sizes), 2 * max(sizes)):
        with streamed(tmp_path, weights_buffer_bytes=buffer) as llm:
            assert modules_of(llm).staging_bytes == buffer
            assert_greedy(model, llm.generate(make_prompts(4, VOCABULARY), GREEDY))
    with pytest.raises(ConfigError, match=f"weights_buffer_bytes is 4096.*{max(sizes)} bytes"):
        streamed(tmp_path, weights_buffer_bytes=4096)


def test_tied_weights_are_found_again_under_the_name_that_stays_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head is packed and the embedding is not. The head has the first name of the weight that they share."""
    from transformers import LlamaForCausalLM

    make = LlamaForCausalLM.__init__

    def head_first(self: Any, config: Any) -> None:
        make(self, config)
        self._modules["model"] = self._modules.pop("model")

    monkeypatch.setattr(LlamaForCausalLM, "__init__", head_first)
    model = saved("llama", tmp_path, tie_word_embeddings=True)
    assert next(iter(model.named_parameters()))[0] == "lm_head.weight"
    for tier in ("disk", "disk", "host"):
        with streamed(tmp_path, weights_tier=tier) as llm:
            assert_greedy(model, llm.generate(make_prompts(4, VOCABULARY), GREEDY))


def test_weights_that_only_the_configuration_ties_stay_different(tmp_path: Path) -> None:
    """transformers warns of such a model, and loads it with two weights."""
    model = saved("llama", tmp_path, tie_word_embeddings=False)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    for tier in ("disk", "disk", "host"):
        with streamed(tmp_path, weights_tier=tier) as llm:
            assert_greedy(model, llm.generate(make_prompts(4, VOCABULARY), GREEDY))


def test_a_changed_model_gets_a_new_file_and_an_incomplete_one_is_made_again(tmp_path: Path) -> None:
    saved("llama", tmp_path)
    with streamed(tmp_path, check_at_load=False) as llm:
        llm.generate([[3, 4]], GREEDY)
    (first,) = tmp_path.glob("windlass-weights/*.weights")
    first.write_bytes(first.read_bytes()[:5000])  # as if the writer had been killed
    model = saved("llama", tmp_path, seed=1)
    with streamed(tmp_path, check_at_load=False) as llm:
        assert_greedy(model, llm.generate([[3, 4]], GREEDY))
    assert len(list(tmp_path.glob("windlass-weights/*.weights"))) == 2


def test_a_read_error_names_file_and_layer_and_the_engine_goes_on(tmp_path: Path) -> None:
    model = saved("llama", tmp_path)
    with streamed(tmp_path, weights_buffer_bytes=16384) as llm:
        (file,) = tmp_path.glob("windlass-weights/*.weights")
        llm.generate([[3, 4, 5]], GREEDY)
        whole = file.read_bytes()
        os.truncate(file, 4096)
        with pytest.raises(StorageError, match=rf"weights of model\.layers\.\d.* of {file} failed at byte"):
            llm.generate([[3, 4, 5]], GREEDY)
        assert not llm.engine.has_requests() and llm.stats().kv_cache_usage == 0
        file.write_bytes(whole)
        assert_greedy(model, llm.generate([[3, 4, 5]], GREEDY))


def test_what_cannot_be_streamed_is_refused_by_name(tmp_path: Path) -> None:
    model = saved("llama", tmp_path)
    with pytest.raises(ConfigError, match="weights_tier is 'disk', but a live module is in memory already"):
        LLM(model, weights_tier="disk", **SMALL)
    with pytest.raises(ConfigError, match="weights_tier is 'nvme'; write one of device, host, disk"):
        LLM(tmp_path, weights_tier="nvme")
    with pytest.raises(ConfigError, match="weights_directory is .* without weights_tier"):
        LLM(tmp_path, weights_directory=tmp_path)
    with pytest.raises(ConfigError, match="weights_buffer_bytes is 65536 with weights_tier 'host'.*leave it out"):
        LLM(tmp_path, weights_tier="host", weights_buffer_bytes=65536)
    with pytest.raises(ConfigError, match="tp x ep x pp is 2; streamed weights need one rank"):
        LLM(tmp_path, weights_tier="disk", tp=2)
    with pytest.raises(ConfigError, match="weights is 'int4_g128' with weights_tier 'disk'; streamed weights take"):
        LLM(tmp_path, weights="int4_g128", weights_tier="disk", skip_tokenizer_init=True)
    with pytest.raises(ConfigError, match="activations is 'int8' with weights_tier 'disk'"):
        LLM(tmp_path, weights="int8", activations="int8", weights_tier="disk")
    with pytest.raises(ConfigError, match="needs a model on the CPU"):
        LLM(tmp_path, weights_tier="disk", device="meta", skip_tokenizer_init=True)
    with pytest.raises(ModelError, match="is not a safetensors file"):
        other = tmp_path / "pickled"
        model.config.save_pretrained(other)
        torch.save(model.state_dict(), other / "pytorch_model.bin")
        streamed(other)
    with pytest.raises(StorageError, match="weights_directory"):
        (tmp_path / "file").touch()
        streamed(tmp_path, weights_directory=tmp_path / "file")


def test_more_sequences_share_the_time_of_reading() -> None:
    options = windlass.inference.engine_options.EngineOptions.from_arguments
    assert options(weights_tier="disk").max_sequences == 256
    assert options(weights_tier="disk", max_sequences=4).max_sequences == 4
    assert options(weights_tier="disk", max_tokens_per_step=32).max_sequences == 32
    assert options().max_sequences == options(weights_tier="host").max_sequences == 64


@pytest.mark.parametrize(
    ("token_seconds", "given", "expected"), [(0.05, {}, 25), (1.0, {}, 16), (0.05, {"max_sequences": 64}, 64)]
)
def test_the_batch_computes_while_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, token_seconds: float, given: dict[str, int], expected: int
) -> None:
    cost = StepCost(weight_seconds=1.0, token_seconds=token_seconds)
    monkeypatch.setattr(engine_factory, "measure_step_cost", lambda *_, **__: cost)
    build("llama").save_pretrained(tmp_path)
    options = {"kv_cache_tokens": 320, "max_model_len": 32, **given}
    with LLM(tmp_path, weights_tier="disk", skip_tokenizer_init=True, **options) as llm:
        assert llm.engine.options.max_sequences == expected


class CountedSource:
    """Source in memory that fills each unit with the unit's number, and records every read."""

    def __init__(self) -> None:
        self.reads: list[int] = []

    def allocate_buffer(self, nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8)

    def start(self, unit: int, into: torch.Tensor) -> CountedSource:
        self.reads.append(unit)
        into.fill_(unit)
        return self

    def wait(self) -> None:
        """Do nothing: `start` has filled the buffer."""

    def finish(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""

    def reopen(self) -> None:
        """Do nothing."""


@pytest.mark.parametrize("seed", range(20))
def test_any_order_of_use_gets_the_bytes_of_its_units(seed: int) -> None:
    """Repeated, skipped, nested and unexpected units, in rings that hold from one unit to all of them."""
    generator = torch.Generator().manual_seed(seed)

    def draw(high: int) -> int:
        return int(torch.randint(high, (), generator=generator))

    sizes = [4096 * (1 + draw(5)) for _ in range(8)]
    source = CountedSource()
    stream = WeightStream(source, sizes, max(sizes) + 4096 * draw(40))

    def check(unit: int, memory: torch.Tensor) -> None:
        assert memory.numel() == sizes[unit] and bool((memory == unit).all())

    usual = [draw(8) for _ in range(10)]
    for _ in range(30):
        stream.begin_forward()
        for unit in usual if draw(3) else [draw(8) for _ in range(6)]:
            with stream.lend(unit) as memory:
                check(unit, memory)
                if not draw(4):
                    inner = draw(8)
                    with stream.lend(inner) as other:
                        check(inner, other)
                check(unit, memory)
    before = stream.stats.mispredicted
    for _ in range(3):  # the order of a forward predicts the next forward
        stream.begin_forward()
        for unit in usual:
            with stream.lend(unit) as memory:
                check(unit, memory)
        found, before = stream.stats.mispredicted - before, stream.stats.mispredicted
    if stream.buffer_bytes >= 3 * max(sizes):
        assert found == 0
    stream.close()


class LateRead:
    """Read that fills its buffer only in `wait` or `finish`."""

    def __init__(self, source: LateSource, unit: int, into: torch.Tensor) -> None:
        self.source, self.unit = source, unit
        self.first, self.stop = into.data_ptr(), into.data_ptr() + into.numel()
        self.into = weakref.ref(into)

    def wait(self) -> None:
        if self.unit == self.source.interrupted_wait:
            self.source.interrupted_wait = None
            raise KeyboardInterrupt
        self.finish()

    def finish(self) -> None:
        if self in self.source.in_flight:
            into = self.into()
            assert into is not None, "the memory was freed during the read"
            into.fill_(self.unit)
            self.source.in_flight.remove(self)


class LateSource:
    """Source with reads that stay in flight until they are awaited, and may be interrupted like by Ctrl-C."""

    def __init__(self) -> None:
        self.in_flight: list[LateRead] = []
        self.interrupted_wait: int | None = None
        self.interrupted_start: int | None = None
        self.closed = False

    def allocate_buffer(self, nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8)

    def start(self, unit: int, into: torch.Tensor) -> LateRead:
        if self.closed:
            raise StorageError("closed")
        read = LateRead(self, unit, into)
        assert not any(read.first < one.stop and one.first < read.stop for one in self.in_flight), "memory in use"
        self.in_flight.append(read)
        if unit == self.interrupted_start:
            raise KeyboardInterrupt
        return read

    def close(self) -> None:
        self.closed = True
        for read in list(self.in_flight):
            read.finish()

    def reopen(self) -> None:
        self.closed = False


def test_embeddings_begin_a_forward_of_the_stream(tmp_path: Path) -> None:
    """Embeddings call only the decoder: the record of used units must not grow, and failed reads are tried again."""
    saved("llama", tmp_path)
    with streamed(tmp_path) as llm:
        stream, expected = modules_of(llm).lender, llm.embed([[5, 6, 7]])[0].outputs.embedding
        assert isinstance(stream, WeightStream)
        read = stream.stats.mispredicted
        for _ in range(5):
            assert llm.embed([[5, 6, 7]])[0].outputs.embedding == expected
        assert len(stream._used) <= len(stream._order)
        assert stream.stats.mispredicted <= read + 1
        stream._failed = True  # as after Ctrl-C while a product waits
        stream._drop_unused()
        assert llm.embed([[5, 6, 7]])[0].outputs.embedding == expected
        assert not stream._failed


@pytest.mark.parametrize("uses_ring", [True, False])
def test_memory_of_an_interrupted_wait_is_used_again_only_after_its_read(uses_ring: bool) -> None:
    """A unit outside of the ring has memory of its own, while another unit fills the ring."""
    source = LateSource()
    stream = WeightStream(source, [4096] * 3, 8192 if uses_ring else 4096)
    stream.begin_forward()
    with pytest.raises(KeyboardInterrupt), stream.lend(0) if not uses_ring else torch.no_grad():
        source.interrupted_wait = 0 if uses_ring else 1
        with stream.lend(source.interrupted_wait):
            pass
    assert source.in_flight
    for _ in range(2):
        stream.begin_forward()
        for unit in range(3):
            with stream.lend(unit) as memory:
                assert bool((memory == unit).all())
    stream.close()
    assert not source.in_flight


@pytest.mark.parametrize("unit", [1, 2])
def test_a_forward_after_an_interrupted_start_reads_again(unit: int) -> None:
    source = LateSource()
    stream = WeightStream(source, [4096] * 3, 8192)
    source.interrupted_start = unit  # the read is in flight, but the stream never gets it
    with pytest.raises(KeyboardInterrupt):
        stream.begin_forward()
        with stream.lend(0):
            pass
    assert source.closed and not source.in_flight, "its memory could be used again during the read"
    source.interrupted_start = None
    for _ in range(2):
        stream.begin_forward()
        for other in range(3):
            with stream.lend(other) as memory:
                assert bool((memory == other).all())
    stream.close()
    assert not source.in_flight


def test_a_forward_after_an_interrupted_start_opens_the_file_again(tmp_path: Path) -> None:
    (tmp_path / "weights").write_bytes(b"".join(bytes([unit]) * 4096 for unit in range(3)))
    units = [StoredUnit((f"layer{unit}",), 4096 * unit, 4096, {}) for unit in range(3)]
    source = DiskUnits(tmp_path / "weights", units)
    stream, interrupted = WeightStream(source, [4096] * 3, 8192), [1]

    def start(unit: int, into: torch.Tensor) -> Any:
        read = DiskUnits.start(source, unit, into)
        if unit in interrupted:
            interrupted.remove(unit)
            raise KeyboardInterrupt
        return read

    source.start = start  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        stream.begin_forward()
    for _ in range(2):
        stream.begin_forward()
        for unit in range(3):
            with stream.lend(unit) as memory:
                assert bool((memory == unit).all())
    stream.close()
    source.close()


def test_a_file_that_was_replaced_is_not_read_after_an_interrupt(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(bytes(4096))
    source = DiskUnits(path, [StoredUnit(("layer",), 0, 4096, {})])
    source.close()
    (tmp_path / "other").write_bytes(bytes([1]) * 4096)
    (tmp_path / "other").replace(path)
    with pytest.raises(StorageError, match=r"weights was replaced .*build the engine again"):
        source.reopen()


def test_experts_of_an_interrupted_forward_are_given_back_before_the_next_one() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Parameter(torch.empty(2, 3, 4, device="meta"), requires_grad=False)

        def forward(self, *, interrupted: bool) -> torch.Tensor:
            if interrupted:
                raise KeyboardInterrupt
            return self.up.sum()

    lent: list[str] = []

    @contextmanager
    def lend() -> Iterator[dict[str, torch.Tensor]]:
        assert not lent, "the memory of an earlier forward is still lent"
        lent.append("up")
        yield {"up": torch.ones(2, 3, 4)}
        lent.remove("up")

    experts = Experts()
    StackedParameters(experts, ["up"], lend)
    with pytest.raises(KeyboardInterrupt):
        experts(interrupted=True)
    assert lent
    for _ in range(2):
        assert experts(interrupted=False) == 24
        assert not lent
        assert experts.up.is_meta
