"""``vllm-omni generate MODEL --prompt TEXT``: answer one prompt with its media, without a server.

``generate_media.py`` has what differs for a diffusion pipeline.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from vllm.logger import configure_logging_from_args

from vllm_omni.config import OmniConfig
from vllm_omni.engine.orchestrator import Orchestrator
from vllm_omni.entrypoints.cli.deployment import Deployment, DeploymentParser, add_engine_flags, parse_deployment
from vllm_omni.entrypoints.cli.generate_media import add_arguments as add_diffusion_arguments
from vllm_omni.entrypoints.cli.generate_media import generate_media, reject_diffusion_options
from vllm_omni.entrypoints.cli.output import (
    DEFAULT_NAMES,
    answer_path,
    check_writable,
    print_start,
    print_times,
    save_files,
    stage_seconds,
)
from vllm_omni.entrypoints.cli.prompt import read_media, read_prompt
from vllm_omni.entrypoints.cli.quiet import only_the_answer_on_stdout
from vllm_omni.entrypoints.omni_llm import OmniLLM
from vllm_omni.errors import ConfigError, InvalidRequest
from vllm_omni.messages.outputs import OmniRequestOutput

DESCRIPTION = """Answer one prompt, media included, without a server. Text goes to stdout, speech to a file, and logs,
paths and times to stderr. Images, videos and sounds of a diffusion pipeline go to files, and their paths to stdout."""

USAGE = "vllm-omni generate MODEL --prompt TEXT [--image FILE] [--audio FILE] [--video FILE] [options]"

MAX_SEED = 2**63 - 1


def generate(args: Sequence[str]) -> None:
    """Check the arguments, start every stage, answer, stop every stage.

    Raises:
        SystemExit: a flag is wrong.
        ConfigError: a file or name in an argument is wrong, or the deployment is.
        InvalidRequest: the stages rejected the prompt.
        StageFailed: a stage did not start, or failed.
    """
    parsed = parse_generate_args(args)
    with only_the_answer_on_stdout() as stdout:
        configure_logging_from_args(parsed.args)
        _generate(parsed, stdout)


def parse_generate_args(args: Sequence[str]) -> Deployment:
    """Raise ``SystemExit`` if a flag is wrong."""
    return parse_deployment("generate", args, _add_arguments, _check, description=DESCRIPTION, usage=USAGE)


def _generate(parsed: Deployment, stdout: TextIO) -> None:
    options = parsed.args
    prompt = read_prompt(options)
    answer_path(options.output)  # rejects a suffix that no modality has
    # The files are the user's own, and this engine has no other user.
    config = parsed.load_config(allowed_local_media_path="/")
    if config.stages[0].is_diffusion:
        generate_media(config, Orchestrator(config).medium(), options, prompt, stdout)
        return
    reject_diffusion_options(options)
    audio_path = answer_path(options.output, "audio")
    modalities = _check_request(config, options)
    if "audio" in modalities:
        check_writable(audio_path)
    allowed = config.stages[0].engine_args["allowed_local_media_path"]
    media = [read_media(kind, named, allowed, options.use_audio_in_video) for kind, named in options.media]
    voice = _read_voice(options, allowed)

    content = [*media, {"type": "text", "text": prompt}]
    messages = [{"role": "user", "content": content if media else prompt}]
    if options.system is not None:
        messages.insert(0, {"role": "system", "content": options.system})
    print_start(config)
    params, speaker = _stage_params(config, options), options.speaker
    with OmniLLM(config=config) as omni:
        if omni.engine.orchestrator.pipeline.speaks_prompts:
            (output,) = omni.speak(prompt, params, modalities=modalities, speaker=speaker, **voice)
        else:
            (output,) = omni.chat(
                messages,
                params,
                modalities,
                use_tqdm=False,
                speaker=speaker,
                mm_processor_kwargs={"use_audio_in_video": True} if options.use_audio_in_video else None,
            )
    write_answer(output, config, modalities, audio_path, as_json=options.json, stdout=stdout)


def _add_arguments(parser: DeploymentParser) -> None:
    add_engine_flags(parser)
    parser.conflict_handler = "resolve"  # --seed is the sampling's here; an engine's is --stage NAME.seed=N
    group = parser.add_argument_group("Prompt", "Text and media. Media come before the text, in the order given.")
    group.add_argument("--prompt", metavar="TEXT", help='The text; "-" reads it from stdin.')
    group.add_argument("--prompt-file", metavar="FILE", help="Read the text from a file instead.")
    group.add_argument("--system", metavar="TEXT", help="The system prompt.")
    for kind in ("image", "audio", "video"):
        group.add_argument(
            f"--{kind}",
            metavar="FILE",
            dest="media",
            action=_AppendMedia,
            default=[],
            help=f"{kind.capitalize()} of the prompt: a file, or a URL (http, https, data). May be repeated.",
        )
    group.add_argument("--use-audio-in-video", action="store_true", help="Use the sound of the videos as well.")
    group = parser.add_argument_group("Answer", "Modalities and sampling of the answer, and its files.")
    group.add_argument(
        "--modalities", metavar="LIST", type=_words, help="text,audio or one of them; by default, all of the model's."
    )
    group.add_argument("--speaker", metavar="NAME", help="A voice of the checkpoint; by default, its first.")
    group.add_argument(
        "--ref-audio",
        metavar="FILE",
        help="A recording of the voice to speak in: a file, or a URL (http, https, data).",
    )
    group.add_argument("--ref-text", metavar="TEXT", help="What the recording says; without it, its timbre is cloned.")
    group.add_argument("--max-tokens", metavar="N", type=_at_least(1), help="Maximum number of text tokens.")
    group.add_argument(
        "--seed",
        metavar="N",
        dest="sampling_seed",
        type=_at_least(0, MAX_SEED),
        help="Seed of every stage's sampling (an engine's own seed is --stage NAME.seed=N).",
    )
    group.add_argument(
        "-o",
        "--output",
        metavar="PATH",
        help="A file, whose suffix chooses the format, or a directory, created if needed. By default "
        f"./{DEFAULT_NAMES['audio']}, for a diffusion pipeline ./{DEFAULT_NAMES['image']} or "
        f"./{DEFAULT_NAMES['video']}; existing files are replaced, and several outputs are numbered.",
    )
    group.add_argument("--json", action="store_true", help="Print everything about the answer as one line of JSON.")
    add_diffusion_arguments(parser)
    parser.own_groups = ["Prompt", "Answer", "Diffusion", "Omni"]


class _AppendMedia(argparse.Action):
    """Collect all media in one list: their order is their order in the prompt."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        assert option is not None, "not a positional argument"
        media = getattr(namespace, self.dest, None) or []
        setattr(namespace, self.dest, [*media, (option.removeprefix("--"), values)])


def _check(parser: DeploymentParser, options: argparse.Namespace) -> None:
    kinds = {kind for kind, _ in options.media}
    prompts = [options.prompt, options.prompt_file]
    for message, is_wrong in {
        "no prompt: give --prompt TEXT, --prompt - (stdin) or --prompt-file FILE": prompts == [None, None],
        "--prompt and --prompt-file are alternatives: give one of them": None not in prompts,
        "--use-audio-in-video: there is no --video": options.use_audio_in_video and "video" not in kinds,
        "--use-audio-in-video: not with --audio: the model would take every sound for a video's": (
            options.use_audio_in_video and "audio" in kinds
        ),
        "--ref-text: it is the transcript of --ref-audio, which is missing": (
            options.ref_text is not None and options.ref_audio is None
        ),
        "--ref-audio and --speaker are alternatives: each is a whole voice": None
        not in (options.ref_audio, options.speaker),
        "--modalities codec_ids: only with --json": "codec_ids" in (options.modalities or ()) and not options.json,
    }.items():
        if is_wrong:
            parser.error(message)


def _words(text: str) -> list[str]:
    words = [word.strip() for word in text.split(",")]
    if not all(words):
        raise argparse.ArgumentTypeError(f"{text!r}: must be names separated by commas, for example text,audio")
    return words


def _at_least(least: int, most: int | None = None) -> Any:
    def parse(text: str) -> int:
        value = int(text)
        if value < least or (most is not None and value > most):
            valid = f"at least {least}" if most is None else f"{least} to {most}"
            raise argparse.ArgumentTypeError(f"{value}: valid: {valid}")
        return value

    parse.__name__ = "int"  # argparse names the type when the text is not a number
    return parse


# -- before any stage starts -------------------------------------------------------------------------------------------


def _check_request(config: OmniConfig, options: argparse.Namespace) -> Sequence[str]:
    """Return the modalities of the answer. Raise ``ConfigError`` if the model lacks one of them, or the speaker."""
    orchestrator = Orchestrator(config)
    try:
        if options.modalities is not None:
            orchestrator.outputs_of(options.modalities)
        if orchestrator.pipeline.speaks_prompts and (options.media or options.system is not None):
            raise ConfigError("this model speaks the prompt, a text: it has no media and no --system; leave them out")
        if options.ref_audio is not None:
            if orchestrator.pipeline.voice_output is None:
                raise ConfigError("--ref-audio: this model clones no voices: leave it out")
        else:
            orchestrator.pipeline.check_options({} if options.speaker is None else {"speaker": options.speaker})
    except InvalidRequest as exc:
        raise ConfigError(str(exc)) from exc
    return options.modalities or list(orchestrator.modalities_of())


def _read_voice(options: argparse.Namespace, allowed_local_media_path: str) -> dict[str, Any]:
    """Arguments of ``OmniLLM.speak`` for a cloned voice. Raise ``ConfigError`` if its recording cannot be read."""
    if options.ref_audio is None:
        return {}
    part = read_media("audio", options.ref_audio, allowed_local_media_path, option="--ref-audio")
    return {"ref_audio": part["audio_url"]["url"], "ref_text": options.ref_text}


def _stage_params(config: OmniConfig, options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    params: dict[str, dict[str, Any]] = {name: {} for name in config.stage_names}
    if options.max_tokens is not None:
        params[config.stage_names[0]]["max_tokens"] = options.max_tokens
    if options.sampling_seed is not None:
        for stage in params.values():
            stage["seed"] = options.sampling_seed
    return params


# -- the answer --------------------------------------------------------------------------------------------------------


def write_answer(
    output: OmniRequestOutput,
    config: OmniConfig,
    modalities: Sequence[str],
    audio_path: Path,
    *,
    as_json: bool,
    stdout: TextIO,
) -> None:
    """Print the texts, and write the speech to its file.

    Raises:
        OmniError: the speech cannot be written; the text has been printed.
    """
    if not as_json:
        _print_texts(output, modalities, stdout)
    saved = None
    if "audio" in modalities and len(output.multimodal_output["audio"]) > 0:  # empty after a single token
        (saved,) = save_files(audio_path, lambda path: [output.save_audio(path)], "the speech")
    if as_json:
        print(json.dumps(_as_data(output, config, modalities, saved), ensure_ascii=False), file=stdout)
        return
    if saved is not None:
        rate = output.multimodal_output["sample_rate"]
        print(f"speech  {saved} ({_num_seconds(output):.1f} s, {rate} Hz)", file=sys.stderr)
    elif "audio" in modalities:
        print("speech  none: the text is too short for speech", file=sys.stderr)
    print_times(output)


def _print_texts(output: OmniRequestOutput, modalities: Sequence[str], stdout: TextIO) -> None:
    if "text" in modalities:
        print(output.outputs[0].text, file=stdout, flush=True)
    for name, text in _other_texts(output).items():
        print(f"{name}: {text}", file=stdout, flush=True)


def _other_texts(output: OmniRequestOutput) -> dict[str, str]:
    """The texts of further stages, by the names of their modalities."""
    return {name: value for name, value in output.multimodal_output.items() if isinstance(value, str)}


def _num_seconds(output: OmniRequestOutput) -> float:
    return len(output.multimodal_output["audio"]) / float(output.multimodal_output["sample_rate"])


def _describe_file(output: OmniRequestOutput, path: Path) -> dict[str, Any]:
    """The speech in a file."""
    return {
        "path": str(path),
        "sample_rate": output.multimodal_output["sample_rate"],
        "num_samples": len(output.multimodal_output["audio"]),
        "seconds": round(_num_seconds(output), 4),
    }


def _as_data(
    output: OmniRequestOutput, config: OmniConfig, modalities: Sequence[str], saved: Path | None
) -> dict[str, Any]:
    data: dict[str, Any] = {"model": config.model}
    if "text" in modalities:
        answer = output.outputs[0]
        data |= {"text": answer.text, "finish_reason": answer.finish_reason}
    data |= _other_texts(output)
    if "audio" in modalities:
        data["audio"] = saved and _describe_file(output, saved)
    if "codec_ids" in output.multimodal_output:
        data["codec_ids"] = output.multimodal_output["codec_ids"]
    data["num_prompt_tokens"] = len(output.prompt_token_ids or ())
    if output.outputs:  # speech of a given text has none
        data["num_tokens"] = len(output.outputs[0].token_ids)
    data["stage_seconds"] = stage_seconds(output)
    return data
