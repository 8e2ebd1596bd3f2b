"""Run DeepSpeed's own unit tests on CPU, once on DeepSpeed and once on the stand-in, and compare the outcomes.

    python tools/run_deepspeed_suite.py CHECKOUT --reference PYTHON [--out DIR] [--cases N] [--files PATTERN ...]

CHECKOUT is a checkout of DeepSpeed's repository (only its `tests/` is used), PYTHON an interpreter whose environment
has DeepSpeed and no windlass. The stand-in runs under the interpreter that runs this script. Both environments need
pytest. Outcomes are appended to DIR as they come, and a second run continues where the first one ended.

The tests run in a copy of `tests/` that is not next to DeepSpeed's source. The stand-in runs in strict mode
(docs/compat.md). A test counts only if DeepSpeed itself passes it. This file is also the pytest plugin that records
outcomes inside both runs, so it imports only the standard library.
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

EXCLUDED_FILES = {
    "unit/checkpoint/test_autotp_uc_checkpoint.py": "AutoTP's internal functions",
    "unit/compile/*": "DeepCompile",
    "unit/model_parallelism/test_autotp*": "AutoTP's internal functions",
    "unit/model_parallelism/test_tp_plan*": "AutoTP's internal functions",
    "unit/inference/v2/*": "the ragged engine's internal functions",
    "unit/module_inject/*": "AutoTP's internal functions",
    "unit/ops/accelerators/*": "fused transformer kernels",
    "unit/ops/deepspeed4science/*": "CUDA kernels",
    "unit/ops/sparse_attention/*": "CUDA kernels",
    "unit/ops/spatial/*": "CUDA kernels",
    "unit/ops/transformer/*": "inference kernels",
    "unit/ops/adam/test_zf_torch_adam.py": "ZenFlow",
    "unit/runtime/rollout/*": "inference",
    "unit/runtime/tensor_parallel/*": "AutoTP's internal functions",
    "unit/runtime/test_tp_plan_extraction.py": "AutoTP's internal functions",
    "unit/runtime/zenflow/*": "ZenFlow",
    "unit/sequence/*": "inference kernels",
    "unit/sequence_parallelism/test_autosp*": "DeepCompile",
    "unit/v1/compile/*": "DeepCompile",
    "unit/v1/moe/test_autoep*": "AutoEP",
    "unit/v1/moe/test_fused_expert_layout.py": "AutoEP",
    "unit/v1/nvme/*": "kernels for NVMe",
    "unit/v1/ops/*": "CUDA kernels",
    "unit/v1/pin_memory/*": "kernels for pinned memory",
}
"""Excluded test files, with the subsystem of DeepSpeed that each tests and that windlass does not have."""

FORKSERVER_PRELOAD = (
    "torch",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "torch.utils.cpp_extension",
    "deepspeed",
    "deepspeed.comm",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "unit.common",
)
"""Modules that the server of forked ranks imports once, instead of every rank of every test."""


# The plugin. DEEPSPEED_SUITE_COLLECT and DEEPSPEED_SUITE_RECORD name the files that it writes.


def pytest_configure(config: Any) -> None:
    """Import the large modules once for all ranks."""
    import multiprocessing

    multiprocessing.get_context("forkserver").set_forkserver_preload(list(FORKSERVER_PRELOAD))


def pytest_collection_finish(session: Any) -> None:
    """Write the collected tests and the number of ranks that each starts."""
    if path := os.environ.get("DEEPSPEED_SUITE_COLLECT"):
        with open(path, "w") as file:
            for item in session.items:
                file.write(json.dumps({"test": item.nodeid, "ranks": _num_ranks(item)}) + "\n")


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """Keep the tests that DEEPSPEED_SUITE_TESTS lists, in its order."""
    if path := os.environ.get("DEEPSPEED_SUITE_TESTS"):
        order = {test: number for number, test in enumerate(Path(path).read_text().splitlines())}
        items[:] = sorted((item for item in items if item.nodeid in order), key=lambda item: order[item.nodeid])


def _num_ranks(item: Any) -> int:
    if not getattr(item.cls, "is_dist_test", False):
        return 0
    marked = [mark.args[0] for mark in item.iter_markers("world_size")]
    ranks = marked[0] if marked else getattr(item, "callspec", None) and item.callspec.params.get("world_size")
    ranks = ranks or item.cls.world_size
    return ranks if isinstance(ranks, int) else max(ranks)


def pytest_runtest_logstart(nodeid: str, location: Any) -> None:
    """Record that a test has begun. A test without a later record has hung or crashed."""
    _append_record({"test": nodeid, "begun": True})


def pytest_runtest_logreport(report: Any) -> None:
    """Record the outcome of the call, and of a setup or teardown that did not pass."""
    if report.when == "call" or report.outcome != "passed":
        entry = {"test": report.nodeid, "outcome": report.outcome, "when": report.when}
        if report.outcome == "failed":
            crash = getattr(report.longrepr, "reprcrash", None)
            entry |= {"message": crash.message if crash else report.longreprtext[-2000:], "text": report.longreprtext}
        elif report.outcome == "skipped" and isinstance(report.longrepr, tuple):
            entry["message"] = report.longrepr[2]
        _append_record(entry)


def pytest_collectreport(report: Any) -> None:
    """Record a file that could not be imported: all of its tests have failed."""
    if report.failed:
        _append_record({"file": report.nodeid, "outcome": "failed", "text": report.longreprtext})


def _append_record(entry: dict[str, Any]) -> None:
    if path := os.environ.get("DEEPSPEED_SUITE_RECORD"):
        with open(path, "a") as file:
            file.write(json.dumps(entry) + "\n")


# The runner.


class TestSide:
    """One of the two runs: an interpreter, the first entries of its path, and the file of its outcomes."""

    def __init__(self, name: str, python: str, tests: Path, out: Path, first: Sequence[str] = ()) -> None:
        self.name = name
        self.python = python
        self.tests = tests
        self.file = out / f"{name}.jsonl"
        here = str(Path(__file__).resolve().parent)
        self.environment = os.environ | {
            "DS_ACCELERATOR": "cpu",
            "LOCAL_SIZE": "2",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "DS_UNITTEST_TIMEOUT": "90",
            "WINDLASS_DEEPSPEED_STRICT": "1",
            "DEEPSPEED_SUITE_RECORD": str(self.file),
            # Each side has its own folder: kernels are rebuilt whenever another environment has used the folder.
            "TORCH_EXTENSIONS_DIR": str(out / "extensions" / name),
            "PATH": f"{Path(python).parent}:{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join([*first, here, str(tests), *_python_path()]),
        }

    def start(self, arguments: Iterable[str], **more: str) -> subprocess.Popen[bytes]:
        """Start pytest in a process group of its own."""
        command = [self.python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:randomly"]
        command += ["-p", Path(__file__).stem, *arguments]
        log = open(self.file.with_suffix(".log"), "ab")  # noqa: SIM115 - the child writes it
        with log:
            return subprocess.Popen(
                command,
                cwd=self.tests,
                env=self.environment | more,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def collect(self, path: Path) -> list[dict[str, Any]]:
        """List all tests that can be collected."""
        record = {"DEEPSPEED_SUITE_COLLECT": str(path), "DEEPSPEED_SUITE_RECORD": ""}
        self.start(["--collect-only", "--continue-on-collection-errors", "unit"], **record).wait()
        return [json.loads(line) for line in path.read_text().splitlines()]

    def outcomes(self) -> dict[str, dict[str, Any]]:
        """Read the recorded outcomes: the worst of each test; `begun` for a test that has not ended."""
        results: dict[str, dict[str, Any]] = {}
        if self.file.exists():
            for line in self.file.read_text().splitlines():
                entry = json.loads(line)
                old = results.get(entry.get("test", ""))
                if "test" in entry and (old is None or "begun" in old or entry.get("outcome") == "failed"):
                    results[entry["test"]] = entry
        return results

    def drop_failures(self) -> None:
        """Keep only the recorded passes, so that the next run repeats all other tests."""
        kept = [entry for entry in self.outcomes().values() if entry.get("outcome") == "passed"]
        self.file.write_text("".join(json.dumps(entry) + "\n" for entry in kept))

    def run(self, tests: Sequence[str], ranks: Mapping[str, int], patience: float) -> None:
        """Run the tests that have no outcome yet: those without ranks file by file, all others in one process.

        Tests with ranks do their work in the ranks, which are new for each test, so one process suffices.
        """
        groups = [
            list(group) for _, group in groupby(tests, key=lambda test: test.split("::")[0] if not ranks[test] else "")
        ]
        for members in groups:
            while left := [test for test in members if "outcome" not in self.outcomes().get(test, {})]:
                print(f"[{self.name}] {len(left)} from {left[0]}", flush=True)
                self.run_once(left, patience)

    def _size(self) -> int:
        return self.file.stat().st_size if self.file.exists() else 0

    def run_once(self, tests: Sequence[str], patience: float) -> None:
        """Run tests in one process. Record the test at which it hung, died or stopped as failed."""
        listed = self.file.with_suffix(".tests")
        listed.write_text("\n".join(tests) + "\n")
        files = dict.fromkeys(test.split("::")[0] for test in tests)
        child = self.start(["--continue-on-collection-errors", *files], DEEPSPEED_SUITE_TESTS=str(listed))
        seen, size = time.monotonic(), self._size()
        first = size
        while child.poll() is None:
            time.sleep(0.2)
            now = self._size()
            if now != size:
                seen, size = time.monotonic(), now
            # Before the first outcome, imports and collection are silent for minutes on a busy machine.
            if time.monotonic() - seen > (patience if size != first else 5 * patience):
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
                for lock in Path(self.environment["TORCH_EXTENSIONS_DIR"]).glob("*/lock"):
                    lock.unlink()  # lock of a killed compilation: later compilations would wait for it
        result = self.outcomes()
        left = [test for test in tests if "outcome" not in result.get(test, {})]
        begun = [test for test in left if test in result]
        if left:
            blamed = begun or left  # if no test has begun, the files cannot be imported
            with open(self.file, "a") as file:
                why = "hung, or the process died" if begun else "not collected: see the log"
                for test in blamed:
                    file.write(json.dumps({"test": test, "outcome": "failed", "message": why, "text": why}) + "\n")


def _python_path() -> list[str]:
    return [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]


def select_tests(collected: Sequence[dict[str, Any]], cases: int, patterns: Sequence[str]) -> list[str]:
    """Choose tests of at most two ranks, outside `EXCLUDED_FILES`.

    Take `cases` evenly spread tests of each function, counted from the last, because the first are often for fp16,
    which DeepSpeed refuses on CPU.
    """
    functions = defaultdict(list)
    for entry in collected:
        test, file = entry["test"], entry["test"].split("::")[0]
        out = any(fnmatch.fnmatch(file, pattern) for pattern in EXCLUDED_FILES)
        if entry["ranks"] <= 2 and not out and any(fnmatch.fnmatch(file, pattern) for pattern in patterns):
            functions[test.split("[")[0]].append(test)
    chosen = []
    for tests in functions.values():
        count = min(cases, len(tests))
        chosen += [tests[-1 - number * (len(tests) - 1) // max(count - 1, 1)] for number in range(count)]
    ranks = {entry["test"]: entry["ranks"] for entry in collected}
    # Tests without ranks are first. The order of the others mixes the files, so that a partial run is a fair sample.
    return sorted(chosen, key=lambda test: (ranks[test] > 0, ranks[test] and hashlib.sha1(test.encode()).digest()))


def failure_reason(entry: dict[str, Any]) -> str:
    """Reduce a failure to one line, without the figures that differ from test to test."""
    first = next((line for line in entry.get("message", "").splitlines() if line.strip()), "?")
    return re.sub(r"0x[0-9a-f]+|\d+\.\d+|/\S+", "*", first)[:150]


def print_report(reference: dict[str, Any], standin: dict[str, Any], selected: Sequence[str]) -> None:
    """Print the counts, the ratio, and the failures by reason."""
    passed = [test for test in selected if reference.get(test, {}).get("outcome") == "passed"]
    other = Counter(standin.get(test, {}).get("outcome", "not run") for test in passed)
    print(f"selected                   {len(selected)}")
    print(f"DeepSpeed passes           {len(passed)}")
    print(f"of these the stand-in      {dict(other)}")
    print(f"ratio                      {other['passed'] / max(len(passed), 1):.1%}")
    groups: dict[str, list[str]] = defaultdict(list)
    for test in passed:
        if standin.get(test, {}).get("outcome", "passed") != "passed":
            groups[failure_reason(standin[test])].append(test)
    for why, tests in sorted(groups.items(), key=lambda pair: -len(pair[1])):
        files = Counter(test.split("::")[0] for test in tests)
        print(f"{len(tests):5}  {why}")
        for file, count in files.most_common():
            print(f"           {count:4} {file}")


def main() -> int:
    """Run both sides and print the report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkout", type=Path, help="a checkout of DeepSpeed's repository")
    parser.add_argument("--reference", required=True, help="a Python that has DeepSpeed")
    parser.add_argument("--out", type=Path, default=Path("deepspeed-suite"), help="the folder for outcomes and logs")
    parser.add_argument("--cases", type=int, default=4, help="cases of each parametrised test function (4)")
    parser.add_argument("--files", nargs="+", default=["*"], help="only test files that fit one of these patterns")
    parser.add_argument("--patience", type=float, default=150, help="seconds after which a silent test is killed (150)")
    parser.add_argument("--only", choices=["reference", "standin"], help="run only this side")
    parser.add_argument("--report", action="store_true", help="run nothing, report what is recorded")
    parser.add_argument("--again", action="store_true", help="forget what failed on the stand-in and run it again")
    options = parser.parse_args()
    out = options.out.resolve()
    tests = out / "work" / "tests"
    if not tests.exists():
        shutil.copytree(options.checkout / "tests", tests)
    standin_path = subprocess.check_output([sys.executable, "-m", "windlass.compat"], text=True).strip()
    reference = TestSide("reference", options.reference, tests, out)
    standin = TestSide("standin", sys.executable, tests, out, [standin_path])
    collected = out / "collected.jsonl"
    if collected.exists():
        result = [json.loads(line) for line in collected.read_text().splitlines()]
    else:
        result = reference.collect(collected)
    selected = select_tests(result, options.cases, options.files)
    ranks = {entry["test"]: entry["ranks"] for entry in result}
    if not options.report:
        if options.only != "standin":
            reference.run(selected, ranks, options.patience)
        if options.only != "reference":
            results = reference.outcomes()
            if options.again:
                standin.drop_failures()
            passed = [test for test in selected if results.get(test, {}).get("outcome") == "passed"]
            standin.run(passed, ranks, options.patience)
    print_report(reference.outcomes(), standin.outcomes(), selected)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
