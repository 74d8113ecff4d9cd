"""The audio tokenizer equals the reference in three configurations; so does its decoder as a stage's model."""

from functools import cache
from types import SimpleNamespace

import pytest
import torch

from tests.reference.mimo_audio import AudioTokenizer
from vllm_omni.errors import ConfigError
from vllm_omni.model_executor.models.mimo_audio import decoder
from vllm_omni.model_executor.models.mimo_audio.audio_tokenizer import (
    codec_directory,
    load_decoder,
    load_encoder,
    log_mels,
    num_frames,
    read_codec_config,
)
from vllm_omni.model_executor.models.mimo_audio.decoder import MiMoAudioDecoder
from vllm_omni.testing.mimo_audio import build

VARIANTS = ("base", "narrow", "asr")
NUM_CHANNELS = 8


@pytest.fixture(scope="module", params=VARIANTS)
def checkpoint(request, tmp_path_factory):
    return build(tmp_path_factory.mktemp(request.param), variant=request.param, seed=2)


@cache
def reference(path):
    return AudioTokenizer(path / "audio_tokenizer")


def make_wave(num_samples: int, seed: int) -> torch.Tensor:
    time = torch.arange(num_samples) / 24000
    noise = torch.randn(num_samples, generator=torch.Generator().manual_seed(seed))
    return 0.3 * torch.sin(2 * torch.pi * (200 + 150 * seed * time) * time) + 0.05 * noise


def make_codes(path, num: int, seed: int) -> torch.Tensor:
    """[num, channels]"""
    sizes = read_codec_config(codec_directory(str(path)))["codebook_size"][:NUM_CHANNELS]
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randint(size, (num,), generator=generator) for size in sizes], dim=1)


def test_codes_of_sounds_equal_the_reference(checkpoint):
    directory = codec_directory(str(checkpoint))
    config = read_codec_config(directory)
    encoder = load_encoder(config, NUM_CHANNELS, directory)
    for seed, num_samples in enumerate((481, 960, 24000, 30721, 33333)):
        wave = make_wave(num_samples, seed)
        codes = encoder.encode(log_mels(wave, config))
        assert len(codes) == num_frames(1 + num_samples // 240)
        assert torch.equal(codes.T, reference(checkpoint).encode(wave)[:NUM_CHANNELS]), num_samples


def test_sound_of_codes_equals_the_reference(checkpoint):
    directory = codec_directory(str(checkpoint))
    whole = load_decoder(read_codec_config(directory), NUM_CHANNELS, directory)
    for num in (1, 4, 37, 140):  # 560 positions of the vocoder: more than one block of queries
        codes = make_codes(checkpoint, num, seed=num)
        expected = reference(checkpoint).decode(codes.T).wave
        torch.testing.assert_close(whole(codes[None])[0], expected, atol=1e-6, rtol=0)


def make_decoder(path) -> MiMoAudioDecoder:
    hf_config = SimpleNamespace(model_config={"num_channels": NUM_CHANNELS})
    model = MiMoAudioDecoder(
        vllm_config=SimpleNamespace(model_config=SimpleNamespace(model=str(path), hf_config=hf_config))
    )
    model.load_weights(iter(()))
    return model


def test_sounds_of_a_batch_are_those_of_each_alone_piece_by_piece(checkpoint, monkeypatch):
    monkeypatch.setattr(decoder, "FRAMES_PER_PIECE", 30)  # 1500: a minute
    model = make_decoder(checkpoint)
    lengths = (13, 40, 0, 13, 70)
    batch = [make_codes(checkpoint, num, seed) for seed, num in enumerate(lengths)]
    read = [model.read({"codes": codes.flatten().tolist()}) for codes in batch]
    for codes, made in zip(batch, model.generate(read), strict=True):
        pieces = codes.split(30) if len(codes) else []
        expected = torch.cat([torch.zeros(0), *(reference(checkpoint).decode(one.T).wave for one in pieces)])
        torch.testing.assert_close(made["audio"], expected, atol=1e-6, rtol=0)


def test_wrong_codes_are_rejected(checkpoint):
    model = make_decoder(checkpoint)
    with pytest.raises(ValueError, match="frames have 8"):
        model.read({"codes": [1] * 7})
    with pytest.raises(ValueError, match="channel 7 must lie in"):
        model.read({"codes": [0] * 7 + [999]})


def test_too_short_a_sound_and_a_missing_tokenizer_are_errors(checkpoint, tmp_path):
    config = read_codec_config(codec_directory(str(checkpoint)))
    with pytest.raises(ValueError, match="has 480 samples at 24 kHz: it needs at least 481"):
        log_mels(torch.zeros(480), config)
    with pytest.raises(ConfigError, match="needs its audio tokenizer in the directory"):
        codec_directory(str(tmp_path))
