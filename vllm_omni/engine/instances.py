"""``InstanceGroup``: the node of a stage that is several engines, each of which encodes, prefills, decodes, or does
several of these.

The ``Router`` assigns a request's tasks to instances, one after the other; this class runs them. A task is one request
to an engine. Embeddings and KV caches travel between engines over the relay, by vLLM's EC and KV connectors; this
process handles their references and holds their leases, so that a result outlives a target that terminates or has no
room: another instance pulls the same one.

From: HydraInfer, sections 4.1 (request processor), 4.3 (pull-based migration) and 4.4 (instances of any mix).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, NamedTuple

from msgspec import structs
from vllm.sampling_params import SamplingParams

from vllm_omni import envs
from vllm_omni.config import StageConfig
from vllm_omni.config.budgets import EPDConfig
from vllm_omni.config.epd import REPLIES, Balance, Tasks
from vllm_omni.engine.group import EngineGroup
from vllm_omni.engine.instance_request import InstanceRequest, generates_picture, may_resume
from vllm_omni.engine.media_names import of_tenant, without_media
from vllm_omni.engine.prompt_names import names_of_prompt
from vllm_omni.engine.stage import StageEngine
from vllm_omni.engine.transfer_params import EC, KV
from vllm_omni.epd.assignment import RequestSize
from vllm_omni.epd.cost import CostModel
from vllm_omni.epd.image_store import ImageStore, ImageStoreStatistics
from vllm_omni.epd.router import MAX_TERMINATIONS, Assignment, Recovery, RequestState, Router
from vllm_omni.errors import RelayError, StageFailed, StageUnavailable
from vllm_omni.messages.outputs import OmniRequestOutput
from vllm_omni.messages.payload import Payload, decode
from vllm_omni.messages.report import NodeReport, Reporter, ignore
from vllm_omni.model_executor.pipeline import RequestContext, StageRequest
from vllm_omni.process.status import StageState
from vllm_omni.relay.hub import RelayHub
from vllm_omni.worker.media_pool import MediaView

logger = logging.getLogger(__name__)


class InstanceStatistics(NamedTuple):
    """Counts since the start, and the work that is outstanding now."""

    num_tasks: Mapping[str, int]  # by instance: assignments
    num_encoded: int  # images encoded, including those later discarded; EC connectors count them
    num_migrations: int  # of KV caches
    num_redone: int  # assignments to another instance, because the first terminated or did not start in time
    images: ImageStoreStatistics
    work: Mapping[str, float]  # by instance: outstanding work, in seconds with a cost model, otherwise in tokens


class _NotStarted(Exception):
    """The instance did not start its tasks in time, and another one may."""


class InstanceGroup(EngineGroup):
    """The node of a stage with several instances.

    Args:
        hub: of the front end; it ends leases.
    """

    def __init__(
        self, config: StageConfig, engines: Sequence[StageEngine], hub: RelayHub, balance: Balance | None = None
    ) -> None:
        super().__init__(config, engines)
        self.deployment = replace(config.deployment, balance=balance)
        instances = {engine.name: engine.instance for engine in engines if engine.instance is not None}
        kinds = {name: one.kind for name, one in instances.items() if one.kind is not None}
        cost = CostModel.of(EPDConfig.parse(config.budgets).cost)
        self.router = Router(kinds, self.deployment, self.is_available, cost, has_pool=config.pool is not None)
        self._hub = hub
        relay_bytes = self.deployment.relay_bytes or envs.VLLM_OMNI_RELAY_BYTES
        self._pool = MediaView(self.front.vllm_config) if config.pool is not None and config.pool.keeps_media else None
        # What the pool keeps need not be kept in a relay, too.
        kept = 0 if self._pool is not None else self.deployment.image_cache_bytes
        self.images = ImageStore(relay_bytes // 4 if kept is None else min(kept, relay_bytes // 2), self._release)
        self._num_encoded = self._num_migrations = 0
        self._changed = asyncio.Event()  # an instance has recovered, or has failed for good
        self._loop: asyncio.AbstractEventLoop | None = None
        for engine in engines:
            engine.on_status = self._on_status

    # -- health -------------------------------------------------------------------------------------------------------

    def _on_status(self) -> None:
        """Called from a supervisor's thread."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._note_change)

    def _note_change(self) -> None:
        for name in self.engines:
            if not self.is_alive(name):
                self.images.forget_source(name)
        self._changed.set()
        self._changed = asyncio.Event()

    async def vacate(self, name: str) -> bool:
        """See ``EngineGroup.vacate``; images that it has encoded are encoded again for later requests."""
        self.images.forget_source(name)
        return await super().vacate(name)

    def statistics(self) -> InstanceStatistics:
        """Safe to call from any thread."""
        num_tasks, num_redone, work, _ = self.router.statistics()
        images = self.images.statistics()
        return InstanceStatistics(num_tasks, self._num_encoded, self._num_migrations, num_redone, images, work)

    # -- a request ----------------------------------------------------------------------------------------------------

    async def generate(
        self,
        request: StageRequest,
        context: RequestContext,
        wanted: frozenset[str],
        suffix: str = "",
        report: Reporter = ignore,
    ) -> AsyncGenerator[OmniRequestOutput, None]:
        """See ``StageNode.generate``.

        Raises:
            InvalidRequest: an instance rejected the request.
            StageFailed: the model failed on it; or the decoding instance terminated and the reply cannot be resumed.
            StageUnavailable: no instance that could resume the request recovered within ``recovery_timeout_s``.
        """
        self.check_health()
        self._loop = asyncio.get_running_loop()
        routed = await self._make_request(request, context, wanted, suffix, report)
        try:
            self._find_images(routed)
            while routed.state.todo:
                assignment = await self._assign(routed)
                async with aclosing(self._serve(routed, assignment)) as outputs:
                    async for output in outputs:
                        yield output
        finally:
            self._end_leases(routed, and_images=True)

    async def _make_request(
        self, request: StageRequest, context: RequestContext, wanted: frozenset[str], suffix: str, report: Reporter
    ) -> InstanceRequest:
        pieces = structs.replace(request, is_read_whole=False)  # another instance can resume the reply behind them
        prompt, params = await self.front.prepare(pieces, context, wanted)
        # The connectors' parameters are set here, whatever the user put there.
        params.extra_args = {key: value for key, value in (params.extra_args or {}).items() if key not in (EC, KV)}
        spec = self.front.spec
        is_apart = self.deployment.separates_pictures and generates_picture(params)
        state = RequestState(
            RequestSize.of(prompt, params.max_tokens, params.n),
            names_of_prompt(prompt, context.lora_request),
            todo=Tasks.P | Tasks.G if is_apart else Tasks.PD,
            # The instance that computes the prompt publishes its rows and returns its log probabilities. Latents are
            # published by the one that denoises.
            keeps_together=bool(spec.publishing_fields & wanted and not spec.publishes_pictures)
            or bool(spec.frame_fields)
            or params.prompt_logprobs is not None,
            is_resumable=may_resume(params) and "prompt_token_ids" in prompt and not spec.frame_fields,
            session=context.session_id,
            reads_pool=not (spec.publishes_rows and spec.publishing_fields & wanted),
            reads_cache=not params.skip_reading_prefix_cache,
        )
        request_id = f"{context.request_id}-{self.name}{suffix}"
        return InstanceRequest(context, request_id, prompt, params, state, report)

    def _find_images(self, request: InstanceRequest) -> None:
        """Take the embeddings that are kept from earlier requests; if some are missing, the next task is an encode.

        Those in the host's pool are read by each instance that needs them.
        """
        hashes: Mapping[str, Sequence[str]] = request.prompt.get("mm_hashes") or {}
        identifiers = [self._identifier(request, one) for names in hashes.values() for one in names]
        if self.deployment.separates_encode:
            for identifier in identifiers:
                if identifier not in request.images and (image := self.images.take(identifier)) is not None:
                    request.images[identifier] = image
        missing = {identifier for identifier in identifiers if identifier not in request.images}
        if missing and (self._pool is None or missing - self._pool.find(missing)):
            request.state.todo |= Tasks.E

    def _identifier(self, request: InstanceRequest, mm_hash: str) -> str:
        """Name of an image in the engines: with the adapter, if that concerns the encoder."""
        name = self.front.llm.input_processor._get_mm_identifier(mm_hash, request.context.lora_request)
        return name if self._pool is None else of_tenant(name, request.prompt.get("cache_salt"))

    # -- assignments --------------------------------------------------------------------------------------------------

    async def _assign(self, request: InstanceRequest) -> Assignment:
        """Assign the next tasks; while no instance can take them, wait for one to recover.

        Raises:
            StageUnavailable: none recovers, or none does in time.
        """
        while (assignment := self.assign(request.state)) is None:
            status = self.current_status()
            if status.state is StageState.FAILED:
                raise StageUnavailable(self.name, f"{status.state}: {status.reason}")
            try:
                async with asyncio.timeout(self.router.recovery_left_s(request.state)):
                    await self._changed.wait()
            except TimeoutError:
                waited = f"no instance became available within {self.router.recovery_timeout_s:g} s"
                raise StageUnavailable(self.name, f"{waited} (epd.recovery_timeout_s): {status.reason}") from None
        return assignment

    async def _serve(self, request: InstanceRequest, assignment: Assignment) -> AsyncGenerator[OmniRequestOutput, None]:
        """Run the tasks of an assignment; if they are the request's last, yield the reply."""
        state = request.state
        try:
            if assignment.tasks == Tasks.E:
                await self._encode(request, assignment)
            elif assignment.tasks != state.todo:
                await self._prefill(request, assignment)
            else:
                async with aclosing(self._reply(request, assignment)) as outputs:
                    async for output in outputs:
                        yield output
        except _NotStarted:
            said = "stage %s: did not start %s in time, which moves to another instance"
            logger.warning(said, assignment.instance, request.request_id)
            self.router.withdraw(state, assignment)
        except StageFailed:
            if self.is_alive(assignment.instance):
                raise  # the model failed on this request, as it would on another instance
            self._recover(request, self.engines[assignment.instance])
        else:
            self.router.complete(state, assignment)
        finally:
            self.router.release(assignment)

    def _recover(self, request: InstanceRequest, engine: StageEngine) -> None:
        """Prepare the request for another instance, as its engine has terminated.

        Raises:
            StageFailed: the reply could differ, or the request may be what terminates instances.
        """
        cause = engine.termination_reason()
        recovery = self.router.recover(request.state)
        if recovery is Recovery.TOO_MANY:
            also = f"so did {MAX_TERMINATIONS} others that had the request"
            raise StageFailed(engine.name, f"{cause}; {also}: the request is not tried again")
        if recovery is Recovery.NOT_RESUMABLE:
            after = f"after {len(request.given)} tokens of the reply, which with these sampling parameters"
            raise StageFailed(engine.name, f"{cause}, {after} cannot be resumed on another instance")
        logger.warning("stage %s: %s; %s moves to another instance", engine.name, cause, request.request_id)
        self.images.forget_source(engine.name)
        if recovery is Recovery.RESUME:  # with another prompt, so the KV cache has no further use
            self._end_leases(request, and_images=False)
            self._find_images(request)

    # -- tasks --------------------------------------------------------------------------------------------------------

    async def _encode(self, request: InstanceRequest, assignment: Assignment) -> None:
        """Have the missing images encoded, and take over their leases."""
        prompt = without_media(request.prompt, lambda one: self._identifier(request, one) in request.images)
        output, published = await self._run_task(request, assignment, prompt, {EC: {"encode_only": True}})
        packed: Mapping[str, bytes] = (output.ec_transfer_params or {}).get("images", {})
        try:
            for identifier, data in packed.items():
                if identifier not in request.images:
                    payload = decode(data)
                    request.images[identifier] = self.images.put(identifier, assignment.instance, bytes(data), payload)
                    published[:] = [one for one in published if one != payload]
        finally:
            for payload in published:  # duplicates, when the prompt has an image twice; or of unreadable references
                self._release(payload)

    async def _prefill(self, request: InstanceRequest, assignment: Assignment) -> None:
        """Have the KV cache of the prompt computed, and take over its lease."""
        extra_args = {KV: {"do_remote_decode": True}, **self._image_args(request, assignment)}
        output, published = await self._run_task(request, assignment, request.prompt_so_far, extra_args)
        request.leases += published
        request.pages = output.kv_transfer_params
        self._num_migrations += 1

    async def _run_task(
        self, request: InstanceRequest, assignment: Assignment, prompt: Any, extra_args: dict[str, Any]
    ) -> tuple[OmniRequestOutput, list[Payload]]:
        """Run a request whose token is discarded; return its last output and the payloads that it published."""
        published: list[Payload] = []
        last: OmniRequestOutput | None = None
        params = request.without_reply(extra_args)

        def take(report: NodeReport) -> None:  # what it has published: other instances read it
            published.extend(report.published)
            request.report(structs.replace(report, published=[]))

        try:
            async with aclosing(self._run(request, assignment, prompt, params, take)) as outputs:
                async for output in outputs:
                    last = output
        except BaseException:
            for payload in published:
                self._release(payload)
            raise
        assert last is not None, "a request ends with an output or an error"
        self._count_encoded(last)
        self.router.note_found(request.state, assignment, last.num_cached_tokens or 0)
        return last, published

    async def _reply(self, request: InstanceRequest, assignment: Assignment) -> AsyncGenerator[OmniRequestOutput, None]:
        """Have the reply computed, or the rest of it."""
        extra_args = self._image_args(request, assignment)
        can_pull = self._has_connector(assignment, "kv_transfer_config")
        if request.pages is not None and can_pull and self.router.kinds[assignment.instance] & REPLIES:
            extra_args[KV] = dict(request.pages)
        prompt, params = request.with_reply(extra_args)
        earlier_logprob = request.cumulative_logprob
        async with aclosing(self._run(request, assignment, prompt, params, request.report)) as outputs:
            async for output in outputs:
                if not request.state.num_given:
                    self.router.note_found(request.state, assignment, output.num_cached_tokens or 0)
                if params.n == 1:
                    self._end_leases(request, and_images=True)  # the prompt is computed
                if output.finished:
                    self._count_encoded(output)
                request.add_output(output, earlier_logprob)
                yield output
        self.router.note_reply(request.state, assignment, request.given[:-1])

    async def _run(
        self,
        request: InstanceRequest,
        assignment: Assignment,
        prompt: Any,
        params: SamplingParams,
        report: Reporter,
    ) -> AsyncGenerator[OmniRequestOutput, None]:
        """Run one request on the assigned engine.

        Raises:
            _NotStarted: no output came in time, and another instance has no more work.
        """
        engine = self.engines[assignment.instance]
        async with aclosing(engine.run(prompt, params, request.task_id, request.context, report)) as outputs:
            first = asyncio.ensure_future(anext(outputs, None))
            try:
                while not (await asyncio.wait({first}, timeout=self.router.admission_timeout_s))[0]:
                    if self.router.may_withdraw(request.state, assignment):
                        raise _NotStarted
            finally:  # where it has ended, takes its error: a request that is cancelled does not ask for the result
                first.cancel()
                await asyncio.gather(first, return_exceptions=True)
            output = first.result()
            while output is not None:
                yield output
                output = await anext(outputs, None)

    def _has_connector(self, assignment: Assignment, name: str) -> bool:
        instance = self.engines[assignment.instance].instance
        assert instance is not None
        return name in instance.engine_args

    def _image_args(self, request: InstanceRequest, assignment: Assignment) -> dict[str, Any]:
        """References of the embeddings; a decode gets them as well, as it may have to compute the prompt again."""
        if not request.images or not self._has_connector(assignment, "ec_transfer_config"):
            return {}
        return {EC: {"images": {identifier: image.packed for identifier, image in request.images.items()}}}

    def _count_encoded(self, output: OmniRequestOutput) -> None:
        self._num_encoded += int((output.ec_transfer_params or {}).get("num_encoded", 0))

    # -- leases -------------------------------------------------------------------------------------------------------

    def _end_leases(self, request: InstanceRequest, *, and_images: bool) -> None:
        for payload in request.leases:
            self._release(payload)
        request.leases, request.pages = [], None
        if and_images:
            for image in request.images.values():
                self.images.give_back(image)
            request.images = {}

    def _release(self, payload: Payload) -> None:
        try:
            self._hub.release_payload(payload, for_all=True)
        except RelayError as exc:  # the instance has terminated, and its relay with it
            logger.debug("a lease could not be ended: %s", exc)
