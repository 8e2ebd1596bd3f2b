"""Tests of a parameter of 2^31 + 1 elements: no count, offset or length overflows 32 bits.

Run the slow tests alone: they need 9 GB of memory and 14 GB of disk; training needs 18 GiB and 16 GiB.
"""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.dist.harness import run_ranks
from tests.unit.kernels.rule_cases import RULES
from windlass.checkpoint import read_full
from windlass.checkpoint.fragment_boxes import boxes_of_range, flat_start
from windlass.checkpoint.safetensors_export import export_safetensors
from windlass.checkpoint.torch_file_writer import write_torch_file
from windlass.comm.ordered_sum import sum_of_squares
from windlass.kernels import keyed_sum
from windlass.kernels.kernel_dispatch import apply_updates
from windlass.kernels.update_tensors import UpdateTensors
from windlass.storage import DiskTier, free_memory
from windlass.zero.core.unit_layout import layout_of

NUMEL = (1 << 31) + 1
SPOTS = [0, 1, (1 << 30) + 3, (1 << 31) - 1, 1 << 31]


@pytest.mark.parametrize("ranks", [1, 2, 3, 64])
def test_large_parameter_is_split_at_one_shard_boundary(ranks: int) -> None:
    layout = layout_of([(7,), (NUMEL,), (3, 5), (1 << 16, 1 << 16)], ranks)
    result = [0] * 4
    for rank in range(ranks):
        start, stop = layout.shard_range(rank, ranks)
        for piece in layout.pieces(start, stop):
            assert piece.start == result[piece.index] and 0 <= piece.offset <= stop - start - piece.numel
            result[piece.index] = piece.stop
    assert result == [7, NUMEL, 15, 1 << 32]


def test_boxes_beyond_32_bits() -> None:
    shape = ((1 << 16) + 1, 1 << 16)  # 2^32 + 2^16 elements
    first, last = (1 << 31) - 5, (1 << 32) + 77
    at = first
    for box in boxes_of_range(shape, first, last):
        assert flat_start(shape, box.offsets) == at
        at += math.prod(box.sizes)
    assert at == last


@pytest.mark.slow
def test_kernels_and_disk_reach_the_last_element(tmp_path: Path) -> None:
    parameter = torch.zeros(NUMEL, dtype=torch.bfloat16)
    gradient = torch.zeros(NUMEL, dtype=torch.bfloat16)  # zero pages: only those written below take memory
    for number, spot in enumerate(SPOTS):
        parameter[spot] = 2.0 + number
    assert sum_of_squares(parameter).item() == sum((2.0 + n) ** 2 for n in range(len(SPOTS)))
    words = parameter.view(torch.int16)
    middle = (1 << 31) - 12_345
    total = keyed_sum(words[:middle], 0, 5) + keyed_sum(words[middle:], middle, 5)
    assert keyed_sum(words, 0, 5) == total != 0
    with DiskTier([tmp_path]) as tier:
        extent = tier.allocate(parameter.nbytes, "a large parameter")
        tier.write(extent, 0, parameter).wait()
        back = torch.empty(1 << 20, dtype=torch.bfloat16)
        for spot in SPOTS:
            start = min(max(spot - 100, 0), NUMEL - back.numel())
            tier.read(extent, 2 * start, back).wait()
            assert torch.equal(back, parameter[start : start + back.numel()])
    rule = RULES["sgd"](1)
    before = parameter[SPOTS].clone()
    expected = UpdateTensors(before.clone(), torch.zeros(len(SPOTS), dtype=torch.bfloat16))
    expected.gradient.fill_(0.5)
    for spot in SPOTS:
        gradient[spot] = 0.5
    apply_updates(rule, [UpdateTensors(parameter, gradient)])
    apply_updates(rule, [expected])
    assert torch.equal(parameter[SPOTS], expected.parameter) and not torch.equal(expected.parameter, before)


class Large(nn.Module):
    """Model that uses a few elements of a frozen parameter of `NUMEL` elements."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Parameter(torch.zeros(NUMEL, dtype=torch.bfloat16), requires_grad=False)
        self.after = nn.Linear(len(SPOTS), 1)
        with torch.no_grad():
            self.large[SPOTS] = torch.arange(1.0, len(SPOTS) + 1).bfloat16()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(x * self.large[SPOTS].float()).mean()


def saved_and_loaded(folder: str) -> list[float]:
    """Save the model, zero it, and load it. Return the used elements."""
    import windlass

    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": 1},
    }
    engine = windlass.initialize(model=Large(), config=config)[0]
    engine.backward(engine(torch.ones(2, len(SPOTS))))
    engine.step()
    engine.save_checkpoint(folder, tag="t", exclude_frozen_parameters=False)
    with torch.no_grad():
        engine.module.large.zero_()
    engine.load_checkpoint(folder, tag="t")
    result: list[float] = engine.module.large[SPOTS].tolist()
    engine.destroy()
    return result


@pytest.mark.slow
def test_checkpoint_export_and_torch_file_reach_the_last_element(tmp_path: Path) -> None:
    from safetensors import safe_open

    expected = [float(number) for number in range(1, len(SPOTS) + 1)]
    assert run_ranks(saved_and_loaded, 1, str(tmp_path / "run"), timeout=900.0) == [expected]
    large = dict(read_full(tmp_path / "run", "t"))["param/large"]
    assert large.numel() == NUMEL and large[SPOTS].tolist() == expected
    export_safetensors(tmp_path / "run", tmp_path / "exported")
    with safe_open(tmp_path / "exported" / "model.safetensors", "pt") as file:
        part = file.get_slice("large")
        assert [part[spot : spot + 1].item() for spot in SPOTS] == expected
    write_torch_file(tmp_path / "large.pt", {"before": torch.ones(3), "large": large, "after": torch.ones(3)})
    back = torch.load(tmp_path / "large.pt", mmap=True, weights_only=True)
    assert back["large"][SPOTS].tolist() == expected and back["after"].tolist() == [1.0] * 3


class Trained(nn.Module):
    """Model with one trained parameter of `NUMEL` elements. The loss uses a few of them."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Parameter(torch.zeros(NUMEL, dtype=torch.bfloat16))
        with torch.no_grad():
            self.large[SPOTS] = first_values()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.large[SPOTS].float()).sum(-1).mean()


def first_values() -> torch.Tensor:
    return torch.arange(1.0, len(SPOTS) + 1).bfloat16()


def slopes(step: int) -> torch.Tensor:
    """Return the gradient of the used elements: different in each step, and exact in bf16."""
    return torch.tensor([1.0, -2.0, 3.0, -4.0, 5.0]) / (1 + 3 * step)


ADAMW = {"lr": 0.1, "betas": (0.5, 0.75), "weight_decay": 0.1}
STEPS = 2
ROOM = 18 << 30, 16 << 30  # bytes of memory and disk: three bf16 states on disk; values, gradients, buffers in memory


def trained(folder: str) -> tuple[list[float], int]:
    """Train with states on disk. Return the used elements, and the number of elements that are not 0."""
    import windlass

    disk = {"device": "nvme", "nvme_path": folder, "buffer_count": 2}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True},
        "optimizer": {"type": "AdamW", "params": ADAMW},
        "zero_optimization": {"stage": 1, "sub_group_size": 100_000_000, "offload_optimizer": disk},
    }
    engine = windlass.initialize(model=Trained(), config=config)[0]
    for step in range(STEPS):
        engine.backward(engine(slopes(step)[None]))
        engine.step()
    large = engine.module.large.detach()
    result = large[SPOTS].tolist(), sum(int(part.count_nonzero()) for part in large.split(1 << 26))
    engine.destroy()
    return result


@pytest.mark.slow
def test_steps_reach_the_last_element_and_no_other(tmp_path: Path) -> None:
    memory, disk = free_memory() or 0, shutil.disk_usage(tmp_path).free
    if memory < ROOM[0] or disk < ROOM[1]:
        room = f"{ROOM[0] >> 30} GiB of memory and {ROOM[1] >> 30} GiB at {tmp_path}"
        pytest.skip(f"a trained parameter of {NUMEL:,} elements needs {room}; free are {memory >> 30} and {disk >> 30}")
    parameter = nn.Parameter(first_values().float())
    optimizer = torch.optim.AdamW([parameter], **ADAMW)
    for step in range(STEPS):
        parameter.grad = slopes(step).bfloat16().float()
        optimizer.step()
    ((found, changed),) = run_ranks(trained, 1, str(tmp_path / "disk"), timeout=1800.0)
    assert changed == len(SPOTS)
    torch.testing.assert_close(torch.tensor(found), parameter.detach(), rtol=2.0**-7, atol=0.0)
    assert (torch.tensor(found) - first_values()).abs().min() > 0.05  # above 4, bf16 values are 0.03 apart
