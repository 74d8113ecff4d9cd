"""Files that decode to far more than they have, or that say less than they decode to."""

import io
import struct
import zlib

import av
import numpy as np
from PIL import Image


def encode(image: Image.Image, image_format: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, image_format, **options)
    return file.getvalue()


def plain(width: int, height: int, image_format: str = "PNG") -> bytes:
    """A picture of one colour, which takes few bytes."""
    return encode(Image.new("RGB", (width, height)), image_format)


def png_that_says(width: int, height: int) -> bytes:
    """The header of a large picture, with no pixels behind it."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"\0")) + chunk(b"IEND", b"")


def icon(side: int, inside: int) -> bytes:
    """An ICO file that says that its picture has one size, and whose PNG has another."""
    png = plain(inside, inside)
    return struct.pack("<HHH", 0, 1, 1) + struct.pack("<BBBBHHII", side, side, 0, 0, 1, 32, len(png), 22) + png


def tiled_tiff(side: int, tile: int) -> bytes:
    """A TIFF whose only tile, which is decoded whole, is larger than the picture."""
    data = zlib.compress(bytes(tile * tile * 3))
    num_tags = 11
    start = 8 + 2 + num_tags * 12 + 4  # of the tile
    tags = [
        *((256, 4, 1, side), (257, 4, 1, side), (258, 3, 3, start + len(data)), (259, 3, 1, 8), (262, 3, 1, 2)),
        *((277, 3, 1, 3), (284, 3, 1, 1), (322, 4, 1, tile), (323, 4, 1, tile)),
        *((324, 4, 1, start), (325, 4, 1, len(data))),
    ]
    directory = struct.pack("<H", num_tags) + b"".join(struct.pack("<HHII", *tag) for tag in tags) + bytes(4)
    return b"II*\0" + struct.pack("<I", 8) + directory + data + struct.pack("<HHH", 8, 8, 8)


def animation(num_frames: int, image_format: str, side: int = 16) -> bytes:
    frames = [Image.new("RGB", (side, side), (97 * index % 256, 57 * index % 256, 0)) for index in range(num_frames)]
    return encode(frames[0], image_format, save_all=True, append_images=frames[1:], duration=40)


def wav(num_samples: int, sample_rate: int, *, says: int | None = None) -> bytes:
    """Silence in 8 bits, mono; the header says so many samples instead."""
    size = num_samples if says is None else says
    about = struct.pack("<IHHIIHH", 16, 1, 1, sample_rate, sample_rate, 1, 8)
    return (
        b"RIFF"
        + struct.pack("<I", min(36 + size, 2**32 - 1))
        + b"WAVEfmt "
        + about
        + b"data"
        + struct.pack("<I", size)
        + b"\x80" * num_samples
    )


def film(num_frames: int, width: int = 64, height: int = 48, container: str = "mp4", fps: int = 10) -> bytes:
    file = io.BytesIO()
    with av.open(file, "w", format=container) as made:
        stream = made.add_stream("mpeg4", rate=fps)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        frame = av.VideoFrame.from_ndarray(np.zeros((height, width, 3), np.uint8), format="rgb24")
        for index in range(num_frames):
            frame.pts = index
            made.mux(stream.encode(frame))
        made.mux(stream.encode())
    return file.getvalue()


def film_that_says(num_frames: int) -> bytes:
    """An MP4 of 5 frames whose table of times has an entry for so many."""
    data = bytearray(film(5))
    entry = data.index(b"stts") + 12
    assert struct.unpack_from(">II", data, entry - 4) == (1, 5)
    struct.pack_into(">I", data, entry, num_frames)
    return bytes(data)


PLAYLISTS = {
    "concat": b"ffconcat version 1.0\nfile other.wav\n",
    "sdp": b"v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\nm=audio 5004 RTP/AVP 0\n",
    "hls": b"#EXTM3U\n#EXT-X-TARGETDURATION:10\n#EXTINF:10,\nhttp://127.0.0.1:9/x.ts\n#EXT-X-ENDLIST\n",
}
"""Files that name others, which FFmpeg would open, or wait for."""
