"""The one tag under which all ranks save."""

from __future__ import annotations

from windlass.base.errors import CheckpointError
from windlass.base.log import logger


class TagError(CheckpointError, AssertionError):
    """Ranks that save under different tags; DeepSpeed asserts that they do not."""


def agree_on_tag(tags: list[str], tag_validation: str) -> str:
    """Rank 0's, whatever the others say (a tag with a loss in it, say), as far as `checkpoint.tag_validation` lets it.

    Raises:
        TagError: it says `FAIL`, and they differ.
    """
    if len(set(tags)) > 1 and tag_validation != "IGNORE":
        told = "; ".join(f"rank {rank}: {tag!r:.80}" for rank, tag in enumerate(tags))
        if tag_validation == "FAIL":
            raise TagError(
                f"ranks save under different tags ({told}), and checkpoint.tag_validation is FAIL; give all the same"
            )
        logger.warning("ranks save under different tags (%s): rank 0's is taken", told)
    return tags[0]
