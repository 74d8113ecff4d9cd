"""Errors of single requests: prompts that vLLM cannot read, and failures that an engine reports in an output."""

import binascii
import errno

from vllm.exceptions import VLLMClientError

from vllm_omni.errors import InvalidRequest, Overloaded, SourceLost, StageFailed, Unavailable
from vllm_omni.messages.outputs import OmniRequestOutput


def rejection(exc: BaseException, stage: str = "") -> InvalidRequest:
    """Make the error for a request whose text or media caused ``exc``; raise it from ``exc``.

    vLLM's own errors there have no common class.

    Errors that are not the request's fault (a missing package, no memory, a dead stage) are raised unchanged; where no
    file descriptor is free, ``Overloaded``.

    The message includes the cause: "the processor failed" says less than "the image is 1000 times as high as wide".
    """
    if isinstance(exc, ImportError | MemoryError | Overloaded | StageFailed):
        raise exc
    if isinstance(exc, OSError) and exc.errno in (errno.EMFILE, errno.ENFILE):
        raise Overloaded(f"the media of the prompt cannot be read now: {exc}") from exc
    if isinstance(exc, InvalidRequest):
        return type(exc)(f"stage {stage!r}: {exc}", param=exc.param) if stage else exc
    said = str(exc) or type(exc).__name__
    if not isinstance(exc, ValueError | VLLMClientError) or isinstance(exc, binascii.Error):
        said = f"the prompt or its media cannot be read: {said}"
    cause = exc.__cause__
    if cause is not None and str(cause) and str(cause) not in said:
        said = f"{said}: {cause}"
    return InvalidRequest(f"stage {stage!r}: {said}" if stage else said, param=getattr(exc, "parameter", None))


def raise_reported(output: OmniRequestOutput, stage: str, *, is_constrained: bool = False) -> None:
    """Raise the error that an engine reports in an output, if it does.

    Args:
        is_constrained: the engine ends the request with an error only if its ``structured_outputs`` allow no token.

    Raises:
        InvalidRequest: it is the request's fault.
        Unavailable: the same request succeeds when it is sent again.
        SourceLost: the stage could not read what another one had published for it.
        StageFailed: it is none of these.
    """
    for report in (output.multimodal_output, output.ec_transfer_params or {}):
        if (error := report.get("error")) is None:
            continue
        if report.get("invalid"):
            raise InvalidRequest(f"stage {stage!r}: {error}", param=report.get("param"))
        if report.get("retry"):
            raise Unavailable(f"stage {stage!r}: {error}")
        raise (SourceLost if report.get("lost") else StageFailed)(stage, error)
    if any(completion.finish_reason == "error" for completion in output.outputs):
        if is_constrained:
            raise InvalidRequest(
                f"stage {stage!r}: no token is allowed by the schema or grammar of the request: it cannot be compiled, "
                "or refers to itself without an end",
                param="structured_outputs",
            )
        raise StageFailed(stage, "its engine gave the request up (finish_reason 'error')")
