"""The error tree. Callers catch by level; only the HTTP app and Dagster translate errors.

::

    ZombiError
    ├── RejectedError       the caller's fault: 4xx, repeating it changes nothing
    │   ├── InvalidRequestError       400
    │   ├── UnauthorizedError         401
    │   ├── ForbiddenError            403
    │   ├── NotFoundError             404
    │   ├── NotAcceptableError        406
    │   ├── ConflictError             409, the state has moved on
    │   │   └── FencedError           another worker has taken over; this one must stop
    │   ├── PayloadTooLargeError      413
    │   └── UnsupportedMediaError     415
    ├── TransientError      a retry may help: 503 with Retry-After
    │   ├── OverloadedError           too much in flight
    │   ├── BufferFullError           the hot buffer is at its limit
    │   ├── HotStorageError           RocksDB did not take the write
    │   ├── GatewayUnreachableError   no answer from the gateway
    │   ├── LakeUnavailableError      the catalog or the object store does not answer
    │   └── EngineUnavailableError    Spark does not answer
    └── TerminalError       a retry cannot help
        ├── SettingsError             a ZOMBI_ variable that cannot work
        ├── StartupError              the process cannot start: port, lock, disk
        ├── CorruptionError           stored bytes that break an invariant
        ├── LakeRefusedError          the object store says no: bucket, credentials, region
        └── LakeConflictError         the table is not as this platform left it
"""

from __future__ import annotations

from typing import ClassVar


class ZombiError(Exception):
    """Base of every error the platform raises on purpose."""

    status: ClassVar[int] = 500
    code: str = "INTERNAL_ERROR"

    def __init__(self, message: str, *, code: str | None = None) -> None:
        super().__init__(message)
        if code is not None:
            self.code = code


class RejectedError(ZombiError):
    status = 400
    code = "INVALID_REQUEST"


class InvalidRequestError(RejectedError):
    pass


class UnauthorizedError(RejectedError):
    status = 401
    code = "UNAUTHORIZED"


class ForbiddenError(RejectedError):
    status = 403
    code = "FORBIDDEN"


class NotFoundError(RejectedError):
    status = 404
    code = "NOT_FOUND"


class NotAcceptableError(RejectedError):
    status = 406
    code = "NOT_ACCEPTABLE"


class ConflictError(RejectedError):
    status = 409
    code = "CONFLICT"


class FencedError(ConflictError):
    code = "FENCED"


class PayloadTooLargeError(RejectedError):
    status = 413
    code = "PAYLOAD_TOO_LARGE"


class UnsupportedMediaError(RejectedError):
    status = 415
    code = "UNSUPPORTED_MEDIA_TYPE"


class TransientError(ZombiError):
    """Carries how long a polite caller waits before it tries again."""

    status = 503
    code = "UNAVAILABLE"

    def __init__(self, message: str, *, code: str | None = None, retry_after_secs: int = 1) -> None:
        super().__init__(message, code=code)
        self.retry_after_secs = retry_after_secs


class OverloadedError(TransientError):
    code = "SERVER_OVERLOADED"


class BufferFullError(TransientError):
    code = "BUFFER_FULL"


class HotStorageError(TransientError):
    code = "HOT_STORAGE_UNAVAILABLE"


class GatewayUnreachableError(TransientError):
    code = "GATEWAY_UNREACHABLE"


class LakeUnavailableError(TransientError):
    code = "LAKE_UNAVAILABLE"


class EngineUnavailableError(TransientError):
    code = "ENGINE_UNAVAILABLE"


class TerminalError(ZombiError):
    code = "TERMINAL_ERROR"


class SettingsError(TerminalError):
    code = "INVALID_SETTINGS"


class StartupError(TerminalError):
    code = "CANNOT_START"


class CorruptionError(TerminalError):
    code = "CORRUPTION"


class LakeRefusedError(TerminalError):
    code = "LAKE_REFUSED"


class LakeConflictError(TerminalError):
    code = "LAKE_CONFLICT"
