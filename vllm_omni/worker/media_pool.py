"""``MediaPool``: what encoders compute of images, sounds and videos, kept in the pool of the host beyond the engine.

vLLM's encoder cache ends with its process. Here the runner looks an item up before it encodes it, wherever the encode
was scheduled (in front of the language model, beside it, or in an instance that only encodes), and what it has encoded
is stored in the background. vLLM's EC connectors decide in the scheduler that an item will be loaded: one that was
evicted or damaged by the time it is loaded fails its request. In the runner, such an item is encoded.

From: Omni-Flow sections 4.1 (Global Params Pool) and 5.1 (a hit skips the encoder; inputs that outlive KV pages).
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.distributed import GroupCoordinator, get_pp_group, get_tp_group

from vllm_omni.kv.identifiers import is_counter
from vllm_omni.kv.pool.checkpoint import checkpoint_digest, checkpoint_folder
from vllm_omni.kv.pool.directory.layout import layout_id
from vllm_omni.kv.pool.host_peers import HostPeers
from vllm_omni.kv.pool.ownership import slab_directory
from vllm_omni.kv.pool.tensors import (
    DISK,
    PEER,
    Found,
    TensorStore,
    open_tensors,
    page_bytes,
    page_key,
    tensor_digest,
)
from vllm_omni.messages.media_counts import MEDIA_POOL, MediaCounts

logger = logging.getLogger(__name__)

EMBEDS = "embeds"
FORMAT = 1  # of keys and pages
PROMPT_EMBEDS = "prompt_embeds"  # vLLM's modality of what has been encoded already
NUM_READERS = 4
LOAD_TIMEOUT_S = 2.0  # for all items of a step; a disk that takes longer is slower than an encoder
MAX_QUEUED = 64  # items; further ones are dropped, so that a slow disk holds no memory of the engine
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
_PROCESSOR_SETTINGS = ("mm_processor_kwargs", "media_io_kwargs", "mm_encoder_attn_dtype", "video_pruning_rate")

Batch = tuple[list[str], list[tuple[str, Any]], list[tuple[str, Any]]]
"""Identifiers, (modality, processed data) and (request id, position) of items, as vLLM's runner batches them."""


class Split(NamedTuple):
    """A batch of items, divided."""

    found: dict[str, Tensor]  # identifier -> what its encoder computed earlier, on the host
    rest: Batch  # to be encoded


class MediaPool:
    """Reads and stores what encoders compute, for the runner of one rank.

    The first rank reads and stores; the others of its tensor-parallel group receive what it has read, so that all
    encode the same items together.

    Args:
        tensors: None: this is not the first rank.
        group: of the ranks, if there are several.

    Attributes:
        loaded: items of the last batch that were found.
    """

    def __init__(self, tensors: TensorStore | None, group: GroupCoordinator | None = None) -> None:
        self._tensors = tensors
        self._group = group
        self.loaded: frozenset[str] = frozenset()
        self._encoding: set[str] = set()  # items of the batch that are to be stored once they have been encoded
        self._readers = ThreadPoolExecutor(NUM_READERS, thread_name_prefix="media_pool_read")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="media_pool_write")
        self._late: set[Future[Found | None]] = set()  # reads that no step waits for any longer
        self._lock = threading.Lock()
        self._num_queued = self._num_dropped = self._num_encoded = 0
        self._hits: Counter[str] = Counter()  # by medium
        self._reported = MediaCounts()

    # -- a batch ------------------------------------------------------------------------------------------------------

    def split(self, batch: Batch) -> Split:
        """Look items up; waits ``LOAD_TIMEOUT_S`` at most."""
        names, items, places = batch
        wanted = {
            name: place.get_num_embeds()
            for name, (modality, _), (_, place) in zip(names, items, places, strict=True)
            if modality != PROMPT_EMBEDS and not is_counter(name)
        }
        if not wanted:
            return Split({}, batch)
        found = self._load(wanted) if self._tensors is not None else {}
        if self._group is not None:
            found = self._group.broadcast_tensor_dict(found, src=0) or {}
        self.loaded = frozenset(found)
        self._encoding = wanted.keys() - found.keys()
        self._num_encoded += len(self._encoding)
        kept = [index for index, name in enumerate(names) if name not in found]
        rest = [names[index] for index in kept], [items[index] for index in kept], [places[index] for index in kept]
        return Split(found, rest)

    def _load(self, wanted: Mapping[str, int]) -> dict[str, Tensor]:
        """Those items that are kept whole, by their number of rows."""
        self._late = {one for one in self._late if not one.done()}
        if self._late:  # the medium hangs: the threads that read it may all be waiting
            return {}
        assert self._tensors is not None
        reads = {name: self._readers.submit(self._tensors.get, name, EMBEDS) for name in wanted}
        _, late = wait(reads.values(), LOAD_TIMEOUT_S)
        self._late = {one for one in late if not one.cancel()}
        if late:
            logger.warning("%d encoded media were not read within %g s, and are encoded", len(late), LOAD_TIMEOUT_S)
        found = {}
        for name, read in reads.items():
            one = self._result(name, read) if read not in late else None
            if one is not None and len(one.tensor) == wanted[name]:
                found[name] = one.tensor
                self._hits[one.medium] += 1
                if one.medium == DISK:
                    self._store(name, _to_host(one.tensor))
        return found

    @staticmethod
    def _result(name: str, read: Future[Found | None]) -> Found | None:
        try:
            return read.result()
        except Exception:  # only the item is concerned: it can be encoded
            logger.exception("the encoded item %s cannot be read", name)
            return None

    def keep(self, name: str, embeds: Tensor) -> None:
        """Store, in the background, an item of the batch that has been encoded.

        Args:
            embeds: [num_embeds, width], which nothing changes afterwards.
        """
        if name not in self._encoding:
            return
        self._encoding.discard(name)
        if self._tensors is not None:
            self._store(name, _to_host(embeds))

    def forget(self) -> None:
        """Drop the batch: its encode was cancelled, or has failed."""
        self._encoding.clear()

    def _store(self, name: str, tensor: Callable[[], Tensor]) -> None:
        with self._lock:
            is_full = self._num_queued >= MAX_QUEUED
            self._num_queued += not is_full
            self._num_dropped += is_full
        if not is_full:
            self._writer.submit(self._put, name, tensor)

    def _put(self, name: str, tensor: Callable[[], Tensor]) -> None:
        assert self._tensors is not None
        try:
            with torch.inference_mode():
                self._tensors.put(name, tensor(), EMBEDS)
        except Exception:  # it can be encoded again
            logger.exception("the encoded item %s cannot be stored", name)
        finally:
            with self._lock:
                self._num_queued -= 1

    def close(self) -> None:
        """Store what has been queued, and leave the media to the next process."""
        self._writer.shutdown()
        self._readers.shutdown(wait=not self._late, cancel_futures=True)
        if self._tensors is not None:
            self._tensors.close()

    # -- for metrics --------------------------------------------------------------------------------------------------

    def take_counts(self) -> MediaCounts | None:
        """What has changed since the last call; None: nothing, or this is not the first rank."""
        if self._tensors is None:
            return None
        now, before = self.counts(), self._reported
        self._reported = now
        return None if now == before else now.since(before)

    def counts(self) -> MediaCounts:
        """What has been done since the start, and what is kept now."""
        assert self._tensors is not None
        of_tensors = self._tensors.statistics()
        stores = {medium: one.store for medium, one in self._tensors.media.items()}
        counted = {medium: store.counts() for medium, store in stores.items()}
        peers = self._tensors.peers
        corrupt = {medium: one["corrupt"] for medium, one in counted.items()}
        return MediaCounts(
            hits=dict(self._hits),
            encoded=self._num_encoded,
            stored=of_tensors.num_stored,
            dropped=of_tensors.num_dropped + self._num_dropped,
            evicted={medium: one["evicted"] for medium, one in counted.items()},
            corrupt=corrupt | ({PEER: peers.num_damaged} if peers is not None else {}),
            failures={medium: one["failures"] for medium, one in counted.items()},
            kept={medium: len(one) for medium, one in self._tensors.media.items()},
        )


def _to_host(embeds: Tensor) -> Callable[[], Tensor]:
    """What copies embeddings to the host, once they have been computed; to be called in another thread."""
    if embeds.device.type == "cpu":
        return lambda: embeds
    event = torch.Event(embeds.device)
    event.record()

    def copy() -> Tensor:
        event.synchronize()
        return embeds.cpu()

    return copy


# -- opening ----------------------------------------------------------------------------------------------------------


def open_media_pool(config: VllmConfig) -> MediaPool | None:
    """Open what an engine's configuration says of its media (``engine/pool_args.py``); None: this rank encodes none.

    Raises:
        ConfigError: no room, no directory, or a checkpoint that cannot be told from others.
    """
    options = config.additional_config.get(MEDIA_POOL)
    if options is None or not get_pp_group().is_first_rank:
        return None
    group = get_tp_group() if get_tp_group().world_size > 1 else None
    if not get_tp_group().is_first_rank:
        return MediaPool(None, group)
    model = config.model_config
    size = page_bytes(model.get_inputs_embeds_size(), model.dtype)
    where = {name: options[name] for name in ("directory", "disk", "disk_bytes")}
    return MediaPool(open_tensors(media_layout(config, options), size, options["memory_bytes"], **where), group)


class MediaView:
    """Which encoded items engines of this host have in memory, for a process that has no encoder.

    Args:
        config: of an engine that keeps media.
    """

    def __init__(self, config: VllmConfig) -> None:
        options = config.additional_config[MEDIA_POOL]
        slabs = Path(options["directory"]) if options["directory"] else slab_directory()
        self._slabs = HostPeers(slabs, media_layout(config, options), None)

    def find(self, identifiers: Iterable[str]) -> set[str]:
        """Those that are there now; one may be evicted before it is read, and is then encoded by its reader."""
        self._slabs.update()
        return {one for one in identifiers if page_key(tensor_digest(one, EMBEDS), 0) in self._slabs}


def media_layout(config: VllmConfig, options: Mapping[str, Any]) -> str:
    """Id of what an engine's encoders compute: of the weights, and of all else that it depends on but the media."""
    model = config.model_config
    folder = checkpoint_folder(model.model, model.revision)
    settings = {name: getattr(model.multimodal_config, name) for name in _PROCESSOR_SETTINGS}
    fields = {
        "format": FORMAT,
        "stage": options["stage"],
        "identity": options["identity"],
        "dtype": str(model.dtype),
        "processor": _files_digest(folder),
        "settings": {name: repr(value) for name, value in settings.items()},
    }
    return layout_id(fields, checkpoint=checkpoint_digest(model.model, model.revision))


def _files_digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for name in PROCESSOR_FILES:
        data = (folder / name).read_bytes() if (folder / name).is_file() else b""
        digest.update(f"{name} {len(data)} ".encode() + data)
    return digest.hexdigest()
