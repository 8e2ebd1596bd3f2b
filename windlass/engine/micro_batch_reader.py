"""Reading of all micro-batches of a pipeline step before the step begins. Every stage reads the same micro-batches."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from windlass.base.errors import DataError
from windlass.comm.mesh import Mesh
from windlass.engine.input_consistency import InputConsistencyCheck, input_digest


class MicroBatchReader:
    """Reader of micro-batches from the source that was set last.

    Args:
        mesh: the mesh that defines which ranks compute the same samples.

    Attributes:
        transform: function applied to each micro-batch; None: micro-batches are returned as they were read.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._source: Iterator[Any] | None = None
        self._seen_purposes: set[str] = set()
        self.transform: Callable[[Any], Any] | None = None

    def set_source(self, data: Iterable[Any]) -> None:
        """Read from `data` in later calls."""
        self._source = iter(data)

    def read(self, count: int, data: Iterable[Any] | None = None, *, purpose: str, loader: Any = None) -> list[Any]:
        """Return the next micro-batches.

        Args:
            count: number of micro-batches.
            data: source for this call; by default the source that was set.
            purpose: name of the calling method, for messages.
            loader: data loader that becomes the source, repeated forever, if no source was set.

        Raises:
            StopIteration: there are no more micro-batches.
            DataError: fewer than `count` micro-batches are left, or there is no source.
        """
        if data is None and self._source is None and loader is not None:
            self._source = repeat_forever(loader)
        source = iter(data) if data is not None else self._source
        if source is None:
            raise DataError(
                f"{purpose} has nothing to read: pass it an iterator of micro-batches on every rank of the pipeline, "
                "or pass training_data to initialize"
            )
        micro_batches = list(itertools.islice(source, count))
        if not micro_batches:
            raise StopIteration
        if len(micro_batches) < count:
            raise DataError(
                f"{purpose} needs {count} micro-batches (gradient_accumulation_steps), and its iterator ended after "
                f"{len(micro_batches)}; drop the last ones, or repeat the loader"
            )
        return micro_batches if self.transform is None else [self.transform(batch) for batch in micro_batches]

    def is_first_use(self, purpose: str) -> bool:
        """Return True at the first call with this `purpose`, and False later."""
        first = purpose not in self._seen_purposes
        self._seen_purposes.add(purpose)
        return first

    def check_same_on_peers(self, batches: list[Any]) -> None:
        """Compare micro-batches with those of the ranks that compute the same samples. Collective over these ranks.

        Raises:
            DataError: another rank read different micro-batches.
        """
        InputConsistencyCheck(self._mesh).check(batches)
        axis = self._mesh.pp
        digests = axis.all_gather_object(input_digest(batches))
        other = next((place for place, digest in enumerate(digests) if digest != digests[0]), None)
        if other is not None:
            raise DataError(
                f"ranks {axis.group.ranks[0]} and {axis.group.ranks[other]} are stages of one pipeline and got "
                "different micro-batches. Make the sampler with num_replicas, rank = engine.data_loading_ranks (here "
                f"num_replicas is {self._mesh.grid.data_loading_size}), or pass training_data to initialize"
            )


def repeat_forever(loader: Iterable[Any]) -> Iterator[Any]:
    """Yield the loader's batches, epoch after epoch. Stop if an epoch is empty."""
    while True:
        empty = True
        for batch in loader:
            empty = False
            yield batch
        if empty:
            return
