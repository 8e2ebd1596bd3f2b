"""The errors that windlass raises on purpose; each says what, where and how to mend it."""

from __future__ import annotations

from windlass.base.text import escape_unprintable


class WindlassError(Exception):
    """Base of every error raised on purpose. The command line prints its text without a traceback."""

    def __str__(self) -> str:
        """Return the message in printable characters: names, keys and other hosts' output are quoted in it."""
        return escape_unprintable(super().__str__())


class ConfigError(WindlassError, ValueError):
    """A configuration that cannot be honoured: unknown key, wrong type, contradiction, impossible batch triangle."""


class DataError(WindlassError, ValueError):
    """Training data or a tokenizer that is missing, unreadable, empty or damaged."""


class ModelError(WindlassError, ValueError):
    """A model or optimizer that cannot be trained as given: no trainable parameter, wrong device, foreign
    parameters."""


class WeightFormatError(ModelError):
    """A weight format that does not exist, or a weight or packed tensor that does not fit it."""


class GatherError(ModelError, RuntimeError):
    """Parameters that are gathered by hand already were gathered again."""


class CheckpointError(WindlassError, RuntimeError):
    """A checkpoint that cannot be written or read: missing, damaged, of another layout, disk full."""


class CommunicationError(WindlassError, RuntimeError):
    """Ranks that cannot talk to each other: a peer died, a wait timed out, a transport was refused."""


class CollectiveArgumentError(CommunicationError, ValueError):
    """A tensor, its parts or a peer do not fit the group of a collective."""


class CodecError(CommunicationError, ValueError):
    """A codec that does not exist, differs between ranks, or cannot encode a tensor of the given dtype."""


class PeerError(WindlassError, RuntimeError):
    """Another rank raised in what all ranks do together; the text has its rank, where it was, and its error."""


class ShardedParameterError(WindlassError, RuntimeError):
    """A parameter whose values are spread over ranks was used where they are not gathered."""


class GradientAccessError(ModelError, RuntimeError):
    """A gradient that is sharded over ranks was read or changed through a parameter's `.grad`."""


class DeviceMemoryError(WindlassError, RuntimeError):
    """The (emulated) device has no room for what is to be kept there."""


class LossError(WindlassError, ArithmeticError):
    """A loss or gradient that is not finite, or a loss scale that cannot fall further."""


class UpdateError(WindlassError, RuntimeError):
    """An update that went on behind the next forward and backward failed; its own error is the cause."""


class StorageError(WindlassError, RuntimeError):
    """The disk tier cannot hold or return what it was given: no space, no permission, a short read, a lost device."""


class DamageError(StorageError):
    """The disk tier returned other bytes than were written to it: flipped bits, an old block, a file cut short."""
