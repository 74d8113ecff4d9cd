"""Deterministic synthetic media, and prompts with them for both transformers and vLLM."""

import wave
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

SAMPLING_RATE = 16000  # Hz, as the models' feature extractors expect

Audio = tuple[NDArray[np.float32], int]  # samples in [-1, 1], sampling rate
Video = NDArray[np.uint8]  # [T, H, W, 3]


def make_image(width: int, height: int, seed: int = 0) -> Image.Image:
    """Coloured waves with a little noise: smooth enough to survive PNG and resizing, different for every seed."""
    return Image.fromarray(_make_frame(width, height, phase=0.0, seed=seed))


def make_audio(seconds: float, seed: int = 0) -> Audio:
    """A chirp with an overtone and noise, mono, at 16 kHz."""
    rng = np.random.default_rng(seed)
    time_s = np.arange(round(seconds * SAMPLING_RATE)) / SAMPLING_RATE
    pitch = rng.uniform(150.0, 400.0)
    chirp = np.sin(2 * np.pi * (pitch * time_s + 20.0 * np.sin(time_s * 3)))
    overtone = 0.3 * np.sin(2 * np.pi * 3.1 * pitch * time_s)
    noise = 0.02 * rng.standard_normal(time_s.size)
    return (0.4 * chirp + overtone + noise).astype(np.float32).clip(-1, 1), SAMPLING_RATE


def make_video(num_frames: int, width: int = 56, height: int = 56, seed: int = 0) -> Video:
    """Waves that move from frame to frame."""
    return np.stack([_make_frame(width, height, phase=0.4 * index, seed=seed) for index in range(num_frames)])


def _make_frame(width: int, height: int, phase: float, seed: int) -> NDArray[np.uint8]:
    rng = np.random.default_rng(seed)
    across, down = np.meshgrid(np.linspace(0, 1, width), np.linspace(0, 1, height))
    frequency = rng.uniform(2.0, 9.0, size=(3, 2))
    waves = [np.sin(fx * across + fy * down + phase + channel) for channel, (fx, fy) in enumerate(frequency)]
    noise = rng.uniform(-8, 8, size=(height, width, 3))
    return (np.stack(waves, axis=-1) * 110 + 128 + noise).clip(0, 255).astype(np.uint8)


def write_png(path: Path, image: Image.Image) -> Path:
    image.save(path, format="PNG")
    return path


def write_wav(path: Path, audio: Audio) -> Path:
    """16-bit PCM, mono."""
    samples, sampling_rate = audio
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(sampling_rate)
        file.writeframes((samples * 32767).round().astype("<i2").tobytes())
    return path


def write_mp4(path: Path, video: Video, fps: int, audio: Audio | None = None) -> Path:
    """MPEG-4 part 2 frames and, if given, an AAC track. Needs PyAV; both codecs lose a little."""
    import av

    with av.open(str(path), "w") as container:
        picture = container.add_stream("mpeg4", rate=fps)
        picture.height, picture.width = video.shape[1:3]
        picture.pix_fmt = "yuv420p"
        sound = container.add_stream("aac", rate=audio[1], layout="mono") if audio else None
        for frame in video:
            container.mux(picture.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(picture.encode())
        if sound is not None:
            samples, sampling_rate = audio
            for start in range(0, samples.size, 1024):  # the size of an AAC frame
                block = av.AudioFrame.from_ndarray(samples[None, start : start + 1024], format="fltp", layout="mono")
                block.sample_rate, block.pts, block.time_base = sampling_rate, start, Fraction(1, sampling_rate)
                container.mux(sound.encode(block))
            container.mux(sound.encode())
    return path


IMAGE = "<|vision_bos|><|IMAGE|><|vision_eos|>"
AUDIO = "<|audio_bos|><|AUDIO|><|audio_eos|>"
VIDEO = "<|vision_bos|><|VIDEO|><|vision_eos|>"


def format_prompt(user: str, system: str = "You are Qwen.") -> str:
    return f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n"


@dataclass(frozen=True)
class Case:
    """One prompt with its media.

    ``fps`` belongs to all videos of the case; ``None`` leaves it to the library, which then takes 2. With
    ``use_audio_in_video`` the audios come first those of the videos, in order, and have no placeholder of their own.
    """

    name: str
    prompt: str  # chat-formatted, one placeholder for each item
    images: tuple[Image.Image, ...] = ()
    audios: tuple[Audio, ...] = ()
    videos: tuple[Video, ...] = ()
    fps: float | None = None
    use_audio_in_video: bool = False
    with_video_metadata: bool = False  # give vLLM (array, metadata) instead of the array alone

    @property
    def multi_modal_data(self) -> dict[str, list[object]]:
        """The media in vLLM's form."""
        videos = [(video, self._metadata(video)) for video in self.videos] if self.with_video_metadata else self.videos
        data = {"image": self.images, "audio": self.audios, "video": videos}
        return {modality: list(items) for modality, items in data.items() if items}

    @property
    def mm_processor_kwargs(self) -> dict[str, object]:
        """Further arguments for vLLM's processor.

        vLLM interleaves a video's audio by ``second_per_grid_ts``, which it takes as 1 when absent, while the
        positions come from ``fps``: only at 2 frames per second do the two agree by themselves.
        """
        kwargs: dict[str, object] = {}
        if self.fps is not None:
            kwargs["fps"] = self.fps
        if self.use_audio_in_video:
            kwargs["use_audio_in_video"] = True
            kwargs["second_per_grid_ts"] = [2 / (self.fps or 2.0)] * len(self.videos)
        return kwargs

    @property
    def vllm_prompt(self) -> dict[str, object]:
        """The argument of ``LLM.generate``."""
        prompt: dict[str, object] = {"prompt": self.prompt}
        if self.multi_modal_data:
            prompt["multi_modal_data"] = self.multi_modal_data
        if self.mm_processor_kwargs:
            prompt["mm_processor_kwargs"] = self.mm_processor_kwargs
        return prompt

    @property
    def processor_kwargs(self) -> dict[str, object]:
        """The arguments of ``Qwen2_5OmniProcessor.__call__``."""
        kwargs: dict[str, object] = {"text": self.prompt, "return_tensors": "pt"}
        if self.images:
            kwargs["images"] = list(self.images)
        if self.audios:
            kwargs["audio"] = [samples for samples, _ in self.audios]
        if self.videos:
            kwargs["videos"] = list(self.videos)
            kwargs["use_audio_in_video"] = self.use_audio_in_video
        if self.fps is not None:
            kwargs["fps"] = self.fps
        return kwargs

    def _metadata(self, video: Video) -> dict[str, object]:
        fps = self.fps or 2.0
        return {
            "fps": fps,
            "duration": len(video) / fps,
            "total_num_frames": len(video),
            "frames_indices": list(range(len(video))),
            "video_backend": "opencv",
            "do_sample_frames": False,
        }


def make_cases() -> list[Case]:
    small, tall, wide = make_image(56, 84, seed=1), make_image(60, 140, seed=2), make_image(224, 112, seed=3)
    short, long = make_audio(0.5, seed=4), make_audio(12.0, seed=5)
    spoken, dance = make_audio(3.9, seed=6), make_video(8, 70, 56, seed=7)
    return [
        Case("text", format_prompt("Hello, who are you?")),
        Case("text2", format_prompt("Count from one to ten, slowly, and say nothing else.", system="Be brief.")),
        Case("image", format_prompt(f"{IMAGE}What is in this picture?"), images=(wide,)),
        Case("images", format_prompt(f"{IMAGE} and {IMAGE}, or {IMAGE}?"), images=(small, tall, wide)),
        Case("audio_short", format_prompt(f"{AUDIO}What was said?"), audios=(short,)),
        Case("audio_long", format_prompt(f"Listen: {AUDIO}"), audios=(long,)),
        Case("video", format_prompt(f"{VIDEO}What happens?"), videos=(make_video(4, seed=8),)),
        Case("video_fps1", format_prompt(f"{VIDEO}What happens?"), videos=(dance[:4],), fps=1.0),
        Case("video_fps2", format_prompt(f"{VIDEO}What happens?"), videos=(dance,), fps=2.0, with_video_metadata=True),
        Case("video_fps4", format_prompt(f"{VIDEO}What happens?"), videos=(dance[2:],), fps=4.0),
        Case(
            "video_audio",
            format_prompt(f"{VIDEO}Describe it."),
            audios=(spoken,),
            videos=(dance,),
            use_audio_in_video=True,
        ),
        # The same video with a shorter sound and a longer one.
        *(
            Case(
                name,
                format_prompt(f"{VIDEO}Describe it."),
                audios=(sound,),
                videos=(dance,),
                use_audio_in_video=True,
            )
            for name, sound in (("video_audio_short", short), ("video_audio_long", long))
        ),
        Case(
            "video_audio_fps1",
            format_prompt(f"Look: {VIDEO}"),
            audios=(spoken,),
            videos=(dance[:4],),
            fps=1.0,
            use_audio_in_video=True,
        ),
        Case(
            "video_audio_fps4",
            format_prompt(f"Look: {VIDEO}"),
            audios=(short,),
            videos=(dance[:4],),
            fps=4.0,
            use_audio_in_video=True,
        ),
        Case(
            "mixed",
            format_prompt(f"{AUDIO}First {IMAGE}then {VIDEO}and {IMAGE}. {AUDIO} All of it."),
            images=(small, tall),
            audios=(spoken, short),
            videos=(dance[:4],),
            fps=2.0,
        ),
    ]


CASES: list[Case] = make_cases()
