"""Run the tests that the changed files can reach: `make near`, or `python tools/select_tests.py --list`."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path, PurePosixPath

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.import_graph import ImportGraph

ROOT = Path(__file__).resolve().parents[1]
CACHE = ROOT / ".pytest_cache" / "file_facts.json"
# Files that affect the installed packages or the way tests run: a change of them reaches every test.
REACHES_ALL = ("pyproject.toml", "Makefile", "constraints.txt", "requirements.lock", ".ci/run")
NATIVE = ("windlass/kernels/native/", "CMakeLists.txt", "windlass/kernels/")
# Files that count as read only by tests that name them.
PROSE = {".md", ".png"}
PROSE_NAMES = {".gitignore", ".gitattributes", "LICENSE", ".pre-commit-config.yaml"}


def select_tests(root: Path, files: list[str], changed: set[str], cache: Path | None = None) -> tuple[list[str], str]:
    """Return the test modules that `changed` reaches, and the reason if all modules are returned, else an empty text.

    Args:
        root: folder of the repository.
        files: all files of the repository, relative to `root`.
        changed: files that were changed, added or deleted, relative to `root`.
        cache: file that keeps the facts of unchanged files between calls.
    """
    tests = sorted(file for file in files if is_test(file))
    graph = ImportGraph(root, files, cache)
    read = set().union(*graph.edges.values()) if graph.edges else set()
    seeds: set[str] = set()
    for file in sorted(changed):
        path = PurePosixPath(file)
        if file in REACHES_ALL:
            return tests, f"{file} reaches every test"
        if file.startswith(NATIVE) and path.suffix != ".py":
            seeds |= {item for item in files if item.startswith("windlass/kernels/") and item.endswith(".py")}
        elif file not in graph.files:
            if not is_test(file) and path.suffix not in PROSE:
                return tests, f"{file} was deleted: what read it is not known"
        elif path.suffix != ".py" and file not in read and path.suffix not in PROSE and path.name not in PROSE_NAMES:
            return tests, f"no file is known to read {file}"
        seeds.add(file)
    reached = graph.reached_by(seeds)
    return [test for test in tests if test in reached], ""


def is_test(file: str) -> bool:
    """Return True if `make test` collects `file`."""
    path = PurePosixPath(file)
    return path.parts[0] == "tests" and path.parts[1] != "parity" and path.match("test_*.py")


def repository_files(root: Path) -> list[str]:
    """Return the files of the working tree that git tracks or does not ignore."""
    listed = _git(root, "ls-files", "--cached", "--others", "--exclude-standard", "-z").split("\0")
    return sorted({file for file in listed if file and (root / file).is_file()})


def changed_files(root: Path, base: str) -> set[str]:
    """Return the files in which the working tree differs from the commit `base`, untracked files included."""
    differing = _git(root, "diff", "--name-only", "--no-renames", "-z", base, "--").split("\0")
    untracked = _git(root, "ls-files", "--others", "--exclude-standard", "-z").split("\0")
    return {file for file in [*differing, *untracked] if file}


def default_base(root: Path) -> str:
    """Return the commit where this branch left `main`, or `HEAD` if there is no `main`."""
    result = subprocess.run(["git", "merge-base", "main", "HEAD"], cwd=root, capture_output=True, text=True)
    return result.stdout.strip() if result.returncode == 0 else "HEAD"


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"git {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


def main(arguments: list[str]) -> None:
    """Select the tests and replace this process by pytest, or print them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", default="", help="commit to compare with (default: where this branch left main)")
    parser.add_argument("--list", action="store_true", help="print the test modules instead of running them")
    parser.add_argument("options", nargs="*", help="options of pytest, after --")
    given = parser.parse_args(arguments)
    base = given.base or default_base(ROOT)
    changed = changed_files(ROOT, base)
    tests, reason = select_tests(ROOT, repository_files(ROOT), changed, CACHE)
    print(f"{len(changed)} changed files since {base[:12]} reach {len(tests)} test modules", file=sys.stderr)
    if reason:
        print(reason, file=sys.stderr)
    if given.list:
        print(*tests, sep="\n", end="\n" if tests else "")
    elif tests:
        sys.stderr.flush()
        os.chdir(ROOT)
        os.execv(sys.executable, [sys.executable, "-m", "pytest", *given.options, *tests])


if __name__ == "__main__":
    main(sys.argv[1:])
