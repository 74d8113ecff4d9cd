"""``record_frames``: what a model with a code predictor generates in an engine of the test's process."""

from collections import defaultdict

import pytest

from vllm_omni.model_executor.stage_model import PredictsFrames


def record_frames(model: type[PredictsFrames], monkeypatch: pytest.MonkeyPatch) -> dict[str, list]:
    """Record the frames of every request of the model from now on: id of the request -> its frames, in order."""
    frames = defaultdict(list)
    predict = model.predict_frames

    def recorded(self, infos, hidden_states, token_ids):
        predicted = predict(self, infos, hidden_states, token_ids)
        for info, frame in zip(infos, predicted, strict=True):
            if frame is not None:
                frames[info.request_id.partition("-")[0]].append(frame)
        return [None] * len(infos)  # upstream's LLM takes a token with a payload for the output of a pooling model

    monkeypatch.setattr(model, "predict_frames", recorded)
    return frames


def frames_of_output(frames: dict[str, list], output) -> list:
    """Of an output of upstream's ``LLM``."""
    return frames[output.request_id.partition("-")[0]]
