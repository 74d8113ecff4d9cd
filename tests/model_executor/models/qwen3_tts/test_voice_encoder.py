"""The encoders of recordings equal those of the model's own package: golden files."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.reference.test_qwen3_tts import CASES, GOLDEN, recording
from vllm_omni.errors import OmniError
from vllm_omni.flow import Chunk
from vllm_omni.model_executor.models.qwen3_tts.voice_encoder import encode, encode_voice, load_voice_encoder
from vllm_omni.speech.voice_encoder import CodecEncoder, SpeakerEncoder
from vllm_omni.testing.qwen3_tts import build

TOLERANCE = 1e-5  # of x-vectors with values up to 3, float32


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    return build(tmp_path_factory.mktemp("qwen3_tts"), variant="clone")


def codes_of(features: dict[str, Any]) -> list[list[int]]:
    return np.frombuffer(features["codes"], np.int16).reshape(features["num_frames"], -1).tolist()


def check(features: dict[str, Any], case: dict[str, Any]) -> None:
    golden = load_file(GOLDEN / "clone.safetensors")
    expected = golden[f"{case['name']}.x_vector"].numpy()
    assert np.abs(np.frombuffer(features["x_vector"], np.float32) - expected).max() < TOLERANCE, case
    if (codes := golden.get(f"{case['name']}.reference_codes")) is not None:
        assert codes_of(features) == codes.tolist(), case


@pytest.mark.parametrize("case", CASES["clone"], ids=lambda case: case["name"])
def test_features_equal_the_packages(case, path):
    samples = recording(**case["reference"]).tobytes()
    check(encode(load_voice_encoder(str(path)), samples, with_codes=True), case)


async def test_the_function_encodes_a_request(path):
    case = CASES["clone"][0]
    samples = recording(**case["reference"]).tobytes()

    async def chunks():
        yield Chunk({"model": str(path), "revision": None, "samples": samples, "with_codes": True}, last=True)

    (emission,) = [one async for one in encode_voice(SimpleNamespace(inputs={"recording": chunks()}))]
    assert emission.field == "voice"
    check(emission.payload, case)


def test_codes_are_encoded_only_where_they_are_asked_for(path):
    samples = recording(1.0, seed=1).tobytes()
    assert encode(load_voice_encoder(str(path)), samples, with_codes=False).keys() == {"x_vector"}


def test_a_checkpoint_in_several_files_is_read_by_its_index(path, tmp_path):
    shutil.copytree(path, tmp_path / "sharded")
    tensors = load_file(tmp_path / "sharded" / "model.safetensors")
    (tmp_path / "sharded" / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {f"model-{index}.safetensors": names[index::3] for index in range(3)}
    for file, held in shards.items():
        save_file({name: tensors[name] for name in held}, tmp_path / "sharded" / file)
    index = {"weight_map": {name: file for file, held in shards.items() for name in held}}
    (tmp_path / "sharded" / "model.safetensors.index.json").write_text(json.dumps(index))
    whole, sharded = (load_voice_encoder(str(one)).state_dict() for one in (path, tmp_path / "sharded"))
    assert all(torch.equal(whole[name], tensor) for name, tensor in sharded.items())


def test_a_checkpoint_without_the_encoders_tensors_is_reported(tmp_path):
    build(tmp_path, variant="clone")
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["speaker_encoder.fc.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(OmniError, match=r"(?s)cannot be loaded.*speaker_encoder\.fc\.weight"):
        load_voice_encoder(str(tmp_path))


def test_names_and_shapes_are_those_of_the_published_checkpoints():
    """Of Qwen3-TTS-12Hz-0.6B-Base: 76 tensors of the speaker encoder, and Mimi's encoder half."""
    speaker = {
        "mel_dim": 128, "enc_dim": 1024, "enc_channels": [512, 512, 512, 512, 1536],
        "enc_kernel_sizes": [5, 3, 3, 3, 1], "enc_dilations": [1, 2, 3, 4, 1], "enc_attention_channels": 128,
        "enc_res2net_scale": 8, "enc_se_channels": 128,
    }  # fmt: skip
    with torch.device("meta"):
        codec = CodecEncoder({"num_quantizers": 32, "codebook_size": 2048}, 16, 1920)
    tensors = SpeakerEncoder(speaker).state_dict()
    assert len(tensors) == 76
    assert tensors["fc.weight"].shape == (1024, 3072, 1)
    assert {name.partition(".")[0] for name in codec.state_dict()} == {
        "encoder", "encoder_transformer", "downsample", "quantizer",
    }  # fmt: skip
