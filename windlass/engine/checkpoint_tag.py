"""Agreement of all ranks on one checkpoint tag."""

from __future__ import annotations

from windlass.base.errors import CheckpointError
from windlass.base.log import logger


class TagError(CheckpointError, AssertionError):
    """Error for ranks that save under different tags. An AssertionError too, because DeepSpeed raises one."""


def agree_on_tag(tags: list[str], tag_validation: str) -> str:
    """Return rank 0's tag.

    The tags of ranks may differ, e.g. if they contain a loss; `checkpoint.tag_validation` sets whether that is allowed.

    Raises:
        TagError: the tags differ and `tag_validation` is `FAIL`.
    """
    if len(set(tags)) > 1 and tag_validation != "IGNORE":
        tags_text = "; ".join(f"rank {rank}: {tag!r:.80}" for rank, tag in enumerate(tags))
        if tag_validation == "FAIL":
            raise TagError(
                f"ranks save under different tags ({tags_text}), and checkpoint.tag_validation is FAIL; pass the same "
                "tag on all ranks"
            )
        logger.warning(
            "ranks save under different tags (%s): rank 0's tag is used; pass the same tag on all ranks", tags_text
        )
    return tags[0]
