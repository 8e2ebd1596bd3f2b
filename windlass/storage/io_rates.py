"""Byte counts and times of disk transfers."""

from __future__ import annotations

from dataclasses import astuple, dataclass


@dataclass(frozen=True)
class IoRates:
    """Bytes and times of disk transfers in an interval.

    Times count while at least one request of the kind is outstanding.

    Attributes:
        read_bytes, write_bytes: bytes of successful requests.
        disk_read_bytes, disk_write_bytes: bytes moved from and to the disk, in whole pages and including failed
            requests.
        read_seconds, write_seconds: time with a read, or a write, outstanding.
        busy_seconds: time with either outstanding.
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
        """Bytes per second while a read is outstanding; 0 without reads."""
        return self.read_bytes / self.read_seconds if self.read_seconds else 0.0

    @property
    def write_rate(self) -> float:
        """Bytes per second while a write is outstanding; 0 without writes."""
        return self.write_bytes / self.write_seconds if self.write_seconds else 0.0

    @property
    def rate(self) -> float:
        """Bytes per second in both directions while any request is outstanding; 0 without requests."""
        return (self.read_bytes + self.write_bytes) / self.busy_seconds if self.busy_seconds else 0.0

    def since(self, earlier: IoRates) -> IoRates:
        """Return the bytes and times since `earlier`."""
        return IoRates(*(local - before for local, before in zip(astuple(self), astuple(earlier), strict=True)))

    def plus(self, other: IoRates) -> IoRates:
        """Return the sum of both intervals."""
        return IoRates(*(local + more for local, more in zip(astuple(self), astuple(other), strict=True)))

    def __str__(self) -> str:
        return (
            f"read {self.read_bytes / 1e9:.2f} GB at {self.read_rate / 1e9:.2f} GB/s, "
            f"wrote {self.write_bytes / 1e9:.2f} GB at {self.write_rate / 1e9:.2f} GB/s"
        )
