"""The training loop of one rank: steps, held-out measurements, checkpoints."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import torch
import torch.distributed as dist

from windlass.base.errors import CheckpointError, LossError
from windlass.base.log import logger
from windlass.cli.training.agreement import Verdict, agree
from windlass.cli.training.evaluation import bits_per_byte
from windlass.cli.training.interrupt import Interrupt
from windlass.cli.training.metrics import Metrics, Row, perplexity
from windlass.cli.training.plan import Plan
from windlass.cli.training.progress import Display
from windlass.data.held_out import HeldOut
from windlass.data.loader import SequenceLoader
from windlass.observe.memory import device_memory, rss

_PRIME = 1_000_003
_SEEDS = 2**63  # a seed of today's date, times two primes, is more than torch takes


class Trainer:
    """Takes an engine from where it stands to `plan.steps`.

    Args:
        loader: of this rank; its state travels in the checkpoint, so that a resume goes on at the exact sample.
    """

    def __init__(
        self, engine: Any, loader: SequenceLoader, held_out: HeldOut, plan: Plan, interrupt: Interrupt
    ) -> None:
        self.engine, self.loader, self.held_out, self.plan = engine, loader, held_out, plan
        self.interrupt = interrupt
        self.rank = dist.get_rank()
        self.step = 0
        self.bits_before: float | None = None
        self.bits_now: float | None = None
        self._saved_at: int | None = None
        self._measured_at: int | None = None

    def run(self) -> bool:
        """Trains to the last step, or until some rank is asked to stop; saves in both cases. True when all is done."""
        if self.bits_before is None:
            self.bits_before = self._measure()
        with closing(Reporter(self)) as reporter:
            stopped = False
            while self.step < self.plan.steps and not stopped:
                stopped = self._advance(reporter)
                if self.plan.save_every and self.step % self.plan.save_every == 0:
                    self.save()
            if not stopped and self._measured_at != self.step:
                reporter.measured(self._measure())
        self.save()
        return not stopped

    def save(self) -> None:
        """Writes a checkpoint of this step, once. Collective.

        Raises:
            CheckpointError: it could not be written.
        """
        if self._saved_at == self.step:
            return
        state = {"step": self.step, "bits_before": self.bits_before, "loader": self.loader.state_dict()}
        try:
            self.engine.save_checkpoint(str(self.plan.checkpoints), tag=f"step{self.step}", client_state=state)
        except OSError as error:
            raise CheckpointError(
                f"cannot write the checkpoint of step {self.step} to {self.plan.checkpoints}: "
                f"{error.strerror or error}; free some space or choose another --out"
            ) from error
        self._saved_at = self.step

    def load(self) -> None:
        """Goes on from the latest checkpoint. Collective.

        Raises:
            CheckpointError: there is none.
        """
        path, state = self.engine.load_checkpoint(str(self.plan.checkpoints))
        if path is None or "loader" not in (state or {}):
            raise CheckpointError(
                f"nothing to resume: no checkpoint of `windlass train` in {self.plan.checkpoints}; "
                "check --out, or leave out --resume"
            )
        self.loader.load_state_dict(state["loader"])
        self.step, self.bits_before = int(state["step"]), state["bits_before"]
        self._saved_at = self.step

    def _advance(self, reporter: Reporter) -> bool:
        """One optimizer step; True if the ranks agreed to stop after it."""
        started = time.monotonic()
        # Seeded by the step, dropout needs no random state in the checkpoint to repeat itself after a resume.
        _, reader = self.engine.readers
        torch.manual_seed(((self.plan.seed * _PRIME + self.step) * _PRIME + reader) % _SEEDS)
        if self.engine.mesh.pp.size > 1:
            loss = self.engine.train_batch(self._micro_batches())
            verdict = agree([loss], self.interrupt.wanted)
        else:
            verdict = self._micro_steps()
        self.step += 1
        norm = self.engine.grad_norm()
        reporter.stepped(verdict.loss, norm, time.monotonic() - started)
        if not verdict.stop and self.plan.eval_every and self.step % self.plan.eval_every == 0:
            reporter.measured(self._measure())
        return verdict.stop

    def _micro_batches(self) -> Iterator[dict[str, torch.Tensor]]:
        while True:
            yield {name: ids.to(self.engine.device) for name, ids in next(self.loader).items()}

    def _micro_steps(self) -> Verdict:
        losses: list[torch.Tensor] = []
        batches = self._micro_batches()
        accumulation = self.engine.gradient_accumulation_steps()
        for micro in range(accumulation):
            loss = self.engine(**next(batches)).loss
            self.engine.backward(loss)
            losses.append(loss.detach())
            if micro == accumulation - 1:
                verdict = agree(losses, self.interrupt.wanted)
                self._require_finite(verdict.bad)
            self.engine.step()
        return verdict

    def _measure(self) -> float:
        micro = self.engine.train_micro_batch_size_per_gpu()
        self._measured_at = self.step
        self.engine.finish_update()  # what is measured is what would be saved
        self.bits_now = bits_per_byte(self.engine, self.held_out, micro)
        return self.bits_now

    def _require_finite(self, bad: tuple[int, int] | None) -> None:
        if bad is None or self.engine.fp16_enabled():  # under fp16 the engine skips the step and lowers the loss scale
            return
        rank, micro = bad
        raise LossError(
            f"the loss is not finite at step {self.step + 1} (rank {rank}, micro-batch {micro + 1}); the weights were "
            "not changed by it. Try a lower learning rate, a longer warm-up or a smaller gradient_clipping, and go on "
            "with --resume from the last checkpoint; --debug shows more"
        )


class Reporter:
    """What rank 0 shows and writes down about a run; silent on the others."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        plan, engine = trainer.plan, trainer.engine
        tokens = engine.train_batch_size() * plan.seq_len
        self._tokens, self._speed = tokens, 0.0
        self._metrics: Metrics | None = None
        self._display: Display | None = None
        if trainer.rank != 0:
            return
        board = plan.config.get("tensorboard", {}).get("enabled", False)
        self._metrics = Metrics(plan.metrics, None if board else plan.events, trainer.step)
        self._display = Display(plan.steps, trainer.step)
        if trainer.step == 0:
            self.measured(trainer.bits_before)

    def stepped(self, loss: float, norm: float | None, seconds: float) -> None:
        """One optimizer step was done in so many seconds."""
        if self._metrics is None or self._display is None:
            return
        trainer = self._trainer
        speed = self._tokens / seconds
        self._speed = 0.9 * self._speed + 0.1 * speed if self._speed else speed
        device = device_memory(trainer.engine.device)
        row = Row(
            step=trainer.step,
            loss=loss,
            perplexity=perplexity(loss),
            learning_rate=float(trainer.engine.get_lr()[0]),
            gradient_norm=None if norm is None else float(norm),
            tokens_per_second=self._speed,
            memory_bytes=rss() if device is None else device.allocated,
        )
        self._metrics.add(row)
        self._display.step(row)

    def measured(self, bits: float | None) -> None:
        """The held-out text was measured at the step that was just done."""
        if self._metrics is None or self._display is None or bits is None:
            return
        self._metrics.add(Row(step=self._trainer.step, held_out_bits_per_byte=bits))
        self._display.note(f"step {self._trainer.step}: held-out bits per byte {bits:.3f}")

    def close(self) -> None:
        """Ends the display and the files."""
        if self._metrics is not None:
            self._metrics.close()
        if self._display is not None:
            self._display.close()
        if self._trainer.interrupt.wanted and self._trainer.rank == 0:
            logger.info("stopping after step %d; saving", self._trainer.step)
