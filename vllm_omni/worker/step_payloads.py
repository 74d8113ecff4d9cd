"""What a step of ``ARModelRunner`` publishes behind its tokens, request id -> packed payload: pictures, and frames."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.v1.outputs import ModelRunnerOutput

from vllm_omni.messages.canvas_step import GRID, LATENTS, NUM_STEPS, STEP
from vllm_omni.messages.payload import Payload, pack
from vllm_omni.messages.stage_step import readers_of
from vllm_omni.model_executor.frame_publisher import FRAME, FramePublisher
from vllm_omni.model_executor.stage_model import PredictsFrames, RequestInfo
from vllm_omni.relay.hub import RelayHub
from vllm_omni.worker.canvases import CanvasRunner


def publish_pictures(
    canvases: CanvasRunner,
    output: ModelRunnerOutput,
    hidden_states: Tensor,
    hub: RelayHub,
    infos: Mapping[str, RequestInfo],
) -> dict[str, Tensor]:
    """The ends of denoise steps, with the latents of complete pictures, whose requests end in ``output``."""
    payloads = {}
    for request_id, report in canvases.advance(hidden_states).items():
        if request_id not in output.req_id_to_index:  # another branch of it has ended the step
            output.req_id_to_index[request_id] = len(output.req_ids)
            output.req_ids.append(request_id)
            output.sampled_token_ids.append([])
        if report.is_last:
            output.sampled_token_ids[output.req_id_to_index[request_id]] = [canvases.end_of_picture]
        if get_tensor_model_parallel_rank() == 0:
            plan = canvases.plan_of(request_id)
            tree: dict[str, Any] = {} if report.is_last else {STEP: report.num_done, NUM_STEPS: plan.num_steps}
            if report.latents is not None:
                tree |= {LATENTS: report.latents, GRID: list(plan.grid)}
            payloads[request_id] = pack(hub.publish(request_id, tree, **readers_of(infos[request_id].args)))
    return payloads


def publish_frames(
    predictor: PredictsFrames, output: ModelRunnerOutput, hidden_states: Tensor, infos: Mapping[str, RequestInfo]
) -> dict[str, Tensor]:
    """The frames that this step's tokens begin, with the codes of all groups.

    Args:
        hidden_states: of the sampled rows, [num_reqs, hidden_size].
    """
    rows, of_rows, tokens = [], [], []
    for row, (request_id, sampled) in enumerate(zip(output.req_ids, output.sampled_token_ids, strict=True)):
        info = infos.get(request_id)
        if sampled and info is not None and not info.error:
            rows.append(row)
            of_rows.append(info)
            tokens.append(sampled[0])
    if not rows:
        return {}
    frames = predictor.predict_frames(of_rows, hidden_states[rows], tokens)
    if get_tensor_model_parallel_rank() != 0:  # every rank needs the frames, and one publishes them
        return {}
    return {
        info.request_id: pack(_payload_of(info, frame))
        for info, frame in zip(of_rows, frames, strict=True)
        if frame is not None
    }


def _payload_of(info: RequestInfo, frame: list[int]) -> Payload:
    if isinstance(info.publisher, FramePublisher):
        return info.publisher.publish(frame)
    return Payload(values={FRAME: frame})
