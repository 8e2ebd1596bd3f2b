"""Sources of a corpus: files, directories, globs, the standard library's sources, and hub datasets."""

from __future__ import annotations

import glob
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from windlass.base.errors import DataError
from windlass.base.log import logger
from windlass.data.document_formats import (
    KNOWN_SUFFIXES,
    READ_ERRORS,
    detect_format,
    has_records,
    is_text,
    read_hub,
    read_json,
    read_lines,
    read_parquet,
    read_text,
)

_SKIPPED_FOLDERS = {"__pycache__", "node_modules", "site-packages", "dist-packages"}
# Tests and generated tables are not typical Python code. Near-copies of training text among the held-out documents
# would improve the score.
_SKIPPED_IN_STDLIB = _SKIPPED_FOLDERS | {"test", "tests", "idle_test", "encodings", "pydoc_data"}


@dataclass(frozen=True)
class CorpusSource:
    """File or hub dataset, and the format in which it is read."""

    location: str
    format: str  # "text", "lines", "json", "parquet" or "hub"

    def documents(self, text_field: str = "text") -> Iterator[str]:
        """Yield the non-empty documents in file order.

        Raises:
            DataError: the source is unreadable or of another format, or a record has no `text_field`.
        """
        reader = {"json": read_json, "lines": read_lines, "parquet": read_parquet, "hub": read_hub}.get(self.format)
        texts = reader(self.location, text_field) if reader else read_text(self.location)
        try:
            yield from (text for text in texts if text.strip())
        except READ_ERRORS as error:
            reason = getattr(error, "strerror", None) or error
            raise DataError(
                f"cannot read {self.location}: {reason}; check the path, its rights and the file"
            ) from error


def find_sources(specs: Sequence[str], exclude_dir: Path | None = None, text_field: str = "text") -> list[CorpusSource]:
    """Return the sources of `specs`, sorted within each spec and without duplicates.

    A spec is a file, a directory (read recursively), a glob, `stdlib` (the sources of the running Python), or
    `hub:NAME[@CONFIG][:SPLIT]` (a Hugging Face dataset; the default split is `train`).

    Args:
        exclude_dir: directory that is skipped inside other directories, e.g. the output of a run.
        text_field: field of a record that holds the record's text. A `.json` file of settings (one object over several
            lines, or without this field) is read as plain text, unless a spec names the file.

    Raises:
        DataError: no spec is given, or a spec matches nothing readable.
    """
    if not specs:
        raise DataError("no data given; use --data with files, directories, globs, 'stdlib' or 'hub:NAME'")
    found: dict[str, CorpusSource] = {}
    for spec in specs:
        for source in _expand(spec, exclude_dir and exclude_dir.resolve(), text_field):
            found.setdefault(source.location, source)
    return list(found.values())


def _expand(spec: str, exclude_dir: Path | None, text_field: str) -> list[CorpusSource]:
    if spec == "stdlib" and not os.path.exists(spec):
        return _stdlib()
    if spec.startswith("hub:"):
        return [CorpusSource(spec.removeprefix("hub:"), "hub")]
    path = Path(spec).expanduser()
    if path.is_dir():
        return _require_sources(spec, _from_directory(path, _SKIPPED_FOLDERS, text_field, exclude_dir))
    if path.is_file():
        return [_from_named_file(path)]
    matches = sorted(glob.glob(str(path), recursive=True))
    if not matches:
        raise DataError(
            f"data path {spec!r} does not exist and matches no file; give a file, a directory, a quoted glob, "
            "'stdlib' or 'hub:NAME'"
        )
    sources: list[CorpusSource] = []
    for match in map(Path, matches):
        sources += (
            _from_directory(match, _SKIPPED_FOLDERS, text_field, exclude_dir)
            if match.is_dir()
            else _readable_sources([match], text_field)
        )
    return _require_sources(spec, sources)


def _stdlib() -> list[CorpusSource]:
    root = Path(sysconfig.get_paths()["stdlib"])
    sources = [
        source
        for source in _from_directory(root, _SKIPPED_IN_STDLIB, text_field="text")
        if source.location.endswith(".py")
    ]
    if not sources:
        raise DataError(
            f"this Python has no sources of its standard library under {root}; pass your own files with --data"
        )
    return sources


def _from_named_file(path: Path) -> CorpusSource:
    kind = detect_format(path)
    if kind == "text" and not is_text(path):
        raise DataError(
            f"{path} is not UTF-8 text; readable formats are text and source files, {', '.join(KNOWN_SUFFIXES)}"
        )
    return CorpusSource(str(path), kind)


def _from_directory(
    root: Path, skipped: set[str], text_field: str, exclude_dir: Path | None = None
) -> list[CorpusSource]:
    paths: list[Path] = []
    for folder, folders, names in os.walk(root):
        visible = (name for name in folders if name not in skipped and not name.startswith("."))
        folders[:] = sorted(
            name for name in visible if exclude_dir is None or Path(folder, name).resolve() != exclude_dir
        )
        paths += [Path(folder, name) for name in sorted(names) if not name.startswith(".")]
    return _readable_sources(paths, text_field)


def _readable_sources(paths: Sequence[Path], text_field: str) -> list[CorpusSource]:
    """Return the sources of files that were not named individually. Binary files are skipped."""
    kinds = [(path, _detect_format(path, text_field)) for path in paths if path.is_file()]
    kept = [CorpusSource(str(path), kind) for path, kind in kinds if kind != "text" or is_text(path)]
    if len(kept) < len(kinds):
        logger.debug("skipped %d files that are not text", len(kinds) - len(kept))
    settings = [one.location for one in kept if one.format == "text" and detect_format(Path(one.location)) == "json"]
    if settings:
        logger.warning(
            "%d .json files have no records with the field %r and are read as text with their keys, such as %s; if "
            "they are documents, pass the field of their text as --text-field",
            len(settings),
            text_field,
            settings[0],
        )
    return kept


def _detect_format(path: Path, text_field: str) -> str:
    """Detect the format as `detect_format` does, but treat a `.json` file without records (e.g. settings) as text."""
    kind = detect_format(path)
    return "text" if kind == "json" and not has_records(path, text_field) else kind


def _require_sources(spec: str, sources: list[CorpusSource]) -> list[CorpusSource]:
    if not sources:
        raise DataError(
            f"data path {spec!r} holds no readable file; text, source, JSON lines and Parquet files are read"
        )
    return sources
