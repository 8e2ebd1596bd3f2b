"""Training loop of one rank: steps, held-out evaluations, checkpoints."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from windlass.base.errors import CheckpointError, LossError
from windlass.base.log import logger
from windlass.cli.training.loss_agreement import LossAgreement, all_reduce_losses, all_reduce_sum
from windlass.cli.training.progress_display import ProgressDisplay
from windlass.cli.training.run_metrics import MetricsLog, MetricsRow, perplexity
from windlass.cli.training.stop_signals import StopSignals
from windlass.cli.training.training_plan import TrainingPlan
from windlass.data.held_out import IGNORE_INDEX, HeldOutSet
from windlass.data.resumable_loaders import SequenceLoader
from windlass.observe.memory_usage import device_memory, resident_bytes


def held_out_bits_per_byte(engine: Any, held_out: HeldOutSet, micro_batch: int) -> float:
    """Return the negative log likelihood of the held-out text in bits, divided by its bytes. Collective.

    The figure is comparable between tokenizers, unlike a loss or a perplexity per token.
    """
    device, (readers, reader) = engine.device, engine.data_loading_ranks
    nats = torch.zeros((), dtype=torch.float64)
    training = engine.module.training
    engine.eval()
    with torch.no_grad():
        for inputs, labels in held_out.batches(micro_batch, reader, readers):
            logits = _evaluate_logits(engine, torch.from_numpy(inputs).to(device))
            if logits is None:  # only the last stage of a pipeline has logits
                continue
            targets = torch.from_numpy(labels).to(device)
            loss = F.cross_entropy(
                logits.float().flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=IGNORE_INDEX
            )
            nats += loss.double().cpu()
    engine.train(training)
    together = engine.mesh.grid.size("sp", "tp")  # ranks along these axes measured the same samples
    return held_out.bits_per_byte(all_reduce_sum([float(nats)], device)[0] / together)


def _evaluate_logits(engine: Any, ids: torch.Tensor) -> torch.Tensor | None:
    """Return the logits `[micro, seq, vocabulary]`; None on all pipeline stages but the last."""
    if engine.mesh.pp.size == 1:
        logits: torch.Tensor = engine(input_ids=ids).logits
        return logits
    found = engine.eval_batch(iter([{"input_ids": ids}]), compute_loss=False, num_micro_batches=1)
    return None if found is None else found[0]


_SEED_FACTOR = 1_000_003
_SEED_MODULUS = 2**63  # torch's limit of seeds; `seed * _SEED_FACTOR**2` exceeds it, e.g. for 20240131


class TrainLoop:
    """Training of an engine from its current step to `plan.steps`.

    Args:
        loader: loader of this rank. Checkpoints contain its state, so that a resumed run continues at the exact sample.
    """

    def __init__(
        self, engine: Any, loader: SequenceLoader, held_out: HeldOutSet, plan: TrainingPlan, stop_signals: StopSignals
    ) -> None:
        self.engine, self.loader, self.held_out, self.plan = engine, loader, held_out, plan
        self.stop_signals = stop_signals
        self.rank = dist.get_rank()
        self.step = 0
        self.initial_bits_per_byte: float | None = None
        self.current_bits_per_byte: float | None = None
        self._last_saved_step: int | None = None
        self._last_measured_step: int | None = None

    def run(self) -> bool:
        """Train to the last step or until a stop request on some rank, then save. Return False after a stop request.
        Collective."""
        if self.initial_bits_per_byte is None:
            self.initial_bits_per_byte = self._evaluate_held_out()
        with closing(TrainingReporter(self)) as reporter:
            stopped = False
            while self.step < self.plan.steps and not stopped:
                stopped = self._train_step(reporter)
                if self.plan.save_every and self.step % self.plan.save_every == 0:
                    self.save()
            if not stopped and self._last_measured_step != self.step:
                reporter.report_held_out(self._evaluate_held_out())
        self.save()
        return not stopped

    def save(self) -> None:
        """Write a checkpoint of the current step, unless this step was saved or loaded last. Collective.

        Raises:
            CheckpointError: the checkpoint cannot be written.
        """
        if self._last_saved_step == self.step:
            return
        state = {"step": self.step, "bits_before": self.initial_bits_per_byte, "loader": self.loader.state_dict()}
        try:
            self.engine.save_checkpoint(str(self.plan.checkpoint_folder), tag=f"step{self.step}", client_state=state)
        except OSError as error:
            raise CheckpointError(
                f"cannot write the checkpoint of step {self.step} to {self.plan.checkpoint_folder}: "
                f"{error.strerror or error}; free some space or choose another --out"
            ) from error
        self._last_saved_step = self.step

    def load(self) -> None:
        """Load the latest checkpoint. Collective.

        Raises:
            CheckpointError: there is no checkpoint of `windlass train`.
        """
        path, state = self.engine.load_checkpoint(str(self.plan.checkpoint_folder))
        if path is None or "loader" not in (state or {}):
            raise CheckpointError(
                f"nothing to resume: no checkpoint of `windlass train` in {self.plan.checkpoint_folder}; "
                "check --out, or leave out --resume"
            )
        self.loader.load_state_dict(state["loader"])
        self.step, self.initial_bits_per_byte = int(state["step"]), state["bits_before"]
        self._last_saved_step = self.step

    def _train_step(self, reporter: TrainingReporter) -> bool:
        """Run one optimizer step. Return True if some rank received a stop request."""
        started = time.monotonic()
        # Each step has its own fixed seed, so dropout is the same after a resume, though checkpoints have no random
        # state.
        _, reader = self.engine.data_loading_ranks
        torch.manual_seed(((self.plan.seed * _SEED_FACTOR + self.step) * _SEED_FACTOR + reader) % _SEED_MODULUS)
        if self.engine.mesh.pp.size > 1:
            loss = self.engine.train_batch(self._micro_batches())
            agreement = all_reduce_losses([loss], self.stop_signals.stop_requested)
        else:
            agreement = self._train_micro_batches()
        self.step += 1
        norm = self.engine.grad_norm()
        reporter.report_step(agreement.loss, norm, time.monotonic() - started)
        if not agreement.stop_requested and self.plan.eval_every and self.step % self.plan.eval_every == 0:
            reporter.report_held_out(self._evaluate_held_out())
        return agreement.stop_requested

    def _micro_batches(self) -> Iterator[dict[str, torch.Tensor]]:
        while True:
            yield {name: ids.to(self.engine.device) for name, ids in next(self.loader).items()}

    def _train_micro_batches(self) -> LossAgreement:
        losses: list[torch.Tensor] = []
        batches = self._micro_batches()
        accumulation = self.engine.gradient_accumulation_steps()
        for micro in range(accumulation):
            loss = self.engine(**next(batches)).loss
            self.engine.backward(loss)
            losses.append(loss.detach())
            if micro == accumulation - 1:
                agreement = all_reduce_losses(losses, self.stop_signals.stop_requested)
                self._require_finite(agreement.first_non_finite)
            self.engine.step()
        return agreement

    def _evaluate_held_out(self) -> float:
        micro = self.engine.train_micro_batch_size_per_gpu()
        self._last_measured_step = self.step
        # a delayed update is applied first, so that the measured weights are those a checkpoint would contain
        self.engine.finish_update()
        self.current_bits_per_byte = held_out_bits_per_byte(self.engine, self.held_out, micro)
        return self.current_bits_per_byte

    def _require_finite(self, first_non_finite: tuple[int, int] | None) -> None:
        if (
            first_non_finite is None or self.engine.fp16_enabled()
        ):  # under fp16 the engine skips the step and lowers the loss scale
            return
        rank, micro = first_non_finite
        raise LossError(
            f"the loss is not finite at step {self.step + 1} (rank {rank}, micro-batch {micro + 1}); this step did "
            "not change the weights. Try a lower learning rate, a longer warm-up or a smaller gradient_clipping, and "
            "continue with --resume from the last checkpoint; --debug shows more"
        )


class TrainingReporter:
    """Display and metrics of a run on rank 0; does nothing on other ranks."""

    def __init__(self, trainer: TrainLoop) -> None:
        self._trainer = trainer
        plan, engine = trainer.plan, trainer.engine
        tokens = engine.train_batch_size() * plan.seq_len
        self._tokens_per_step, self._tokens_per_second = tokens, 0.0
        self._metrics: MetricsLog | None = None
        self._display: ProgressDisplay | None = None
        if trainer.rank != 0:
            return
        board = plan.config.get("tensorboard", {}).get("enabled", False)
        self._metrics = MetricsLog(plan.metrics_file, None if board else plan.tensorboard_folder, trainer.step)
        self._display = ProgressDisplay(plan.steps, trainer.step)
        if trainer.step == 0:
            self.report_held_out(trainer.initial_bits_per_byte)

    def report_step(self, loss: float, norm: float | None, seconds: float) -> None:
        """Record one optimizer step that took `seconds`."""
        if self._metrics is None or self._display is None:
            return
        trainer = self._trainer
        speed = self._tokens_per_step / seconds
        self._tokens_per_second = 0.9 * self._tokens_per_second + 0.1 * speed if self._tokens_per_second else speed
        device = device_memory(trainer.engine.device)
        row = MetricsRow(
            step=trainer.step,
            loss=loss,
            perplexity=perplexity(loss),
            learning_rate=float(trainer.engine.get_lr()[0]),
            gradient_norm=None if norm is None else float(norm),
            tokens_per_second=self._tokens_per_second,
            memory_bytes=resident_bytes() if device is None else device.allocated,
        )
        self._metrics.append(row)
        self._display.show_step(row)

    def report_held_out(self, bits: float | None) -> None:
        """Record a held-out evaluation at the current step."""
        if self._metrics is None or self._display is None or bits is None:
            return
        self._metrics.append(MetricsRow(step=self._trainer.step, held_out_bits_per_byte=bits))
        self._display.show_note(f"step {self._trainer.step}: held-out bits per byte {bits:.3f}")

    def close(self) -> None:
        """Close the display and the metrics file."""
        if self._metrics is not None:
            self._metrics.close()
        if self._display is not None:
            self._display.close()
        if self._trainer.stop_signals.stop_requested and self._trainer.rank == 0:
            logger.info("stopping after step %d; saving", self._trainer.step)
