"""Errors that windlass raises on purpose. Each message gives the problem, the place and the fix."""

from __future__ import annotations

from windlass.base.text import escape_unprintable


class WindlassError(Exception):
    """Base of all errors of windlass. The command line prints the message without a traceback.

    Attributes:
        exit_code: exit code of a command that ends with this error.
    """

    exit_code = 1

    def __str__(self) -> str:
        """Return the message with unprintable characters escaped, since it quotes names, keys and output of other
        hosts.
        """
        return escape_unprintable(super().__str__())


class ConfigError(WindlassError, ValueError):
    """Error for an invalid configuration: unknown key, wrong type, contradiction, inconsistent batch sizes."""


class DataError(WindlassError, ValueError):
    """Error for training data or a tokenizer that is missing, unreadable, damaged, too short, or different between
    ranks."""


class ModelError(WindlassError, ValueError):
    """Error for a model or optimizer that can't be trained as given: no trainable parameter, wrong device, parameters
    of another model.
    """


class WeightFormatError(ModelError):
    """Error for a weight format that does not exist, or a weight or packed tensor that does not fit it."""


class RequestError(WindlassError, ValueError):
    """Error for an inference request that cannot be served: a parameter out of range, a prompt that is too long, an
    unknown adapter.

    Attributes:
        parameter: name of the invalid argument, if there is one.
    """

    def __init__(self, message: str, *, parameter: str | None = None) -> None:
        super().__init__(message)
        self.parameter = parameter


class EngineOverloadedError(RequestError):
    """Error for a request that was refused because too many others wait. Retry after `retry_after` seconds."""

    def __init__(self, message: str, *, retry_after: int = 1) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class GatherError(ModelError, RuntimeError):
    """Error for gathering parameters that another `GatheredParameters` context has gathered already."""


class CheckpointError(WindlassError, RuntimeError):
    """Error for a checkpoint that can't be written or read: missing, damaged, of another layout, disk full."""


class RunStoppedError(WindlassError, RuntimeError):
    """Error of a command that a signal stopped before its result. The exit code is 128 plus the signal's number."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + number


class CommunicationError(WindlassError, RuntimeError):
    """Error for failed communication between ranks: a peer died, a wait timed out, a transport was refused."""


class CollectiveArgumentError(CommunicationError, ValueError):
    """Error for a tensor, split sizes or a peer that do not fit the group of a collective."""


class CodecError(CommunicationError, ValueError):
    """Error for a codec that does not exist, differs between ranks, or cannot encode a tensor."""


class PeerError(WindlassError, RuntimeError):
    """Error of another rank in a collective operation. The message names the rank and its error."""


class ShardedParameterError(WindlassError, RuntimeError):
    """Error for the use of a sharded parameter where it is not gathered."""


class GradientAccessError(ModelError, RuntimeError):
    """Error for access to a sharded gradient through a parameter's `.grad`."""


class LossScalingError(ModelError, RuntimeError):
    """Error for a backward of a loss that was not multiplied by the loss scale, or a loss scale that cannot be set."""


class DeviceMemoryError(WindlassError, RuntimeError):
    """Error for too little memory on the emulated device."""


class LossError(WindlassError, ArithmeticError):
    """Error for a loss or gradient that is not finite, or a loss scale that can't decrease further."""


class UpdateError(WindlassError, RuntimeError):
    """Error of an optimizer update that failed after it changed a part of the state, e.g. a delayed update."""


class StorageError(WindlassError, RuntimeError):
    """Error of the disk tier, which could not store or return data: no space, no permission, a short read, a lost
    device."""


class DamageError(StorageError):
    """Error for data on the disk tier that differs from what was written: flipped bits, an old block, a truncated
    file."""
