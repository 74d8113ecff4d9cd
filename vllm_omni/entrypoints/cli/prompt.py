"""Read the prompt of ``vllm-omni generate``: its text and its media."""

import argparse
import base64
import re
import sys
from pathlib import Path
from typing import Any

from PIL import Image, UnidentifiedImageError
from vllm.connections import global_http_connection
from vllm.multimodal.media.connector import MediaConnector

from vllm_omni.engine.rejection import rejection
from vllm_omni.entrypoints.cli.parser import reason
from vllm_omni.errors import ConfigError

FETCH_TIMEOUT_S = 30.0


def read_prompt(options: argparse.Namespace) -> str:
    """Read the text of ``--prompt``, ``--prompt-file`` or stdin. Raise ``ConfigError`` if there is none."""
    source = "--prompt" if options.prompt_file is None else f"--prompt-file {options.prompt_file}"
    try:
        if options.prompt_file is not None:
            text = Path(options.prompt_file).read_text(encoding="utf-8")
        elif options.prompt == "-":
            text = sys.stdin.read()
        else:
            text = options.prompt
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{source}: cannot be read: {reason(exc)}") from exc
    if not text.strip():
        raise ConfigError(f"{source}: the prompt is empty")
    return str(text)


def read_media(
    kind: str, name: str, allowed_local_media_path: str, with_sound: bool = False, *, option: str | None = None
) -> dict[str, Any]:
    """Fetch an image, sound or video and decode it once, so that a wrong one fails before any stage starts.

    Args:
        option: that named it, for errors; the kind's by default.

    Returns:
        A part of a message's content in OpenAI's API, with a ``file:`` or ``data:`` URL.

    Raises:
        ConfigError: the medium cannot be fetched or decoded.
    """
    flag = f"{option or f'--{kind}'} {name if len(name) <= 80 else name[:77] + '...'}"
    try:
        url = _url(kind, name)
    except Exception as exc:  # the HTTP client's errors have no class in common
        raise ConfigError(f"{flag}: {reason(exc)}") from exc
    connector = MediaConnector(allowed_local_media_path=allowed_local_media_path)
    fetch = {"image": connector.fetch_image, "audio": connector.fetch_audio, "video": connector.fetch_video}[kind]
    try:
        fetch(url)
    except Exception as exc:
        raise ConfigError(f"{flag}: not a readable {kind}: {reason(rejection(exc))}") from exc
    if kind == "video" and with_sound:
        try:
            connector.fetch_audio(url)
        except Exception as exc:
            raise ConfigError(f"{flag}: no readable sound (--use-audio-in-video): {reason(rejection(exc))}") from exc
    return {"type": f"{kind}_url", f"{kind}_url": {"url": url}}


def _url(kind: str, name: str) -> str:
    """Turn a file or URL into a ``file:`` or ``data:`` URL; fetches remote data."""
    if re.match(r"https?:", name, re.IGNORECASE):
        data = global_http_connection.get_bytes(name, timeout=FETCH_TIMEOUT_S)
        return f"data:{kind}/any;base64,{base64.b64encode(data).decode()}"
    if re.match(r"(data|file):", name, re.IGNORECASE):
        return name
    with Path(name).open("rb"):
        return Path(name).resolve().as_uri()


def read_image(name: str) -> Image.Image:
    """Read the image file of a diffusion pipeline. Raise ``ConfigError`` if that fails."""
    try:
        with Image.open(name) as image:
            return image.convert("RGB")
    except UnidentifiedImageError:
        raise ConfigError(f"--image {name}: not a readable image") from None
    except (OSError, ValueError, Image.DecompressionBombError) as exc:
        raise ConfigError(f"--image {name}: {reason(exc)}") from exc
