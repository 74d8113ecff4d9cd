"""Every error this project raises, by fault and by what a caller can do next.

Wrong input raises ``InvalidRequest`` or ``ConfigError`` (both are ``ValueError``: the caller can correct them).
``Unavailable`` can be tried again. Other failures raise a plain ``OmniError``.
"""

from typing import Self


class OmniError(Exception):
    """Base of all errors of this project."""


class ConfigError(OmniError, ValueError):
    """A deployment file, flag or keyword is wrong; the message names the source, the key and the valid range."""


class InvalidRequest(OmniError, ValueError):
    """A request is malformed; the message says what, why and the nearest right thing. HTTP 400.

    ``param`` names the field at fault, if it is a single one.
    """

    def __init__(self, message: str, *, param: str | None = None):
        super().__init__(message)
        self.param = param


class RequestTooLarge(InvalidRequest):
    """The body of a request has more bytes than are read. HTTP 413."""


class UnknownModel(InvalidRequest):
    """A request names a model that is not served. HTTP 404."""


class UnknownVoice(InvalidRequest):
    """A request names an uploaded voice that is not there. HTTP 404."""


class UnknownRequest(InvalidRequest):
    """The trace of a request is asked for that is not kept. HTTP 404."""


class VoiceExists(InvalidRequest):
    """A voice cannot be uploaded under the name of another one. HTTP 409."""


class UnknownFile(InvalidRequest):
    """A request names a video or a file that is not there. HTTP 404."""


class NotReady(InvalidRequest):
    """A request asks for the files of a video that is not complete. HTTP 409."""


class FileExpired(InvalidRequest):
    """A request names a file by an address that has expired. HTTP 410."""


class WrongSignature(InvalidRequest):
    """The address of a file has no signature, or a wrong one. HTTP 403."""


class JobGone(OmniError):
    """A job was deleted while it ran."""


class GraphError(OmniError, ValueError):
    """A graph declaration is wrong; the message names the node and the field."""


class PlanError(GraphError):
    """A graph is right, but a server does not support it: the message names the construct and the node."""


class CallAborted(OmniError):
    """The request was aborted by its owner."""


class DeadlineExceeded(OmniError, TimeoutError):
    """A wait passed its deadline; the message names what was awaited."""


class LinkError(OmniError):
    """A message could not be handed to another process."""


class RemoteError(OmniError):
    """A node in another process raised an exception; ``error_type`` names its class."""

    def __init__(self, error_type: str, message: str):
        super().__init__(f"{error_type}: {message}")
        self.error_type = error_type


class RoleUnavailable(OmniError):
    """The process that serves a role has died, or has not started yet; the message names the role."""


class RegistryUnavailable(OmniError):
    """The registry of replicas did not answer in time."""


class RelayError(OmniError):
    """A tensor could not travel between two stages."""


class RelayClosed(RelayError):
    """You closed it: the relay was closed before the call."""


class RelayBroken(RelayError):
    """The other side broke: the payload is missing, or does not match its reference."""


class RelayTimeout(RelayError, TimeoutError):
    """A deadline passed: no room, or the bytes did not arrive; the call can be repeated."""


class PoolExhausted(RelayError):
    """No room in a pool of buffers; nothing was allocated. ``is_final``: the request exceeds the whole pool."""

    def __init__(self, message: str, *, is_final: bool = False):
        super().__init__(message)
        self.is_final = is_final


class StageFailed(OmniError):
    """A stage's engine died or failed a request; ``stage`` names it."""

    def __init__(self, stage: str, reason: str):
        super().__init__(f"stage {stage!r}: {reason}")
        self.stage = stage
        self.reason = reason

    def within(self, node: str) -> Self:
        """The same error of a stage of the graph that a node calls."""
        return type(self)(f"{node} > {self.stage}", self.reason)


class EngineLost(StageFailed):
    """An engine has died, or its host is lost, and with it what a request had there: another engine may answer it."""


class SourceLost(StageFailed):
    """A stage could not read what another one had published for it, most often because that one's engine has died."""


class Unavailable(OmniError):
    """The request can be tried again, later or elsewhere. HTTP 503."""


class StageUnavailable(StageFailed, Unavailable):
    """A stage that the request needs is being restarted, or could not be: nothing was started."""


class Overloaded(Unavailable):
    """Too many requests or jobs wait: this one was not started. HTTP 429, with the seconds after which to try again."""

    def __init__(self, message: str, *, retry_after_s: int = 1):
        super().__init__(message)
        self.retry_after_s = retry_after_s


class StorageFull(Unavailable):
    """A result cannot be stored: the quota is used up, or the disk is full."""


class ShuttingDown(Unavailable):
    """The server is being stopped: the request was not started, or was aborted."""


def how_to_install(*extras: str) -> str:
    """Return what installs this project with one of its extras, for the end of an error's message."""
    first, *others = (f"'.[{extra}]'" for extra in extras)
    return f"in the checkout of this project: pip install -e {first}" + "".join(f" (or {one})" for one in others)


class MissingDependency(OmniError, ImportError):
    """An optional package is absent or its version unsupported; the message says which extra installs it."""
