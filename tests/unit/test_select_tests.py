"""Tests of `make near`: the tests that a changed file can reach, in a toy repository and in this one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.import_graph import ImportGraph
from tools.select_tests import CACHE, is_test, repository_files, select_tests

ROOT = Path(__file__).parents[2]

TOY = {
    "windlass/__init__.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n"
    "    from windlass.top import run as run\n    from windlass import pack as pack\n"
    "def __getattr__(name): ...\n",
    "windlass/__main__.py": "from windlass.command import main\n",
    "windlass/low.py": "'''See windlass.top.'''\n",
    "windlass/middle.py": "from . import low\nraise ValueError('see windlass.top for more')\n",
    "windlass/top.py": "import windlass.middle\n",
    "windlass/table.py": "NAMES = {'run': 'windlass.top.run'}\n",
    "windlass/command.py": "",
    "windlass/pack/__init__.py": "",
    "windlass/pack/inner.py": "",
    "windlass/kernels/__init__.py": "",
    "windlass/kernels/native/sum.cpp": "",
    "bench/speed.py": "import rig.clock\n",
    "bench/rig/__init__.py": "",
    "bench/rig/clock.py": "",
    "docs/guide.md": "```python\nfrom windlass import run\n```\n",
    "tests/conftest.py": "",
    "tests/data/rows.txt": "",
    "assets/unread.bin": "",
    "tests/test_low.py": "import windlass.low\n",
    "tests/test_lazy_name.py": "import windlass\nwindlass.run()\n",
    "tests/test_table.py": "def test():\n    from windlass import table\n",
    "tests/test_patch.py": "def test(monkeypatch):\n    monkeypatch.setattr('windlass.middle.f', 1)\n",
    "tests/test_program.py": "PROGRAM = f'''\\nimport windlass.top\\n{1}'''\n",
    "tests/test_command.py": "import sys\nCOMMAND = [sys.executable, '-m', 'windlass']\n",
    "tests/test_script.py": "SCRIPT = ROOT / 'bench' / 'speed.py'\n",
    "tests/test_rows.py": "ROWS = (ROOT / 'data' / 'rows.txt').read_text()\n",
    "tests/test_guide.py": "GUIDE = ROOT / 'docs/guide.md'\n",
    "tests/test_kernels.py": "import windlass.kernels\n",
    "tests/test_inner.py": "from windlass.pack.inner import f\n",
    "tests/test_alone.py": "",
    "pyproject.toml": "",
}
USERS_OF_TOP = {"lazy_name", "table", "program", "guide"}
EVERY_TEST = {Path(name).stem.removeprefix("test_") for name in TOY if is_test(name)}


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("repository")
    for name, text in TOY.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    return root


@pytest.mark.parametrize(
    ("changed", "selected"),
    [
        ("windlass/top.py", USERS_OF_TOP),
        ("windlass/middle.py", USERS_OF_TOP | {"patch"}),
        ("windlass/low.py", USERS_OF_TOP | {"patch", "low"}),
        ("windlass/table.py", {"table"}),
        ("windlass/command.py", {"command"}),
        ("windlass/pack/inner.py", {"inner"}),
        ("windlass/kernels/native/sum.cpp", {"kernels"}),
        ("bench/rig/clock.py", {"script"}),
        ("docs/guide.md", {"guide"}),
        ("tests/data/rows.txt", {"rows"}),
        ("tests/test_alone.py", {"alone"}),
        ("tests/conftest.py", EVERY_TEST),
        ("pyproject.toml", EVERY_TEST),
        ("assets/unread.bin", EVERY_TEST),
        ("windlass/deleted.py", EVERY_TEST),
        ("tests/test_deleted.py", set()),
    ],
)
def test_toy_selection(toy: Path, changed: str, selected: set[str]) -> None:
    """A changed file selects the tests that read it by an import, a string, a program or a path, and no others."""
    tests, _ = select_tests(toy, list(TOY), {changed})
    assert {Path(test).stem.removeprefix("test_") for test in tests} == selected


def reached_tests(graph: ImportGraph, changed: str) -> set[str]:
    assert changed in graph.files, f"{changed} was renamed: name a file that exists"
    return {file for file in graph.reached_by({changed}) if is_test(file)}


def test_selection_in_this_repository(subtests: pytest.Subtests) -> None:
    """One test, because reading all files takes seconds. Files unchanged since the last run are not read."""
    graph = ImportGraph(ROOT, repository_files(ROOT), CACHE)
    with subtests.test("every test reaches itself and its harness"):
        every_test_reaches_itself_and_its_harness(graph)
    with subtests.test("errors reach nearly every test"):
        errors_reach_nearly_every_test(graph)
    with subtests.test("a command reaches only tests that run commands"):
        a_command_reaches_only_tests_that_run_commands(graph)


def every_test_reaches_itself_and_its_harness(graph: ImportGraph) -> None:
    tests = {file for file in graph.files if is_test(file)}
    assert len(tests) > 200
    assert reached_tests(graph, "tests/conftest.py") == tests
    for test in tests:
        assert test in reached_tests(graph, test)


def errors_reach_nearly_every_test(graph: ImportGraph) -> None:
    tests = {file for file in graph.files if is_test(file)}
    assert len(reached_tests(graph, "windlass/base/errors.py")) > 0.8 * len(tests)


def a_command_reaches_only_tests_that_run_commands(graph: ImportGraph) -> None:
    reached = reached_tests(graph, "windlass/cli/generate.py")
    assert "tests/unit/optim/test_muon.py" not in reached
    assert "tests/dist/test_collectives.py" not in reached
    assert reached, "the tests of the command"


def test_cached_facts_follow_the_text(toy: Path, tmp_path: Path) -> None:
    """A second run reads the cache, notices a changed file, and ignores a damaged cache."""
    cache = tmp_path / "facts.json"
    first = ImportGraph(toy, list(TOY), cache).edges
    assert ImportGraph(toy, list(TOY), cache).edges == first == ImportGraph(toy, list(TOY)).edges
    alone = toy / "tests/test_alone.py"
    alone.write_text("import windlass.low\n", encoding="utf-8")
    try:
        assert "windlass/low.py" in ImportGraph(toy, list(TOY), cache).edges["tests/test_alone.py"]
    finally:
        alone.write_text("", encoding="utf-8")
    cache.write_text(cache.read_text(encoding="utf-8")[:-9], encoding="utf-8")
    assert ImportGraph(toy, list(TOY), cache).edges == first


def test_unchanged_files_are_not_read_again(toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "facts.json"
    first = ImportGraph(toy, list(TOY), cache).edges
    monkeypatch.setattr("tools.file_facts.facts", None)
    assert ImportGraph(toy, list(TOY), cache).edges == first
