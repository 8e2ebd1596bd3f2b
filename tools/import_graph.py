"""Graph of the files that each file of the repository uses: imports, names in strings, scripts, programs and data."""

from __future__ import annotations

import functools
from pathlib import Path, PurePosixPath

from tools.file_facts import FileFacts, facts_of_files

# Folders from which programs of the repository are started, so that their neighbours import without a package.
IMPORT_ROOTS = ("", "bench", "tools")


class ImportGraph:
    """Edges from each file to the files that it imports, starts or reads.

    The graph has too many edges rather than too few: a dotted name in a string counts as an import. Paths are
    relative to the root, with slashes.

    Args:
        root: folder of the repository.
        files: paths of the files that exist, relative to `root`.
        cache: file that keeps the facts of unchanged files.
    """

    def __init__(self, root: Path, files: list[str], cache: Path | None = None) -> None:
        self.files = set(files)
        self._by_name: dict[str, set[str]] = {}
        for file in self.files:
            path = PurePosixPath(file)
            if file.startswith("windlass/"):  # the package's modules are found by their dotted names
                continue
            self._by_name.setdefault(path.name, set()).add(file)
            if path.suffix != ".py" and len(path.parts) > 1:
                self._by_name.setdefault(path.parent.name, set()).add(file)
        self._python = {file for file in self.files if file.endswith(".py")}
        self._compat = {file for file in self._python if file.startswith("windlass/compat/")}
        self._folders = {str(parent) for file in self._python for parent in PurePosixPath(file).parents}
        facts = facts_of_files(root, sorted(self.files), cache)
        self._lazy = {file: item.lazy for file, item in facts.items() if item.lazy is not None}
        self.edges = {file: self._edges(file, item) - {file} for file, item in facts.items()}

    def reached_by(self, changed: set[str]) -> set[str]:
        """Return every file that depends on a file of `changed`, directly or not, and `changed` itself."""
        reached, waiting = set(changed), list(changed)
        while waiting:
            new = self._readers.get(waiting.pop(), set()) - reached
            reached |= new
            waiting += new
        return reached

    @functools.cached_property
    def _readers(self) -> dict[str, set[str]]:
        """Files that read each file directly."""
        readers: dict[str, set[str]] = {}
        for file, read in self.edges.items():
            for item in read:
                readers.setdefault(item, set()).add(file)
        return readers

    def _edges(self, file: str, facts: FileFacts) -> set[str]:
        result = self._implied_edges(file) if file.endswith(".py") else set()
        for name in facts.names:
            result |= self._resolve(file, name)
        for name in facts.whole:  # a lazy package that is passed as a value: any of its names may be used
            module = name.replace(".", "/") + "/__init__.py"
            for target in self._lazy.get(module, {}).values():
                result |= self._resolve(file, target)
        for token in facts.tokens:
            result |= self._by_name.get(token, set())
            if token.startswith("*.") and token != "*.py":
                result |= self._ending_with(token[1:])
        return result | self._python if facts.walks_python else result

    @functools.cache  # noqa: B019  (one graph a process)
    def _ending_with(self, end: str) -> set[str]:
        return {file for file in self.files if file.endswith(end) and not file.startswith("windlass/")}

    def _resolve(self, file: str, dotted: str) -> set[str]:
        """Return the files that an import of `dotted` runs: its packages, its module, and the module of a lazy name."""
        if dotted.partition(".")[0] == "deepspeed":
            return self._compat
        results: set[str] = set()
        for root in {*IMPORT_ROOTS, file.rpartition("/")[0]}:
            results |= self._resolve_under(root, dotted)
        return results

    @functools.cache  # noqa: B019  (one graph a process)
    def _resolve_under(self, root: str, dotted: str, lazy: bool = True) -> set[str]:
        results: set[str] = set()
        at = f"{root}/" if root else ""
        parts = dotted.split(".")
        for index, part in enumerate(parts):
            at += part
            if f"{at}.py" in self.files:
                return results | {f"{at}.py"}
            package = f"{at}/__init__.py"
            if package in self.files:
                results.add(package)
                following = parts[index + 1] if index + 1 < len(parts) else ""
                target = self._lazy.get(package, {}).get(following) if lazy else None
                if target is not None:  # the module `windlass.initialize` has the lazy name itself
                    return results | self._resolve_under(root, ".".join([target, *parts[index + 2 :]]), lazy=False)
            elif at not in self._folders:
                return results
            at += "/"
        return results

    def _implied_edges(self, file: str) -> set[str]:
        """Return the files that pytest and Python load with a file: packages above it, conftest files, the stand-in
        package.
        """
        results = set()
        for parent in PurePosixPath(file).parents:
            above = {f"{parent}/__init__.py"}
            if file.startswith("tests/"):
                above.add(f"{parent}/conftest.py")
            results |= above & self.files
        if file == "windlass/compat/stand_in_path.py":
            results |= {item for item in self._python if item.startswith("windlass/compat/path/")}
        return results
