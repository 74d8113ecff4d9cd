"""Decoding a stream piece by piece equals the reference's whole decode."""

import math

import pytest
import torch
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeCode2WavConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeCode2Wav

from tests.reference.qwen3_tts_codec import decode_whole
from vllm_omni.errors import ConfigError, PoolExhausted
from vllm_omni.speech.codec_config import CodecConfig
from vllm_omni.speech.codec_decoder import CodecDecoder
from vllm_omni.speech.codec_streams import CodecStreams

SIZES = {
    "num_quantizers": 4, "codebook_size": 16, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "intermediate_size": 48, "sliding_window": 6, "decoder_dim": 32,
    "upsample_rates": [4, 3], "upsampling_ratios": [2, 2], "max_position_embeddings": 1000,
}  # fmt: skip
TOLERANCE = 1e-5  # of samples within [-1, 1], float32


def randomize(model):
    """Weights with which every layer matters, and samples that are rarely clamped."""
    for name, parameter in model.named_parameters():
        if name.endswith(("alpha", "beta")):
            torch.nn.init.normal_(parameter, std=0.2)
        elif name.endswith("cluster_usage"):
            torch.nn.init.uniform_(parameter, 0.5, 2)
        elif parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.8 * math.prod(parameter.shape[1:]) ** -0.5)
        else:
            torch.nn.init.normal_(parameter, mean=0.0 if name.endswith("bias") else 0.5, std=0.1)
    model.decoder[-1].conv.weight.data *= 0.1
    model.decoder[-1].conv.bias.data.zero_()


def omni_decoder(seed, **sizes):
    """Qwen3-Omni's module, and ours with its weights."""
    torch.manual_seed(seed)
    config = Qwen3OmniMoeCode2WavConfig(**SIZES | sizes)
    reference = Qwen3OmniMoeCode2Wav._from_config(config).eval()
    randomize(reference)
    decoder = CodecDecoder(CodecConfig.of(config.to_dict()))
    decoder.load_state_dict(reference.state_dict())
    return reference, decoder.eval()


def tts_decoder(seed, **sizes):
    torch.manual_seed(seed)
    config = CodecConfig.of(SIZES | {"codebook_dim": 16, "latent_dim": 24, "head_dim": 8} | sizes)
    decoder = CodecDecoder(config)
    randomize(decoder)
    weights, codec = decoder.state_dict(), decoder.config
    return lambda codes: decode_whole(weights, codec, codes), decoder.eval()


def stream(streams, codes, pieces, name="one"):
    streams.open(name)
    waves, start = [], 0
    for num_frames in pieces:
        waves.append(streams.push({name: codes[:, start : start + num_frames]})[name])
        start += num_frames
    assert start == codes.shape[1]
    streams.close(name)
    return torch.cat(waves)


@pytest.mark.parametrize("make", [omni_decoder, tts_decoder])
@torch.inference_mode()
def test_a_stream_in_any_pieces_equals_the_whole_decode(make):
    for seed, sizes in enumerate(({}, {"sliding_window": 3, "num_key_value_heads": 2}, {"upsample_rates": [5, 4, 3]})):
        reference, decoder = make(seed, **sizes)
        codes = torch.randint(16, (4, 40))
        whole = reference(codes[None]).flatten()
        assert 0.05 < whole.abs().max() < 1  # neither silent nor clamped
        streams = CodecStreams(decoder, 2)
        for pieces in ([40], [1] * 40, [7] * 5 + [5], [1, 2, 4, 8, 16, 9]):
            wave = stream(streams, codes, pieces)
            assert wave.shape == whole.shape, (sizes, pieces)
            assert (wave - whole).abs().max() < TOLERANCE, (sizes, pieces)
        config = decoder.config
        assert len(whole) == 40 * config.samples_per_frame - config.num_trimmed


@torch.inference_mode()
def test_streams_at_different_positions_share_a_batch_without_touching_each_other():
    reference, decoder = omni_decoder(7)
    streams = CodecStreams(decoder, 5)
    codes = {str(index): torch.randint(16, (4, 12 + index)) for index in range(5)}
    waves = {name: [] for name in codes}
    position = dict.fromkeys(codes, 0)
    random = torch.Generator().manual_seed(4)
    while any(position[name] < one.shape[1] for name, one in codes.items()):
        pushed = {}
        for name, one in codes.items():
            num_left = one.shape[1] - position[name]
            num_frames = min(num_left, int(torch.randint(4, (), generator=random)))
            if position[name] == 0 and num_frames:
                streams.open(name)
            if num_frames:
                pushed[name] = one[:, position[name] : position[name] + num_frames]
                position[name] += num_frames
        for name, wave in streams.push(pushed).items():
            waves[name].append(wave)
    for name, one in codes.items():
        whole = reference(one[None]).flatten()
        assert (torch.cat(waves[name]) - whole).abs().max() < TOLERANCE


@torch.inference_mode()
def test_a_copied_stream_continues_behind_its_source():
    reference, decoder = tts_decoder(2)
    codes = torch.randint(16, (4, 20))
    streams = CodecStreams(decoder, 2)
    streams.open("voice")
    streams.push({"voice": codes[:, :8]})
    for _ in range(2):  # the source stands where it stood
        streams.copy("voice", "answer")
        wave = streams.push({"answer": codes[:, 8:]})["answer"]
        streams.close("answer")
        whole = reference(codes[None]).flatten()
        assert (wave - whole[8 * decoder.config.samples_per_frame :]).abs().max() < TOLERANCE


def test_rows_of_closed_streams_are_used_again_and_more_than_there_are_is_an_error():
    _, decoder = tts_decoder(0)
    streams = CodecStreams(decoder, 2)
    streams.open("a")
    streams.open("b")
    with pytest.raises(PoolExhausted, match="2 codec streams"):
        streams.open("c")
    streams.close("a")
    streams.close("a")  # an abort may come twice
    streams.open("c")
    assert streams.num_open == 2


def test_an_incomplete_configuration_is_rejected_with_the_missing_fields():
    with pytest.raises(ConfigError, match="decoder_dim"):
        CodecConfig.of({name: value for name, value in SIZES.items() if name != "decoder_dim"})
    with pytest.raises(ConfigError, match="latent_dim"):
        CodecConfig.of(SIZES | {"codebook_dim": 8})
