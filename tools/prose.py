"""Refuse docstrings and comments that break the style rules of CONTRIBUTING.md, as far as a pattern can tell.

    python tools/prose.py [PATH ...]

Checks the first word of every docstring, retired words in docstrings and comments, and names of classes that occur
twice in the package. Prints `path:line: reason` for each finding and exits with 1 if there is any.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

_DEFAULT_PATHS = ("windlass", "tests", "bench", "tools", "examples")
_FIRST_WORDS = re.compile(r"(what|whether|who|whose|whom|how|which|where|when|if|of|to whom|it|they)\b", re.IGNORECASE)

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
    r"\bgo(es)? on (from|with)\b": "resumes, continues",
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
    r"\bhitherto\b|\bthereof\b|\bwherein\b|\bwhereof\b|\bthereby\b": "rewrite in present-day English",
}
_RETIRED_PATTERNS = [(re.compile(pattern, re.IGNORECASE), instead) for pattern, instead in _RETIRED.items()]


def _docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) or not node.body:
            continue
        first = node.body[0]
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
            yield first.lineno, first.value.value


def _comments(source: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def find_problems(path: Path) -> Iterator[tuple[int, str]]:
    """Yield `(line, reason)` for each docstring or comment of a Python file that breaks a rule."""
    source = path.read_text()
    docstrings = list(_docstrings(ast.parse(source, filename=str(path))))
    for line, text in docstrings:
        first_word = _FIRST_WORDS.match(text.strip())
        if first_word:
            yield line, f"a docstring begins with {first_word.group()!r}: begin with a verb or a noun phrase"
    for line, text in [*docstrings, *_comments(source)]:
        for pattern, instead in _RETIRED_PATTERNS:
            result = pattern.search(text)
            if result:
                yield line, f"{result.group()!r}: {instead}"


def find_repeated_classes(package: Path) -> Iterator[tuple[Path, int, str]]:
    """Yield `(path, line, reason)` for each public top-level class whose name another module of the package uses.

    `compat` is left out: its classes have DeepSpeed's names.
    """
    places: dict[str, list[tuple[Path, int]]] = defaultdict(list)
    for path in sorted(package.rglob("*.py")):
        if "compat" in path.parts:  # its classes have DeepSpeed's names
            continue
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append((path, node.lineno))
    for name, result in places.items():
        for path, line in result[1:]:
            yield path, line, f"class {name} stands in {result[0][0]} too"


def main(arguments: list[str]) -> int:
    """Check the given files and folders, or the whole project. Return the exit status."""
    paths = [Path(argument) for argument in arguments or _DEFAULT_PATHS]
    files = [file for path in paths for file in (sorted(path.rglob("*.py")) if path.is_dir() else [path])]
    findings = [f"{file}:{line}: {reason}" for file in files for line, reason in find_problems(file)]
    if not arguments:
        findings += [f"{path}:{line}: {reason}" for path, line, reason in find_repeated_classes(Path("windlass"))]
    print("\n".join(findings) if findings else "prose: no findings")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
