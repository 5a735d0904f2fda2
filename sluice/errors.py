"""Every failure Sluice can name, with its gRPC status, HTTP status and whether another try can help.

SluiceError
|-- ConfigError            a pod can't start like this
|   |-- UnsupportedModel   a checkpoint variant we refuse by name
|   |-- CheckpointError    a tensor is missing, extra or ill-shaped
|   `-- GeometryError      target and draft state don't fit together
|-- BadRequest             the client's body breaks a limit
|-- Untrusted              no certificate, or one that the other side doesn't accept
|-- WrongRole              a certificate that doesn't speak for who may make this call
|-- LayoutRefused          two pods don't agree on state
|-- NotReady               no agreed peer yet, or draining
|-- Overloaded             queue or pools are full
|-- PeerLost               the other pod went away
|-- RankLost               one of a pod's own rank processes went away: the pod must restart
|-- StaleEpoch             a message from another life of a pod
|-- DeadlineExceeded       the request's time is up
|-- Aborted                the client or the peer gave up
|-- TransferFailed         state didn't arrive
|   |-- SpanMismatch       two sides count a component's rows differently
|   `-- DigestMismatch     bytes arrived, but not the ones that were sent
`-- InternalError          a bug of ours
    |-- PoolError          pages or slots used against their state
    `-- IllegalTransition  a state machine was pushed off its table
"""

from __future__ import annotations


class SluiceError(Exception):
    """Base. ``stage`` says where in a request's life; ``remedy`` what a person can do about it;
    ``retry_after_s`` when another try may succeed, None where nobody knows.
    """

    grpc_status = "INTERNAL"
    http_status = 500
    retryable = False

    def __init__(
        self,
        message: str,
        *,
        stage: str = "",
        remedy: str = "",
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.stage = stage
        self.remedy = remedy
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        where = f"[{self.stage}] " if self.stage else ""
        what_to_do = f" ({self.remedy})" if self.remedy else ""
        return f"{where}{self.message}{what_to_do}"

    @property
    def code(self) -> str:
        """Stable machine-readable name, the same on the wire and over HTTP."""
        return type(self).__name__


class ConfigError(SluiceError):
    grpc_status = "FAILED_PRECONDITION"


class UnsupportedModel(ConfigError):
    pass


class CheckpointError(ConfigError):
    pass


class GeometryError(ConfigError):
    pass


class BadRequest(SluiceError):
    grpc_status = "INVALID_ARGUMENT"
    http_status = 400

    def __init__(
        self, message: str, *, field: str = "", stage: str = "validate", remedy: str = ""
    ) -> None:
        super().__init__(message, stage=stage, remedy=remedy)
        self.field = field


class Untrusted(SluiceError):
    grpc_status = "UNAUTHENTICATED"
    http_status = 503
    retryable = True  # on another pair; this one stays as it is until somebody changes a file


class WrongRole(SluiceError):
    grpc_status = "PERMISSION_DENIED"
    http_status = 503


class LayoutRefused(SluiceError):
    grpc_status = "FAILED_PRECONDITION"
    http_status = 503


class NotReady(SluiceError):
    grpc_status = "UNAVAILABLE"
    http_status = 503
    retryable = True


class Overloaded(SluiceError):
    grpc_status = "RESOURCE_EXHAUSTED"
    http_status = 429
    retryable = True


class PeerLost(SluiceError):
    grpc_status = "UNAVAILABLE"
    http_status = 503
    retryable = True


class RankLost(SluiceError):
    grpc_status = "UNAVAILABLE"
    http_status = 503
    retryable = True


class StaleEpoch(SluiceError):
    grpc_status = "ABORTED"
    http_status = 503
    retryable = True


class DeadlineExceeded(SluiceError):
    grpc_status = "DEADLINE_EXCEEDED"
    http_status = 504


class Aborted(SluiceError):
    grpc_status = "CANCELLED"
    http_status = 499


class TransferFailed(SluiceError):
    grpc_status = "UNAVAILABLE"
    http_status = 503
    retryable = True


class SpanMismatch(TransferFailed):
    grpc_status = "FAILED_PRECONDITION"
    retryable = False


class DigestMismatch(TransferFailed):
    grpc_status = "DATA_LOSS"


class InternalError(SluiceError):
    @classmethod
    def of(cls, error: Exception, stage: str) -> InternalError:
        """What nobody expected, as a bug of ours."""
        wrapped = cls(f"{type(error).__name__}: {error}", stage=stage)
        wrapped.__cause__ = error
        return wrapped


class PoolError(InternalError):
    pass


class IllegalTransition(InternalError):
    pass


def as_sluice_error(error: BaseException, *, stage: str = "") -> SluiceError:
    """``error`` itself when it is typed, ``DeadlineExceeded`` for a time-out; anything else is a bug of ours."""
    if isinstance(error, SluiceError):
        return error
    if isinstance(error, TimeoutError):
        return DeadlineExceeded(str(error) or "time is up", stage=stage)
    return InternalError(f"{type(error).__name__}: {error}", stage=stage)
