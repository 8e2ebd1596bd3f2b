"""The micro-batches of a step of a pipeline, all of them before anything begins, the same on every stage."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from windlass.base.errors import DataError
from windlass.comm.mesh import Mesh
from windlass.engine.input_consistency import InputConsistencyCheck, input_digest


class MicroBatchReader:
    """Reads them from what it was last given.

    Args:
        mesh: says which ranks compute the same samples.

    Attributes:
        change: what is done to each.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._source: Iterator[Any] | None = None
        self._seen_purposes: set[str] = set()
        self.transform: Callable[[Any], Any] | None = None

    def set_source(self, data: Iterable[Any]) -> None:
        """Read from here from now on."""
        self._source = iter(data)

    def read(self, count: int, data: Iterable[Any] | None = None, *, purpose: str, loader: Any = None) -> list[Any]:
        """The next micro-batches.

        Args:
            count: how many.
            data: whence this time; by default what was taken.
            what: is made of them.
            loader: taken, again and again, if nothing was.

        Raises:
            StopIteration: there are no more.
            DataError: there are too few, or nobody said whence.
        """
        if data is None and self._source is None and loader is not None:
            self._source = repeat_forever(loader)
        source = iter(data) if data is not None else self._source
        if source is None:
            raise DataError(
                f"{purpose} has nothing to read: pass it an iterator of micro-batches, on every rank of the pipeline, or "
                "pass training_data to initialize"
            )
        found = list(itertools.islice(source, count))
        if not found:
            raise StopIteration
        if len(found) < count:
            raise DataError(
                f"{purpose} needs {count} micro-batches (gradient_accumulation_steps), and its iterator ended after "
                f"{len(found)}; leave the last ones out, or repeat the loader"
            )
        return found if self.transform is None else [self.transform(batch) for batch in found]

    def is_first_use(self, purpose: str) -> bool:
        """Whether `what` is made for the first time; True once for each."""
        first = purpose not in self._seen_purposes
        self._seen_purposes.add(purpose)
        return first

    def check_same_on_peers(self, batches: list[Any]) -> None:
        """Compare micro-batches over the ranks that compute the same samples. Collective over them.

        Raises:
            DataError: others read other ones.
        """
        InputConsistencyCheck(self._mesh).check(batches)
        axis = self._mesh.pp
        heard = axis.all_gather_object(input_digest(batches))
        other = next((place for place, said in enumerate(heard) if said != heard[0]), None)
        if other is not None:
            raise DataError(
                f"ranks {axis.group.ranks[0]} and {axis.group.ranks[other]} are stages of one pipeline and were given "
                f"different micro-batches; of {self._mesh.grid.data_loading_size} readers each has to read for all its stages: "
                "make the sampler with num_replicas, rank = engine.readers, or pass training_data to initialize"
            )


def repeat_forever(loader: Iterable[Any]) -> Iterator[Any]:
    """The loader's batches, epoch after epoch."""
    while True:
        empty = True
        for batch in loader:
            empty = False
            yield batch
        if empty:
            return
