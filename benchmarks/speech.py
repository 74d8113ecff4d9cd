"""Qwen3-TTS: the talker with its code predictor, and the codec's decoder, beside a cached reference on the same cores.

    python -m benchmarks.speech [--runs 5] [--concurrency 16] [--frames 60] [--short]

Baseline: ``tests/reference/qwen3_tts_cached.py``, transformers' ``Qwen3Model`` with a cache for talker and predictor,
one request after the other, in this process; with the number of threads that is fastest, found at the start. The
model's own package also makes two nested calls of ``generate`` for each frame. Ours are the talker in an engine core of
vLLM and ``CodecStreams``, in this process, too. Runs alternate; frames and samples of both sides are compared.

Model: ``vllm_omni.testing.qwen3_tts``, variant "wide": 37 million random parameters, float32, greedy. Workload: a text
of a few words, ``--frames`` frames of 16 codes (80 ms of sound each). Regime: at 1 a step is bound by reading weights,
the predictor's once for each of its 15 passes; at 16 by arithmetic. ``floor`` of the predictor is the time of its
linear layers alone, as products of their shapes by torch, with weights by rows or columns, or by oneDNN with packed
weights, whichever is fastest; that of the decoder is the time of its convolutions and linear layers, repeated on the
same inputs.

* frames/s: of talker and predictor, prompt included, no sound.
* first audio: from the request to the samples of the first frame, in a job that decodes each frame as it comes.
* decoder: streams that all have the next frames, in one batch and one after another.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # read at import; stdout is for the table

import torch
from torch import Tensor, get_num_threads, set_num_threads  # before vLLM's CPU worker replaces the latter
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from vllm import LLM, SamplingParams
from vllm.inputs import tokens_input
from vllm.v1.engine import EngineCoreRequest

from tests.reference.qwen3_tts_cached import CachedReference
from vllm_omni.messages.payload import unpack
from vllm_omni.messages.stage_step import STAGE_ARGS
from vllm_omni.model_executor.models.qwen3_tts.hf_config import talker_hf_config
from vllm_omni.model_executor.models.qwen3_tts.prompt import PromptMaker
from vllm_omni.plugin import register
from vllm_omni.speech.code_predictor import PredictorConfig
from vllm_omni.speech.codec_decoder import CodecDecoder
from vllm_omni.speech.codec_streams import CodecStreams
from vllm_omni.testing.qwen3_tts import build

ENGINE_ARGS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 512,
    "block_size": 32,
    "num_gpu_blocks_override": 512,
    "hf_overrides": talker_hf_config,
    "worker_cls": "vllm_omni.worker.cpu_worker.CPUARWorker",
    "scheduler_cls": "vllm_omni.core.sched.stream.StreamScheduler",
    "async_scheduling": False,
    "enable_prompt_embeds": True,
    "enable_prefix_caching": False,
    "skip_tokenizer_init": True,
    "generation_config": "vllm",
    "disable_log_stats": True,
}
SPEAKER = "ryan"
REPETITION_PENALTY = 1.05
CHUNKS = (1, 8)  # frames of a push to the decoder
TOLERANCE = 1e-4  # of samples, by their maximum

Frame = list[int]


def text_of(index: int) -> str:
    return f"This is sentence number {index}."


# -- the two sides -----------------------------------------------------------------------------------------------------


class Talker:
    """The talker in an engine core of this process, stepped by the caller."""

    def __init__(self, path: Path, reference: CachedReference, concurrency: int, *, is_eager: bool) -> None:
        register()
        self._reference = reference
        self._llm = LLM(str(path), max_num_seqs=concurrency, enforce_eager=is_eager, **ENGINE_ARGS)
        self._core = self._llm.llm_engine.engine_core
        self._num_requests = 0
        self.predictor_s: list[float] = []  # of each call
        worker = self._core.engine_core.model_executor.driver_worker.worker
        predictor = worker.model_runner.get_model().code_predictor
        predictor.register_forward_pre_hook(lambda *_: self.predictor_s.append(-time.perf_counter()))
        predictor.register_forward_hook(
            lambda *_: self.predictor_s.append(self.predictor_s.pop() + time.perf_counter())
        )

    def speak(self, texts: Sequence[str], num_frames: int) -> Iterator[dict[int, Frame]]:
        """Each step's frames, by the index of their text."""
        indices = {}
        for index, text in enumerate(texts):
            request = self._request(text, num_frames)
            indices[request.request_id] = index
            self._core.add_request(request)
        num_open = len(texts)
        while num_open:
            outputs = self._core.get_output().outputs
            num_open -= sum(output.finished for output in outputs)
            yield {
                indices[output.request_id]: unpack(output.pooling_output).values["frame"]
                for output in outputs
                if output.pooling_output is not None
            }

    def shutdown(self) -> None:
        self._core.shutdown()

    def _request(self, text: str, num_frames: int) -> EngineCoreRequest:
        config = self._reference.config
        ids = self._reference.ids(f"<|im_start|>assistant\n{text}<|im_end|>\n<|im_start|>assistant\n")
        prompt = PromptMaker(config).make(ids[:3], ids[3:-5], speaker=SPEAKER, is_streamed=True)
        params = SamplingParams(
            temperature=0,
            max_tokens=num_frames,
            min_tokens=num_frames,  # the end is not allowed before
            repetition_penalty=REPETITION_PENALTY,
            stop_token_ids=[config["talker_config"]["codec_eos_token_id"]],
            detokenize=False,
            extra_args={STAGE_ARGS: {"payloads": [], **prompt._asdict(), "sampling": {"temperature": 0.0}}},
        )
        self._num_requests += 1
        padding = tokens_input([config["talker_config"]["codec_pad_id"]] * len(prompt.text_ids))
        processor = self._llm.llm_engine.input_processor
        return processor.process_inputs(f"speech-{self._num_requests}", padding, params, ("generate",))


def load_decoder(reference: CachedReference) -> CodecDecoder:
    decoder = CodecDecoder(reference.decoder_config).eval()
    tensors = {name.removeprefix("decoder."): one for name, one in reference.codec_weights.items()}
    decoder.load_state_dict({name: tensors[name] for name in decoder.state_dict()})
    return decoder


def measure_frames(talker: Talker, texts: Sequence[str], num_frames: int) -> tuple[dict[str, float], list[list[Frame]]]:
    """Rates of a job of all texts at once. A step's times are medians of those in which all texts have a frame."""
    frames: list[list[Frame]] = [[] for _ in texts]
    step_s, predictor_s = [], []
    talker.predictor_s.clear()
    started = step_started = time.perf_counter()
    for step in talker.speak(texts, num_frames):
        step_ended = time.perf_counter()
        if len(step) == len(texts):
            step_s.append(step_ended - step_started)
            predictor_s.append(talker.predictor_s[-1])
        step_started = step_ended
        for index, frame in step.items():
            frames[index].append(frame)
    elapsed_s = time.perf_counter() - started
    rates = {
        "frames_s": len(texts) * num_frames / elapsed_s,
        "step_ms": 1e3 * statistics.median(step_s),
        "predictor_ms": 1e3 * statistics.median(predictor_s),
    }
    return rates, frames


def measure_first_audio(
    talker: Talker, decoder: CodecDecoder, text: str, num_frames: int
) -> tuple[dict[str, float], Tensor]:
    """A job whose frames are decoded one by one, as they come."""
    streams, samples, first_audio_s = CodecStreams(decoder, 1), [], 0.0
    started = time.perf_counter()
    streams.open("speech")
    for step in talker.speak([text], num_frames):
        for frame in step.values():
            samples.append(streams.push({"speech": torch.tensor(frame)[:, None]})["speech"])
            first_audio_s = first_audio_s or time.perf_counter() - started
    return {"first_audio_s": first_audio_s, "total_s": time.perf_counter() - started}, torch.cat(samples)


# -- floors ------------------------------------------------------------------------------------------------------------


def median_ms(run: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return 1e3 * statistics.median(times[1:])


@torch.inference_mode()
def predictor_floor_ms(section: dict[str, Any], talker_size: int, batch: int, repeats: int) -> float:
    """The linear layers of a frame's passes, those of one input as one product: the fastest of torch, by rows or
    columns, and oneDNN.
    """
    config = PredictorConfig.of(section)
    size, dim, num_residual = config.hidden_size, config.head_dim, config.num_code_groups - 1
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    layer = [
        (size, (heads + 2 * kv_heads) * dim),
        (heads * dim, size),
        (size, 2 * config.intermediate_size),
        (config.intermediate_size, size),
    ]
    start = [(talker_size, size)] if talker_size != size else []

    shapes = start + layer * config.num_hidden_layers
    shapes_of_heads = [(size, config.vocab_size)] * num_residual

    def plain(shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
        return torch.randn(shape[1], shape[0]), torch.randn(batch, shape[0])

    def by_column(shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
        weight, x = plain(shape)
        return weight.t().contiguous().t(), x

    def packed(shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
        weight, x = plain(shape)
        return torch.ops.mkldnn._reorder_linear_weight(weight, batch), x

    def multiply(weight: Tensor, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")

    def run_of(
        make: Callable[[tuple[int, int]], tuple[Tensor, Tensor]], product: Callable[[Tensor, Tensor], Tensor]
    ) -> Callable[[], None]:
        layers, heads_of_groups = [make(one) for one in shapes], [make(one) for one in shapes_of_heads]

        def run() -> None:
            for group, (head, x_of_head) in enumerate(heads_of_groups):
                for weight, x in layers:
                    product(weight, torch.cat((x, x)) if group == 0 else x)  # the hidden state and the first code
                product(head, x_of_head)

        return run

    def linear(weight: Tensor, x: Tensor) -> Tensor:
        return functional.linear(x, weight)

    runs = run_of(plain, linear), run_of(by_column, linear), run_of(packed, multiply)
    return min(median_ms(run, repeats) for run in runs)


class RecordedProducts(TorchFunctionMode):
    """Keeps each convolution and linear layer with its inputs, to be repeated alone."""

    FUNCTIONS = (torch.conv1d, functional.conv1d, functional.conv_transpose1d, functional.linear)

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Callable[[], object]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in self.FUNCTIONS:
            self.calls.append(lambda: func(*args, **kwargs))
        return func(*args, **kwargs)

    def repeat(self) -> None:
        for call in self.calls:
            call()


@torch.inference_mode()
def measure_decoder(decoder: CodecDecoder, num_streams: int, num_frames: int, repeats: int) -> dict[str, float]:
    """Milliseconds for the next frames of all streams, in one batch and one stream after another."""
    together, apart = CodecStreams(decoder, num_streams), CodecStreams(decoder, num_streams)
    names = [str(index) for index in range(num_streams)]
    for name in names:
        together.open(name)
        apart.open(name)
    generator, config = torch.Generator().manual_seed(0), decoder.config
    times: dict[str, list[float]] = {"together_ms": [], "apart_ms": [], "floor_together_ms": [], "floor_apart_ms": []}
    for repeat in range(repeats + 1):  # the first starts the streams
        shape = (num_streams, config.num_quantizers, num_frames)
        codes = dict(zip(names, torch.randint(config.codebook_size, shape, generator=generator), strict=True))
        started = time.perf_counter()
        batch = together.push(codes)
        middle = time.perf_counter()
        singles = {name: apart.push({name: one})[name] for name, one in codes.items()}
        ended = time.perf_counter()
        assert all((batch[name] - singles[name]).abs().max() < TOLERANCE for name in names), (
            "a batch changes the samples"
        )
        if repeat:
            times["together_ms"].append(1e3 * (middle - started))
            times["apart_ms"].append(1e3 * (ended - middle))
    with RecordedProducts() as batched:
        together.push(codes)
    with RecordedProducts() as single:
        apart.push({names[0]: codes[names[0]]})
    for _ in range(repeats):
        times["floor_together_ms"].append(median_ms(batched.repeat, 1))
        times["floor_apart_ms"].append(num_streams * median_ms(single.repeat, 1))
    return {name: statistics.median(values) for name, values in times.items()} | {"num_frames": num_frames}


# -- the whole ---------------------------------------------------------------------------------------------------------


def fastest_threads(reference: CachedReference) -> int:
    """Threads with which the reference is fastest."""
    times = {}
    for num_threads in sorted({1, get_num_threads()}):
        set_num_threads(num_threads)
        reference.job(text_of(0), 2, speaker=SPEAKER, streaming=True)
        times[num_threads] = reference.job(text_of(0), 8, speaker=SPEAKER, streaming=True).total_s
    return min(times, key=lambda one: times[one])


def measure(talker: Talker, reference: CachedReference, options: argparse.Namespace) -> dict[str, Any]:
    num_threads = get_num_threads()
    reference_threads = fastest_threads(reference)
    decoder = load_decoder(reference)
    rows: dict[str, list[dict[str, float]]] = {"reference": [], "alone": [], "audio": [], "together": []}
    for run in range(-1, options.runs):  # the first warms up
        texts = [text_of(index) for index in range(options.concurrency)]
        set_num_threads(reference_threads)
        job = reference.job(texts[0], options.frames, REPETITION_PENALTY, speaker=SPEAKER, streaming=True)
        set_num_threads(num_threads)
        alone, frames = measure_frames(talker, texts[:1], options.frames)
        assert frames[0] == job.codes.tolist(), "the frames are not the reference's"
        audio, wave = measure_first_audio(talker, decoder, texts[0], options.frames)
        assert (wave - job.wave).abs().max() < TOLERANCE * job.wave.abs().max(), "the samples are not the reference's"
        together, frames = measure_frames(talker, texts, options.frames)
        assert frames[0] == job.codes.tolist(), "the frames among others are not the reference's"
        theirs = {"frames_s": options.frames / job.frames_s, "total_s": job.total_s}
        if run >= 0:
            for row, one in zip(rows.values(), (theirs, alone, audio, together), strict=True):
                row.append(one)
    config = reference.talker_config
    section, size = config["code_predictor_config"], config["hidden_size"]
    repeats = 5 if options.short else 30
    return {
        "threads": {"reference": reference_threads, "ours": num_threads},
        **{name: {key: statistics.median(one[key] for one in row) for key in row[0]} for name, row in rows.items()},
        "predictor_floor_ms": {
            name: predictor_floor_ms(section, size, batch, repeats)
            for name, batch in (("alone", 1), ("together", options.concurrency))
        },
        "decoder": [measure_decoder(decoder, options.concurrency, chunk, repeats) for chunk in CHUNKS],
    }


def goals(result: dict[str, Any], concurrency: int) -> list[tuple[str, float, float, bool]]:
    """(subject, goal, measured, whether it is reached)."""
    theirs, alone, together = result["reference"], result["alone"], result["together"]
    least = [
        ("frames/s at 1, times the reference's", 1.3, alone["frames_s"] / theirs["frames_s"]),
        (f"frames/s at {concurrency}, times the reference's", 8.0, together["frames_s"] / theirs["frames_s"]),
    ]
    for row in result["decoder"]:
        floor = row["floor_apart_ms"] / row["floor_together_ms"]
        what = f"decoder, {concurrency} streams by {row['num_frames']}, times one by one (or the floor's)"
        least.append((what, min(3.0, floor), row["apart_ms"] / row["together_ms"]))
    most = [("first audio, share of the reference's job", 0.15, result["audio"]["first_audio_s"] / theirs["total_s"])]
    for name, number in (("alone", 1), ("together", concurrency)):
        floor = result["predictor_floor_ms"][name]
        most.append((f"predictor at {number}, times its floor", 1.2, result[name]["predictor_ms"] / floor))
    return [(what, goal, got, got >= goal) for what, goal, got in least] + [
        (what, goal, got, got <= goal) for what, goal, got in most
    ]


def report(result: dict[str, Any], options: argparse.Namespace) -> None:
    theirs, audio = result["reference"], result["audio"]
    threads, number = result["threads"], options.concurrency
    print(f"\n{os.cpu_count()} cores, torch {torch.__version__}, {platform.machine()}; float32, greedy")
    print(
        f"{options.frames} frames a request; medians of {options.runs} runs; {threads['ours']} thread(s), "
        f"the reference {threads['reference']}; same frames\n"
    )
    print("| talker + predictor | frames/s | ratio | step, ms | predictor, ms | share | its floor, ms | ratio |")
    print("|---|---|---|---|---|---|---|---|")
    print(f"| reference, 1 | {theirs['frames_s']:.1f} | 1 | {1e3 / theirs['frames_s']:.1f} | | | | |")
    for name, size in (("alone", 1), ("together", number)):
        row, floor = result[name], result["predictor_floor_ms"][name]
        frames_s, step_ms, predictor_ms = row["frames_s"], row["step_ms"], row["predictor_ms"]
        print(
            f"| ours, {size} | {frames_s:.1f} | {frames_s / theirs['frames_s']:.2f} | {step_ms:.1f} "
            f"| {predictor_ms:.1f} | {predictor_ms / step_ms:.2f} | {floor:.1f} | {predictor_ms / floor:.2f} |"
        )
    print("\n| one job with sound | first audio, s | all, s | first audio / the reference's job |\n|---|---|---|---|")
    print(f"| reference | {theirs['total_s']:.2f} | {theirs['total_s']:.2f} | 1 |")
    share = audio["first_audio_s"] / theirs["total_s"]
    print(f"| ours | {audio['first_audio_s']:.3f} | {audio['total_s']:.2f} | {share:.3f} |")
    print(f"\n| decoder, {number} streams | at once, ms | one by one, ms | ratio | floors, ms | their ratio |")
    print("|---|---|---|---|---|---|")
    for row in result["decoder"]:
        floors = row["floor_together_ms"], row["floor_apart_ms"]
        print(
            f"| {row['num_frames']} frame(s) | {row['together_ms']:.1f} | {row['apart_ms']:.1f} "
            f"| {row['apart_ms'] / row['together_ms']:.2f} | {floors[0]:.1f}, {floors[1]:.1f} "
            f"| {floors[1] / floors[0]:.2f} |"
        )
    print("\n| goal | at least / at most | measured | |\n|---|---|---|---|")
    for what, goal, got, reached in goals(result, number):
        print(f"| {what} | {goal:.2f} | {got:.2f} | {'reached' if reached else 'MISSED'} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--frames", type=int, default=60, help="of each request")
    parser.add_argument("--variant", default="wide", help="of the checkpoint")
    parser.add_argument("--eager", action="store_true", help="do not compile the talker")
    parser.add_argument("--short", action="store_true", help="one run of a few frames, to see that it works")
    options = parser.parse_args()
    if options.short:
        options.runs, options.frames = 1, 12
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # threads are this process's, which has both sides
    with tempfile.TemporaryDirectory() as directory:
        path = build(Path(directory), variant=options.variant)
        reference = CachedReference(path)
        talker = Talker(path, reference, options.concurrency, is_eager=options.eager)
        try:
            result = measure(talker, reference, options)
        finally:
            talker.shutdown()
    report(result, options)
    print(json.dumps({"benchmark": "speech", **result, "goals": goals(result, options.concurrency)}))


if __name__ == "__main__":
    main()
