"""Tests that a checkpoint holds the position in the data.

On the same number of ranks the next batches are equal. On another number of ranks, the remaining samples of the epoch
are equal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.dist.harness import run_ranks
from tests.dist.test_partial_load import listening

MICRO, SAMPLES = 2, 48


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Samples that hold their index and noise from all generators that a script may use."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        import random

        import numpy as np

        noise = torch.rand(4) + random.random() + float(np.random.rand())
        return {"x": noise + index, "number": torch.tensor(index)}


class Dropping(nn.Module):
    """Layer with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(self.layer(x), 0.5).square().mean()


def engine_for(seed: int, accumulation: int = 1, **more: Any) -> Any:
    import random

    import numpy as np

    import windlass

    for seeded in (torch.manual_seed, random.seed, np.random.seed):
        seeded(seed + dist.get_rank())
    config = {
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": accumulation,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    }
    return windlass.initialize(model=Dropping(), config=config, training_data=Rows(), **more)[0]


def trained(engine: Any, batches: Iterator[Any]) -> tuple[list[float], list[int]]:
    """Train on these batches on this rank. Return losses and sample indices."""
    losses, numbers = [], []
    for batch in batches:
        loss = engine(batch["x"])
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        numbers += batch["number"].tolist()
    return losses, numbers


def epochs(engine: Any) -> Iterator[Any]:
    """Yield batches epoch after epoch, as most scripts do."""
    while True:
        yield from engine.training_dataloader


def again(engine: Any) -> Iterator[Any]:
    """Return a loader that restarts by itself, for scripts that count steps."""
    from windlass.data.resumable_loaders import CyclingLoader

    return CyclingLoader(engine.training_dataloader)


WAYS = {"epochs": epochs, "again": again}


def interrupted(way: str, before: int, folder: str) -> dict[str, Any]:
    """Save within an epoch and continue into the next.

    Then resume in a new engine, and in one that was at another position.
    """
    after = 12
    engine = engine_for(0)
    batches = WAYS[way](engine)
    trained(engine, islice(batches, before))
    engine.save_checkpoint(folder)
    expected = trained(engine, islice(batches, after))
    engine.destroy()
    other = engine_for(50)
    other.load_checkpoint(folder)
    actual = trained(other, islice(WAYS[way](other), after))
    other.destroy()
    third = engine_for(90)
    batches = WAYS[way](third)
    trained(third, islice(batches, 3))
    third.load_checkpoint(folder)
    under_way = trained(third, islice(batches, after))
    third.destroy()
    return {"wanted": expected, "found": actual, "under way": under_way}


@pytest.mark.parametrize(("ranks", "way", "before"), [(1, "epochs", 20), (2, "again", 5), (3, "epochs", 8)])
def test_same_batches_on_the_same_number_of_ranks(ranks: int, way: str, before: int, tmp_path: Any) -> None:
    for result in run_ranks(interrupted, ranks, way, before, str(tmp_path)):
        assert result["found"] == result["wanted"]
        assert result["under way"] == result["wanted"]


def begun(batches: int, folder: str) -> list[int]:
    engine = engine_for(0)
    _, numbers = trained(engine, islice(epochs(engine), batches))
    engine.save_checkpoint(folder)
    engine.destroy()
    return numbers


def rest(folder: str) -> tuple[list[int], list[int]]:
    """Return the samples that remain of the epoch after a load, and those of the next epoch."""
    engine = engine_for(50)
    engine.load_checkpoint(folder)
    results = [trained(engine, iter(engine.training_dataloader))[1] for _ in range(2)]
    engine.destroy()
    return results[0], results[1]


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 3), (3, 1), (3, 2)])
def test_same_samples_on_another_number_of_ranks(before: int, after: int, tmp_path: Any) -> None:
    seen = Counter(n for numbers in run_ranks(begun, before, 3, str(tmp_path)) for n in numbers)
    result = run_ranks(rest, after, str(tmp_path))
    assert Counter(seen.values()) == {1: 3 * before * MICRO}
    left = Counter(n for item, _ in result for n in item)
    # samples repeated from the epoch's beginning to fill the last batch of the ranks
    repeated = left - (Counter(range(SAMPLES)) - seen)
    assert left - repeated == Counter(range(SAMPLES)) - seen
    assert repeated.total() == -(SAMPLES - seen.total()) % after
    assert Counter(n for _, other in result for n in other) == Counter(range(SAMPLES))


def saved_in_a_step(folder: str) -> list[list[int]]:
    """Save within a step of four micro-batches: the first step, the second step, and a step after a load."""
    found = []
    for tag, taken in (("first", 2), ("second", 6), ("resumed", 3)):
        engine = engine_for(0, accumulation=4)
        if tag == "resumed":
            engine.load_checkpoint(folder, tag="second")
        numbers = trained(engine, islice(epochs(engine), taken))[1]
        engine.save_checkpoint(folder, tag=tag)
        engine.destroy()
        other = engine_for(50, accumulation=4)
        other.load_checkpoint(folder, tag=tag)
        again = trained(other, islice(epochs(other), taken))[1]
        other.destroy()
        found.append([numbers, again])
    return found


def test_a_save_within_a_step_resumes_at_the_first_sample_of_the_step(tmp_path: Any) -> None:
    first, second, resumed = run_ranks(saved_in_a_step, 1, str(tmp_path))[0]
    assert first[1] == first[0]
    assert second[1][: 2 * MICRO] == second[0][4 * MICRO :]
    assert resumed[0] == second[1][: 3 * MICRO] == resumed[1]


def saved_in_a_step_of_an_earlier_loop(folder: str) -> tuple[int, list[list[int]]]:
    """Save after an epoch that ends within a step, and within the first step of a loop that follows an aborted loop."""
    engine = engine_for(0, accumulation=5)
    trained(engine, engine.training_dataloader)  # 24 batches
    engine.save_checkpoint(folder, tag="epoch")
    found = [trained(engine, islice(engine.training_dataloader, number))[1] for number in (6, 2)]
    engine.save_checkpoint(folder, tag="loop")
    engine.destroy()
    other = engine_for(50, accumulation=5)
    other.load_checkpoint(folder, tag="epoch")
    count = len(list(other.training_dataloader))
    other.load_checkpoint(folder, tag="loop")
    found.append(trained(other, islice(other.training_dataloader, 2))[1])
    other.destroy()
    return count, found


def test_save_within_a_step_resumes_in_the_current_epoch(tmp_path: Any) -> None:
    count, (left, second, resumed) = run_ranks(saved_in_a_step_of_an_earlier_loop, 1, str(tmp_path))[0]
    assert count == SAMPLES // MICRO
    assert resumed == second == left[: 2 * MICRO]


class Fewer(Rows):
    """Dataset of another length."""

    def __len__(self) -> int:
        return SAMPLES - 1


def onto_other_data(folder: str) -> dict[str, Any]:
    engine = engine_for(0)
    trained(engine, islice(epochs(engine), 2))
    engine.save_checkpoint(folder)
    engine.destroy()
    other = engine_for(50)
    other.training_dataloader = None
    loader = other.deepspeed_io(Fewer())
    assert other.training_dataloader is loader
    assert other.deepspeed_io(Rows(), route="eval", batch_size=3) is not other.training_dataloader
    text = ""
    try:
        other.load_checkpoint(folder)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    steps = other.global_steps
    other.load_checkpoint(folder, load_data_position=False)
    result = len(list(other.training_dataloader))
    other.destroy()
    return {"said": text, "steps": steps, "found": result}


def test_other_data_is_refused_by_default(tmp_path: Any) -> None:
    for result in run_ranks(onto_other_data, 2, str(tmp_path)):
        assert result["said"].startswith("CheckpointError: ")
        assert "failed on ranks 0, 1: cannot resume the data order: the dataset had 48 samples" in result["said"]
        assert "load_data_position=False" in result["said"] and result["steps"] == 0
        assert result["found"] == 12


def uneven_positions(folder: str) -> list[str]:
    """Return the warnings of a save for which one rank has taken more batches than the other."""
    engine = engine_for(0)
    list(islice(engine.training_dataloader, 1 + dist.get_rank()))
    with listening() as text:
        engine.save_checkpoint(folder)
    engine.destroy()
    return [line for line in text if "different data positions" in line]


def test_ranks_at_different_positions_cause_a_warning(tmp_path: Any) -> None:
    text = run_ranks(uneven_positions, 2, str(tmp_path))[0]
    assert len(text) == 1 and "rank 0: {'epoch': 0, 'consumed': 4" in text[0] and "'consumed': 8" in text[0]


class Unreadable(list[int]):
    """Loader of another library, whose state can be read on the first rank only."""

    def state_dict(self) -> dict[str, int]:
        if dist.get_rank():
            raise RuntimeError("the workers have ended")
        return {"at": 0}


def save_without_a_position(folder: str) -> str:
    import windlass
    from windlass.data.resumable_loaders import CyclingLoader

    engine = engine_for(0)
    engine.training_dataloader = CyclingLoader(Unreadable())
    with pytest.raises(windlass.WindlassError) as refused:
        engine.save_checkpoint(folder)
    engine.destroy()
    return str(refused.value)


def test_a_position_that_one_rank_cannot_read_stops_the_save_on_all(tmp_path: Any) -> None:
    for text in run_ranks(save_without_a_position, 2, str(tmp_path), timeout=20.0):
        assert "rank 1" in text and "the workers have ended" in text
