"""Checkpoint directory: tags, the file `latest`, the lock that is held during renames, and errors of the disk."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from windlass.base.atomic_file import PARTIAL_SUFFIX, write_atomically
from windlass.base.errors import CheckpointError
from windlass.base.log import logger
from windlass.base.regular_file import open_regular
from windlass.checkpoint.foreign_formats import ForeignFormat, foreign_formats

INDEX_FILE = "checkpoint.json"
LATEST = "latest"
LATEST_UNIVERSAL = "latest_universal"  # file with the tag of a converted checkpoint (`checkpoint.load_universal`)
_LONGEST_LATEST = 4096  # bytes; a tag has at most 200
_LOCK_TIMEOUT_S = 60.0  # seconds that another job may hold the lock

# [Note: atomic checkpoints] Data is written to a directory with a hidden name (staging_checkpoint.py). Every file is
# fsynced (`checkpoint.json` after the data files), then the directory, and a rename gives the directory the name `TAG`.
# Only then is `latest` replaced, by a rename too. A save under an existing tag first moves the old checkpoint to
# `.TAG.replaced`; if a crash between the two renames leaves no `TAG`, a load reads `.TAG.replaced`.


def check_tag(tag: str) -> str:
    """Return the tag if it is a valid name inside the checkpoint directory.

    Raises:
        CheckpointError: an empty, hidden or reserved name, one of more than 200 bytes, or one with a path separator or
            an unprintable character.
    """
    reserved = (LATEST, LATEST_UNIVERSAL, INDEX_FILE)
    broken = not tag or tag.startswith(".") or tag in reserved or len(tag.encode("utf-8", "surrogatepass")) > 200
    if broken or any(letter in "/\\" or not letter.isprintable() for letter in tag):
        raise CheckpointError(
            f"the checkpoint tag {tag!r:.80} cannot be used: a tag is one visible file name of at most 200 bytes, "
            f"without / or \\, and none of {', '.join(reserved)}"
        )
    return tag


def read_latest(directory: str | os.PathLike[str], name: str = LATEST) -> str | None:
    """Return the tag in the file `latest` (or `name`); None if there is no such file.

    Raises:
        CheckpointError: the file cannot be read, leads out of `directory`, or does not contain a valid tag.
    """
    path = Path(directory) / name
    try:
        with open_regular(path, Path(directory)) as file:
            tag = _written_tag(Path(directory), file.read(_LONGEST_LATEST).decode("utf-8"))
    except FileNotFoundError:
        return None
    except OSError as error:
        reason = error.strerror or error
        raise CheckpointError(f"{path} cannot be read ({reason}); write a tag into it, or pass the tag") from error
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} cannot be read ({error}); write a tag into it, or pass the tag") from error
    try:
        return check_tag(tag)
    except CheckpointError as error:
        raise CheckpointError(f"{path} is refused: {error}") from error


def _written_tag(directory: Path, text: str) -> str:
    """Return the tag in the text of a file `latest`, without the blanks around it unless a checkpoint has them."""
    tag = text.strip("\r\n")
    paths = (directory / tag, replaced_path(directory, tag))
    return tag if any(os.path.lexists(path) for path in paths) else tag.strip()


def write_latest(directory: Path, tag: str, name: str = LATEST) -> None:
    """Write the tag to `latest` (or `name`), atomically and durably."""
    path = directory / name
    with disk_errors(path, len(tag)), rename_lock(directory) as alone:
        for left in directory.glob(f".{name}.*{PARTIAL_SUFFIX}") if alone else ():
            left.unlink(missing_ok=True)  # temporary file of a writer that was killed
        write_atomically(path, tag, durable=True)
        fsync_directory(directory)


@contextmanager
def rename_lock(directory: Path) -> Iterator[bool]:
    """Hold the lock for renames in `directory`, briefly, so that jobs that save there at the same time take turns.

    If the holder dies, the system releases the lock once all children that it forked meanwhile have ended. Yields True,
    or False on file systems without locks; each rename is atomic there too.

    Raises:
        CheckpointError: another process has held the lock for a minute.
    """
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    owner = os.getpid()
    try:
        yield _acquire_lock(descriptor, directory)
    finally:
        release_lock(descriptor, owner)


def release_lock(descriptor: int, owner: int) -> None:
    """Release the lock of an open file and close it.

    Closing is not enough: a child forked meanwhile, such as a worker of a DataLoader, shares the lock. For the same
    reason only the process `owner`, which took the lock, may release it.
    """
    if os.getpid() == owner:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def _acquire_lock(descriptor: int, directory: Path) -> bool:
    end = time.monotonic() + _LOCK_TIMEOUT_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > end:
                raise CheckpointError(
                    f"{directory} has been locked for {_LOCK_TIMEOUT_S:.0f} s by {_lock_holder(descriptor)}, which "
                    "also saves there; end that job, or save to another directory"
                ) from None
            time.sleep(0.02)
        except OSError:
            return False


def _lock_holder(descriptor: int) -> str:
    """Return a description of the process that holds the lock of an open directory; "another job" if it is unknown."""
    node = os.fstat(descriptor).st_ino
    with suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/locks").read_text().splitlines():
            fields = line.split()
            if fields[1] == "FLOCK" and int(fields[5].rpartition(":")[2]) == node:
                command = Path(f"/proc/{int(fields[4])}/cmdline").read_bytes().replace(b"\0", b" ")
                return f"process {int(fields[4])} ({to_printable(command.decode('utf-8', 'replace').strip())})"
    return "another job"


def to_printable(text: str, longest: int = 200) -> str:
    """Return untrusted text with unprintable characters replaced, at most `longest` characters."""
    return "".join(letter if letter.isprintable() else "?" for letter in text[:longest])


def list_tags(directory: str | os.PathLike[str]) -> list[str]:
    """Return the tags of windlass's finished checkpoints in `directory`, oldest first; [] if it cannot be read."""
    finished = []
    try:
        for path in Path(directory).iterdir():
            with suppress(OSError):  # not a checkpoint, not readable, or removed meanwhile
                if path.name[0] != ".":
                    finished.append(((path / INDEX_FILE).stat().st_mtime_ns, path.name))
    except OSError:
        return []
    return [name for _, name in sorted(finished)]


def find_checkpoint(directory: str | os.PathLike[str], tag: str | None) -> tuple[str, Path]:
    """Return tag and directory of the checkpoint `tag`, or of the one in `latest` if `tag` is None.

    Raises:
        CheckpointError: there is no such checkpoint, its path leads out of `directory`, or the tag or `latest` is
            invalid.
    """
    root = Path(directory)
    if not root.is_dir():
        raise CheckpointError(f"the checkpoint directory {root} does not exist; pass the directory given to the save")
    name = read_latest(root) if tag is None else check_tag(tag)
    if name is None:
        raise CheckpointError(f"{root} has no {LATEST!r} file; pass a tag. {_known_tags_message(root)}")
    path = root / name
    if not path.exists() and is_checkpoint(replaced_path(root, name)):
        with rename_lock(root):  # a running save holds the lock between its two renames
            if died := not path.exists():
                path = replaced_path(root, name)
        if died:
            logger.warning("the process that replaced %s died; reading the previous checkpoint, %s", name, path)
    if not path.resolve().is_relative_to(root.resolve()):
        raise CheckpointError(f"{path} leads outside {root}, to {path.resolve()}; pass that directory itself")
    if not path.is_dir():
        raise CheckpointError(f"there is no checkpoint {name!r} in {root}. {_known_tags_message(root)}")
    if not is_any_checkpoint(path):
        raise CheckpointError(
            f"{path} is not a windlass checkpoint: it has no {INDEX_FILE}; it may be an "
            f"unfinished save. {_known_tags_message(root)}"
        )
    return name, path


def require_space(path: Path, needed: int) -> None:
    """Raise CheckpointError unless the file system of `path` has `needed` bytes free."""
    free = shutil.disk_usage(path).free
    if free < needed:
        raise CheckpointError(
            f"no room for the checkpoint {path}: it needs {needed} bytes, {free} are free; nothing was written, "
            "earlier checkpoints are unchanged. Free some space or save to another disk"
        )


@contextmanager
def disk_errors(path: Path, needed: int) -> Iterator[None]:
    """Turn an OSError while writing `path` into a CheckpointError: for a full disk, with the needed and free bytes."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise CheckpointError(
                f"disk full while writing {path}: it needs {needed} bytes, {_free_bytes(path)} are free; earlier "
                "checkpoints are unchanged. Free some space or save to another disk"
            ) from error
        if error.errno == errno.EFBIG:
            raise CheckpointError(
                f"{path} cannot be written: {error.strerror}: it needs {needed} bytes; earlier checkpoints are "
                "unchanged. Raise the limit of file sizes (`ulimit -f`), or save to a file system that takes such files"
            ) from error
        raise CheckpointError(f"{path} cannot be written: {error.strerror or error}; check path and rights") from error


def fsync_directory(directory: Path) -> None:
    """Make the names in `directory` durable.

    Does nothing on Windows, which cannot open a directory and needs no such call.
    """
    if os.name == "nt":
        return
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def replaced_path(directory: Path, tag: str) -> Path:
    """Return the path of the previous checkpoint `tag` while a new one replaces it."""
    return directory / f".{tag}.replaced"


def remove_tag(path: Path) -> None:
    """Remove the directory of a checkpoint. If `path` is a symbolic link, remove only the link."""
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path)


def is_checkpoint(path: Path) -> bool:
    """Return True if `path` is a finished checkpoint of windlass, damaged or not."""
    return (path / INDEX_FILE).is_file()


def is_any_checkpoint(path: Path) -> bool:
    """Return True if `path` is a finished checkpoint of windlass or of another format, damaged or not."""
    return is_checkpoint(path) or foreign_format_of(path) is not None


def foreign_format_of(path: Path) -> ForeignFormat | None:
    """Return the format of another library's checkpoint; None if windlass wrote it, or `path` is not one."""
    return None if is_checkpoint(path) else next((one for one in foreign_formats() if one.recognizes(path)), None)


def _known_tags_message(root: Path) -> str:
    known = list_tags(root)
    return f"Checkpoints there: {', '.join(known[-5:])}" if known else "There is no finished checkpoint there"


def _free_bytes(path: Path) -> int:
    parent = next(parent for parent in path.resolve().parents if parent.exists())
    return shutil.disk_usage(parent).free
