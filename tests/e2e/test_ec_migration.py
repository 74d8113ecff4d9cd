"""Engines in processes of their own: one encodes for another, whose tokens are those of a single stock engine."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import pytest
from PIL import Image
from vllm import LLM, RequestOutput, SamplingParams

from tests.reference import llava, llava_next, qwen2_vl
from vllm_omni.model_executor.models.qwen2_5_omni import tiny
from vllm_omni.relay.codec import decode
from vllm_omni.relay.hub import RelayHub, RelayOptions

pytestmark = [
    pytest.mark.slow,
    # vLLM's own, of a worker in this process.
    pytest.mark.filterwarnings("ignore:`torch.distributed.reduce_op` is deprecated:FutureWarning"),
]

NUM_TOKENS = 8
ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 256,
    "max_num_seqs": 8,
    "block_size": 32,
    "async_scheduling": False,
    "limit_mm_per_prompt": {"image": 2},
}
EPD_ENGINE: dict[str, Any] = {
    **ENGINE,
    "worker_cls": "vllm_omni.worker.worker.CPUARWorker",
    "scheduler_cls": "vllm_omni.core.sched.epd.EPDScheduler",
}
ENCODE_ONLY = {"encode_only": True}

Prompt = dict[str, Any]


def make_instance(checkpoint: Path, ec_role: str, transport: str = "shm", **engine: Any) -> LLM:
    ec_transfer_config = {
        "ec_connector": "RelayECConnector",
        "ec_connector_module_path": "vllm_omni.kv.ec_connector",
        "ec_role": ec_role,
        "ec_connector_extra_config": {"pull_timeout_s": 5},
    }
    relay = {"transport": transport, "num_bytes": 1 << 20, "inline_bytes": 0}
    epd = engine.pop("epd", {})
    return LLM(
        str(checkpoint),
        **EPD_ENGINE | engine,
        ec_transfer_config=ec_transfer_config,
        additional_config={"relay": relay, "epd": epd},
    )


def make_prompts(seed: int) -> list[Prompt]:
    """One image, two, and one that recurs; named by content, as a front end does."""
    rng = np.random.default_rng(seed)
    shape = (llava.IMAGE_SIZE, llava.IMAGE_SIZE, 3)
    images = [Image.fromarray(rng.integers(0, 255, shape, dtype=np.uint8)) for _ in range(4)]

    def make(text: str, *numbers: int) -> Prompt:
        return {
            "prompt": text,
            "multi_modal_data": {"image": [images[number] for number in numbers]},
            "multi_modal_uuids": {"image": [f"{seed}-{number}" for number in numbers]},
        }

    return [
        make("<s> w1 <image> w4", 0),
        make("<s> <image> w1 <image> w2", 1, 2),
        make("<s> w7 w8 <image> w9 <image> w3", 3, 0),
    ]


def run(llm: LLM, prompts: list[Prompt], params: list[dict[str, Any] | None]) -> list[RequestOutput]:
    sampling = [
        SamplingParams(
            temperature=0,
            max_tokens=NUM_TOKENS,
            ignore_eos=True,
            extra_args={"ec_transfer_params": one} if one is not None else None,
        )
        for one in params
    ]
    return llm.generate(prompts, sampling, use_tqdm=False)


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def num_encoded(outputs: list[RequestOutput]) -> list[int]:
    return [output.ec_transfer_params["num_encoded"] for output in outputs]


def encode_on(llm: LLM, prompts: list[Prompt]) -> list[dict[str, Any]]:
    """What each consumer's request is to carry."""
    outputs = run(llm, prompts, [ENCODE_ONLY] * len(prompts))
    assert tokens(outputs) == [[]] * len(prompts)
    return [{"images": output.ec_transfer_params["images"]} for output in outputs]


def close(llm: LLM) -> None:
    if psutil.pid_exists(llm.llm_engine.engine_core.resources.engine_manager.processes[0].pid):
        llm.llm_engine.engine_core.shutdown(timeout=1)


def kill(llm: LLM) -> None:
    """Its workers first, which hold what was put: they would live until they notice."""
    for process in llm.llm_engine.engine_core.resources.engine_manager.processes:
        engine = psutil.Process(process.pid)
        killed = [*engine.children(recursive=True), engine]
        for one in killed:
            one.kill()
        psutil.wait_procs(killed, timeout=20)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llava.build(tmp_path_factory.mktemp("llava"))


@pytest.fixture(scope="module")
def stock(checkpoint: Path) -> Iterator[Callable[[list[Prompt]], list[list[int]]]]:
    llm = LLM(str(checkpoint), **ENGINE)
    yield lambda prompts: tokens(run(llm, prompts, [None] * len(prompts)))
    close(llm)


@pytest.fixture(scope="module")
def encoder(checkpoint: Path) -> Iterator[LLM]:
    """E: no cache blocks, no language model."""
    llm = make_instance(checkpoint, "ec_producer")
    yield llm
    close(llm)


@pytest.fixture(scope="module")
def consumer(checkpoint: Path) -> Iterator[LLM]:
    """PD, with a prefix cache."""
    llm = make_instance(checkpoint, "ec_consumer")
    yield llm
    close(llm)


@pytest.fixture(scope="module")
def both(checkpoint: Path) -> Iterator[LLM]:
    """Encodes for others by another transport, in slices beside its own tokens; without a prefix cache."""
    epd = {"token_budget": 64, "image_budget": 2 * llava.NUM_IMAGE_TOKENS, "num_encode_layers": 1}
    llm = make_instance(checkpoint, "ec_both", "tcp", enable_prefix_caching=False, epd=epd)
    yield llm
    close(llm)


def test_a_consumer_answers_as_stock_does_and_encodes_nothing(stock: Any, encoder: LLM, consumer: LLM) -> None:
    prompts = make_prompts(0)
    outputs = run(consumer, prompts, encode_on(encoder, prompts))
    assert tokens(outputs) == stock(prompts)
    assert len({tuple(one) for one in tokens(outputs)}) == len(prompts)  # or the images would not matter
    assert num_encoded(outputs) == [0, 0, 0]


def test_without_a_prefix_cache_it_does_so_too(stock: Any, encoder: LLM, both: LLM) -> None:
    prompts = make_prompts(1)
    outputs = run(both, prompts, encode_on(encoder, prompts))
    assert tokens(outputs) == stock(prompts)
    assert num_encoded(outputs) == [0, 0, 0]


def test_an_engine_encodes_for_another_beside_its_own_requests(stock: Any, both: LLM, consumer: LLM) -> None:
    own, others = make_prompts(2), make_prompts(3)
    outputs = run(both, [*own, *others], [None] * 3 + [ENCODE_ONLY] * 3)
    assert tokens(outputs[:3]) == stock(own)
    assert sum(num_encoded(outputs)) == 8
    params = [{"images": output.ec_transfer_params["images"]} for output in outputs[3:]]
    answers = run(consumer, others, params)
    assert tokens(answers) == stock(others)
    assert num_encoded(answers) == [0, 0, 0]


def test_an_image_that_an_encoder_knows_is_not_encoded_again(encoder: LLM) -> None:
    prompts = make_prompts(4)
    first, second = (run(encoder, prompts, [ENCODE_ONLY] * 3) for _ in range(2))
    assert sum(num_encoded(first)) == 4 and sum(num_encoded(second)) == 0
    assert [set(one.ec_transfer_params["images"]) for one in first] == [
        set(one.ec_transfer_params["images"]) for one in second
    ]


def test_what_the_front_end_has_released_is_encoded_by_the_consumer(stock: Any, encoder: LLM, consumer: LLM) -> None:
    prompts = make_prompts(5)
    (before,) = encoder.collective_rpc("relay_statistics")
    params = encode_on(encoder, prompts)
    front_end = RelayHub(RelayOptions())
    for one in params:
        for payload in one["images"].values():
            front_end.release_payload(decode(payload), for_all=True)
    front_end.close()
    (after,) = encoder.collective_rpc("relay_statistics")
    assert after["shm"]["num_leases"] == before["shm"]["num_leases"]
    outputs = run(consumer, prompts, params)
    assert tokens(outputs) == stock(prompts)
    assert sum(num_encoded(outputs)) == 4


def test_an_encoder_refuses_to_answer_and_a_text_to_be_encoded(encoder: LLM) -> None:
    answer, text = run(encoder, [make_prompts(7)[0], {"prompt": "<s> w1"}], [None, ENCODE_ONLY])
    assert "only encodes" in answer.ec_transfer_params["error"]
    assert "nothing to encode" in text.ec_transfer_params["error"]


# -- other models -----------------------------------------------------------------------------------------------------


class Model(NamedTuple):
    build: Callable[[Path], Path]
    image: str  # what stands for one in a prompt
    audio: str = ""
    engine: dict[str, Any] = {}


MODELS = {
    "LLaVA-NeXT": Model(llava_next.build, "<image>"),
    "Qwen2-VL": Model(qwen2_vl.build, qwen2_vl.IMAGE),
    "Qwen2.5-Omni": Model(
        tiny.build,
        "<|vision_bos|><|IMAGE|><|vision_eos|>",
        "<|audio_bos|><|AUDIO|><|audio_eos|>",
        {"limit_mm_per_prompt": {"image": 2, "audio": 1, "video": 0}},
    ),
}


def make_prompts_of(model: Model) -> list[Prompt]:
    """Images of several shapes, and a sound if the model hears."""
    rng = np.random.default_rng(0)
    shapes = [(56, 56, 3), (56, 112, 3), (112, 70, 3)]
    images = [Image.fromarray(rng.integers(0, 255, shape, dtype=np.uint8)) for shape in shapes]
    prompts: list[Prompt] = [
        {
            "prompt": f"w1 {model.image} w4",
            "multi_modal_data": {"image": images[:1]},
            "multi_modal_uuids": {"image": ["0"]},
        },
        {
            "prompt": f"w3 {model.image} w4 {model.image} w5",
            "multi_modal_data": {"image": images[1:]},
            "multi_modal_uuids": {"image": ["1", "2"]},
        },
    ]
    if model.audio:
        sound = np.sin(np.arange(16000) / 30).astype(np.float32)
        audio = {"multi_modal_data": {"audio": [(sound, 16000)]}, "multi_modal_uuids": {"audio": ["sound"]}}
        prompts.append({"prompt": f"w2 {model.audio} w4", **audio})
    return prompts


@pytest.mark.parametrize("name", MODELS)
def test_other_models_answer_as_stock_does(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    model = MODELS[name]
    checkpoint = model.build(tmp_path)
    prompts = make_prompts_of(model)
    engine = {"max_model_len": 512, **model.engine}
    # An instance without a language model has a process of its own: what vLLM keeps per process would be without data.
    encoder = make_instance(checkpoint, "ec_producer", **engine)
    request.addfinalizer(lambda: close(encoder))
    params = encode_on(encoder, prompts)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    stock = LLM(str(checkpoint), **{**ENGINE, **engine})
    expected = tokens(run(stock, prompts, [None] * len(prompts)))
    stock.llm_engine.engine_core.shutdown()
    consumer = make_instance(checkpoint, "ec_consumer", **engine)
    outputs = run(consumer, prompts, params)
    consumer.llm_engine.engine_core.shutdown()
    assert tokens(outputs) == expected
    assert len({tuple(one) for one in expected}) == len(prompts)
    assert num_encoded(outputs) == [0] * len(prompts)


# -- the last tests: what dies is not started again -------------------------------------------------------------------


@pytest.mark.parametrize("source", ["encoder", "both"])
def test_what_a_dead_engine_had_is_encoded_by_the_consumer(
    source: str, stock: Any, consumer: LLM, request: pytest.FixtureRequest
) -> None:
    prompts = make_prompts(8 + (source == "both"))
    engine: LLM = request.getfixturevalue(source)
    params = encode_on(engine, prompts)
    kill(engine)
    outputs = run(consumer, prompts, params)
    assert tokens(outputs) == stock(prompts)
    assert sum(num_encoded(outputs)) == 4
