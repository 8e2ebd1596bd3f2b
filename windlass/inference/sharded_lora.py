"""LoRA adapters of a model that is sharded over ranks: the leader's side."""

from __future__ import annotations

from pathlib import Path

from windlass.base.errors import ModelError
from windlass.inference.lora import LoraAdapters
from windlass.inference.rank_channel import RankChannel, RankCommand


class ShardedLoraAdapters:
    """`AdapterStore` that loads and unloads LoRA adapters on all ranks of a sharded model.

    Args:
        adapters: this rank's parts of the adapters.
        channel: channel to the other ranks, each of which runs a `RankWorker`.
    """

    def __init__(self, adapters: LoraAdapters, channel: RankChannel) -> None:
        self._adapters, self._channel = adapters, channel

    @property
    def names(self) -> list[str]:
        """Names of the loaded adapters."""
        return self._adapters.names

    def add(self, name: str, directory: str | Path) -> None:
        """Load an adapter of peft; see `LoraAdapters.add`. The other ranks need no access to the directory."""
        weights = self._adapters.read(name, directory)
        problem = None
        with self._channel.guard():
            self._channel.send(RankCommand.CALL, ("add_adapter", (name, weights)))
            try:
                self._adapters.add_weights(name, weights)
            except ModelError as error:  # all ranks raise the same error, so the channel stays usable
                problem = error
        if problem is not None:
            raise problem

    def remove(self, name: str) -> None:
        """Unload an adapter; see `LoraAdapters.remove`."""
        self.check_name(name)
        with self._channel.guard():
            self._channel.send(RankCommand.CALL, ("remove_adapter", (name,)))
            self._adapters.remove(name)

    def check_name(self, name: str) -> None:
        """Raise a RequestError if there is no adapter of this name."""
        self._adapters.check_name(name)

    def cache_salt(self, name: str) -> bytes:
        """Return bytes that separate the cached prefixes of this adapter from those of other adapters."""
        return self._adapters.cache_salt(name)
