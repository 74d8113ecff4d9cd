"""``ServedPayloads``: encodes what crosses the edges of a served graph, for a link between processes. Nothing is
pickled.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, get_type_hints

import msgspec
import numpy as np
import torch
from msgspec import msgpack
from PIL import Image
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalKwargsItem, MultiModalKwargsItems, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from vllm_omni.config.diffusion_params import DiffusionParams
from vllm_omni.errors import RelayBroken
from vllm_omni.messages.payload import Payload, TensorRef
from vllm_omni.messages.report import NodeReport
from vllm_omni.messages.request import RequestContext, StageRequest
from vllm_omni.messages.stage_output import StageOutput
from vllm_omni.relay.inline import InlineRelay

# Codes of msgpack's extension types; both ends of a link have the same version of this package.
_STRUCTS: Mapping[int, type] = {
    1: StageRequest,
    2: StageOutput,
    3: RequestContext,
    4: NodeReport,
    5: Payload,
    6: SamplingParams,
    7: DiffusionParams,
    8: LoRARequest,
    9: PlaceholderRange,
}
_TENSOR, _ARRAY, _IMAGE, _MEDIA, _TUPLE = 16, 17, 18, 19, 20

_PLAIN = frozenset([int, float, str, bytes, bool, type(None)])

_IMAGE_MODES = frozenset(["1", "L", "LA", "RGB", "RGBA", "I", "F", "I;16"])
"""Modes of PIL whose pixels say everything; an image with a palette needs converting."""


class ServedPayloads:
    """What a served graph sends along its edges: the structs of ``messages/``, and what pipelines put into them.

    That is what msgpack has, tuples, tensors (as references whose bytes are inline), arrays, images, and vLLM's
    parameters and rendered prompts; nested in any way. A value comes back as the type that it was.

    Args:
        more: further structs and named tuples, by codes from 32; the same at both ends.
    """

    def __init__(self, more: Mapping[int, type] | None = None) -> None:
        structs = {**_STRUCTS, **(more or {})}
        self._codes = {kind: code for code, kind in structs.items()}
        self._open = {kind: _open_fields(kind) for kind in structs.values()}
        self._inline = InlineRelay()
        self._encoder = msgpack.Encoder(enc_hook=self._encode_other)
        self._decoder = msgpack.Decoder(ext_hook=self._decode_ext)
        self._decoders: dict[int, msgpack.Decoder[Any]] = {
            code: msgpack.Decoder(kind, ext_hook=self._decode_ext, dec_hook=_decode_other)
            for code, kind in structs.items()
        }

    def encode(self, value: Any) -> bytes:
        """See ``PayloadCodec``.

        Raises:
            TypeError: it contains a value of a type that cannot travel.
        """
        return self._encoder.encode(self._marked(value))

    def decode(self, data: bytes) -> Any:
        """See ``PayloadCodec``."""
        try:
            return self._decoder.decode(data)
        except (RelayBroken, TypeError, RuntimeError) as exc:  # of a tensor, an image, an array
            raise ValueError(f"malformed payload: {exc}") from exc

    def _marked(self, value: Any) -> Any:
        """Put everything whose type msgpack would lose into an extension type that names it."""
        kind = type(value)
        if kind in _PLAIN:
            return value
        if kind is dict:
            return {name: self._marked(one) for name, one in value.items()}
        if kind is list:
            # Token ids are many.
            return value if set(map(type, value)) <= _PLAIN else [self._marked(one) for one in value]
        if kind is tuple:
            return msgpack.Ext(_TUPLE, self._encoder.encode([self._marked(one) for one in value]))
        code = self._codes.get(kind)
        if code is None:
            return self._encode_other(value)
        if fields := self._open[kind]:
            value = msgspec.structs.replace(value, **{name: self._marked(getattr(value, name)) for name in fields})
        return msgpack.Ext(code, self._encoder.encode(value))

    def _encode_other(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return msgpack.Ext(_TENSOR, msgpack.encode(self._inline.put_nowait("", value)))
        if isinstance(value, np.ndarray) and not value.dtype.hasobject:
            return msgpack.Ext(_ARRAY, msgpack.encode((value.dtype.str, value.shape, value.tobytes())))
        if isinstance(value, np.generic):
            return value.item()
        if isinstance(value, Image.Image) and value.mode in _IMAGE_MODES:
            return msgpack.Ext(_IMAGE, msgpack.encode((value.mode, value.size, value.tobytes())))
        if isinstance(value, MultiModalKwargsItems):
            items = {name: [_encode_item(one) for one in some] for name, some in value.items()}
            return msgpack.Ext(_MEDIA, msgpack.encode(items))
        raise TypeError(f"a {type(value).__name__} cannot travel: {value!r:.100}")

    def _decode_ext(self, code: int, data: memoryview) -> Any:
        if (decoder := self._decoders.get(code)) is not None:
            return decoder.decode(data)
        if code == _TUPLE:
            return tuple(self._decoder.decode(data))
        if code == _TENSOR:
            return self._inline.get_nowait(msgpack.decode(data, type=TensorRef))
        if code == _ARRAY:
            dtype, shape, content = msgpack.decode(data)
            return np.frombuffer(bytearray(content), dtype).reshape(shape)
        if code == _IMAGE:
            mode, size, content = msgpack.decode(data)
            return Image.frombytes(mode, tuple(size), content)
        if code == _MEDIA:
            media = msgpack.decode(data)
            return MultiModalKwargsItems({name: [_decode_item(one) for one in some] for name, some in media.items()})
        raise ValueError(f"a payload with an unknown type, {code}")


def _encode_item(item: MultiModalKwargsItem | None) -> list[bytes] | None:
    """Of a rendered prompt; None: the engine has it."""
    return None if item is None else [bytes(one) for one in MsgpackEncoder(size_threshold=0).encode(item)]


def _decode_item(encoded: list[bytes] | None) -> MultiModalKwargsItem | None:
    if encoded is None:
        return None
    buffers = [bytearray(one) for one in encoded]  # the tensors' own
    item: MultiModalKwargsItem = MsgpackDecoder(MultiModalKwargsItem).decode(buffers)
    return item


def _decode_other(kind: type, value: Any) -> Any:
    """A field of a type that msgspec does not know has been decoded as an extension type before."""
    if not isinstance(value, kind):
        raise ValueError(f"a {type(value).__name__} where a {kind.__name__} is needed")
    return value


def _open_fields(kind: type) -> Sequence[str]:
    """The fields of a struct of ours into which pipelines put anything."""
    if dataclasses.is_dataclass(kind) or not kind.__module__.startswith("vllm_omni.messages."):
        return ()
    return [name for name, hint in get_type_hints(kind).items() if "typing.Any" in str(hint)]
