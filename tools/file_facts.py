"""Names and paths in the text of one file of the repository, for the import graph."""

from __future__ import annotations

import ast
import gc
import hashlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

_DOTTED = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+")
_DOTTED_ONLY = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+(?::\w+)?")
_IMPORT_LINE = re.compile(r"(?:^|[;\n])\s*(?:from\s+[\w.]+\s+import|import\s+\w)")
_IMPORTED_NAMES = re.compile(r"from\s+([\w.]+)\s+import\s+\(?([\w, \n]+)")
_IMPORTED = re.compile(r"\bimport\s+([\w.]+(?:\s*,\s*[\w.]+)*)")
_RUN_AS_MODULE = re.compile(r"-m\s+([\w.]+)")
_TOKEN = re.compile(r"[^\s/'\"`(){},;:=<>|]+")
_CONSOLE_SCRIPTS = {"windlass": "windlass.__main__", "deepspeed": "deepspeed", "ds_report": "deepspeed"}
_WALKS = {"walk_packages", "iter_modules", "rglob"}
_PYTHON_PATTERNS = {"*.py", "**/*.py", "*"}


@dataclass
class FileFacts:
    """Names and paths in one file's text, before they are resolved against the files that exist.

    Docstrings and `if TYPE_CHECKING:` run nothing and are left out.

    Attributes:
        names: dotted names that the file imports, uses, starts as programs, or has in strings.
        tokens: words of strings that may be names of files or folders, or patterns of names.
        whole: imported names that are used without an attribute. Any name of such a module may be used.
        walks_python: True if the file walks packages or lists all `*.py`.
        lazy: lazily imported name -> its dotted name, if the file is a package with such names.
    """

    names: set[str] = field(default_factory=set)
    tokens: set[str] = field(default_factory=set)
    whole: set[str] = field(default_factory=set)
    walks_python: bool = False
    lazy: dict[str, str] | None = None


def facts_of_files(root: Path, files: list[str], cache: Path | None = None) -> dict[str, FileFacts]:
    """Return the facts of every file of `files`, relative to `root`, that is Python or a page.

    Args:
        cache: file that keeps the facts of unchanged files between calls, with the hash of each file's text.
    """
    kept = _load(cache) if cache is not None else {}
    results: dict[str, FileFacts] = {}
    hashes: dict[str, str] = {}
    collects = gc.isenabled()
    gc.disable()  # syntax trees have no cycles, and garbage collection doubles the time of parsing
    try:
        for file in files:
            if file.endswith((".py", ".md")):
                text = (root / file).read_bytes()
                hashes[file] = hashlib.sha1(text, usedforsecurity=False).hexdigest()
                known = kept.get(file)
                results[file] = known[1] if known and known[0] == hashes[file] else facts(file, text.decode("utf-8"))
    finally:
        if collects:
            gc.enable()
    if cache is not None and {file: entry[0] for file, entry in kept.items()} != hashes:
        _save(cache, {file: (hashes[file], item) for file, item in results.items()})
    return results


def facts(file: str, text: str) -> FileFacts:
    """Return the facts of one file with this text. A page (`*.md`) counts as a program: readers run its examples."""
    if not file.endswith(".py"):
        result = FileFacts()
        _add_text(result, text)
        return result
    return _facts_of_tree(file, ast.parse(text, file))


def _facts_of_tree(file: str, tree: ast.Module) -> FileFacts:
    result = FileFacts()
    if any(isinstance(node, ast.FunctionDef) and node.name == "__getattr__" for node in tree.body):
        result.lazy = dict(_type_checking_names(tree))
    in_package = file.startswith("windlass/")
    aliases: dict[str, str] = {}
    nodes = _running_nodes(tree)
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                result.names.add(alias.name)
                name = alias.name if alias.asname else alias.name.partition(".")[0]
                aliases[alias.asname or name] = name
        elif isinstance(node, ast.ImportFrom):
            module = _absolute(file, node)
            for alias in node.names:
                result.names.add(f"{module}.{alias.name}")
                aliases[alias.asname or alias.name] = f"{module}.{alias.name}"
    strings: set[str] = set()
    walks: set[str] = set()
    with_attribute: set[int] = set()
    for node in nodes:
        if isinstance(node, ast.Attribute):
            chain = _attribute_chain(node)
            if chain:
                with_attribute.add(id(chain[0]))
                if chain[0].id in aliases:
                    result.names.add(".".join([aliases[chain[0].id], *chain[1]]))
            if node.attr in _WALKS and not in_package:
                walks.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            strings.add(node.value)
        elif isinstance(node, (ast.List, ast.Tuple)):
            _add_command(result, node, in_package)
        elif isinstance(node, (ast.BinOp, ast.Call)) and not in_package:
            _add_console_scripts(result, [node.right] if isinstance(node, ast.BinOp) else _looked_up(node))
    result.walks_python = any(walk != "rglob" or bool(_PYTHON_PATTERNS & strings) for walk in walks)
    if result.lazy is None:  # strings of a lazy package only name what it imports lazily
        for value in strings:
            _add_string(result, value, in_package)
    result.whole = {
        aliases[node.id]
        for node in nodes
        if isinstance(node, ast.Name) and node.id in aliases and id(node) not in with_attribute
    }
    return result


def _add_command(found: FileFacts, node: ast.List | ast.Tuple, in_package: bool) -> None:
    values = [item.value if isinstance(item, ast.Constant) else None for item in node.elts]
    if not in_package:
        _add_console_scripts(found, node.elts)
    for flag, module in zip(values, values[1:], strict=False):
        if flag == "-m" and isinstance(module, str):
            found.names |= {module, f"{module}.__main__"}


def _add_console_scripts(found: FileFacts, nodes: list[ast.expr]) -> None:
    for node in nodes:
        if isinstance(node, ast.Constant) and node.value in _CONSOLE_SCRIPTS:
            found.names.add(_CONSOLE_SCRIPTS[node.value])


def _add_string(found: FileFacts, text: str, in_package: bool) -> None:
    if _DOTTED_ONLY.fullmatch(text):
        found.names.add(text.replace(":", "."))
    elif _IMPORT_LINE.search(text) or (not in_package and "import " in text):
        _add_text(found, text)
    if in_package:
        return  # the package's strings are messages: files and commands in them are not read
    command = text.strip().partition(" ")
    if command[1] and command[0] in _CONSOLE_SCRIPTS:
        found.names.add(_CONSOLE_SCRIPTS[command[0]])
    for module in _RUN_AS_MODULE.findall(text):
        found.names |= {module, f"{module}.__main__"}
    found.tokens.update(_TOKEN.findall(text))


def _add_text(found: FileFacts, text: str) -> None:
    """Add the names of a program, or of the programs and commands of a page."""
    for module, names in _IMPORTED_NAMES.findall(text):
        found.names |= {f"{module}.{name}" for name in re.findall(r"\w+", names)}
    for names in _IMPORTED.findall(text):
        found.names.update(re.findall(r"[\w.]+", names))
    found.names.update(_DOTTED.findall(text))
    for command, module in _CONSOLE_SCRIPTS.items():
        if re.search(rf"(?:^|\n)\s*(?:\$ )?{command}\b", text):
            found.names.add(module)


def _running_nodes(tree: ast.AST) -> list[ast.AST]:
    """Return the nodes of code that runs: no docstrings, nothing under `if TYPE_CHECKING:`."""
    found: list[ast.AST] = []
    waiting: list[ast.AST] = [tree]
    while waiting:
        for name, value in vars(waiting.pop()).items():
            if name == "ctx" or not isinstance(value, (list, ast.AST)):
                continue
            for child in value if isinstance(value, list) else (value,):
                if isinstance(child, ast.If) and _is_type_checking(child):
                    waiting += child.orelse
                elif isinstance(child, ast.AST) and not (
                    isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)
                ):
                    found.append(child)
                    waiting.append(child)
    return found


def _is_type_checking(node: ast.If) -> bool:
    return any("TYPE_CHECKING" in (getattr(n, "id", ""), getattr(n, "attr", "")) for n in ast.walk(node.test))


def _type_checking_names(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in tree.body:
        if isinstance(node, ast.If) and _is_type_checking(node):
            for item in node.body:
                if isinstance(item, ast.ImportFrom):
                    yield from ((alias.asname or alias.name, f"{item.module}.{alias.name}") for alias in item.names)


def _attribute_chain(node: ast.Attribute) -> tuple[ast.Name, list[str]] | None:
    names: list[str] = []
    at: ast.expr = node
    while isinstance(at, ast.Attribute):
        names.append(at.attr)
        at = at.value
    return (at, names[::-1]) if isinstance(at, ast.Name) else None


def _looked_up(node: ast.Call) -> list[ast.expr]:
    """Return the arguments of a call that looks up a program, as `shutil.which` does."""
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    return node.args if name in ("which", "with_name", "joinpath", "join") else []


def _absolute(file: str, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    package = PurePosixPath(file).parts[: -node.level]
    return ".".join([*package, *([node.module] if node.module else [])])


def _version() -> str:
    """Return the hash of this file, so that cached facts of an older version are not used."""
    return hashlib.sha1(Path(__file__).read_bytes(), usedforsecurity=False).hexdigest()


def _load(cache: Path) -> dict[str, tuple[str, FileFacts]]:
    if not cache.exists():
        return {}
    try:
        content = json.loads(cache.read_text(encoding="utf-8"))
    except ValueError:  # cut off by a full disk: it is only a cache
        return {}
    if content.pop("version", None) != _version():
        return {}
    return {
        file: (digest, FileFacts(set(names), set(tokens), set(full), walks_python, lazy))
        for file, (digest, names, tokens, full, walks_python, lazy) in content.items()
    }


def _save(cache: Path, entries: dict[str, tuple[str, FileFacts]]) -> None:
    content: dict[str, object] = {"version": _version()}
    for file, (digest, item) in entries.items():
        content[file] = (
            digest,
            sorted(item.names),
            sorted(item.tokens),
            sorted(item.whole),
            item.walks_python,
            item.lazy,
        )
    cache.parent.mkdir(parents=True, exist_ok=True)
    part = cache.with_name(f"{cache.name}.{os.getpid()}")
    part.write_text(json.dumps(content), encoding="utf-8")
    part.replace(cache)
