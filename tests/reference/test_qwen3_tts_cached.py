"""The baseline of the speech benchmark generates the plain reference's frames."""

import pytest
import torch

from tests.reference.qwen3_tts import Reference
from tests.reference.qwen3_tts_cached import CachedReference
from vllm_omni.testing.qwen3_tts import build


@pytest.mark.parametrize("variant", ["base", "small"])
def test_frames_and_samples_equal_those_without_a_cache(variant, tmp_path):
    path = build(tmp_path, variant=variant)
    prompt = {"speaker": "ryan", "streaming": True}
    speech = Reference(path).speak("Hello there.", max_tokens=12, **prompt)
    job = CachedReference(path).job("Hello there.", len(speech.codes), **prompt)
    assert job.codes.tolist() == speech.codes.tolist()
    assert torch.equal(job.wave, speech.wave)
