"""Program of each rank of a verification: `python -m windlass.verify.verification_rank JOB`."""

from __future__ import annotations

import json
import os
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from windlass.base.compute_device import local_device
from windlass.base.dtypes import parse_dtype
from windlass.base.errors import ConfigError
from windlass.config import Config
from windlass.engine.initialize_observer import InitializeObserver
from windlass.engine.training_engine import Engine
from windlass.launch.script_session import is_plain_end, record_script_failure, run_script
from windlass.verify.engine_verifier import EngineVerifier
from windlass.verify.independent_run import IndependentRun
from windlass.verify.reference_model import ReferenceModel
from windlass.verify.verification_job import VerificationJob
from windlass.zero import GatheredParameters
from windlass.zero.sharded_init import initial_shard
from windlass.zero.update.update_class import update_class


class VerificationFinished(SystemExit):
    """Exit of the script on all ranks, after enough steps were compared or a tensor deviated."""


class VerificationSession(InitializeObserver):
    """Verification of all engines with an optimizer. Ends after enough steps of the first one, or after a deviation."""

    def __init__(self, job: VerificationJob) -> None:
        self.job, self.config_override = job, job.config
        self.verifiers: list[EngineVerifier] = []
        self._reference: ReferenceModel | None = None
        self._independent_reference: ReferenceModel | None = None
        self._pending: tuple[torch.optim.Optimizer | None, Config | None] = None, None

    def before_sharding(self, model: nn.Module, optimizer: torch.optim.Optimizer | None, config: Config) -> None:
        """Copy the full model on rank 0 before it is sharded, unless it has no optimizer. Sharding keeps the values of
        rank 0. Collective if the model has initial shards.

        Raises:
            ConfigError: the optimizer's update reduces gradients itself.
        """
        self._reference, self._pending = None, (optimizer, config)
        if optimizer is None:
            return
        if update_class(optimizer).reduces_itself:
            raise ConfigError(
                f"verify compares the optimizer with its own step in plain PyTorch, and {type(optimizer).__name__} has "
                "none: its update reduces gradients itself; verify the script with another optimizer.type"
            )
        mixed = config.fp16.enabled or config.bf16.enabled
        table = config.dtype_table()
        compute = parse_dtype(table.param_dtype) if mixed else None
        masters = (
            (parse_dtype(table.master_dtype), parse_dtype(table.state_dtype)) if table.master_dtype != "fp32" else None
        )
        sharded = [p for p in model.parameters() if initial_shard.find(p) is not None]
        full: AbstractContextManager[Any] = GatheredParameters(sharded) if sharded else nullcontext()
        with full:
            if dist.get_rank() == 0:
                self._reference = ReferenceModel(model, optimizer, compute, local_device(), masters)
                if self.job.independent_run:
                    self._independent_reference = ReferenceModel(model, optimizer, compute, local_device(), masters)

    def after_initialize(self, engine: Engine) -> None:
        """Compare the initial weights, and verify the engine from now on, unless it has no optimizer. Collective."""
        optimizer, config = self._pending
        if optimizer is None or config is None:
            return
        alone = (
            IndependentRun(self._independent_reference, engine.gradient_clipping)
            if self._independent_reference is not None
            else None
        )
        watched = EngineVerifier(engine, self._reference, alone, config, self.check_progress)
        self._reference = self._independent_reference = None
        self.verifiers.append(watched)
        watched.compare_initial_weights()
        self.check_progress(watched)

    def write_result(self) -> None:
        """Write the reports to the job's folder. Only rank 0 has them."""
        if any(watched.reference is not None for watched in self.verifiers):
            found = [watched.report.to_dict() for watched in self.verifiers]
            self.job.result_path.write_text(json.dumps(found))

    def note_early_end(self) -> None:
        """Add a note if the script ended before the requested number of steps."""
        first = self.verifiers[0]
        if first.compared_steps < self.job.steps:
            first.report.notes.append(f"the script ended after {first.compared_steps} of {self.job.steps} steps")

    def check_progress(self, verifier: EngineVerifier) -> None:
        """Continue after a comparison, or end the script on all ranks.

        Raises:
            VerificationFinished: a tensor deviated, or enough steps were compared.
        """
        over = verifier.has_deviated or (verifier is self.verifiers[0] and verifier.compared_steps == self.job.steps)
        if over:
            self.write_result()
            raise VerificationFinished(0)


def main(path: str) -> int:
    """Run one rank. Return 0 after a comparison with any result, and 1 if the rank failed."""
    order = VerificationJob.read(path)
    os.dup2(2, 1)  # to stderr: output of the script must not mix with the report
    try:
        run_rank(order)
    except BaseException as error:
        if is_plain_end(error):
            raise
        record_script_failure(order.failure_path, error)
        from windlass import watchdog

        watchdog.report_failure(error)
        return 1
    return 0


def run_rank(job: VerificationJob) -> None:
    """Train the script or model of `job` in this process, compare its steps, and write the report on rank 0.

    Raises:
        VerifyError: the training ended without an engine that has an optimizer, or without a step.
    """
    from windlass.engine.initialize_observer import install_observer
    from windlass.verify import named_model_training
    from windlass.verify.engine_verifier import VerifyError
    from windlass.verify.verification_rank import VerificationFinished, VerificationSession

    session = VerificationSession(job)
    before = install_observer(session)
    try:
        if job.script:
            run_script(job.script)
        else:
            named_model_training.train_named_model(job)
    except VerificationFinished:
        return
    finally:
        install_observer(before)
    if not session.verifiers:
        raise VerifyError(
            "the script ended without an engine that has an optimizer; call windlass.initialize(model=..., "
            "config=...) in it"
        )
    if not session.verifiers[0].compared_steps:
        raise VerifyError(
            "the script ended before its first engine.step() at an accumulation boundary; train for a full step"
        )
    session.note_early_end()
    session.write_result()


if __name__ == "__main__":
    code = main(*sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # A rank that failed must not wait at exit for peers that are still in a collective.
    os._exit(code)
