"""The thinker's processor behind vLLM's cache of processed media, as deployed: what the cache has changes no prompt."""

import copy
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from vllm.config import ModelConfig
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.cache import LruKeyReplicatedSenderCache
from vllm.multimodal.processing import ProcessorInputs, TimingContext

from tests.reference.media import VIDEO, Audio, Video, format_prompt, make_audio, make_video
from vllm_omni.plugin import register
from vllm_omni.testing import qwen2_5_omni as tiny

FIRST, SECOND = make_video(8, seed=1), make_video(8, seed=2)
SHORT, MIDDLE, LONG = (make_audio(seconds, seed=3) for seconds in (1.0, 3.0, 5.0))


class Prompt(NamedTuple):
    token_ids: list[int]
    names: dict[str, list[str]]
    places: dict[str, list[Any]]
    is_sent: dict[str, list[bool]]  # False: the engine has the item, by what the cache remembers


class Front:
    """The processor as the front end uses it: it remembers what it has sent to the engine."""

    def __init__(self, model_config: ModelConfig) -> None:
        self.processor = MULTIMODAL_REGISTRY.create_processor(model_config)
        self.cache = LruKeyReplicatedSenderCache(model_config)

    def ask(self, *pairs: tuple[Video, Audio], has_cache: bool = True, **kwargs: object) -> Prompt:
        token_ids = self.processor.info.get_tokenizer().encode(format_prompt(VIDEO * len(pairs)))
        data = {"video": [video for video, _ in pairs], "audio": [audio for _, audio in pairs]}
        inputs = ProcessorInputs(
            token_ids,
            self.processor.info.parse_mm_data(data),
            hf_processor_mm_kwargs={"use_audio_in_video": True, **kwargs},
            cache=self.cache if has_cache else None,
        )
        made = self.processor.apply(inputs, TimingContext())
        is_sent = {modality: [item is not None for item in items] for modality, items in made["mm_kwargs"].items()}
        return Prompt(made["prompt_token_ids"], made["mm_hashes"], made["mm_placeholders"], is_sent)

    def check(self, *pairs: tuple[Video, Audio], **kwargs: object) -> Prompt:
        """Ask with what the cache has by now; the prompt is that of an empty cache."""
        cached, plain = self.ask(*pairs, **kwargs), self.ask(*pairs, has_cache=False, **kwargs)
        assert cached[:3] == plain[:3]
        return cached


@pytest.fixture(scope="module")
def model_config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    register()
    path: Path = tiny.build(tmp_path_factory.mktemp("qwen2_5_omni"))
    overrides = {"architectures": ["Qwen2_5OmniThinker"]}
    return ModelConfig(str(path), hf_overrides=overrides, dtype="float32", mm_processor_cache_gb=1)


@pytest.fixture
def front(model_config: ModelConfig) -> Front:
    return Front(copy.copy(model_config))


@pytest.mark.parametrize("other", [(FIRST, SHORT), (FIRST, LONG), (SECOND, MIDDLE)], ids=["shorter", "longer", "video"])
def test_a_video_with_another_sound_and_a_sound_with_another_video_are_other_items(
    front: Front, other: tuple[Video, Audio]
) -> None:
    before = front.check((FIRST, MIDDLE))
    after = front.check(other)
    assert after.is_sent == {"video": [True], "audio": [True]}
    assert not {*before.names["video"], *before.names["audio"]} & {*after.names["video"], *after.names["audio"]}


def test_the_same_pair_is_sent_once(front: Front) -> None:
    assert front.check((FIRST, MIDDLE)).is_sent == {"video": [True], "audio": [True]}
    again = front.check((FIRST, MIDDLE))
    assert again.is_sent == {"video": [False], "audio": [False]}
    assert again.names["video"] != again.names["audio"]


@pytest.mark.parametrize("modality", ["video", "audio"])
def test_a_pair_of_which_one_was_evicted_is_processed_again(front: Front, modality: str) -> None:
    names = front.check((FIRST, MIDDLE)).names
    front.cache.invalidate(names[modality][0])
    assert front.check((FIRST, MIDDLE)).is_sent[modality] == [True]


def test_two_pairs_keep_their_own_rates_where_the_first_is_cached(front: Front) -> None:
    rates = {"fps": 1.0, "second_per_grid_ts": [1.0, 2.0]}
    front.check((FIRST, MIDDLE), (FIRST, MIDDLE), **rates)
    front.check((FIRST, MIDDLE), (SECOND, LONG), **rates)
