"""Laws: codecs and their collectives give the bits of a CPU on CUDA, and compressed optimizers train as on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests import oracle
from tests.dist.equivalence_runs import specimen, whole_params
from tests.dist.harness import run_ranks
from tests.gpu.test_one_gpu import _world, on_cuda  # noqa: F401 - a fixture
from tests.models import ROWS, Place
from tests.oracle import relative_error
from tests.unit.comm.test_codecs_on_devices import CPU, NAMES, NUMELS, is_equal, messages, two_phases, zeropp

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

CUDA = torch.device("cuda")


@pytest.mark.parametrize("name", NAMES)
def test_messages_of_cuda_are_those_of_a_cpu(name: str) -> None:
    for numel in NUMELS:
        found = messages(CUDA, name, numel)
        assert all(one.is_cuda for one in found)
        pairs = list(zip([one.to(CPU) for one in found], messages(CPU, name, numel), strict=True))
        if name == "lowrank":  # products of matrices add in another order, and factors may have other signs
            decoded = [pair for pair in pairs if pair[0].dtype != torch.uint8]
            for one, other in decoded:
                torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-2 * float(other.abs().max()))
        else:
            assert all(is_equal(*pair) for pair in pairs), numel


@pytest.mark.parametrize("name", ["sign", "int8", "int4", "topk"])
def test_a_two_phase_all_reduce_of_cuda_is_that_of_a_cpu(name: str) -> None:
    found = [one.to(CPU) for one in two_phases(CUDA, name)]
    assert all(map(is_equal, found, two_phases(CPU, name)))


@pytest.mark.parametrize("name", ["identity", "int8", "int4", "fp8"])
def test_quantized_messages_of_cuda_are_those_of_a_cpu(name: str) -> None:
    for one, other in zip(zeropp(CUDA, name), zeropp(CPU, name), strict=True):
        torch.testing.assert_close(one.to(CPU), other, rtol=1e-6, atol=1e-6)  # CUDA may add products in one rounding


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "OneBitAdam": {"lr": 1e-2, "freeze_step": 2},
    "ZeroOneAdam": {"lr": 1e-2, "var_freeze_step": 2},
    "OneBitLamb": {"lr": 1e-2, "freeze_step": 2},
}


def trained(optimizer: str, *, cuda: bool) -> dict[str, torch.Tensor]:
    """Return the parameters after four steps, two of them in the compressed phase."""
    import windlass

    subject = specimen("four_blocks")
    model = oracle.build(subject)
    if cuda:
        subject, model = on_cuda(subject), model.cuda()
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "optimizer": {"type": optimizer, "params": OPTIMIZERS[optimizer]},
        "zero_optimization": {"stage": 0},
    }
    engine = windlass.initialize(model=model, config=config)[0]
    for step in range(4):
        subject.train(engine, subject.batch(Place(step, 0, 0)), engine.backward)
        engine.step()
    found = {name: value.cpu() for name, value in whole_params(engine.module).items()}
    engine.destroy()
    return found


def trained_on_cpu(optimizer: str) -> dict[str, torch.Tensor]:
    return trained(optimizer, cuda=False)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_compressed_optimizer_trains_as_on_a_cpu(optimizer: str) -> None:
    """A group of one rank sends nothing, so that no code can be rounded another way."""
    (expected,) = run_ranks(trained_on_cpu, 1, optimizer, env={"CUDA_VISIBLE_DEVICES": ""})
    error, where = relative_error(trained(optimizer, cuda=True), expected)
    assert error < 1e-4, f"{where} is off by {error:.2e}"
