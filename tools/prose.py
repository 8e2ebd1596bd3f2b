"""Refuse docstrings, comments and pages that break the style rules of CONTRIBUTING.md, as far as a pattern can tell.

    python tools/prose.py [PATH ...]

Checks the first word of every docstring (of attributes too) and comment, that each entry of a docstring's `Args:` has a
line of its own and begins with a noun, that each entry of `Raises:` names its subject, retired words in docstrings,
comments, messages and Markdown pages, and names of classes that occur twice in the package. Prints `path:line: reason`
for each finding and exits with 1 if there is any.
"""

from __future__ import annotations

import ast
import gc
import hashlib
import io
import json
import os
import re
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_DEFAULT_PATHS = (
    "windlass", "tests", "bench", "tools", "examples", "docs",
    "README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md",
)  # fmt: skip
_FIRST_WORDS = re.compile(r"(what|whether|who|whose|whom|how|which|where|when|if|of|to whom|it|they)\b", re.IGNORECASE)
# A function's docstring begins with a verb.
_NO_VERB = re.compile(
    r"(the|an?|one|two|some|every|each|both|as|in|on|for|from|with|by|at|after|before|under|this|these|there)\b",
    re.IGNORECASE,
)
# A comment begins with the noun that it describes: "# limit for each server", not "# of each server".
_NO_NOUN = re.compile(r"#\s(of|that|which|whose|(?:above|after|by|for|from|in|on|to|with) which)\b")
# An entry of `Args:` also begins with a noun: "folder: folder of the files", not "folder: of the files".
_BARE_ENTRY = re.compile(r"(?m)^ *[`\w, *]+: (?:see )?(of|by|from|to|what|whether|who|how|which|where)\b(?! default\b)")
# An entry of `Raises:` names its subject: "the file is damaged", not "it is damaged".
_NO_SUBJECT = re.compile(r"(?m)^ *\w+: (it|they|none|that|one(?! of\b)|there (?:is|are) none)\b")
_QUOTED = re.compile(r"(?ms)^```.*?^```|`[^`\n]*`|\"[^\"\n]*\"")

# Words of earlier versions of windlass, and the term that replaces each.
_RETIRED = {
    r"\bown cut\b": "local shard",
    r"\bborn sharded\b": "constructed under `zero.Init`, or deferred init",
    r"\bdrawers?\b": "lazy storage handle",
    r"\bmeeting points?\b": "sync point",
    r"\bforesight\b": "prefetcher",
    r"\bresidence\b": "tier",
    r"\btenants?\b": "state entry",
    r"\bfor whom\b": "name the noun",
    r"\bto whom\b": "name the noun",
    r"\bwho(ever)? (is|has|was|does|gets|wants|needs)\b": "name the noun",
    r"\bat home\b": "resident",
    r"\bis told\b": "receives",
    r"\bare told\b": "receive",
    r"\btells? (the )?(others|ranks?)\b": "sends",
    r"\bsays? so\b": "reports",
    r"\bhas heard\b": "has received",
    r"\bsomebody\b": "name the noun",
    r"\bnobody\b": "name the noun",
    r"\banybody\b": "name the noun",
    r"\bhas it whole\b|\bhave it whole\b|\bmade whole\b|\bwhole again\b": "full, or unsharded",
    r"\bcut short\b": "truncated",
    r"\bin mid-\w+": "during",
    r"\bgo(es)? on (from|with|without|until)\b|\b(can|cannot|may|must) go on\b": "resumes, continues",
    r"\bsays? goodbye\b": "sends BYE",
    r"\btakes? (its|their) turns?\b|\bby turns\b": "alternates, is interleaved",
    r"\bthawed\b": "unfrozen",
    r"\bhanded over\b": "passed",
    r"\bfrom afar\b": "remote",
    r"\bwhere there (is|are) none\b": "if there is none",
    r"\bhome tier\b|\bgoes? home\b|\bhomes\b": "tier",
    r"\bsome\w+ else's\b": "name the noun",
    r"\bof ours\b": "name the noun",
    r"\bis no part of\b": "is not included in",
    r"\bbehind the user's back\b": "implicitly",
    r"\bshall\b": "must, or rewrite in the present tense",
    r"\bas it were\b": "delete",
    r"\bin the place of\b": "instead of",
    r"\bin turns\b": "alternately",
    r"\bheld against\b": "compared with",
    r"\bkept back\b": "held back",
    r"\bthe very \w+(?<!end)\b": "the same",
    r"\bfor so many\b|\bover so many\b|\bafter so many\b": "name the number",
    r"\bwithout a word\b": "silently",
    r"\bwhoever\b|\bin any company\b": "rewrite with a noun",
    r"\bgoes home\b|\bcomes? back on its way\b": "rewrite with a noun",
    r"\bmakes no such promise\b": "does not guarantee this",
    r"\bare not there yet\b|\bis not there yet\b": "is missing, or is not loaded yet",
    r"\bforetold\b|\bforetells?\b": "predicted",
    r"\btwins?\b": "counterpart, or clone",
    r"(?<!here )\b(is|are) no (?!longer\b|more\b|one\b|such\b|other\b|\w+er\b)\w+": "is not a, are not",
    r"\bbegin of\b|\b(its|'s) begin\b": "beginning, or start",
    r"\bhitherto\b|\bthereof\b|\bwherein\b|\bwhereof\b|\bthereby\b": "rewrite in present-day English",
}
# Names and values of earlier versions, in code.
_RETIRED_CODE = re.compile(r"(?m)^ +(?:(foresight)\b.*=|[A-Z]+ = \"(present|released|coming)\"$)")
_CURRENT_CODE = {
    "foresight": "prefetcher",
    "present": "unsharded",
    "released": "sharded",
    "coming": "unsharding",
}
_MESSAGE_CALLS = {"add_argument", "debug", "echo", "error", "fail", "info", "print", "skip", "warn", "warning"}
_ANY_RETIRED = re.compile("|".join(_RETIRED), re.IGNORECASE)
_RETIRED_PATTERNS = [(re.compile(pattern, re.IGNORECASE), instead) for pattern, instead in _RETIRED.items()]


_Definition = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def _definitions(node: ast.AST) -> Iterator[_Definition]:
    """Yield the modules, classes and functions below a node, without a walk through the expressions."""
    if isinstance(node, _Definition):
        yield node
    for name in ("body", "orelse", "handlers", "finalbody", "cases"):
        below = getattr(node, name, ())
        for child in below if isinstance(below, list) else ():
            if isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
                yield from _definitions(child)


def _docstrings(definitions: list[_Definition]) -> Iterator[tuple[int, str]]:
    for node in definitions:
        if not node.body:
            continue
        # A string after an attribute of a module or a class documents the attribute.
        strings = node.body if isinstance(node, ast.Module | ast.ClassDef) else node.body[:1]
        for one in strings:
            if isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant) and isinstance(one.value.value, str):
                yield one.lineno, one.value.value


def _comments(source: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def _fragments(source: str) -> Iterator[tuple[int, str]]:
    """Yield `(line, word)` for each comment that begins with a relative clause or `of`."""
    if _NO_NOUN.search(source) is None:
        return
    lines = source.splitlines()
    for line, text in _comments(source):
        continues = line > 1 and all(one.lstrip().startswith("#") for one in lines[line - 2 : line])
        first_words = _NO_NOUN.match(text)
        if first_words and not continues:
            yield line, first_words[1]


def _messages(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the constant parts of the texts of raised errors, log calls, prints and options."""
    for node in ast.walk(tree):
        name = getattr(node, "func", None)
        is_call = isinstance(node, ast.Call) and getattr(name, "attr", getattr(name, "id", "")) in _MESSAGE_CALLS
        if not (isinstance(node, ast.Raise) or is_call):
            continue
        for part in ast.walk(node):
            if isinstance(part, ast.Constant) and isinstance(part.value, str) and " " in part.value:
                yield part.lineno, part.value


def _actions(definitions: list[_Definition]) -> Iterator[tuple[int, str]]:
    """Yield the docstrings of functions, except tests, properties and fixtures."""
    for node in definitions:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.name.startswith("test_"):
            continue
        text = ast.get_docstring(node)
        decorators = " ".join(ast.unparse(decorator) for decorator in node.decorator_list)
        if text and not any(word in decorators for word in ("property", "fixture", "setter")):
            yield node.lineno, text


def _joined_arguments(definitions: list[_Definition]) -> Iterator[tuple[int, str]]:
    """Yield `(line, name)` for each argument that a docstring describes on the line of another one."""
    for node in definitions:
        if isinstance(node, ast.Module):
            continue
        section = re.search(r"\n\n(Args|Attributes):\n((?: +.*\n?)+)", ast.get_docstring(node) or "")
        if section is None:
            continue
        names = {item.arg for item in ast.walk(node) if isinstance(item, ast.arg)}
        names |= {ast.unparse(item.target) for item in ast.walk(node) if isinstance(item, ast.AnnAssign)}
        for entry in re.finditer(r"\S[.;] (\w+): ", section[2]):
            if entry[1] in names:
                yield node.lineno, entry[1]


def _bare_entries(definitions: list[_Definition]) -> Iterator[tuple[int, str, str]]:
    """Yield `(line, entry, word)` for each documented argument, attribute or error whose text begins without a noun."""
    for node in definitions:
        if isinstance(node, ast.Module):
            continue
        for name, section in re.findall(
            r"\n\n(Args|Attributes|Raises):\n((?: +.*\n?)+)", ast.get_docstring(node) or ""
        ):
            for entry in (_NO_SUBJECT if name == "Raises" else _BARE_ENTRY).finditer(section):
                yield node.lineno, entry[0].split(":")[0].strip(), entry[1]


@dataclass
class Report:
    """Findings `(line, reason)` of one file, and its public top-level classes `(line, name)`."""

    problems: list[tuple[int, str]]
    classes: list[tuple[int, str]]


def examine(path: Path, source: str) -> Report:
    """Examine the docstrings, comments and messages of a Python file, or the text of a Markdown page."""
    if path.suffix == ".md":
        return Report(list(_retired_words(source)), [])
    tree = ast.parse(source, filename=str(path))
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]
    return Report(list(_problems(source, tree)), [(node.lineno, node.name) for node in classes])


def _retired_words(page: str) -> Iterator[tuple[int, str]]:
    """Yield `(line, reason)` for each retired word of a page outside code and quotations."""
    text = _QUOTED.sub(lambda quoted: "`" + "\n" * quoted[0].count("\n"), page)
    joined = text.replace("\n", " ")
    for pattern, instead in _RETIRED_PATTERNS:
        for found in pattern.finditer(joined):
            yield text.count("\n", 0, found.start()) + 1, f"{found.group()!r}: {instead}"


def _problems(source: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield `(line, reason)` for each docstring, comment or message that breaks a rule."""
    definitions = list(_definitions(tree))
    docstrings = list(_docstrings(definitions))
    for line, text in docstrings:
        first_word = _FIRST_WORDS.match(text.strip())
        if first_word:
            yield line, f"a docstring begins with {first_word.group()!r}: begin with a verb or a noun phrase"
    for line, text in _actions(definitions):
        first_word = _NO_VERB.match(text)
        if first_word:
            yield line, f"a function's docstring begins with {first_word.group()!r}: begin with a verb"
    for line, name in _joined_arguments(definitions):
        yield line, f"a docstring describes {name!r} within another argument's entry: begin a line for it"
    for line, name, word in _bare_entries(definitions):
        yield line, f"the description of {name!r} begins with {word!r}: begin with the noun"
    for line, word in _fragments(source):
        yield line, f"a comment begins with {word!r}: begin with the noun"
    for old in _RETIRED_CODE.finditer(source):
        word = old[1] or old[2]
        yield source.count("\n", 0, old.start()) + 1, f"{word!r}: {_CURRENT_CODE[word]}"
    if _ANY_RETIRED.search(source) is None:  # most files end here, because finding their comments takes long
        return
    for line, text in [*docstrings, *_comments(source), *_messages(tree)]:
        if _ANY_RETIRED.search(text) is None:
            continue
        for pattern, instead in _RETIRED_PATTERNS:
            result = pattern.search(text)
            if result:
                yield line, f"{result.group()!r}: {instead}"


def find_repeated_classes(reports: Mapping[Path, Report]) -> Iterator[tuple[Path, int, str]]:
    """Yield `(path, line, reason)` for each public top-level class whose name another module of the package uses.

    `compat` is left out: its classes have DeepSpeed's names.
    """
    places: dict[str, list[tuple[Path, int]]] = defaultdict(list)
    for path, report in sorted(reports.items()):
        if path.parts[0] == "windlass" and "compat" not in path.parts:
            for line, name in report.classes:
                places[name].append((path, line))
    for name, result in places.items():
        for path, line in result[1:]:
            yield path, line, f"class {name} stands in {result[0][0]} too"


def examine_files(files: list[Path], cache: Path) -> dict[Path, Report]:
    """Examine files, except those whose text an earlier call has examined.

    Args:
        cache: file that keeps the reports of unchanged files between calls, with the hash of each file's text.
    """
    kept = _load(cache)
    reports: dict[Path, Report] = {}
    entries: dict[str, Any] = {name: entry for name, entry in kept.items() if Path(name).exists()}
    gc.disable()  # syntax trees have no cycles, and garbage collection while parsing takes long
    for path in files:
        text = path.read_bytes()
        digest = hashlib.sha1(text, usedforsecurity=False).hexdigest()
        known = kept.get(str(path))
        if known is not None and known[0] == digest:
            reports[path] = Report(*([(line, name) for line, name in part] for part in known[1:]))
        else:
            reports[path] = examine(path, text.decode("utf-8"))
        entries[str(path)] = (digest, reports[path].problems, reports[path].classes)
    gc.enable()
    cache.parent.mkdir(exist_ok=True)
    part = cache.with_name(f"{cache.name}.{os.getpid()}")
    part.write_text(json.dumps({"version": _version(), "files": entries}))
    part.replace(cache)
    return reports


def _load(cache: Path) -> dict[str, Any]:
    try:
        content = json.loads(cache.read_text())
    except (OSError, ValueError):  # no cache yet, or a cache that a full disk truncated
        return {}
    return dict(content["files"]) if content["version"] == _version() else {}


def _version() -> str:
    """Return the hash of this file, so that cached reports of other rules are not used."""
    return hashlib.sha1(Path(__file__).read_bytes(), usedforsecurity=False).hexdigest()


def _files_below(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.suffix in (".py", ".md"))


def main(arguments: list[str]) -> int:
    """Check the given files and folders, or the whole project. Return the exit status."""
    paths = [Path(argument) for argument in arguments or _DEFAULT_PATHS]
    files = [file for path in paths for file in (_files_below(path) if path.is_dir() else [path])]
    reports = examine_files(files, Path(__file__).parents[1] / ".pytest_cache" / "prose.json")
    findings = [f"{file}:{line}: {reason}" for file, report in reports.items() for line, reason in report.problems]
    if not arguments:
        findings += [f"{path}:{line}: {reason}" for path, line, reason in find_repeated_classes(reports)]
    print("\n".join(findings) if findings else "prose: no findings")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
