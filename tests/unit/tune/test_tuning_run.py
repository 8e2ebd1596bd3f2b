"""Tests of a search over programs that need no torch: they read the trial's job and write a made-up result."""

from __future__ import annotations

import base64
import json
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from windlass.base.errors import ConfigError
from windlass.base.printable_console import PrintableConsole
from windlass.base.processes import descendants
from windlass.config.batch_sizes import MICRO
from windlass.tune.autotuning_command import search_with_report
from windlass.tune.ray_trials import RayTrials
from windlass.tune.result_files import metrics_of
from windlass.tune.trial_command import ProgramCommand, find_config, mapped_options, replace_option
from windlass.tune.trial_process import find_error
from windlass.tune.trial_record import TrialStatus
from windlass.tune.tuning_report import as_json, draw_trials, summary_lines, trials_table
from windlass.tune.tuning_run import TuningError, TuningOutcome, TuningRun, TuningSettings

PROGRAM = """
import base64, json, os, subprocess, sys, time
job = json.loads(base64.urlsafe_b64decode(os.environ["WINDLASS_TUNE_TRIAL"]))
values = job["overrides"]
micro, stage = values.get("train_micro_batch_size_per_gpu", 4), values.get("zero_optimization.stage", 0)
if job["forecast_order"]:
    order = json.load(open(job["forecast_order"]))
    facts = {"parameters": 1000, "can_checkpoint": True, "fed": micro, "micro": micro}
    if order["plans_memory"]:
        sizes = {n: 100 * 2**20 * v.get("train_micro_batch_size_per_gpu", 4) for n, v in order["candidates"].items()}
        facts |= {"host_bytes": sizes, "device_bytes": dict.fromkeys(sizes, 0)}
    json.dump(facts, open(order["result"], "w"))
def measured(step_s, fed=micro, host=2**20):
    figures = dict(step_s=step_s, steps=[step_s] * job["steps"], forward_s=step_s / 2, update_s=step_s / 8)
    figures |= dict(train_batch=16, micro=micro, accumulation=4 // micro or 1, world_size=1, fed_shape=[fed, 8])
    figures |= dict(parameters=1000, device="cpu", peak_device=0, peak_host=host, ended_early=False)
    json.dump(figures, open(job["result"], "w"))
"""
RAW: dict[str, Any] = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": [0, 1, 2]},
}


def tuning(folder: Path, body: str, *arguments: str, raw: dict[str, Any] = RAW, **settings: Any) -> TuningRun:
    script, config = folder / "train.py", folder / "ds.json"
    script.write_text(PROGRAM + body)
    config.write_text(json.dumps(raw))
    given = TuningSettings(folder / "results", folder / "exps", **{"repeats": 0, **settings})
    program = (str(script), "--config", str(config), *arguments)
    return TuningRun(raw, 1, ProgramCommand((sys.executable, "-S"), program, str(config)), given)


def statuses(outcome: TuningOutcome) -> dict[str, TrialStatus]:
    return {record.candidate.name: record.status for record in outcome.records}


def test_the_best_is_found_and_written_with_all_files(tmp_path: Path) -> None:
    body = "measured(0.01 * (3 - stage) + 0.1 / micro)\nassert '--config' in sys.argv and open(sys.argv[2])"
    run = tuning(tmp_path, body, repeats=2)
    outcome = run.run()
    best, results = outcome.best, tmp_path / "results"
    assert best is not None and best.candidate.name == "z2_mbs16_gas1" and outcome.config is not None
    assert outcome.config["zero_optimization"]["stage"] == 2 and outcome.config["train_batch_size"] == 16
    assert json.loads((results / "ds_config_optimal.json").read_text()) == outcome.config
    assert str(results / "ds_config_optimal.json") in (results / "cmd_optimal.txt").read_text()
    folder = results / best.candidate.name
    assert sorted(path.name for path in folder.iterdir()) == [
        *("cmd.txt", "ds_config.json", "exp.json", "metrics.json", "result.json", "stderr.log", "stdout.log")
    ]
    metrics = json.loads((folder / "metrics.json").read_text())
    assert metrics == metrics_of(best) and metrics["throughput"] == pytest.approx(16 / metrics["latency"])
    order = json.loads((tmp_path / "exps" / "z2_mbs16_gas1.json").read_text())
    assert order["ds_config"] == outcome.config and order["result_dir"] == str(folder)
    assert "z2_mbs16_gas1" in (results / "summary.txt").read_text().splitlines()[-1]
    assert json.loads((results / "trials.json").read_text())["best"] == "z2_mbs16_gas1"
    assert json.loads(json.dumps(as_json(outcome)))["throughput"] == pytest.approx(best.throughput)
    assert trials_table(outcome).row_count == len(outcome.records)
    assert draw_trials(outcome, tmp_path / "trials.png") and (tmp_path / "trials.png").read_bytes()[1:4] == b"PNG"
    again = tuning(tmp_path, "sys.exit(1)", keeps_results=True).run()
    assert again.best is not None and again.best.candidate == best.candidate


def test_programs_get_a_value_for_every_list_and_the_report_names_what_is_left_out(tmp_path: Path) -> None:
    zero = {"stage": [0, 3], "stage3_max_reuse_distance": [0, 1000]}
    switches = {"fp16": {"enabled": True}, "bf16": {"enabled": [False, True]}}
    raw = {"train_batch_size": 4, "optimizer": RAW["optimizer"], "zero_optimization": zero, **switches}
    body = "assert {'zero_optimization.stage3_max_reuse_distance', 'bf16.enabled'} <= values.keys()\nmeasured(0.1)"
    outcome = tuning(tmp_path, body, raw=raw).run()
    assert [record.status for record in outcome.records] == [TrialStatus.MEASURED] * 3
    assert any(line.startswith("invalid configurations, left out: 3; z0_bf16: ") for line in summary_lines(outcome))


def test_a_resumed_search_runs_trials_again_whose_files_are_damaged(tmp_path: Path) -> None:
    raw = {**RAW, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 4}
    tuning(tmp_path, "measured(0.01 * (3 - stage))", raw=raw).run()
    results = tmp_path / "results"
    folders = sorted(path.parent for path in results.glob("*/result.json"))
    assert len(folders) == 3
    for folder, name, text in zip(
        folders, ("result.json", "result.json", "ds_config.json"), ('{"step_s": ', "[]", "{"), strict=True
    ):
        (folder / name).write_text(text)
    again = tuning(tmp_path, "measured(0.02 * (3 - stage))", raw=raw, keeps_results=True).run()
    assert sorted(record.step_s for record in again.records) == pytest.approx([0.02, 0.04, 0.06])


@pytest.mark.parametrize("keeps_results", [False, True])
def test_the_best_are_measured_again_also_where_earlier_results_count(tmp_path: Path, keeps_results: bool) -> None:
    body = "open(os.path.join(os.path.dirname(job['result']), 'runs'), 'a').write('x')\nmeasured(0.1)"
    raw = {**RAW, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 4}
    outcome = tuning(tmp_path, body, raw=raw, repeats=1, trials=20, keeps_results=keeps_results).run()
    assert [record.repeats for record in outcome.records] == [2, 2, 2]
    for record in outcome.records:
        assert (tmp_path / "results" / record.candidate.name / "runs").read_text() == "xx"


def test_results_of_another_number_of_ranks_do_not_count(tmp_path: Path) -> None:
    raw = {**RAW, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 4}
    tuning(tmp_path, "measured(0.1)", raw=raw).run()
    for path in (tmp_path / "results").glob("*/result.json"):
        path.write_text(json.dumps({**json.loads(path.read_text()), "world_size": 2}))
    again = tuning(tmp_path, "measured(0.2)", raw=raw, keeps_results=True).run()
    assert [record.step_s for record in again.records] == [0.2, 0.2, 0.2]


def test_no_best_of_an_earlier_search_stays_behind(tmp_path: Path) -> None:
    tuning(tmp_path, "measured(0.1)").run()
    best = tmp_path / "results" / "ds_config_optimal.json"
    given, text = best.with_name("given.json"), best.read_text()
    os.link(best, given)  # a file that is the next search's own input must not be removed
    run = tuning(tmp_path, "sys.exit('no')")
    run.command = ProgramCommand(run.command.launcher, run.command.program, str(given))
    with pytest.raises(TuningError):
        run.run()
    assert best.read_text() == text
    with pytest.raises(TuningError):
        tuning(tmp_path, "sys.exit('no')").run()
    assert not best.exists() and not best.with_name("cmd_optimal.txt").exists()


def test_failed_trials_keep_their_error_and_the_search_goes_on(tmp_path: Path) -> None:
    body = """
if stage == 0: raise ValueError("stage 0 is not for me")
if micro > 4: raise RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")
measured(0.1 / micro, fed=3 if micro == 2 else micro)
"""
    outcome = tuning(tmp_path, body, trials=15).run()
    found = {record.candidate.name: record for record in outcome.records}
    assert outcome.best is not None and outcome.best.candidate.get(MICRO) == 4
    assert {one.error for name, one in found.items() if name.startswith("z0")} >= {"ValueError: stage 0 is not for me"}
    assert TrialStatus.MEMORY in statuses(outcome).values()
    errors = "".join(record.error for record in outcome.records)
    assert "the program feeds batches of 3 and the trial's micro-batch is 2" in errors


def test_a_program_that_fails_after_its_first_forward_ends_the_search(tmp_path: Path) -> None:
    """The search ends after three trials, because each further one would take as long."""
    run = tuning(tmp_path, "raise NameError('loss')", trials=15)
    with pytest.raises(TuningError, match="NameError: loss"):
        run.run()
    assert len(run.state.records) == 3


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("print('nothing to do')", "the program ended before the steps of a trial.*its last line: nothing to do"),
        ("input('name?')", "the program reads standard input, and a trial has none; pass arguments instead: EOFError"),
        ("print('epoch 1', flush=True); time.sleep(60)", "longer than 1 s .* its last line: epoch 1"),
        ("sys.exit(3)", "the program ended with exit code 3 and printed nothing"),
    ],
)
def test_programs_that_cannot_be_measured(tmp_path: Path, body: str, message: str) -> None:
    raw = {
        **RAW,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 4,
        "zero_optimization": {"stage": [0, 1]},
    }
    with pytest.raises(TuningError, match=message):
        tuning(tmp_path, body, raw=raw, trial_seconds=1.0).run()


def test_processes_left_behind_are_ended_and_named(tmp_path: Path) -> None:
    body = """
child = "import os, time; os.setsid(); time.sleep(1000)"
subprocess.Popen([sys.executable, "-S", "-c", child, "the-forgotten-one"])
measured(0.1)
"""
    raw = {
        **RAW,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 4,
        "zero_optimization": {"stage": [0, 1]},
    }
    before = descendants(os.getpid())
    outcome = tuning(tmp_path, body, raw=raw).run()
    assert all("the-forgotten-one" in record.left_behind[0] for record in outcome.records)
    assert "left a process behind, which was ended" in "".join(summary_lines(outcome))
    assert set(descendants(os.getpid())) <= set(before)


class RayModule:
    """Stand-in for the part of Ray's API that is used; a trial runs in this process when `fit` is called."""

    def __init__(self, hosts: int) -> None:
        self._hosts, self.concurrent, self.bundles = hosts, list[int](), list[dict[str, int]]()
        self.tune = SimpleNamespace(
            with_resources=lambda trainable, resources: trainable,
            PlacementGroupFactory=self.bundles.extend,
            grid_search=lambda values: {"grid_search": values},
            TuneConfig=lambda max_concurrent_trials: max_concurrent_trials,
            Tuner=self._tuner,
        )

    def init(self, address: str, **options: Any) -> None:
        assert address == "auto"

    def nodes(self) -> list[dict[str, Any]]:
        return [{"Alive": True, "Resources": {"CPU": 16.0}}] * self._hosts + [{"Alive": False}]

    def _tuner(self, trainable: Any, param_space: Any, tune_config: int) -> Any:
        calls = param_space["call"]["grid_search"]
        self.concurrent.append(min(tune_config, len(calls)))

        def fit() -> list[Any]:
            configs = [{"call": json.loads(json.dumps(call))} for call in calls]
            found = [SimpleNamespace(config=one, metrics=trainable(one), error=None) for one in configs]
            return [*found[1:], *found[:1]]  # not in the order of the calls

        return SimpleNamespace(fit=fit)


def test_trials_run_at_the_same_time_on_the_hosts_of_ray(tmp_path: Path) -> None:
    run = tuning(tmp_path, "measured(0.01 * (3 - stage) + 0.1 / micro)")
    ray = RayModule(hosts=3)
    run.parallel = RayTrials("auto", 1, load=lambda: ray)
    outcome = run.run()
    assert outcome.best is not None and outcome.best.candidate.get(MICRO) >= 8
    assert max(ray.concurrent) == 3
    assert {bundle["CPU"] for bundle in ray.bundles} == {9}  # over half of a host's 16: no host runs two trials
    assert all(record.status is TrialStatus.MEASURED for record in outcome.records)


def test_trials_of_more_ranks_than_a_host_of_ray_has_cpus_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"--ray auto: a trial has 17 ranks.* has 16 CPUs"):
        RayTrials("auto", 17, load=lambda: RayModule(hosts=2))


@pytest.mark.peer
@pytest.mark.filterwarnings("default")
def test_optuna_proposes_every_good_configuration(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    body = "if stage == 0: raise ValueError('not for me')\nmeasured(0.01 * (3 - stage) + 0.1 / micro)"
    outcome = tuning(tmp_path, body, tuner="optuna", trials=14).run()
    assert outcome.best is not None and outcome.best.candidate.name == "z2_mbs16_gas1"
    assert 5 <= len(outcome.records) <= 14  # a sampler proposes some candidates twice, but each runs once
    (tmp_path / "few").mkdir()
    assert len(tuning(tmp_path / "few", body, tuner="optuna", trials=4).run().records) == 4


@pytest.mark.peer
@pytest.mark.filterwarnings("default")
def test_ray_tune_runs_the_trials_of_a_search(tmp_path: Path) -> None:
    ray = pytest.importorskip("ray")
    pytest.importorskip("ray.tune")
    body = "if stage == 0: raise ValueError('not for me')\nmeasured(0.01 * (3 - stage) + 0.1 / micro)"
    run = tuning(tmp_path, body, trials=6)
    run.parallel = RayTrials("local", 1)
    try:
        assert run.parallel.hosts == 1
        outcome = run.run()
    finally:
        ray.shutdown()
    assert outcome.best is not None and outcome.best.candidate.get(MICRO) >= 8
    ran = [record for record in outcome.records if record.ran]
    assert len(ran) == 6 and all(record.seconds > 0 for record in ran)
    errors = {record.error for record in ran if record.status is TrialStatus.FAILED}
    assert errors <= {"ValueError: not for me"}


def test_a_cluster_also_tries_every_configuration(tmp_path: Path) -> None:
    run = tuning(tmp_path, "measured(0.1 * (1 + stage))", tuner="gridsearch", trials=10**9)
    ray = RayModule(hosts=4)
    run.parallel = RayTrials("auto", 1, load=lambda: ray)
    outcome = run.run()
    assert max(ray.concurrent) == 4 and len(outcome.records) == outcome.candidates == 15


def test_a_trial_at_its_time_limit_is_not_out_of_memory(tmp_path: Path) -> None:
    """The launcher's report that SIGKILL ended its rank, perhaps for lack of memory, is not read as out of memory."""
    report = "windlass run: rank 0 was ended by SIGKILL (by a user, a scheduler, or the kernel for lack of memory)"
    body = f"""
def ended(*_):
    print({report!r}, file=sys.stderr, flush=True)
    os._exit(1)
import signal
signal.signal(signal.SIGTERM, ended)
print("loading data", flush=True)
time.sleep(60)
"""
    raw = {**RAW, "zero_optimization": {"stage": [0, 1]}}
    with pytest.raises(TuningError) as raised:
        tuning(tmp_path, body, raw=raw, trials=1, trial_seconds=1.0).run()
    text = str(raised.value)
    assert "the program took longer than 1 s" in text and "loading data" in text and "SIGKILL" not in text
    assert "no configuration fits" not in text


def test_no_cluster_at_the_address_names_the_option() -> None:
    ray = RayModule(hosts=1)

    def refuse(**options: Any) -> None:
        raise ConnectionError("Could not find any running Ray instance.\nmore")

    ray.init = refuse  # type: ignore[method-assign, assignment]
    with pytest.raises(ConfigError, match="--ray auto: Could not find any running Ray instance.; start a cluster"):
        RayTrials("auto", 1, load=lambda: ray)


def test_a_wrong_configuration_is_named_by_its_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"/ds\.json cannot be used: 1 problem"):
        tuning(tmp_path, "", raw={**RAW, "zero_optimisation": {"stage": 1}})


def test_error_names_the_nearest_configuration_if_none_fits(tmp_path: Path) -> None:
    run = tuning(tmp_path, "measured(0.1, host=80 * micro * 2**20)", memory=60 << 20)
    with pytest.raises(
        TuningError,
        match=r"no configuration fits: 1 were run(.|\n)*the nearest is z._mbs1_gas16: it needs 100 MiB, 40 MiB more",
    ):
        run.run()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_writes_the_best_so_far(number: int, tmp_path: Path) -> None:
    body = "measured(0.1 / micro) if job['slow_s'] is None else time.sleep(60)"  # the second trial does not end
    run = tuning(tmp_path, body)

    def interrupt() -> None:
        while len(list((tmp_path / "results").glob("z*/cmd.txt"))) < 2:
            time.sleep(0.01)
        time.sleep(0.1)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=interrupt, daemon=True)
    thread.start()
    outcome = search_with_report(run, PrintableConsole(stderr=True))
    thread.join()
    assert outcome.interrupted_by == number and outcome.best is not None
    optimal = json.loads((tmp_path / "results" / "ds_config_optimal.json").read_text())
    assert optimal == run.space.config_of(outcome.best.candidate)


def test_predictions_discard_what_cannot_fit(tmp_path: Path) -> None:
    body = "measured(0.1 / micro, host=100 * micro * 2**20)"
    outcome = tuning(tmp_path, body, memory=300 << 20, trials=20).run()
    discarded = [record for record in outcome.records if record.status is TrialStatus.DISCARDED]
    assert discarded and all(record.candidate.get(MICRO) >= 4 for record in discarded)
    assert outcome.best is not None and outcome.best.candidate.get(MICRO) == 2


def test_a_configuration_in_base64_is_no_path(tmp_path: Path) -> None:
    text = base64.urlsafe_b64encode(json.dumps(RAW).encode()).decode()
    script = tmp_path / "train.py"
    script.touch()
    command = ProgramCommand(("python",), (str(script), "--config", text, str(tmp_path)), text)
    assert command.for_trial(Path("new.json"), RAW) == ["python", str(script), "--config", "new.json", str(tmp_path)]


def test_arguments_of_the_program(tmp_path: Path) -> None:
    config = tmp_path / "ds.json"
    config.write_text("{}")
    words = ("train.py", f"--deepspeed={config}", "--lr", "0.1", "--bs", "4")
    assert find_config(words) == str(config)
    with pytest.raises(ConfigError, match="--deepspeed none.json of the program names no existing file"):
        find_config(("train.py", "--deepspeed", "none.json"))
    command = ProgramCommand(
        ("run",), words, str(config), {"train_micro_batch_size_per_gpu": "--bs", "zero_optimization.stage": "--c"}
    )
    made = command.for_trial(Path("/t.json"), {"train_micro_batch_size_per_gpu": 8, "zero_optimization": {"stage": 1}})
    assert made == ["run", "train.py", "--deepspeed=/t.json", "--lr", "0.1", "--bs", "8", "--c", "1"]
    assert replace_option(["s", "--bs=4"], "--bs", "2") == ["s", "--bs=2"]


def test_keys_that_options_stand_for_have_any_spelling() -> None:
    given = {f"{MICRO} ": "--bs", "zero_optimization.max_reuse_distance": "-d", "optimizer.params.lr": "--lr"}
    expected = {MICRO: "--bs", "zero_optimization.stage3_max_reuse_distance": "-d", "optimizer.params.lr": "--lr"}
    assert mapped_options(given, RAW, "--map") == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"train_micro_batch_size": "--bs"}, f"--map: train_micro_batch_size: unknown key; nearest is {MICRO}"),
        ({"stage": "--z"}, "--map: stage: unknown key; it belongs at zero_optimization.stage"),
        ({"zero_optimization.stag": "--z"}, "zero_optimization.stag: unknown key; nearest is zero_optimization.stage"),
        ({"zero_optimization.stage.x": "--z"}, "zero_optimization.stage has no keys inside"),
        ({"optimizer.params.lrr": "--lr"}, "optimizer.params.lrr: AdamW has no such parameter; nearest is lr"),
        ({"zero_optimization": "--z"}, "zero_optimization is a section"),
        ({MICRO: "bs"}, "'bs', which is not an option"),
        ({MICRO: 3}, "3, which is not an option"),
        (
            {"zero_optimization.max_reuse_distance": "-a", "zero_optimization.stage3_max_reuse_distance": "-b"},
            "-a and -b",
        ),
    ],
)
def test_a_key_that_no_option_can_stand_for_is_refused_by_name(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        mapped_options(given, RAW, "--map")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "a\nTraceback\n  File\nValueError: bad\n[rank 1] RuntimeError: later\nwindlass run: rank 0 ended",
            "ValueError: bad",
        ),
        ("[rank 0] torch.OutOfMemoryError: CUDA out of memory\n", "torch.OutOfMemoryError: CUDA out of memory"),
        (
            "x\nwindlass run: rank 0 was ended by SIGKILL: the kernel killed a process for lack of memory",
            "windlass run: rank 0 was ended by SIGKILL: the kernel killed a process for lack of memory",
        ),
        ("usage: a\na.py: error: unrecognized arguments: --config", "a.py: error: unrecognized arguments: --config"),
        ("[rank0]: Traceback\n[rank0]:   File\n[rank0]: a.KeyError: 'x'\n[rank0]: second line", "a.KeyError: 'x'"),
        ("[rank 0] [rank0]: ValueError: bad\n[rank0]:W1127 12:00 note", "ValueError: bad"),
        ("", ""),
    ],
)
def test_first_error_of_the_program_is_found_in_its_output(text: str, expected: str) -> None:
    assert find_error(text) == expected
