"""Trials at the same time on the hosts of a Ray cluster, by Ray Tune (Liaw et al. 2018), an optional package."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from windlass.base.errors import ConfigError
from windlass.tune.trial_process import TrialEnd, run_trial


@dataclass(frozen=True)
class TrialCall:
    """Arguments of `run_trial`, as plain data.

    Attributes:
        folder, result: Paths on a file system that all hosts share.
    """

    command: tuple[str, ...]
    folder: str
    environ: dict[str, str]
    limit_s: float
    result: str


def import_ray() -> Any:
    """Return the module `ray`, with `ray.tune` imported.

    Raises:
        ConfigError: Ray Tune is not installed.
    """
    try:
        import ray
        import ray.tune
    except ImportError:
        raise ConfigError(
            "--ray: Ray Tune is not installed; pip install 'ray[tune]', or leave the option out to run trials "
            "here, one after another"
        ) from None
    return ray


class RayTrials:
    """Runner of several trials. At most as many of them run at the same time as the cluster has hosts.

    Args:
        address: Address of the cluster, or `auto`.
        ranks: Ranks of a trial, each with at least one CPU and, if `has_gpu`, a GPU.
        load: Function that returns the module `ray`.

    Attributes:
        hosts: Number of hosts of the cluster.

    Raises:
        ConfigError: Ray Tune is not installed, there is no cluster at the address, or no host has as many CPUs as a
            trial has ranks.
    """

    def __init__(
        self, address: str, ranks: int, *, has_gpu: bool = False, load: Callable[[], Any] = import_ray
    ) -> None:
        self._ray = load()
        try:
            self._ray.init(address=address, ignore_reinit_error=True, log_to_driver=False)
        except (ConnectionError, ValueError, RuntimeError) as error:
            first = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise ConfigError(
                f"--ray {address}: {first}; start a cluster with `ray start --head`, give its address, or leave the "
                "option out to run trials here, one after another"
            ) from error
        alive = [node for node in self._ray.nodes() if node["Alive"]]
        self.hosts = len(alive)
        # Two trials on one host would slow each other down. A trial therefore reserves more than half of the CPUs of
        # the smallest host, which leaves no room for a second trial there; a larger host may still take two.
        counts = [int(cpus) for node in alive if (cpus := node.get("Resources", {}).get("CPU", 0))]
        fewest, most = min(counts, default=0), max(counts, default=0)
        if ranks > most:
            raise ConfigError(
                f"--ray {address}: a trial has {ranks} ranks, all on one host, and the largest host of the cluster has "
                f"{most} CPUs, so no trial would ever start; lower --nproc, or leave --ray out"
            )
        self._resources = {"CPU": max(ranks, fewest // 2 + 1), **({"GPU": ranks} if has_gpu else {})}

    def __call__(self, calls: Sequence[TrialCall]) -> list[TrialEnd]:
        """Run the trials, and return the `TrialEnd` of each trial in the order of `calls`."""
        tune = self._ray.tune
        # request one bundle: all ranks of a trial are on one host
        trainable = tune.with_resources(run_call, tune.PlacementGroupFactory([self._resources]))
        tuner = tune.Tuner(
            trainable,
            param_space={"call": tune.grid_search([asdict(call) for call in calls])},
            tune_config=tune.TuneConfig(max_concurrent_trials=self.hosts),
        )
        ends: dict[str, TrialEnd] = {}
        for found in tuner.fit():
            if found.error is None:
                ends[found.config["call"]["result"]] = TrialEnd(**found.metrics["end"])
        lost = TrialEnd(None, "Ray returned no result of the trial; see the log of the Ray cluster", False, (), 0.0)
        return [ends.get(call.result, lost) for call in calls]


def run_call(config: dict[str, Any]) -> dict[str, Any]:
    """Run one trial on the host of a Ray worker. Ray Tune calls this function."""
    call = TrialCall(**config["call"])
    end = run_trial(call.command, Path(call.folder), call.environ, call.limit_s, Path(call.result))
    return {"end": {**asdict(end), "left_behind": tuple(end.left_behind)}}
