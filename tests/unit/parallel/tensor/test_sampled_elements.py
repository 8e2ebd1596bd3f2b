"""Tests of the elements that ranks compare."""

from __future__ import annotations

import pytest
import torch

from windlass.parallel.tensor.stack_sequence_sharding import sample_elements


@pytest.mark.parametrize("numel", [1, 63, 64, 1000, 1 << 25, 3 << 24])
def test_samples_are_from_the_first_to_the_last_element(numel: int) -> None:
    """Indices above 2^24 have no exact float32: the last one of 2^25 elements would be rounded beyond the end."""
    tensor = torch.arange(numel, dtype=torch.int32)
    samples = sample_elements(tensor)
    assert samples[0] == 0 and samples[-1] == numel - 1 and samples.unique().numel() == min(numel, 64)
    assert torch.equal(samples, samples.sort()[0])


def test_samples_of_a_view_are_in_its_own_order() -> None:
    tensor = torch.arange(12.0, requires_grad=True).view(3, 4).t()
    samples = sample_elements(tensor)
    assert not samples.requires_grad and torch.equal(samples.unique_consecutive(), tensor.detach().flatten())
