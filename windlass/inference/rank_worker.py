"""Worker on each rank of a sharded model but the leader (the rank with the scheduler): it runs the leader's
commands."""

from __future__ import annotations

import contextlib
from typing import Any

from windlass.base.errors import CommunicationError, ModelError
from windlass.inference.engine_options import EngineOptions
from windlass.inference.lora import LoraAdapters
from windlass.inference.model_forward import own_modes
from windlass.inference.rank_channel import RankChannel, RankCommand
from windlass.inference.step_batch import ModelRunner


class RankWorker:
    """Worker that runs the leader's commands on this rank's part of a model; see [Note: inference ranks].

    Construction is collective, together with that of the leader's `ShardedRunner`.

    Args:
        runner: runner of this rank's part.
        channel: channel to the leader.
        options: options of the engine.
        tokenizer: tokenizer of transformers, or None.
        max_model_len: largest number of tokens of a sequence.
    """

    def __init__(
        self,
        runner: ModelRunner,
        channel: RankChannel,
        options: EngineOptions,
        *,
        tokenizer: Any,
        max_model_len: int,
    ) -> None:
        self._runner, self._channel, self.options = runner, channel, options
        channel.gather(runner.block_nbytes)  # collective; only the leader uses the result
        self.tokenizer, self.max_model_len = tokenizer, max_model_len
        self.closed = False

    @property
    def runner(self) -> ModelRunner:
        """Runner of this rank's part."""
        return self._runner

    def serve(self) -> None:
        """Run commands until the leader closes its engine.

        Raises:
            Exception: see `take_part`.
        """
        while not self.closed:
            self.take_part()

    def take_part(self) -> Any:
        """Run commands until the leader sends the result of a call, and return the result. Return None if the leader
        closes the engine first.

        Raises:
            PeerError: another rank failed.
            CommunicationError: the engine is closed already, or the ranks have failed before.
            Exception: the leader's call raised this error.
        """
        if self.closed:
            raise CommunicationError("the inference engine of these ranks is closed; load the model anew")
        while True:
            with self._channel.guard(), own_modes():
                command, value = self._channel.receive()
                if command is RankCommand.RUN:
                    self._runner.run(value)
                elif command is RankCommand.CALL:
                    self._call(*value)
            if command is RankCommand.CLOSE:
                self.closed = True
                self._runner.close()
                self._channel.end()
                return None
            if command is RankCommand.RESULT:
                result, error = value
                if error is not None:
                    raise error
                return result

    def close(self) -> None:
        """Run commands until the leader closes the engine. Do nothing if it is closed, or if the ranks have failed."""
        if not self.closed and not self._channel.failed:
            self.serve()

    def _call(self, method: Any, arguments: tuple[Any, ...]) -> None:
        if callable(method):
            method(self._runner.model, *arguments)
        elif method == "add_adapter":
            with contextlib.suppress(ModelError):  # raised on all ranks; the leader reports it
                self._adapters().add_weights(*arguments)
        elif method == "remove_adapter":
            self._adapters().remove(*arguments)
        elif method == "save_blocks":
            self._channel.gather(self._runner.save_blocks(*arguments))
        elif method == "restore_blocks":
            blocks, saved, counts = arguments
            first = sum(counts[: self._channel.index])
            self._runner.restore_blocks(blocks, saved[first : first + counts[self._channel.index]])
        else:
            getattr(self._runner, method)(*arguments)

    def _adapters(self) -> LoraAdapters:
        assert isinstance(self._runner.lora, LoraAdapters)  # only the leader's runner has `ShardedLoraAdapters`
        return self._runner.lora
