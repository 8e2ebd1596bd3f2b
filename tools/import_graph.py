"""Graph of what each file of the repository reads: imports, names of modules in strings, scripts, programs and data."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

# Folders from which programs of the repository are started, so that their neighbours import without a package.
IMPORT_ROOTS = ("", "bench", "tools")
SOURCE_FOLDERS = ("windlass", "tests", "bench", "tools", "examples")
_DOTTED = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+")
_DOTTED_ONLY = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+(?::\w+)?")
_IMPORT_LINE = re.compile(r"(?:^|[;\n])\s*(?:from\s+[\w.]+\s+import|import\s+\w)")
_IMPORTED_NAMES = re.compile(r"from\s+([\w.]+)\s+import\s+\(?([\w, \n]+)")
_IMPORTED = re.compile(r"\bimport\s+([\w.]+(?:\s*,\s*[\w.]+)*)")
_RUN_AS_MODULE = re.compile(r"-m\s+([\w.]+)")
_TOKEN = re.compile(r"[^\s/'\"`(){},;:=<>|]+")
_CONSOLE_SCRIPTS = {"windlass": "windlass.__main__", "deepspeed": "deepspeed", "ds_report": "deepspeed"}
_WALKS = {"walk_packages", "iter_modules", "rglob"}


class ImportGraph:
    """Edges from each file to the files that it imports, starts or reads.

    The graph has too many edges rather than too few: a name in a string counts as an import of what it names. Only
    docstrings and `if TYPE_CHECKING:` are left out, which run nothing. Paths are relative to the root, with slashes.

    Args:
        root: folder of the repository.
        files: paths of the files that exist, relative to `root`.
    """

    def __init__(self, root: Path, files: list[str]) -> None:
        self.root = root
        self.files = set(files)
        self.edges: dict[str, set[str]] = {}
        self._by_name: dict[str, set[str]] = {}
        for file in self.files:
            path = PurePosixPath(file)
            self._by_name.setdefault(path.name, set()).add(file)
            if path.suffix != ".py" and len(path.parts) > 1:
                self._by_name.setdefault(path.parent.name, set()).add(file)
        self._python = {file for file in self.files if file.endswith(".py")}
        self._folders = {str(parent) for file in self._python for parent in PurePosixPath(file).parents}
        self._lazy: dict[str, dict[str, str]] = {}
        trees = {file: ast.parse(self._text(file), file) for file in sorted(self._python)}
        for file, tree in trees.items():
            if any(isinstance(node, ast.FunctionDef) and node.name == "__getattr__" for node in tree.body):
                self._lazy[file] = dict(_type_checking_names(tree))
        for file, tree in trees.items():
            self.edges[file] = self._python_edges(file, tree) | self._implied_edges(file)
        for file in self.files:
            if file.endswith(".md"):
                self.edges[file] = self._text_edges(file, self._text(file))

    def reached_by(self, changed: set[str]) -> set[str]:
        """Return every file that depends on a file of `changed`, directly or not, and `changed` itself."""
        readers: dict[str, set[str]] = {}
        for file, read in self.edges.items():
            for one in read:
                readers.setdefault(one, set()).add(file)
        reached, waiting = set(changed), list(changed)
        while waiting:
            new = readers.get(waiting.pop(), set()) - reached
            reached |= new
            waiting += new
        return reached

    def _text(self, file: str) -> str:
        return (self.root / file).read_text(encoding="utf-8")

    def _python_edges(self, file: str, tree: ast.Module) -> set[str]:
        found: set[str] = set()
        aliases: dict[str, str] = {}
        nodes = _running_nodes(tree)
        for node in nodes:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    found |= self._resolve(file, alias.name)
                    name = alias.name if alias.asname else alias.name.partition(".")[0]
                    aliases[alias.asname or name] = name
            elif isinstance(node, ast.ImportFrom):
                module = _absolute(file, node)
                for alias in node.names:
                    found |= self._resolve(file, f"{module}.{alias.name}")
                    aliases[alias.asname or alias.name] = f"{module}.{alias.name}"
        named_in_strings = file not in self._lazy
        used_with_attribute: set[int] = set()
        for node in nodes:
            if isinstance(node, ast.Attribute):
                chain = _attribute_chain(node)
                if chain:
                    used_with_attribute.add(id(chain[0]))
                    name = ".".join([aliases.get(chain[0].id, chain[0].id), *chain[1]])
                    if chain[0].id in aliases:
                        found |= self._resolve(file, name)
                if node.attr in _WALKS and not file.startswith("windlass/"):
                    found |= self._all_python_if_walked(node.attr, nodes)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and named_in_strings:
                found |= self._string_edges(file, node.value)
            elif isinstance(node, (ast.List, ast.Tuple)):
                found |= self._command_edges(file, node)
            elif isinstance(node, (ast.BinOp, ast.Call)) and not file.startswith("windlass/"):
                found |= self._console_script_edges(file, [node.right] if isinstance(node, ast.BinOp) else _found(node))
        for node in nodes:  # a lazy module passed on whole: any of its names may be asked for
            if isinstance(node, ast.Name) and node.id in aliases and id(node) not in used_with_attribute:
                for lazy in self._resolve(file, aliases[node.id]) & set(self._lazy):
                    if _module_file(aliases[node.id]) == lazy:
                        for target in self._lazy[lazy].values():
                            found |= self._resolve(file, target)
        return found - {file}

    def _all_python_if_walked(self, attribute: str, nodes: list[ast.AST]) -> set[str]:
        """Return all Python files for a test that walks packages, or that reads the text of `*.py`."""
        strings = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
        return self._python if attribute != "rglob" or {"*.py", "**/*.py", "*"} & strings else set()

    def _command_edges(self, file: str, node: ast.List | ast.Tuple) -> set[str]:
        values = [item.value if isinstance(item, ast.Constant) else None for item in node.elts]
        found = set() if file.startswith("windlass/") else self._console_script_edges(file, node.elts)
        for flag, module in zip(values, values[1:], strict=False):
            if flag == "-m" and isinstance(module, str):
                found |= self._resolve(file, module) | self._resolve(file, f"{module}.__main__")
        return found

    def _console_script_edges(self, file: str, nodes: list[ast.expr]) -> set[str]:
        found: set[str] = set()
        for node in nodes:
            if isinstance(node, ast.Constant) and node.value in _CONSOLE_SCRIPTS:
                found |= self._resolve(file, _CONSOLE_SCRIPTS[node.value])
        return found

    def _string_edges(self, file: str, text: str) -> set[str]:
        if _DOTTED_ONLY.fullmatch(text):
            found = self._resolve(file, text.replace(":", "."))
        elif _IMPORT_LINE.search(text) or (not file.startswith("windlass/") and "import " in text):
            found = self._text_edges(file, text)
        else:
            found = set()
        if file.startswith("windlass/"):
            return found  # messages name documents and commands that they do not read
        command = text.strip().partition(" ")
        if command[1] and command[0] in _CONSOLE_SCRIPTS:
            found |= self._resolve(file, _CONSOLE_SCRIPTS[command[0]])
        for module in _RUN_AS_MODULE.findall(text):
            found |= self._resolve(file, module) | self._resolve(file, f"{module}.__main__")
        return found | self._file_edges(text)

    def _text_edges(self, file: str, text: str) -> set[str]:
        """Return the files named by a program, or by the programs and commands of a page."""
        found: set[str] = set()
        for module, names in _IMPORTED_NAMES.findall(text):
            for name in re.findall(r"\w+", names):
                found |= self._resolve(file, f"{module}.{name}")
        for names in _IMPORTED.findall(text):
            for name in re.findall(r"[\w.]+", names):
                found |= self._resolve(file, name)
        for name in set(_DOTTED.findall(text)):
            found |= self._resolve(file, name)
        for command, module in _CONSOLE_SCRIPTS.items():
            if re.search(rf"(?:^|\n)\s*(?:\$ )?{command}\b", text):
                found |= self._resolve(file, module)
        return found

    def _file_edges(self, text: str) -> set[str]:
        found: set[str] = set()
        for token in set(_TOKEN.findall(text)):
            found |= {one for one in self._by_name.get(token, ()) if not one.startswith("windlass/")}
            if token.startswith("*.") and token != "*.py":
                found |= {one for one in self.files if one.endswith(token[1:]) and not one.startswith("windlass/")}
        return found

    def _resolve(self, file: str, dotted: str) -> set[str]:
        """Return the files that an import of `dotted` runs: its packages, its module, and the module of a lazy name."""
        if dotted.partition(".")[0] == "deepspeed":
            return {one for one in self._python if one.startswith("windlass/compat/")}
        found: set[str] = set()
        for root in {*IMPORT_ROOTS, file.rpartition("/")[0]}:
            found |= self._resolve_under(root, dotted)
        return found

    @functools.cache  # noqa: B019  (one graph a process)
    def _resolve_under(self, root: str, dotted: str, lazy: bool = True) -> set[str]:
        found: set[str] = set()
        at = f"{root}/" if root else ""
        parts = dotted.split(".")
        for index, part in enumerate(parts):
            at += part
            if f"{at}.py" in self.files:
                return found | {f"{at}.py"}
            package = f"{at}/__init__.py"
            if package in self.files:
                found.add(package)
                following = parts[index + 1] if index + 1 < len(parts) else ""
                target = self._lazy.get(package, {}).get(following) if lazy else None
                if target is not None:  # `windlass.initialize` is in `windlass.initialize`: not lazy a second time
                    return found | self._resolve_under(root, ".".join([target, *parts[index + 2 :]]), lazy=False)
            elif at not in self._folders:
                return found
            at += "/"
        return found

    def _implied_edges(self, file: str) -> set[str]:
        """Return what pytest and Python load beside a file: packages above it, conftest files, the stand-in package."""
        found = set()
        for parent in PurePosixPath(file).parents:
            above = {f"{parent}/__init__.py"}
            if file.startswith("tests/"):
                above.add(f"{parent}/conftest.py")
            found |= above & self.files
        if file == "windlass/compat/stand_in_path.py":
            found |= {one for one in self._python if one.startswith("windlass/compat/path/")}
        return found - {file}


def _running_nodes(tree: ast.AST) -> list[ast.AST]:
    """Return the nodes of code that runs: no docstrings, nothing under `if TYPE_CHECKING:`."""
    found: list[ast.AST] = []
    waiting: list[ast.AST] = [tree]
    while waiting:
        for name, value in vars(waiting.pop()).items():
            if name == "ctx" or not isinstance(value, (list, ast.AST)):
                continue
            for child in value if isinstance(value, list) else (value,):
                if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
                    waiting += child.orelse
                elif isinstance(child, ast.AST) and not (
                    isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)
                ):
                    found.append(child)
                    waiting.append(child)
    return found


def _type_checking_names(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in tree.body:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            for one in node.body:
                if isinstance(one, ast.ImportFrom):
                    yield from ((alias.asname or alias.name, f"{one.module}.{alias.name}") for alias in one.names)


def _attribute_chain(node: ast.Attribute) -> tuple[ast.Name, list[str]] | None:
    names: list[str] = []
    at: ast.expr = node
    while isinstance(at, ast.Attribute):
        names.append(at.attr)
        at = at.value
    return (at, names[::-1]) if isinstance(at, ast.Name) else None


def _found(node: ast.Call) -> list[ast.expr]:
    """Return the arguments of a call that looks up a program, as `shutil.which` does."""
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    return node.args if name in ("which", "with_name", "joinpath", "join") else []


def _absolute(file: str, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    package = PurePosixPath(file).parts[: -node.level]
    return ".".join([*package, *([node.module] if node.module else [])])


def _module_file(dotted: str) -> str:
    return dotted.replace(".", "/") + "/__init__.py"
