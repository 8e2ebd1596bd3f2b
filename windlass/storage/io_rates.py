"""How much went to and from the disk, in how much time."""

from __future__ import annotations

from dataclasses import astuple, dataclass


@dataclass(frozen=True)
class IoRates:
    """What passed between two moments. Times count while at least one such request was outstanding.

    Attributes:
        read_bytes, write_bytes: asked for by requests that succeeded.
        disk_read_bytes, disk_write_bytes: what passed to and from the disk, whole pages and what failed included.
        read_seconds, write_seconds: with a read, or a write, outstanding.
        busy_seconds: with either outstanding.
    """

    read_bytes: int = 0
    write_bytes: int = 0
    disk_read_bytes: int = 0
    disk_write_bytes: int = 0
    read_seconds: float = 0.0
    write_seconds: float = 0.0
    busy_seconds: float = 0.0

    @property
    def read_rate(self) -> float:
        """Bytes a second while reading; 0 if nothing was read."""
        return self.read_bytes / self.read_seconds if self.read_seconds else 0.0

    @property
    def write_rate(self) -> float:
        """Bytes a second while writing; 0 if nothing was written."""
        return self.write_bytes / self.write_seconds if self.write_seconds else 0.0

    @property
    def rate(self) -> float:
        """Bytes a second in both directions while anything was outstanding; 0 if nothing was."""
        return (self.read_bytes + self.write_bytes) / self.busy_seconds if self.busy_seconds else 0.0

    def since(self, earlier: IoRates) -> IoRates:
        """What came after `earlier`."""
        return IoRates(*(mine - before for mine, before in zip(astuple(self), astuple(earlier), strict=True)))

    def plus(self, other: IoRates) -> IoRates:
        """Both together."""
        return IoRates(*(mine + more for mine, more in zip(astuple(self), astuple(other), strict=True)))

    def __str__(self) -> str:
        return (
            f"read {self.read_bytes / 1e9:.2f} GB at {self.read_rate / 1e9:.2f} GB/s, "
            f"wrote {self.write_bytes / 1e9:.2f} GB at {self.write_rate / 1e9:.2f} GB/s"
        )
