"""``MediaCheck``: which audio and video the thinkers of Qwen2.5-Omni and Qwen3-Omni cannot read."""

from __future__ import annotations

import math
from typing import Any

from transformers import PreTrainedConfig

from vllm_omni.errors import InvalidRequest
from vllm_omni.model_executor.omni_thinker import max_video_positions

MAX_KNOWN_VIDEOS = 1 << 16


class MediaCheck:
    """Judges rendered prompts.

    Args:
        config: the thinker's.
        default_seconds: per pair of frames, where a video's data do not say.
    """

    def __init__(self, config: PreTrainedConfig, default_seconds: float = 1.0) -> None:
        self._config = config
        self._default_seconds = default_seconds
        # By the video's name: vLLM's processor cache leaves out the data of those that the engine has.
        self._video_positions: dict[str, float] = {}

    def check_prompt(self, prompt: Any) -> None:
        """Reject audio that is not finite, and videos that last longer than the model has positions.

        Raises:
            InvalidRequest: a sample that is NaN or infinite; frames per second that are not a positive number, or so
                few that the video lasts for hours.
        """
        tokens_per_second = self._config.position_id_per_seconds
        for item in prompt.get("mm_kwargs", {}).get("audio", ()):
            if item is not None and not item.get_data()["input_audio_features"].isfinite().all():
                raise InvalidRequest("the audio has samples that are NaN, infinite or far beyond [-1, 1]")
        names = prompt.get("mm_hashes", {}).get("video", ())
        for name, item in zip(names, prompt.get("mm_kwargs", {}).get("video", ()), strict=True):
            if item is None:
                continue
            data = item.get_data()
            seconds = float(data.get("second_per_grid_ts", self._default_seconds))
            reach = int(data["video_grid_thw"][0]) * seconds * tokens_per_second
            if not 0 < reach < math.inf:
                raise InvalidRequest(
                    f"mm_processor_kwargs: the video has {seconds} seconds per pair of frames: give an fps above 0"
                )
            self._video_positions[name] = reach
            if len(self._video_positions) > MAX_KNOWN_VIDEOS:
                del self._video_positions[next(iter(self._video_positions))]
        num_positions = sum(self._video_positions.get(name, 0.0) for name in names)
        most = max_video_positions(self._config.text_config)
        if num_positions > most:
            raise InvalidRequest(
                f"mm_processor_kwargs: at this fps the videos last {num_positions / tokens_per_second:.0f} s, and the "
                f"model has positions for {most / tokens_per_second:.0f} s: give a higher fps"
            )
