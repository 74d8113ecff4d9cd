"""What vLLM says of a prompt that it cannot read, in one class: its own errors there have none in common."""

import binascii

from vllm.exceptions import VLLMClientError

from vllm_omni.errors import InvalidRequest, Overloaded, StageFailed


def refusal(exc: BaseException, stage: str = "") -> InvalidRequest:
    """The error for a request whose text or media ``exc`` complains of; raise it from ``exc``.

    What is no fault of the request (a missing package, no memory, a dead stage) is raised as it is.

    The cause is told as well: "the processor failed" says less than "the image is 1000 times as high as wide".
    """
    if isinstance(exc, ImportError | MemoryError | Overloaded | StageFailed):
        raise exc  # the installation's fault, or the machine's
    said = str(exc) or type(exc).__name__
    if not isinstance(exc, ValueError | VLLMClientError) or isinstance(exc, binascii.Error):
        said = f"the prompt or its media cannot be read: {said}"
    cause = exc.__cause__
    if cause is not None and str(cause) and str(cause) not in said:
        said = f"{said}: {cause}"
    return InvalidRequest(f"stage {stage!r}: {said}" if stage else said)
