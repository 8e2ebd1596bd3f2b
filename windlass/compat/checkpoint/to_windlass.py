"""Conversion of a DeepSpeed checkpoint to a windlass checkpoint, with the command line of `ds_to_universal`.

DeepSpeed's command enables resuming with another number of ranks or at another stage. That needs no conversion here:
windlass loads DeepSpeed's directories, like its own, in any layout. The converted checkpoint contains no pickles.
"""

from __future__ import annotations

import argparse
import errno
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from windlass.base.atomic_file import open_new
from windlass.base.broken_pipe import exit_quietly_on_broken_pipe
from windlass.base.errors import CheckpointError, WindlassError
from windlass.base.log import logger
from windlass.base.regular_file import open_regular
from windlass.checkpoint.checkpoint_directory import LATEST_UNIVERSAL, foreign_format_of, is_checkpoint, write_latest
from windlass.checkpoint.checkpoint_index import read_index
from windlass.checkpoint.checkpoint_listing import find_damage
from windlass.checkpoint.checkpoint_ranks import CheckpointRanks
from windlass.checkpoint.checkpoint_save import CheckpointSave
from windlass.checkpoint.checkpoint_state import FlatShard, LazyFlatTensor, SavedState
from windlass.checkpoint.foreign_formats import ParameterOrder
from windlass.checkpoint.staging_checkpoint import StagingCheckpoint
from windlass.checkpoint.stored_checkpoint import StoredCheckpoint


class _StoredTensorStorage:
    """One tensor of the checkpoint to convert. Its values are in memory only inside `open`."""

    is_resident = False

    def __init__(self, stored: StoredCheckpoint, name: str) -> None:
        self._stored, self._name = stored, name
        self._values: torch.Tensor | None = None

    @contextmanager
    def open(self) -> Iterator[None]:
        """Read the values, and free them at the end of the `with` block."""
        self._values = self._stored.read_full(self._name).view(-1)
        try:
            yield
        finally:
            self._values = None

    def shard(self) -> FlatShard:
        """Return the full tensor as a shard."""
        like = self._stored.meta_tensor(self._name)
        return FlatShard(
            self._name, tuple(like.shape), 0, LazyFlatTensor(like.numel(), like.dtype, self, self._loaded_values)
        )

    def _loaded_values(self) -> torch.Tensor:
        assert self._values is not None
        return self._values


def convert_to_windlass(source: Path, target: Path, parameter_order: ParameterOrder | None = None) -> Path:
    """Write the checkpoint in `source`, a tag's directory, as the windlass checkpoint `target`, atomically.

    Memory: one tensor at a time.

    Args:
        parameter_order: names of the optimizer's parameters by group. DeepSpeed's stage 0 stores states by parameter
            number; without this argument its states and master weights are left out.

    Raises:
        CheckpointError: there is no checkpoint in `source`, it is damaged, or `target` cannot be written.
    """
    if is_checkpoint(source):
        staging = StagingCheckpoint(target.parent, target.name)
        try:
            _copy_files(source, staging.path)
            if problem := find_damage(staging.path, read_index(staging.path)):
                raise CheckpointError(f"the copy of {source} is damaged: {problem}")
            return staging.commit()
        except BaseException:
            staging.discard()
            raise
    if foreign_format_of(source) is None:
        raise CheckpointError(
            f"{source} is not the directory of a checkpoint; give DIR/TAG, such as DIR/global_step100"
        )
    with StoredCheckpoint.from_path(source, parameter_order) as stored:
        shards = [_StoredTensorStorage(stored, name).shard() for name in stored.names()]
        if parameter_order is None and stored.engine_data["layout"]["stage"] == 0:
            logger.warning(
                "%s was saved at DeepSpeed's stage 0, which stores optimizer states by number: they are not in %s; "
                "load %s itself to use them",
                source,
                target,
                source,
            )
        ranks = CheckpointRanks(None, 0, 1, is_single_process=True)
        return CheckpointSave(target.parent, target.name, SavedState(shards, plain=stored.plain), ranks, False).finish(
            ranks
        )


def _copy_files(source: Path, target: Path) -> None:
    """Copy the regular files of a checkpoint. Skip hidden files and, with a warning, links that lead
    out of the checkpoint and files that are not regular.

    Raises:
        CheckpointError: a file cannot be read or written.
    """
    for path in sorted(source.iterdir()):
        if path.name[0] == ".":
            continue
        try:
            with open_regular(path, source) as file, open_new(target / path.name) as copy:
                shutil.copyfileobj(file, copy, 1 << 22)
                copy.flush()
                os.fsync(copy.fileno())
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ELOOP):
                raise CheckpointError(
                    f"{path} cannot be copied: {error.strerror or error}; check space and rights"
                ) from error
            logger.warning("%s is not copied: %s", path, error.strerror)


@exit_quietly_on_broken_pipe()
def main(argv: Any = None) -> int:
    """Run the command and return its exit code.

    Args:
        argv: arguments; or an object with `input_folder` and `output_folder`, from a script that calls this function.

    Raises:
        CheckpointError: the conversion failed. With command line arguments, the error is printed instead.
    """
    if argv is not None and not isinstance(argv, (list, tuple)):
        _convert(Path(argv.input_folder), Path(argv.output_folder))
        return 0
    parser = argparse.ArgumentParser(
        "ds_to_universal",
        description="Convert a DeepSpeed checkpoint to a windlass checkpoint. This is optional: windlass loads both in "
        "any layout, at any stage and on any number of ranks.",
    )
    parser.add_argument("--input_folder", required=True, help="directory of a tag, such as DIR/global_step100")
    parser.add_argument("--output_folder", required=True, help="the directory to write; its name is the new tag")
    for name, default in (("--num_extract_workers", 4), ("--num_merge_workers", 2)):
        parser.add_argument(name, type=int, default=default, help="accepted and ignored; one process reads and writes")
    parser.add_argument("--keep_temp_folder", action="store_true", help="accepted and ignored; there is no such folder")
    parser.add_argument(
        "--no_strict", dest="strict", action="store_false", help="accepted and ignored; all states are converted"
    )
    parser.add_argument(
        "--inject_missing_state", action="store_true", help="accepted and ignored; no state is required"
    )
    args = parser.parse_args(argv)
    try:
        _convert(Path(args.input_folder), Path(args.output_folder))
    except (WindlassError, OSError) as error:
        print(f"ds_to_universal: {error}", file=sys.stderr)
        return 1
    return 0


def _convert(source: Path, target: Path) -> None:
    written = convert_to_windlass(source, target.absolute())
    write_latest(written.parent, written.name, LATEST_UNIVERSAL)
    print(f"{written}: a windlass checkpoint, which load_checkpoint loads in any layout, like {source} itself")


if __name__ == "__main__":
    sys.exit(main())
