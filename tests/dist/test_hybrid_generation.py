"""Tests that a training engine generates with the weights of its last step, without copies, and trains as before."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.causal_models import VOCABULARY, build
from tests.dist.harness import run_ranks
from windlass.zero.core.unit import ShardState

PROMPT = [3, 5, 7, 9, 11, 4, 6, 8, 10, 12, 14, 16, 13, 15, 17, 19, 21, 23, 25]


def training_engine(stage: int, **sections: Any) -> Any:
    import windlass

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.05}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **sections,
    }
    return windlass.initialize(model=build("llama", max_position_embeddings=96), config=config)[0]


def full_copy(engine: Any) -> Any:
    """Return a plain model with the engine's weights."""
    model = build("llama", max_position_embeddings=96, seed=1).eval()
    values = [engine.full_state_dict()]  # empty except on the first rank
    dist.broadcast_object_list(values)
    model.load_state_dict(values[0])
    return model


def train_step(engine: Any, rank: int, step: int) -> float:
    generator = torch.Generator().manual_seed(10 * step + rank)
    ids = torch.randint(3, VOCABULARY, (1, 12), generator=generator)
    loss = engine(input_ids=ids, labels=ids).loss
    engine.backward(loss)
    engine.step()
    return float(loss.detach())


def alternate(stage: int, generates: bool, sections: dict[str, Any]) -> list[float]:
    """Train; if `generates`, generate before each step, with more tokens on later data ranks. Return the losses."""
    engine = training_engine(stage, **sections)
    engine.train()
    rank, losses = engine.data_loading_ranks[1], []
    prompt = torch.tensor([PROMPT + [3 + rank]])
    for step in range(3):
        if generates:
            count = 4 + 3 * rank
            actual = engine.generate(prompt, max_new_tokens=count, eos_token_id=None)
            plain = full_copy(engine)
            expected = plain.generate(prompt, max_new_tokens=count, eos_token_id=None)
            assert torch.equal(actual, expected), f"step {step}: values of old weights"
            assert all(module.training for module in engine.module.modules())
        losses.append(train_step(engine, rank, step))
    engine.destroy()
    return losses


@pytest.mark.parametrize(
    ("world", "stage", "sections"),
    [
        (1, 0, {}),
        (2, 1, {"hybrid_engine": {"enabled": True, "release_inference_cache": True, "max_out_tokens": 64}}),
        (2, 2, {}),
        (2, 3, {"hybrid_engine": {"enabled": True}}),
        (2, 1, {"parallel": {"tp": 2}}),
    ],
)
def test_generation_has_the_newest_weights_and_leaves_training_as_it_is(
    world: int, stage: int, sections: dict[str, Any]
) -> None:
    with_generation = run_ranks(alternate, world, stage, True, sections, timeout=240)
    without = run_ranks(alternate, world, stage, False, sections, timeout=240)
    assert with_generation == without


def compare_logprobs(stage: int) -> tuple[float, int, bool]:
    """Compare log-probabilities of generated tokens with those of the training forward.

    Returns:
        The largest difference, the elements of parameters whose memory changed (at stage 3 not counted: 0), and True
        if all units that reshard are sharded.
    """
    from windlass import SamplingParams

    engine = training_engine(stage)
    train_step(engine, dist.get_rank(), 0)
    places = [] if stage == 3 else [parameter.data_ptr() for parameter in engine.module.parameters()]
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, logprobs=0)
    (output,) = engine.hybrid.run(lambda llm: llm.generate([PROMPT], params))
    sharded = [unit.shard_state is ShardState.UNSHARDED for unit in engine._sharded.units if unit.reshards]
    answer = output.outputs[0]
    copied = sum(
        p.numel() for p, place in zip(engine.module.parameters(), places, strict=False) if p.data_ptr() != place
    )
    ids = torch.tensor([PROMPT + list(answer.token_ids)])
    engine.train()
    logprobs = engine(input_ids=ids).logits[0, len(PROMPT) - 1 : -1].float().log_softmax(-1).detach()
    taken = logprobs.gather(1, ids[0, len(PROMPT) :, None])[:, 0]
    result = torch.tensor([e[t].logprob for e, t in zip(answer.logprobs, answer.token_ids, strict=True)])
    engine.destroy()
    return float((result - taken).abs().max()), copied, not any(sharded)


@pytest.mark.parametrize(("world", "stage"), [(1, 0), (2, 2), (2, 3)])
def test_logprobs_are_those_of_the_training_forward(world: int, stage: int) -> None:
    for difference, copied, resharded in run_ranks(compare_logprobs, world, stage, timeout=240):
        assert difference < 1e-5
        assert copied == 0
        assert resharded


def serve_live_module() -> None:
    """Generate with `windlass.LLM(engine.module)` between steps, without notifying the LLM of a step."""
    from windlass import LLM, SamplingParams

    engine = training_engine(0)
    engine.eval()
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    with LLM(engine.module, kv_cache_tokens=96, max_model_len=64) as llm:
        for step in range(2):
            (output,) = llm.generate([PROMPT], params)
            expected = full_copy(engine).generate(torch.tensor([PROMPT]), max_new_tokens=6, eos_token_id=None)
            assert list(output.outputs[0].token_ids) == expected[0, len(PROMPT) :].tolist(), f"step {step}"
            assert output.metrics.num_cached_tokens == 0
            (again,) = llm.generate([PROMPT], params)
            assert again.metrics.num_cached_tokens > 0
            train_step(engine, 0, step)
    engine.destroy()


def test_a_live_module_is_served_between_steps() -> None:
    run_ranks(serve_live_module, 1, timeout=240)
