"""``RelayECConnector``: the embeddings of images, from one engine's image cache into another's, over the relay.

An *encode task* is a request with ``extra_args["ec_transfer_params"] = {"encode_only": True}``. It ends with
``RequestOutput.ec_transfer_params = {"images": {identifier: payload}, "num_encoded": n}``. A consumer's request carries
``{"images": {identifier: payload}}``, and ends with ``{"num_encoded": n}``: how many images it had to encode itself.

``EPDScheduler`` accounts for a pull as for an encode: the image takes its room, is in flight, and then is ready or
lost. vLLM's own way (``has_cache_item``: room and load in one step) is not used, so that no step waits for another
process; a lost image is encoded here.

The front end owns the leases: a put ends when it is released for all. An engine that pulls releases its own read.

From: HydraInfer, section 4.3 (pull-based migration of the image cache).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from vllm.distributed.ec_transfer.ec_connector.base import (
    ECConnectorBase,
    ECConnectorMetadata,
    ECConnectorRole,
    ECConnectorWorkerMetadata,
)
from vllm.v1.request import Request, RequestStatus

from vllm_omni.errors import ConfigError, InvalidRequest, PoolExhausted, RelayBroken
from vllm_omni.kv.identifiers import is_counter
from vllm_omni.messages.images import Pull, Put, PutRejection
from vllm_omni.messages.payload import Payload, decode, encode
from vllm_omni.relay.hub import UNTIL_RELEASED_FOR_ALL, process_hub

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput

logger = logging.getLogger(__name__)

EMBEDS = "embeds"
"""Path of the tensor in an image's payload: [num_embeds, width], the model's dtype."""

NUM_PULL_THREADS = 4
PULL_TIMEOUT_S = 10.0
PUT_TIMEOUT_S = 30.0
MAX_ANNOUNCED = 256
"""Encode tasks that a late abort can still take back; the leases of older ones expire."""


# -- a request's parameters -------------------------------------------------------------------------------------------


class ECParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A request's ``ec_transfer_params``, checked."""

    encode_only: bool = False
    images: dict[str, bytes] = {}  # identifier -> payload, of images whose embeddings lie in another engine


def parse_params(request: Request) -> ECParams:
    """Check a request's ``ec_transfer_params``. Raises ``InvalidRequest``."""
    try:
        params = msgspec.convert(request.ec_transfer_params or {}, ECParams, builtin_types=(bytes,))
    except msgspec.ValidationError as exc:
        known = ", ".join(ECParams.__struct_fields__)
        raise InvalidRequest(f"ec_transfer_params: {exc}; known are {known}") from exc
    identifiers = {feature.identifier for feature in request.mm_features}
    if params.encode_only and not identifiers:
        raise InvalidRequest("ec_transfer_params: encode_only, and the request has nothing to encode")
    for name in sorted(identifiers if params.encode_only else params.images):
        if is_counter(name):
            raise InvalidRequest(
                f"ec_transfer_params: {name!r} is a counter and names another image in another engine; "
                "give multi_modal_uuids made from the content"
            )
    if unknown := sorted(set(params.images) - identifiers):
        raise InvalidRequest(
            f"ec_transfer_params.images: the request has no {unknown[0]!r}; it has {sorted(identifiers)}"
        )
    return params


# -- between scheduler and workers ------------------------------------------------------------------------------------


@dataclass
class RelayECMetadata(ECConnectorMetadata):
    """Puts and pulls that start with a step."""

    puts: list[Put] = field(default_factory=list)  # at once, or when their encode has ended
    pulls: list[Pull] = field(default_factory=list)


@dataclass
class RelayECReport(ECConnectorWorkerMetadata):
    """Puts and pulls that ended with a step."""

    put: dict[Put, bytes] = field(default_factory=dict)
    rejected: dict[Put, PutRejection] = field(default_factory=dict)
    pulled: Counter[str] = field(default_factory=Counter)  # identifier -> on how many ranks
    lost: dict[str, str] = field(default_factory=dict)  # identifier -> why

    def __bool__(self) -> bool:
        return bool(self.put or self.rejected or self.pulled or self.lost)

    def aggregate(self, other: ECConnectorWorkerMetadata) -> RelayECReport:
        assert isinstance(other, RelayECReport)
        return RelayECReport(
            self.put | other.put, self.rejected | other.rejected, self.pulled + other.pulled, self.lost | other.lost
        )


# -- the connector ----------------------------------------------------------------------------------------------------


class RelayECConnector(ECConnectorBase):
    """The scheduler's and the worker's half, depending on the role.

    Options (``ec_connector_extra_config``): ``pull_timeout_s``, ``put_timeout_s``.
    """

    def __init__(self, vllm_config: VllmConfig, role: ECConnectorRole) -> None:
        super().__init__(vllm_config, role)
        assert vllm_config.ec_transfer_config is not None
        option = vllm_config.ec_transfer_config.get_from_extra_config
        self.pull_timeout_s = float(option("pull_timeout_s", PULL_TIMEOUT_S))
        self.put_timeout_s = float(option("put_timeout_s", PUT_TIMEOUT_S))
        if vllm_config.scheduler_config.scheduler_cls is None:
            raise ConfigError("RelayECConnector: needs scheduler_cls = 'vllm_omni.core.sched.epd.EPDScheduler'")
        self.hub = process_hub(vllm_config.additional_config)
        # The scheduler's half.
        self._next = RelayECMetadata()
        self._images: dict[str, dict[str, bytes]] = {}  # of encode tasks: identifier -> payload
        self._announced: dict[str, tuple[bytes, ...]] = {}  # payloads of tasks that have ended, the oldest first
        self._num_encoded: Counter[str] = Counter()  # by request
        # The worker's half.
        parallel = vllm_config.parallel_config
        self._puts = parallel.rank % parallel.tensor_parallel_size == 0
        self._wanted: dict[str, list[str]] = {}  # identifier -> requests for which it is put when it is encoded
        self._encoder_cache: dict[str, torch.Tensor] = {}  # the runner's
        self._pulling: dict[str, Future[torch.Tensor]] = {}
        self._report = RelayECReport()
        self._threads: ThreadPoolExecutor | None = None
        if role is ECConnectorRole.WORKER and self.is_producer and self._puts:
            self.hub.prepare()  # a relay that cannot work fails at start

    def shutdown(self) -> None:
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    # -- scheduler ----------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether puts or pulls start with the next metadata."""
        return bool(self._next.puts or self._next.pulls)

    def start_put(self, request_id: str, identifier: str) -> None:
        """Put an image that is in the encoder cache, or will be when its encode has ended."""
        self._next.puts.append(Put(request_id, identifier))

    def start_pull(self, identifier: str, payload: bytes, num_embeds: int) -> None:
        """Pull an image into the encoder cache."""
        self._next.pulls.append(Pull(identifier, payload, num_embeds))

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> RelayECMetadata:
        metadata, self._next = self._next, RelayECMetadata()
        return metadata

    def add_image(self, request_id: str, identifier: str, payload: bytes) -> None:
        """Take note that an image of an encode task is in the relay."""
        images = self._images.setdefault(request_id, {})
        if identifier in images:
            self.release(payload)
        else:
            images[identifier] = payload

    def count_encode(self, request_id: str) -> None:
        self._num_encoded[request_id] += 1

    def release(self, payload: bytes) -> None:
        """Release a payload that no engine will read."""
        self.hub.release_payload(decode(payload), for_all=True)

    def request_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        images = self._images.pop(request.request_id, {})
        result: dict[str, Any] = {"num_encoded": self._num_encoded.pop(request.request_id, 0)}
        if images and request.status is RequestStatus.FINISHED_STOPPED:
            result["images"] = images
            self._announced[request.request_id] = tuple(images.values())
            while len(self._announced) > MAX_ANNOUNCED:
                del self._announced[next(iter(self._announced))]
        else:
            for payload in images.values():
                self.release(payload)
        return False, result

    def abort_announced(self, request_ids: Iterable[str]) -> None:
        """Release the payloads of encode tasks that were aborted after they had ended: no consumer may know of them."""
        for request_id in request_ids:
            for payload in self._announced.pop(request_id, ()):
                self.release(payload)

    def has_cache_item(self, identifier: str) -> bool:
        return False  # see the module: nothing is loaded in the step that needs it

    def update_state_after_alloc(self, request: Request, index: int) -> None:
        pass

    # -- worker -------------------------------------------------------------------------------------------------------

    def start_save_caches(self, *, encoder_cache: dict[str, torch.Tensor], **kwargs: Any) -> None:
        """Put the images that are in the encoder cache; the others follow when they are encoded."""
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, RelayECMetadata)
        for request_id, identifier in metadata.puts:
            if identifier in encoder_cache:
                self._put(request_id, identifier, encoder_cache[identifier])
            else:
                self._wanted.setdefault(identifier, []).append(request_id)

    def save_caches(self, encoder_cache: dict[str, torch.Tensor], mm_hash: str, **kwargs: Any) -> None:
        for request_id in self._wanted.pop(mm_hash, ()):
            self._put(request_id, mm_hash, encoder_cache[mm_hash])

    def forget_wanted(self) -> None:
        """Drop puts of images whose encode was cancelled."""
        self._wanted.clear()

    def _put(self, request_id: str, identifier: str, embeds: torch.Tensor) -> None:
        if not self._puts:  # all ranks have the same embeddings; the first one puts them
            return
        put = Put(request_id, identifier)
        try:
            ref = self.hub.put_nowait(request_id, embeds.contiguous(), num_readers=UNTIL_RELEASED_FOR_ALL)
        except PoolExhausted as exc:
            self._report.rejected[put] = PutRejection(str(exc), exc.is_final)
            return
        self._report.put[put] = encode(Payload({EMBEDS: ref}))

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **kwargs: Any) -> None:
        """Start the step's pulls; ``get_finished``, at the step's end, stores what has arrived."""
        self._encoder_cache = encoder_cache
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, RelayECMetadata)
        device = torch.device(self._vllm_config.device_config.device_type)
        if device.type != "cpu":  # this thread's device: in pulling threads the first is current
            device = torch.device(device.type, torch.accelerator.current_device_index())
        for pull in metadata.pulls:
            if pull.identifier not in self._pulling:
                if self._threads is None:
                    self._threads = ThreadPoolExecutor(NUM_PULL_THREADS, thread_name_prefix="ec-pull")
                self._pulling[pull.identifier] = self._threads.submit(self._fetch, pull, device)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        for identifier, pulling in list(self._pulling.items()):
            if not pulling.done():
                continue
            del self._pulling[identifier]
            try:
                self._encoder_cache[identifier] = pulling.result()
            except Exception as exc:  # any failure: the image can be encoded here
                logger.warning("the embeddings of image %s are lost: %s", identifier, exc)
                self._report.lost[identifier] = str(exc)
                self._wanted.pop(identifier, None)
            else:
                self._report.pulled[identifier] += 1
                self.save_caches(self._encoder_cache, identifier)
        return None, None

    def build_connector_worker_meta(self) -> RelayECReport | None:
        report, self._report = self._report, RelayECReport()
        return report or None

    def _fetch(self, pull: Pull, device: torch.device) -> torch.Tensor:
        """Pull an image and copy it: the pulled tensor may be a view of the producer's memory."""
        payload = decode(pull.payload)
        ref = payload.tensors.get(EMBEDS)
        if ref is None:
            raise RelayBroken(f"a payload without {EMBEDS!r}")
        model_config = self._vllm_config.model_config
        embeds = self.hub.get_blocking(ref, self.pull_timeout_s)
        try:
            # Some towers return several layers' embeddings side by side.
            width = model_config.get_inputs_embeds_size()
            if embeds.dim() != 2 or embeds.shape[0] != pull.num_embeds or embeds.shape[1] % width:
                raise RelayBroken(
                    f"embeddings {list(embeds.shape)}; needed are [{pull.num_embeds}, a multiple of {width}]"
                )
            copy = embeds.to(device=device, dtype=model_config.dtype, copy=True)
            if device.type != "cpu":
                torch.accelerator.current_stream(device).synchronize()
            return copy
        finally:
            self.hub.release(ref)
