"""Texts for messages about files: system errors with advice, lists of names, and byte counts."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable

_ADVICE = {
    errno.ENOSPC: "free space there, or name another directory (nvme_path)",
    errno.EDQUOT: "your quota there is used up; free some of it, or name another directory (nvme_path)",
    errno.EFBIG: "files may not grow that large here; raise the limit (ulimit -f), or name another file system",
    errno.EACCES: "name a directory that you may write to (nvme_path)",
    errno.EPERM: "name a directory that you may write to (nvme_path)",
    errno.EROFS: "it is mounted read-only; name another directory (nvme_path)",
    errno.ENOTDIR: "a file is where a directory should be; name a directory (nvme_path)",
    errno.EEXIST: "a file is where a directory should be; name a directory (nvme_path)",
    errno.ENOENT: "it does not exist and can't be created; name another directory (nvme_path)",
    errno.EMFILE: "too many open files; raise the limit (ulimit -n)",
    errno.ENOMEM: "the system has no memory left for it; use smaller buffers (buffer_size, buffer_count)",
    errno.ENODATA: "the file was truncated and its contents are lost: resume from a checkpoint",
    errno.EBADMSG: "the disk, its cable or its controller fails (see dmesg and smartctl), or another program wrote to "
    "the file; its contents are lost: resume from a checkpoint",
    errno.ECANCELED: "the disk tier was closed before the transfer ended",
}
_LOST = (
    "the device failed or was removed (see dmesg); if it does not reappear, its contents are lost: resume from a "
    "checkpoint on another one"
)
_ADVICE.update(dict.fromkeys((errno.EIO, errno.ENODEV, errno.ENXIO, errno.EREMOTEIO, errno.ESTALE), _LOST))


def error_name(error: int) -> str:
    """Return the name and text of an error number, e.g. `ENOSPC: No space left on device`.

    ENODATA and EBADMSG, which mean short reads and wrong checksums here, have texts without the name.
    """
    if error == errno.ENODATA:
        return "short read"
    if error == errno.EBADMSG:
        return "damaged: the checksum differs from that of the written bytes"
    return f"{errno.errorcode.get(error, error)}: {os.strerror(error)}"


def is_data_lost(error: int) -> bool:
    """Return True if an error of a read means that the written data is lost, even if the device recovers."""
    return error in (errno.ENODATA, errno.EBADMSG)


def advice_for(error: int) -> str:
    """Return the advice for an error number."""
    return _ADVICE.get(error, "see dmesg for details")


def abbreviate_names(names: Iterable[str], limit: int = 4) -> str:
    """Join names with commas for a message: the first `limit` names, then the number of the others."""
    every = list(names)
    more = len(every) - limit
    return ", ".join(every[:limit]) + (f" and {more} more" if more > 0 else "")


def format_bytes(nbytes: int) -> str:
    """Format a number of bytes in GiB or MiB; below 1 MiB as the exact number."""
    for name, size in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if nbytes >= size:
            return f"{nbytes / size:.2f} {name}"
    return f"{nbytes} bytes"
