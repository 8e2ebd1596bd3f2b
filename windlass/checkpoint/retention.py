"""Removal of old checkpoints once a new one is finished.

[Note: retention] `checkpoint.keep_last` counts finished windlass checkpoints of two kinds: those that this engine wrote
to the directory, and those whose tag is `global_step` and a number (the default tag, so that a restarted run continues
to count). Neither counted nor removed are tags that a user chose, DeepSpeed's checkpoints, and directories that are not
checkpoints. The newest checkpoints stay, and so do the one just saved and the one that `latest` names. A checkpoint
is renamed to a hidden name before its removal, so that a kill in the middle leaves nothing that looks like a
checkpoint.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from windlass.base.errors import CheckpointError
from windlass.base.log import logger
from windlass.checkpoint.checkpoint_directory import fsync_directory, list_tags, read_latest, remove_tag

_DEFAULT = re.compile(r"^global_step\d+$")


def remove_old_checkpoints(
    directory: str | os.PathLike[str], keep_last: int, saved_tag: str, own_tags: Collection[str]
) -> list[str]:
    """Remove the oldest checkpoints of a run beyond the last `keep_last`. Called on one rank.

    Return the tags chosen for removal. A checkpoint that cannot be removed stays, with a warning: the save itself
    succeeded.

    Args:
        saved_tag: the tag that was just saved.
        own_tags: all tags that this run wrote to `directory`.
    """
    root = Path(directory)
    try:
        latest = read_latest(root)
    except CheckpointError as error:
        logger.warning("checkpoint.keep_last removed nothing: %s", error)
        return []
    ours = [tag for tag in list_tags(root) if tag in own_tags or _DEFAULT.match(tag)]
    spared = {saved_tag, latest}
    spared.update([tag for tag in ours if tag not in spared][::-1][: max(0, keep_last - len(spared & set(ours)))])
    gone = [tag for tag in ours if tag not in spared]
    for tag in gone:
        _remove(root, tag)
    for left in root.glob(".*.removing"):
        with suppress(OSError):  # `_remove` has logged it
            remove_tag(left)
    return gone


def _remove(root: Path, tag: str) -> None:
    hidden = root / f".{tag}.removing"
    try:
        if os.path.lexists(hidden):
            remove_tag(hidden)
        os.rename(root / tag, hidden)
        fsync_directory(root)
        remove_tag(hidden)
    except OSError as error:
        logger.warning("the checkpoint %s could not be removed (%s); remove it by hand", root / tag, error)
    else:
        logger.info("removed the checkpoint %s (checkpoint.keep_last)", root / tag)
