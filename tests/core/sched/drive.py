"""Drives a real scheduler through a recorded stream as the engine core does, in place of a model a rule for tokens.

The runner's side keeps what the real one keeps of images, and fails where the real one does: when a step needs an
embedding that is not there.
"""

from __future__ import annotations

import copy
import dataclasses
import random
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from vllm.config import ECTransferConfig, LoRAConfig, SpeculativeConfig, VllmConfig
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, MultiModalKwargsItem, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import DraftTokenIds, ECConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from tests import text_model
from tests.core.sched.random_requests import BLOCK_SIZE, MEAN_STEP_S, Engine, PlannedRequest, Stream
from vllm_omni.core.sched.epd import EPDScheduler
from vllm_omni.core.sched.stream import StreamScheduler
from vllm_omni.kv.ec_connector import EMBEDS, RelayECMetadata, RelayECReport
from vllm_omni.messages.epd_step import EPDModelRunnerOutput, EPDSchedulerOutput
from vllm_omni.messages.images import EncodeReport, Put, PutRejection
from vllm_omni.messages.payload import Payload, encode
from vllm_omni.relay import InlineRelay

S = TypeVar("S", bound=Scheduler)


def make_config(engine: Engine, additional_config: dict[str, Any] | None = None) -> VllmConfig:
    """Of a text model: the parts for images are put into the scheduler, so that no processor is needed."""
    config = text_model.make_config(num_layers=1, num_heads=1, head_size=8, vocab_size=16, block_size=BLOCK_SIZE)
    config.scheduler_config.max_num_seqs = engine.max_num_seqs
    config.scheduler_config.max_num_batched_tokens = engine.max_num_batched_tokens
    config.scheduler_config.policy = engine.policy
    config.scheduler_config.disable_chunked_mm_input = not engine.chunked_images
    config.scheduler_config.async_scheduling = False
    config.cache_config.num_gpu_blocks = engine.num_blocks
    config.cache_config.enable_prefix_caching = engine.prefix_caching
    if engine.max_adapters:
        config.lora_config = LoRAConfig(max_loras=engine.max_adapters)
    if engine.num_spec_tokens:
        config.speculative_config = SpeculativeConfig(
            method="ngram",
            num_speculative_tokens=engine.num_spec_tokens,
            prompt_lookup_max=2,
            target_model_config=config.model_config,
            target_parallel_config=config.parallel_config,
        )
    if engine.ec_role is not None:
        config.scheduler_config.scheduler_cls = "vllm_omni.core.sched.epd.EPDScheduler"
        config.ec_transfer_config = ECTransferConfig(
            ec_connector="RelayECConnector",
            ec_connector_module_path="vllm_omni.kv.ec_connector",
            ec_role=engine.ec_role,  # type: ignore[arg-type]
        )
    config.additional_config = additional_config or {}
    return config


def make_scheduler(scheduler_cls: type[S], engine: Engine, additional_config: dict[str, Any] | None = None) -> S:
    init_none_hash(sha256)
    config = make_config(engine, additional_config)
    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=8, dtype=torch.float32)
    scheduler = scheduler_cls(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(engine.num_blocks, [], [KVCacheGroupSpec(["layer"], spec)]),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK_SIZE,
    )
    # What a multimodal model's configuration would have given.
    scheduler.encoder_cache_manager = EncoderCacheManager(engine.encoder_cache_size)
    scheduler.max_num_encoder_input_tokens = engine.encoder_budget
    if isinstance(scheduler, EPDScheduler) and scheduler.budgets is not None:
        scheduler.turn_on(engine.encoder_cache_size)
    return scheduler


PAYLOAD = encode(Payload({EMBEDS: InlineRelay().put_nowait("", torch.zeros(1, 8))}))


def make_request(planned: PlannedRequest, engine: Engine) -> Request:
    extra_args: dict[str, Any] = {"slo": dict(planned.slo)} if planned.slo else {}
    if planned.encode_only:
        extra_args["ec_transfer_params"] = {"encode_only": True}
    elif planned.elsewhere:
        extra_args["ec_transfer_params"] = {"images": dict.fromkeys(planned.elsewhere, PAYLOAD)}
    return Request(
        planned.request_id,
        list(planned.prompt),
        SamplingParams(
            max_tokens=planned.max_tokens,
            ignore_eos=True,
            extra_args=extra_args or None,
        ),
        None,
        arrival_time=planned.arrival_time,
        priority=planned.priority,
        lora_request=LoRARequest(f"adapter-{planned.adapter}", planned.adapter, "nowhere") if planned.adapter else None,
        mm_features=[
            MultiModalFeatureSpec(
                MultiModalKwargsItem(), "image", image.name, PlaceholderRange(image.offset, image.length)
            )
            for image in planned.images
        ],
        block_hasher=get_request_block_hasher(BLOCK_SIZE, sha256) if engine.prefix_caching else None,
        resumable=planned.resumable,
    )


@dataclasses.dataclass
class Step:
    """One engine step: what was decided, and what became of it."""

    output: dict[str, Any]  # SchedulerOutput, field by field
    tokens: dict[str, list[int]]  # by request
    finished: dict[str, str]  # by request: why
    ec_params: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)  # by request that has ended

    @property
    def num_scheduled_tokens(self) -> dict[str, int]:
        return self.output["num_scheduled_tokens"]


def token(request_id: str, position: int) -> int:
    number = int(request_id) if request_id.isdecimal() else 0  # of a profile
    return (number * 31 + position * 7) % 9


def answer(*inputs: PlannedRequest) -> list[int]:
    """All tokens of a request that is not aborted, or of a session's inputs, whatever else its engine does."""
    tokens: list[int] = []
    length = 0
    for planned in inputs:
        length += len(planned.prompt)
        tokens += [token(planned.request_id, length + number) for number in range(planned.max_tokens)]
        length += planned.max_tokens - 1  # vLLM forgets a session's last token when the next input comes
    return tokens


def answers(stream: Stream) -> dict[str, list[int]]:
    """Of all requests that are not aborted."""
    aborted = {request_id for ids in stream.aborts.values() for request_id in ids}
    inputs: dict[str, list[PlannedRequest]] = {}
    for _, requests in sorted(stream.arrivals.items()):
        for request in requests:
            if request.request_id not in inputs or request.resumable:  # the one that ends a session is none
                inputs.setdefault(request.request_id, []).append(request)
    return {request_id: answer(*its) for request_id, its in inputs.items() if request_id not in aborted}


class SynthesisedRunner:
    """The runner's half of an engine without its model. A token is a function of its request and position."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.images: dict[str, list[MultiModalFeatureSpec]] = {}
        self.encoder_cache: set[str] = set()
        self.num_encodes = 0

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        for request_id in output.finished_req_ids:
            self.images.pop(request_id, None)
        self.encoder_cache -= set(output.free_encoder_mm_hashes)
        starts = dict(
            zip(output.scheduled_cached_reqs.req_ids, output.scheduled_cached_reqs.num_computed_tokens, strict=True)
        )
        for new in output.scheduled_new_reqs:
            self.images[new.req_id] = list(new.mm_features)
            starts[new.req_id] = new.num_computed_tokens
        for request_id, inputs in output.scheduled_encoder_inputs.items():
            self._encode(self.images[request_id][one].identifier for one in inputs)
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            self._check_images(request_id, starts[request_id], starts[request_id] + num_tokens)
        ids = list(output.num_scheduled_tokens)
        sampled: list[list[int]] = []
        for one in ids:
            if self.scheduler.requests[one].is_prefill_chunk:
                sampled.append([])
                continue
            drafts = output.scheduled_spec_decode_tokens.get(one, [])
            sampled.append(self._tokens(one, starts[one] + output.num_scheduled_tokens[one] - len(drafts), drafts))
        return ModelRunnerOutput(
            req_ids=ids, req_id_to_index={one: index for index, one in enumerate(ids)}, sampled_token_ids=sampled
        )

    def _encode(self, names: Iterator[str]) -> None:
        for name in names:
            self.encoder_cache.add(name)
            self.num_encodes += 1

    def _check_images(self, request_id: str, start: int, end: int) -> None:
        for feature in self.images[request_id]:
            position = feature.mm_position
            if position.offset < end and start < position.offset + position.length:
                assert feature.identifier in self.encoder_cache, (
                    f"Encoder cache miss for {feature.identifier} of request {request_id}, tokens {start} to {end}"
                )

    @staticmethod
    def _tokens(request_id: str, length: int, drafts: list[int]) -> list[int]:
        """The drafts up to the first that is wrong, and one more."""
        right = [token(request_id, length + number) for number in range(len(drafts) + 1)]
        num_accepted = next((n for n, draft in enumerate(drafts) if draft != right[n]), len(drafts))
        return right[: num_accepted + 1]


class LayeredRunner(SynthesisedRunner):
    """Encodes batches of images beside the language model, layer by layer, as ``EPDSchedulerOutput`` says."""

    NUM_LAYERS = 5

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__(scheduler)
        self.under_way: list[str] = []
        self.sizes: dict[str, int] = {}  # embeddings of an image, by identifier
        self.num_layers_left = 0
        self.num_embeds = 0
        self.layer_s: Callable[[int], float] = lambda num_embeds: 0.0  # what a layer is reported to have taken
        self.language_s = 0.0  # what the forward of this step took

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        assert not output.scheduled_encoder_inputs, "an encode stands in front of a forward"
        assert not set(output.free_encoder_mm_hashes) & set(self.under_way)
        report = None
        # What this step encodes is there for the next one.
        runner_output = super().execute(output)
        if isinstance(output, EPDSchedulerOutput):
            self.encoder_cache -= set(output.free_behind_forward)
            report = self._go_on(output)
        in_cache = sum(self.sizes.get(name, 0) for name in self.encoder_cache)
        assert in_cache <= self.scheduler.encoder_cache_manager.cache_size, "more than there is room for"
        return EPDModelRunnerOutput(**vars(runner_output), encode_report=report)

    def _go_on(self, output: EPDSchedulerOutput) -> EncodeReport | None:
        if output.encodes:
            assert not self.under_way
            self.under_way = [item.feature.identifier for item in output.encodes]
            assert not set(self.under_way) & self.encoder_cache, "an image that is there is encoded again"
            self.num_layers_left = self.NUM_LAYERS
            self.sizes |= {item.feature.identifier: item.num_embeds for item in output.encodes}
            self.num_embeds = sum(item.num_embeds for item in output.encodes)
        if not self.under_way:
            assert output.num_encode_layers is None, "layers are granted, and there is no batch"
            return None
        num_layers = self.num_layers_left
        layer_s = self.layer_s(self.num_embeds)
        if output.max_seconds is not None and layer_s:
            num_layers = min(num_layers, max(1, int((output.max_seconds - self.language_s) / layer_s)))
        elif output.num_encode_layers is not None:
            assert output.num_encode_layers >= 1
            num_layers = min(num_layers, output.num_encode_layers)
        self.num_layers_left -= num_layers
        encoded = []
        if not self.num_layers_left:
            encoded, self.under_way = self.under_way, []
            self._encode(iter(encoded))
        return EncodeReport(encoded, num_layers, self.NUM_LAYERS, num_layers * layer_s)


class RelayedRunner(LayeredRunner):
    """Pulls and puts images, too: through a relay that has little room, is slow, and loses some.

    Args:
        num_slots: puts that the relay has room for.
        keep_steps: how long each stays there.
        max_steps: that a pull takes.
        loss: share of the pulls that fail.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        seed: int = 0,
        *,
        num_slots: int = 100,
        keep_steps: int = 0,
        max_steps: int = 0,
        loss: float = 0.0,
    ) -> None:
        super().__init__(scheduler)
        self.rng = random.Random(seed)
        self.num_slots, self.keep_steps, self.max_steps, self.loss = num_slots, keep_steps, max_steps, loss
        self.slots: list[int] = []  # steps left
        self.wanted: dict[str, list[Put]] = {}
        self.pulling: dict[str, int] = {}  # steps left
        self.num_pulls = 0
        self.report = RelayECReport()

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        metadata = output.ec_connector_metadata
        assert isinstance(metadata, RelayECMetadata)
        assert not set(output.free_encoder_mm_hashes) & set(self.pulling)
        self.slots = [left - 1 for left in self.slots if left]
        self.report = RelayECReport()
        for put in metadata.puts:
            if put.identifier in self.encoder_cache:
                self._put(put)
            else:
                self.wanted.setdefault(put.identifier, []).append(put)
        for pull in metadata.pulls:
            assert pull.identifier not in self.pulling
            self.pulling[pull.identifier] = self.rng.randint(0, self.max_steps)
        runner_output = super().execute(output)
        for name, left in list(self.pulling.items()):
            self.pulling[name] = left - 1
            if not left:
                del self.pulling[name]
                self._end_pull(name)
        runner_output.ec_connector_output = ECConnectorOutput(ec_connector_worker_meta=self.report or None)
        return runner_output

    def _end_pull(self, name: str) -> None:
        assert name not in self.encoder_cache, "an image that is there is pulled"
        if self.rng.random() < self.loss:
            self.report.lost[name] = "the dice"
            self.wanted.pop(name, None)
            return
        self.num_pulls += 1
        self.report.pulled[name] += 1
        self.encoder_cache.add(name)
        self._put_wanted(name)

    def _encode(self, names: Iterator[str]) -> None:
        for name in names:
            super()._encode(iter([name]))
            self._put_wanted(name)

    def _put_wanted(self, name: str) -> None:
        for put in self.wanted.pop(name, ()):
            self._put(put)

    def _put(self, put: Put) -> None:
        if len(self.slots) < self.num_slots:
            self.slots.append(self.keep_steps)
            self.report.put[put] = PAYLOAD
        else:
            self.report.rejected[put] = PutRejection("full", is_final=not self.num_slots)


def fields_of(output: SchedulerOutput) -> dict[str, Any]:
    """By name, and copied: a scheduler may go on with the containers that it sent."""
    values = {field.name: getattr(output, field.name) for field in dataclasses.fields(SchedulerOutput)}
    # Copies, so that tests compare what was sent and not the live requests.
    values["scheduled_new_reqs"] = [copy.copy(new) for new in output.scheduled_new_reqs]
    return {name: copy.copy(value) for name, value in values.items()}


def drive(
    scheduler: Scheduler,
    stream: Stream,
    *,
    runner: SynthesisedRunner | None = None,
    max_steps: int = 3000,
    on_step: Callable[[SchedulerOutput], None] = lambda output: None,
) -> list[Step]:
    """Until nothing is left.

    Raises:
        AssertionError: requests are left after so many steps.
    """
    runner = runner or SynthesisedRunner(scheduler)
    steps: list[Step] = []
    known: set[str] = set()
    number = 0
    while number < stream.num_steps or scheduler.has_requests():
        assert number < max_steps, f"seed {stream.seed}: after {number} steps these are left: {_left(scheduler)}"
        for planned in stream.arrivals.get(number, ()):
            if planned.request_id in known and planned.request_id not in scheduler.requests:
                continue  # of a session that was aborted
            known.add(planned.request_id)
            scheduler.add_request(make_request(planned, stream.engine))
        number += 1
        output = scheduler.schedule()
        on_step(output)
        step = Step(fields_of(output), {}, {})
        steps.append(step)
        runner_output = runner.execute(output)
        # Aborts come while a batch is computed.
        if aborted := stream.aborts.get(number - 1):
            scheduler.finish_requests(aborted, RequestStatus.FINISHED_ABORTED)
        _update(scheduler, output, runner_output, step)
        if stream.engine.num_spec_tokens:
            scheduler.update_draft_token_ids(_make_drafts(scheduler, stream, number))
    return steps


def let_time_pass(scheduler: StreamScheduler, seed: int) -> Callable[[SchedulerOutput], None]:
    """Gives the scheduler a clock, on which steps take random times; returns what ``drive`` is to call with each."""
    rng = random.Random(f"times of {seed}")
    now = 0.0

    def pass_time(output: SchedulerOutput) -> None:
        nonlocal now
        now += rng.expovariate(1 / MEAN_STEP_S)

    scheduler.clock = lambda: now  # type: ignore[method-assign]
    return pass_time


def _make_drafts(scheduler: Scheduler, stream: Stream, number: int) -> DraftTokenIds:
    """What a proposer gives after a step: for each request that decodes some tokens, most of them right."""
    decoding = sorted((one for one in scheduler.running if not one.is_prefill_chunk), key=lambda one: one.request_id)
    drafts = []
    for request in decoding:
        rng = random.Random(f"{stream.seed} {number} {request.request_id}")
        right = [
            token(request.request_id, request.num_tokens + ahead)
            for ahead in range(rng.randint(0, stream.engine.num_spec_tokens))
        ]
        drafts.append([one if rng.random() < 0.7 else 9 for one in right])
    return DraftTokenIds([request.request_id for request in decoding], drafts)


def _update(scheduler: Scheduler, output: SchedulerOutput, runner_output: ModelRunnerOutput, step: Step) -> None:
    for outputs in scheduler.update_from_output(output, runner_output).values():
        for one in outputs.outputs:
            step.tokens.setdefault(one.request_id, []).extend(one.new_token_ids)
            if one.finish_reason is not None:
                step.finished[one.request_id] = str(one.finish_reason)
                step.ec_params[one.request_id] = one.ec_transfer_params or {}


def _left(scheduler: Scheduler) -> dict[str, str]:
    return {
        name: f"{request.status.name} {request.num_computed_tokens}/{request.num_tokens}"
        for name, request in scheduler.requests.items()
    }


def tokens_of(steps: list[Step]) -> dict[str, list[int]]:
    """What each request was answered in the end."""
    tokens: dict[str, list[int]] = {}
    for step in steps:
        for request_id, new in step.tokens.items():
            tokens.setdefault(request_id, []).extend(new)
    return tokens


def assert_same_steps(stock: list[Step], ours: list[Step]) -> None:
    """Field by field, so that the first difference is named."""
    for number, (left, right) in enumerate(zip(stock, ours, strict=False)):
        for name, value in left.output.items():
            assert value == right.output[name], f"step {number}: {name}: {value} != {right.output[name]}"
        assert left.tokens == right.tokens, f"step {number}: tokens"
        assert left.finished == right.finished, f"step {number}: finished"
    assert len(stock) == len(ours)


def assert_is_idle(scheduler: Scheduler) -> None:
    """Nothing of any request is left."""
    assert not scheduler.requests and not scheduler.running and not len(scheduler.waiting)
    manager: EncoderCacheManager = scheduler.encoder_cache_manager
    assert not manager.request_cached_ids
    assert not any(manager.cached.values())
    assert manager.num_freeable_slots == manager.cache_size
    blocks = scheduler.kv_cache_manager.block_pool
    assert blocks.get_num_free_blocks() == blocks.num_gpu_blocks - 1  # vLLM keeps one as padding
