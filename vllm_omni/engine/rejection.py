"""One error for prompts that vLLM cannot read: its own errors there have no common class."""

import binascii

from vllm.exceptions import VLLMClientError

from vllm_omni.errors import InvalidRequest, Overloaded, StageFailed


def rejection(exc: BaseException, stage: str = "") -> InvalidRequest:
    """Make the error for a request whose text or media caused ``exc``; raise it from ``exc``.

    Errors that are not the request's fault (a missing package, no memory, a dead stage) are raised unchanged.

    The message includes the cause: "the processor failed" says less than "the image is 1000 times as high as wide".
    """
    if isinstance(exc, ImportError | MemoryError | Overloaded | StageFailed):
        raise exc
    said = str(exc) or type(exc).__name__
    if not isinstance(exc, ValueError | VLLMClientError) or isinstance(exc, binascii.Error):
        said = f"the prompt or its media cannot be read: {said}"
    cause = exc.__cause__
    if cause is not None and str(cause) and str(cause) not in said:
        said = f"{said}: {cause}"
    return InvalidRequest(f"stage {stage!r}: {said}" if stage else said)
