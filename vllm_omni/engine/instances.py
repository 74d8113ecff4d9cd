"""``InstanceGroup``: a stage that is several engines, each of which encodes, prefills, decodes, or does several.

A request is given its tasks one by one: whoever is alive and has least to do goes on with what is left. A task is one
request to an engine; embeddings and KV caches go from one to the next over the relay, by vLLM's EC and KV connectors,
and this process sees their references alone. It holds their leases, so that what has been computed survives a target
that dies or has no room: another one pulls the same.

From: HydraInfer, sections 4.1 (request processor), 4.3 (pull-based migration) and 4.4 (instances of any mix).
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from vllm.config import ModelConfig
from vllm.multimodal.hasher import MultiModalHasher
from vllm.multimodal.inputs import MultiModalKwargsItems
from vllm.sampling_params import RequestOutputKind, SamplingParams

from vllm_omni import envs
from vllm_omni.config import StageConfig
from vllm_omni.config.epd import Instance, needless_encoder, no_encoder
from vllm_omni.engine.stage import StageEngine, StageNode, StageState, StageStatus
from vllm_omni.epd.affinity import InstanceBalance, cache_keys
from vllm_omni.epd.budget import EPDConfig
from vllm_omni.epd.image_store import ImageStore, ImageStoreStatistics, StoredImage
from vllm_omni.epd.tasks import Load, Offer, find_offers, may_resume
from vllm_omni.errors import ConfigError, RelayError, StageFailed, StageUnavailable
from vllm_omni.messages.outputs import OmniRequestOutput
from vllm_omni.messages.payload import Payload, decode
from vllm_omni.messages.slo import SLO_ARGS
from vllm_omni.model_executor.pipeline import RequestContext, StageRequest
from vllm_omni.names import suggest
from vllm_omni.relay.hub import RelayHub

logger = logging.getLogger(__name__)

EC, KV = "ec_transfer_params", "kv_transfer_params"
"""Keys of ``SamplingParams.extra_args``, and of vLLM's outputs, for what connectors tell each other."""

WORK_UNITS = 10**9  # of a token or a second: work is counted in whole ones, since of floats something would stay

MAX_DEATHS = 2  # instances that died while they had a request; the next would be told that it is the request's fault

_SET_BY_THE_MIX = ("ec_transfer_config", "kv_transfer_config", "mm_encoder_only")
_EC_CONNECTOR = {
    "ec_connector": "RelayECConnector",
    "ec_connector_module_path": "vllm_omni.kv.ec_connector",
}
_KV_CONNECTOR = {
    "kv_connector": "RelayKVConnector",
    "kv_connector_module_path": "vllm_omni.kv.kv_connector",
    "kv_load_failure_policy": "recompute",
}


def make_instances(config: StageConfig) -> list[Instance]:
    """The instances of a stage, in the order of its mix.

    Raises:
        ConfigError: an engine argument that the mix itself sets, or of an instance that there is not.
    """
    deployment = config.deployment
    where = f"stage {config.name!r}: epd.engine_args"
    for name in _SET_BY_THE_MIX:
        for of, args in (("", config.engine_args), *deployment.engine_args.items()):
            if args.get(name):
                at = f"{where}.{of}" if of else f"stage {config.name!r}: engine_args"
                raise ConfigError(f"{at}.{name}: set by the mix of instances (epd.instances), and cannot be changed")
    front = next(kind for kind in deployment.instances if kind != "E")
    kinds = [(kind, number) for kind, count in deployment.instances.items() for number in range(count)]
    known = [*deployment.instances, *(f"{kind}{number}" for kind, number in kinds)]
    for of in deployment.engine_args:
        if of not in known:
            raise ConfigError(f"{where}.{of}: there is no such instance: {suggest(of, known)}")
    return [
        Instance(config.name, kind, number, instance_args(config, kind, number), (kind, number) == (front, 0))
        for kind, number in kinds
    ]


def check_mix(config: StageConfig, model: ModelConfig) -> None:
    """Raises:
    ConfigError: the mix is not one for this model.
    """
    mix = config.deployment.instances
    where = f"stage {config.name!r}: epd"
    if model.is_encoder_decoder:
        raise ConfigError(f"{where}: an encoder-decoder model has no instances: leave them out")
    if model.supports_multimodal_inputs and not any("E" in kind for kind in mix):
        raise ConfigError(f"{where}: {no_encoder(mix)}")
    if not model.supports_multimodal_inputs and any("E" in kind and kind != "EPD" for kind in mix):
        raise ConfigError(f"{where}: {needless_encoder(mix)}")


def instance_args(config: StageConfig, kind: str, number: int) -> dict[str, Any]:
    """Engine arguments of an instance, over the stage's own."""
    deployment = config.deployment
    args: dict[str, Any] = {}
    if deployment.separates_encode:
        role = {"E": "ec_producer", "ED": "ec_both"}.get(kind, "ec_consumer")
        args["ec_transfer_config"] = {**_EC_CONNECTOR, "ec_role": role}
    if kind == "E":
        args["mm_encoder_only"] = True
        if config.engine_args.get("enable_lora") and not config.engine_args.get("enable_tower_connector_lora"):
            args["enable_lora"] = False  # adapters are the language model's, which it has not
    elif deployment.separates_decode:
        role = "kv_both" if "P" in kind and "D" in kind else "kv_producer" if "P" in kind else "kv_consumer"
        args["kv_transfer_config"] = {**_KV_CONNECTOR, "kv_role": role}
    for of in (kind, f"{kind}{number}"):
        args |= deployment.engine_args.get(of, {})
    return args


class InstanceStatistics(NamedTuple):
    """Counts since the start."""

    num_tasks: Mapping[str, int]  # of each instance
    num_encoded: int  # images that were computed, be it in vain; where embeddings travel (an EC connector counts)
    num_migrations: int  # of KV caches
    num_redone: int  # tasks given to another instance, because the first died or did not begin them
    images: ImageStoreStatistics


@dataclass
class _Journey:
    """One request on its way through the instances."""

    context: RequestContext
    request_id: str
    prompt: dict[str, Any]  # rendered
    params: SamplingParams
    is_whole: bool  # prefill and decode stay together
    load: Load
    todo: str  # what is left of "EPD"
    images: dict[str, StoredImage] = field(default_factory=dict)  # embeddings that are there, by identifier
    pages: dict[str, Any] | None = None  # what the prefill's connector told: the KV cache is there
    leases: list[Payload] = field(default_factory=list)  # of the KV cache
    num_tasks: int = 0
    num_deaths: int = 0
    avoided: set[str] = field(default_factory=set)  # instances that did not begin the next task in time
    # What the user has of a reply that is gone on with elsewhere: then it is part of the prompt.
    given: list[int] = field(default_factory=list)
    cumulative_logprob: float = 0.0

    @property
    def session(self) -> str | None:
        session: str | None = self.context.engine_kwargs.get("session_id")
        return session


class _NotBegun(Exception):
    """The instance did not begin its task in time, and another may."""


class InstanceGroup(StageNode):
    """The node of a stage with several instances.

    Args:
        engines: started by the orchestrator, like all others.
        hub: the front end's: it ends leases.
    """

    def __init__(self, config: StageConfig, engines: Sequence[StageEngine], hub: RelayHub) -> None:
        self.config = config
        self.name = config.name
        self.deployment = config.deployment
        self.engines = {engine.name: engine for engine in engines}
        self.kinds = {engine.name: engine.instance.kind for engine in engines if engine.instance is not None}
        self.front = next(engine for engine in engines if engine.instance is not None and engine.instance.is_front)
        self._hub = hub
        self._balance = InstanceBalance(self.name, self.deployment.balance)
        self._cost = EPDConfig.parse(config.budgets).cost
        relay_bytes = self.deployment.relay_bytes or envs.VLLM_OMNI_RELAY_BYTES
        kept = self.deployment.image_cache_bytes
        self.images = ImageStore(relay_bytes // 4 if kept is None else min(kept, relay_bytes // 2), self._release)
        self._work: Counter[str] = Counter()  # instance -> what it has been given and not done
        self._num_tasks: Counter[str] = Counter()
        self._num_encoded = self._num_migrations = self._num_redone = 0
        self._changed = asyncio.Event()  # an instance has come back, or has been given up
        self._loop: asyncio.AbstractEventLoop | None = None
        for engine in engines:
            engine.on_status = self._on_status

    # -- health -------------------------------------------------------------------------------------------------------

    def check_health(self) -> None:
        """Raises:
        StageUnavailable: no instance with the language model is alive; any of them can serve alone.
        """
        status = self.current_status()
        if status.state is not StageState.RUNNING:
            raise StageUnavailable(self.name, f"{status.state}: {status.reason}")

    def current_status(self) -> StageStatus:
        """Running as long as requests can be served; what an instance says of itself is its own."""
        statuses = {name: self.engines[name].current_status() for name, kind in self.kinds.items() if kind != "E"}
        num_restarts = sum(engine.status.num_restarts for engine in self.engines.values())
        states = {status.state for status in statuses.values()}
        reason = "; ".join(f"{name}: {status.reason}" for name, status in statuses.items() if status.reason)
        for state in (StageState.RUNNING, StageState.RESTARTING):
            if state in states:
                return StageStatus(state, None if state is StageState.RUNNING else reason, num_restarts)
        return StageStatus(StageState.FAILED, reason, num_restarts)

    def _is_alive(self, name: str) -> bool:
        return self.engines[name].current_status().state is StageState.RUNNING

    def _on_status(self) -> None:
        """From a supervisor's thread."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._note_change)

    def _note_change(self) -> None:
        for name in self.engines:
            if not self._is_alive(name):
                self.images.forget_source(name)
        self._changed.set()
        self._changed = asyncio.Event()

    def statistics(self) -> InstanceStatistics:
        return InstanceStatistics(
            dict(self._num_tasks),
            self._num_encoded,
            self._num_migrations,
            self._num_redone,
            self.images.statistics(),
        )

    # -- a request ----------------------------------------------------------------------------------------------------

    async def generate(
        self, request: StageRequest, context: RequestContext, wanted: frozenset[str], seq: int = 0
    ) -> AsyncGenerator[OmniRequestOutput, None]:
        """See ``StageNode.generate``.

        Raises:
            InvalidRequest: an instance refused the request.
            StageFailed: the model failed on it; or whoever decoded it died, and it cannot be gone on with.
            StageUnavailable: nobody that could go on came back within ``recovery_timeout_s``.
        """
        if self.door is not None:
            await self.door.enter(context.request_id)
        self.check_health()
        self._loop = asyncio.get_running_loop()
        prompt = await self.front.render(request.prompt)
        if has_counted_media(prompt):
            prompt = await asyncio.to_thread(name_media, prompt)  # it reads every pixel
        params = self.front.sampling_params(request, context, wanted)
        # What connectors are told is this class's business, whatever the user put there.
        params.extra_args = {key: value for key, value in (params.extra_args or {}).items() if key not in (EC, KV)}
        journey = _Journey(
            context,
            f"{context.request_id}-{self.name}" + (f"-{seq}" if seq else ""),
            prompt,
            params,
            # Rows of the prompt are published, and its log probabilities told, by whoever computes it.
            is_whole=bool(self.front.spec.publishing_fields & wanted) or params.prompt_logprobs is not None,
            load=Load.of(prompt, params),
            todo="PD",
        )
        try:
            self._find_images(journey)
            while journey.todo:
                offer = await self._choose(journey)
                async with aclosing(self._serve(journey, offer)) as outputs:
                    async for output in outputs:
                        yield output
        finally:
            self._end_leases(journey, and_images=True)

    def _find_images(self, journey: _Journey) -> None:
        """Take what has been encoded before; if anything is missing, the request begins with an encode."""
        if not journey.prompt.get("mm_hashes"):
            return
        if self.deployment.separates_encode:
            for identifier in self._identifiers(journey):
                if identifier not in journey.images and (image := self.images.take(identifier)) is not None:
                    journey.images[identifier] = image
        if any(identifier not in journey.images for identifier in self._identifiers(journey)):
            journey.todo = "E" + journey.todo

    def _identifiers(self, journey: _Journey) -> list[str]:
        """Of the images of a request, as engines name them: with the adapter, if that concerns the encoder."""
        hashes: Mapping[str, Sequence[str]] = journey.prompt.get("mm_hashes", {})
        return [self._name(journey, one) for names in hashes.values() for one in names]

    def _name(self, journey: _Journey, mm_hash: str) -> str:
        return self.front.llm.input_processor._get_mm_identifier(mm_hash, journey.context.lora_request)

    # -- who --------------------------------------------------------------------------------------------------------

    def _offers(self, journey: _Journey) -> list[Offer]:
        alive = {name: kind for name, kind in self.kinds.items() if self._is_alive(name)}
        offers = find_offers(journey.todo, alive, is_whole=journey.is_whole)
        return [offer for offer in offers if offer.name not in journey.avoided] or offers

    async def _choose(self, journey: _Journey) -> Offer:
        """Who goes on. If nobody can, wait until somebody is back.

        Raises:
            StageUnavailable: nobody is, in time or any more.
        """
        deadline = asyncio.get_running_loop().time() + self.deployment.recovery_timeout_s
        while not (offers := self._offers(journey)):
            status = self.current_status()
            if status.state is StageState.FAILED:
                raise StageUnavailable(self.name, f"{status.state}: {status.reason}")
            try:
                async with asyncio.timeout_at(deadline):
                    await self._changed.wait()
            except TimeoutError:
                waited = f"nobody to go on within {self.deployment.recovery_timeout_s:g} s (epd.recovery_timeout_s)"
                raise StageUnavailable(self.name, f"{waited}: {status.reason}") from None
        does = {offer.name: offer.does for offer in offers}
        keys = cache_keys(journey.prompt, offers[0].does)
        name = await self._balance.choose(list(does), journey.todo[0], self._work, journey.session, keys)
        return Offer(name, does[name])

    def _may_move(self, journey: _Journey, offer: Offer) -> bool:
        """Whether another instance that is alive would have no more to do with the request than this one has."""
        mine = self._work_of(journey, offer)
        others = [one.name for one in self._offers(journey) if one.name != offer.name]
        return any(self._work[name] + mine <= self._work[offer.name] for name in others)

    def _work_of(self, journey: _Journey, offer: Offer) -> int:
        return round(WORK_UNITS * journey.load.work(offer.does, self._cost))

    # -- a task -------------------------------------------------------------------------------------------------------

    async def _serve(self, journey: _Journey, offer: Offer) -> AsyncGenerator[OmniRequestOutput, None]:
        """Have an instance do its tasks; what it answers goes to the user if these are the last."""
        engine, work = self.engines[offer.name], self._work_of(journey, offer)
        self._work[offer.name] += work
        self._num_tasks[offer.name] += 1
        journey.num_tasks += 1
        try:
            if offer.does == "E":
                await self._encode(journey, offer)
            elif offer.does != journey.todo:
                await self._prefill(journey, offer)
            else:
                async with aclosing(self._reply(journey, offer)) as outputs:
                    async for output in outputs:
                        yield output
        except _NotBegun:
            logger.warning("stage %s: %s did not begin in time, another instance does", offer.name, journey.request_id)
            journey.avoided.add(offer.name)
            self._num_redone += 1
        except StageFailed:
            if self._is_alive(engine.name):
                raise  # the model failed on this request, as it would elsewhere
            self._note_death(journey, engine)
        else:
            journey.todo = journey.todo[len(offer.does) :]
            journey.avoided.clear()
        finally:
            self._work[offer.name] -= work

    def _note_death(self, journey: _Journey, engine: StageEngine) -> None:
        """Go on elsewhere, unless tokens of the reply would change or the request seems to be what kills them.

        Raises:
            StageFailed: it cannot be gone on with.
        """
        cause = engine.cause_of_death()
        journey.num_deaths += 1
        if journey.num_deaths > MAX_DEATHS:
            raise StageFailed(engine.name, f"{cause}; so did {MAX_DEATHS} others that had the request: it is given up")
        if journey.given and not (may_resume(journey.params) and "prompt_token_ids" in journey.prompt):
            raise StageFailed(
                engine.name,
                f"{cause}, after {len(journey.given)} tokens of the reply, which with these sampling parameters "
                "cannot be gone on with elsewhere",
            )
        logger.warning("stage %s: %s; %s goes on elsewhere", engine.name, cause, journey.request_id)
        self._num_redone += 1
        self.images.forget_source(engine.name)
        if journey.given:
            # What was computed of the reply is gone: another prompt, with what the user has at its end.
            self._end_leases(journey, and_images=False)
            journey.todo = "PD"
            self._find_images(journey)

    async def _encode(self, journey: _Journey, offer: Offer) -> None:
        """Have the missing images encoded; their leases are this process's then."""
        prompt = without_media(journey.prompt, lambda one: self._name(journey, one) in journey.images)
        output, published = await self._run_task(journey, offer, prompt, {EC: {"encode_only": True}})
        told = output.ec_transfer_params or {}
        self._num_encoded += int(told.get("num_encoded", 0))
        packed: Mapping[str, bytes] = told.get("images", {})
        for identifier, data in packed.items():
            if identifier not in journey.images:
                payload = decode(data)
                journey.images[identifier] = self.images.put(identifier, offer.name, bytes(data), payload)
                published[:] = [one for one in published if one != payload]
        for payload in published:  # of nobody: an image that came twice
            self._release(payload)

    async def _prefill(self, journey: _Journey, offer: Offer) -> None:
        """Have the KV cache of the prompt computed; its lease is this process's then."""
        extra = {KV: {"do_remote_decode": True}, **self._image_args(journey, offer)}
        output, published = await self._run_task(journey, offer, journey.prompt, extra)
        self._num_encoded += int((output.ec_transfer_params or {}).get("num_encoded", 0))
        journey.leases += published
        journey.pages = output.kv_transfer_params
        self._num_migrations += 1

    async def _run_task(
        self, journey: _Journey, offer: Offer, prompt: Any, extra_args: dict[str, Any]
    ) -> tuple[OmniRequestOutput, list[Payload]]:
        """One request of which no token is used: its last output, and what it has published."""
        params = SamplingParams(
            temperature=0.0,
            max_tokens=1,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args={**_slo(journey.params), **extra_args},
        )
        published: list[Payload] = []
        last: OmniRequestOutput | None = None
        try:
            async with aclosing(self._begin(journey, offer, prompt, params, published)) as outputs:
                async for output in outputs:
                    last = output
        except BaseException:
            for payload in published:
                self._release(payload)
            raise
        assert last is not None, "a request ends with an output or an error"
        return last, published

    async def _reply(self, journey: _Journey, offer: Offer) -> AsyncGenerator[OmniRequestOutput, None]:
        """Have the reply computed, with whatever of it the user has at the end of the prompt."""
        params, prompt = journey.params.clone(), journey.prompt
        extra = {**(params.extra_args or {}), **self._image_args(journey, offer)}
        if journey.pages is not None and "kv_transfer_config" in self._args(offer) and "D" in self.kinds[offer.name]:
            extra[KV] = dict(journey.pages)
        params.extra_args = extra or None
        num_given = len(journey.given)
        if num_given:
            prompt = {**prompt, "prompt_token_ids": [*prompt["prompt_token_ids"], *journey.given]}
            if params.max_tokens is not None:
                params.max_tokens -= num_given
            params.min_tokens = max(0, params.min_tokens - num_given)
        earlier_logprob = journey.cumulative_logprob
        outputs = self._begin(journey, offer, prompt, params, journey.context.payloads)
        async with aclosing(outputs):
            async for output in outputs:
                if params.n == 1:
                    self._end_leases(journey, and_images=True)  # its prompt is computed
                output.prompt_token_ids = journey.prompt.get("prompt_token_ids")
                for completion in output.outputs:
                    journey.given += completion.token_ids
                    if completion.cumulative_logprob is not None:
                        completion.cumulative_logprob += earlier_logprob
                        journey.cumulative_logprob = completion.cumulative_logprob
                if output.finished:
                    self._num_encoded += int((output.ec_transfer_params or {}).get("num_encoded", 0))
                    output.kv_transfer_params = output.ec_transfer_params = None  # between instances alone
                yield output

    async def _begin(
        self, journey: _Journey, offer: Offer, prompt: Any, params: SamplingParams, published: list[Payload]
    ) -> AsyncGenerator[OmniRequestOutput, None]:
        """Run a request on an instance; while it has given nothing, another may get it.

        Raises:
            _NotBegun: it gave nothing in time, and another has no more to do.
        """
        request_id = journey.request_id if journey.num_tasks == 1 else f"{journey.request_id}-t{journey.num_tasks}"
        engine = self.engines[offer.name]
        async with aclosing(engine.run(prompt, params, request_id, journey.context, published)) as outputs:
            first = asyncio.ensure_future(anext(outputs, None))
            try:
                while not (await asyncio.wait({first}, timeout=self.deployment.admission_timeout_s))[0]:
                    if self._may_move(journey, offer):
                        raise _NotBegun
            finally:
                if not first.done():
                    first.cancel()
                    await asyncio.gather(first, return_exceptions=True)
            output = first.result()
            while output is not None:
                yield output
                output = await anext(outputs, None)

    def _args(self, offer: Offer) -> Mapping[str, Any]:
        instance = self.engines[offer.name].instance
        assert instance is not None
        return instance.engine_args

    def _image_args(self, journey: _Journey, offer: Offer) -> dict[str, Any]:
        """Where the embeddings are; also for who decodes: it may have to compute the prompt once more."""
        if not journey.images or "ec_transfer_config" not in self._args(offer):
            return {}
        return {EC: {"images": {identifier: image.packed for identifier, image in journey.images.items()}}}

    # -- leases -------------------------------------------------------------------------------------------------------

    def _end_leases(self, journey: _Journey, *, and_images: bool) -> None:
        for payload in journey.leases:
            self._release(payload)
        journey.leases, journey.pages = [], None
        if and_images:
            for image in journey.images.values():
                self.images.give_back(image)
            journey.images = {}

    def _release(self, payload: Payload) -> None:
        try:
            self._hub.release_payload(payload, for_all=True)
        except RelayError as exc:  # its instance is gone, and with it what lay there
            logger.debug("a lease could not be ended: %s", exc)


def _slo(params: SamplingParams) -> dict[str, Any]:
    """What schedulers of all instances go by; everything else is for whoever writes the reply."""
    return {key: value for key, value in (params.extra_args or {}).items() if key == SLO_ARGS}


# -- prompts ----------------------------------------------------------------------------------------------------------


def has_counted_media(prompt: Any) -> bool:
    """Whether vLLM has named media by a counter, as it does without its caches."""
    hashes: Mapping[str, Sequence[str]] = prompt.get("mm_hashes") or {}
    return any(_is_counter(one) for names in hashes.values() for one in names)


def name_media(prompt: Any) -> Any:
    """The rendered prompt with media named by their content.

    By a counter instances would not know an image again, and two that count alike would take one for the other.
    """
    named = {
        modality: [
            MultiModalHasher.hash_kwargs("blake3", modality=modality, item=_content(item)) if _is_counter(one) else one
            for one, item in zip(names, prompt["mm_kwargs"][modality], strict=True)
        ]
        for modality, names in prompt["mm_hashes"].items()
    }
    return {**prompt, "mm_hashes": named}


def _is_counter(name: str) -> bool:
    return name.startswith("renderer") and "-mm-" in name


def _content(item: Any) -> dict[str, Any]:
    return dict(item.get_data())


def without_media(prompt: Mapping[str, Any], is_known: Callable[[str], bool]) -> Mapping[str, Any]:
    """The rendered prompt without the media of these names; their places in the text stay."""
    hashes: Mapping[str, Sequence[str]] = prompt["mm_hashes"]
    kept = {modality: [n for n, one in enumerate(names) if not is_known(one)] for modality, names in hashes.items()}
    kept = {modality: numbers for modality, numbers in kept.items() if numbers}

    def pick(lists: Mapping[str, Any]) -> dict[str, list[Any]]:
        return {modality: [lists[modality][number] for number in numbers] for modality, numbers in kept.items()}

    return {
        **prompt,
        "mm_hashes": pick(hashes),
        "mm_kwargs": MultiModalKwargsItems(pick(prompt["mm_kwargs"])),
        "mm_placeholders": pick(prompt["mm_placeholders"]),
    }
