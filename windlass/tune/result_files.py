"""Files of a search, with DeepSpeed's names: a folder for each trial, the best configuration, and a summary.

| file | content |
|---|---|
| `RESULTS/NAME/ds_config.json`, `cmd.txt` | configuration and command of a trial |
| `RESULTS/NAME/exp.json`, `metrics.json` | settings of a trial; its latency, throughput and operations |
| `RESULTS/NAME/stdout.log`, `stderr.log` | output of a trial |
| `RESULTS/ds_config_optimal.json`, `cmd_optimal.txt` | the best so far, written after every gain |
| `RESULTS/summary.txt`, `trials.json` | all trials |
| `EXPS/NAME.json` | settings of a trial |
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from windlass.base.atomic_file import make_directory, write_atomically
from windlass.base.errors import ConfigError
from windlass.tune.search_space import Candidate
from windlass.tune.trial_record import TrialRecord

OPTIMAL_CONFIG, OPTIMAL_COMMAND = "ds_config_optimal.json", "cmd_optimal.txt"


class ResultFiles:
    """Writer of the files of a search.

    Args:
        results: Folder of results.
        exps: Folder of the settings of each trial (DeepSpeed's `exps_dir`); None: no such files.
        name: Name of the search in `trials.json`.
        world_size: Number of ranks.

    Raises:
        ConfigError: a folder cannot be made.
    """

    def __init__(self, results: Path, exps: Path | None, name: str, world_size: int) -> None:
        self.results, self._exps, self._name, self._world = results.resolve(), exps, name, world_size
        for folder in (self.results, exps):
            if folder is not None:
                try:
                    make_directory(folder)
                except OSError as error:
                    raise ConfigError(
                        f"cannot make the folder {folder} for results: {error.strerror}; choose another one (--out, or "
                        "autotuning.results_dir and autotuning.exps_dir)"
                    ) from error

    def folder_of(self, candidate: Candidate) -> Path:
        """Return the folder of a trial, and make it."""
        folder = self.results / candidate.name
        make_directory(folder)
        return folder

    def write_order(self, candidate: Candidate, config: dict[str, Any], command: Sequence[str]) -> Path:
        """Write configuration, command and settings of a trial. Return the path of the configuration."""
        folder = self.folder_of(candidate)
        path = folder / "ds_config.json"
        write_atomically(path, json.dumps(config, indent=2))
        write_atomically(folder / "cmd.txt", shlex.join(command) + "\n")
        order = {
            "name": candidate.name,
            "ds_config": config,
            "num_gpus": self._world,
            "num_nodes": 1,
            "result_dir": str(folder),
        }
        if self._exps is not None:
            write_atomically(self._exps / f"{candidate.name}.json", json.dumps(order, indent=2))
        write_atomically(folder / "exp.json", json.dumps(order, indent=2))
        return path

    def write_metrics(self, record: TrialRecord) -> None:
        """Write the metrics of a measured trial."""
        if record.measured:
            write_atomically(self.folder_of(record.candidate) / "metrics.json", json.dumps(metrics_of(record)))

    def remove_best(self, config: str | None) -> None:
        """Remove the best configuration of an earlier search, unless it is the file `config`, from which this search
        starts."""
        for name in (OPTIMAL_CONFIG, OPTIMAL_COMMAND):
            path = self.results / name
            if path.exists() and not (config is not None and os.path.exists(config) and path.samefile(config)):
                path.unlink()

    def write_best(self, config: dict[str, Any], command: Sequence[str]) -> None:
        """Write the best configuration so far, and the command that uses it."""
        write_atomically(self.results / OPTIMAL_CONFIG, json.dumps(config, indent=2))
        write_atomically(self.results / OPTIMAL_COMMAND, shlex.join(command) + "\n")

    def write_summary(self, records: Sequence[TrialRecord], best: TrialRecord | None, metric: str) -> None:
        """Write the summary of all trials."""
        spaces: dict[str, list[TrialRecord]] = {}
        for record in records:
            spaces.setdefault(record.candidate.name.partition("_")[0], []).append(record)
        lines = [f"{'tuning_space':<14}{'num_experiments':>17}{'best_metric_val':>18}  best_exp_name"]
        for space, members in spaces.items():
            counted = [record for record in members if record.counts]
            top = max(counted, key=lambda record: record.score(metric), default=None)
            value, name = "-", "-"
            if top is not None:
                value, name = f"{abs(top.score(metric)):.4f}", top.candidate.name
            lines.append(f"{space:<14}{len(members):>17}{value:>18}  {name}")
        if best is not None:
            lines.append(f"{'global':<14}{len(records):>17}{abs(best.score(metric)):>18.4f}  {best.candidate.name}")
        write_atomically(self.results / "summary.txt", "\n".join(lines) + "\n")
        rows = [record.as_json() for record in records]
        found = {"name": self._name, "metric": metric, "best": best.candidate.name if best else None, "trials": rows}
        write_atomically(self.results / "trials.json", json.dumps(found, indent=1))


def metrics_of(record: TrialRecord) -> dict[str, float]:
    """Return DeepSpeed's metrics of a trial. Times are in seconds; 6 FLOPs are counted for each parameter and token."""
    measured = record.measured
    tokens = (measured["fed_shape"][1:2] or [1])[0]
    flops = 6.0 * measured["parameters"] * tokens * measured["train_batch"] / measured["world_size"]
    return {
        "latency": record.step_s,
        "throughput": record.throughput,
        "FLOPS_per_gpu": flops / record.step_s,
        "forward": measured["forward_s"],
        "step": measured["update_s"],
    }
