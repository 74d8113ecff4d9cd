"""``OmniLLM``: the synchronous interface of ``AsyncOmni``, used as vLLM's ``LLM``."""

from __future__ import annotations

import asyncio
import logging
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from os import PathLike
from typing import Any

from tqdm import tqdm

from vllm_omni.compat import require_vllm

require_vllm("OmniLLM")

from vllm.inputs import EngineInput  # noqa: E402  # behind the check that vLLM is there
from vllm.renderers import ChatParams  # noqa: E402

from vllm_omni.config import StageConfig  # noqa: E402
from vllm_omni.config.diffusion_params import DiffusionParams  # noqa: E402
from vllm_omni.engine.rejection import rejection  # noqa: E402
from vllm_omni.entrypoints.async_omni import AsyncOmni  # noqa: E402
from vllm_omni.entrypoints.stage_params import ParamsList  # noqa: E402
from vllm_omni.entrypoints.voice_cloning import Recording  # noqa: E402
from vllm_omni.errors import InvalidRequest, OmniError  # noqa: E402
from vllm_omni.messages.outputs import OmniRequestOutput, Progress, collect  # noqa: E402

logger = logging.getLogger(__name__)

END_TIMEOUT_S = 10.0  # how long ``close`` waits for the event loop


class OmniLLM:
    """Runs prompts through every stage of an any-to-any model.

        omni = OmniLLM("Qwen/Qwen2.5-Omni-7B")
        (output,) = omni.generate("Tell me a story.")
        print(output.outputs[0].text)
        output.save_audio("story.wav")

        omni = OmniLLM("Qwen/Qwen-Image")
        (output,) = omni.generate("A cat in the snow.", DiffusionParams(height=512, width=512, seed=1))
        output.save("cat.png")

    Use it as a context manager, or call ``close``, to end the stages' processes. Arguments and errors: ``AsyncOmni``.
    """

    def __init__(
        self,
        model: str | PathLike[str] | None = None,
        *,
        stage_configs: Sequence[StageConfig] | None = None,
        **kwargs: Any,
    ) -> None:
        self.engine = AsyncOmni(model, stage_configs=stage_configs, **kwargs)
        # One loop for the object's life: the engines' clients belong to the loop that first used them.
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="omni-llm", daemon=True)
        self._thread.start()
        # Also runs at the interpreter's exit, and when this object is garbage.
        self._finalizer = weakref.finalize(self, _close, self.engine, self._loop, self._thread)

    # -- requests -----------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Any,
        sampling_params_list: ParamsList = None,
        modalities: Sequence[str] | None = None,
        use_tqdm: bool = True,
        lora_request: Any = None,
        priority: Sequence[int] | int | None = None,
        *,
        graph: str | None = None,
        speaker: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> list[OmniRequestOutput]:
        """Answer prompts, all at once; the outputs come in the prompts' order.

        Args:
            prompts: one prompt or a list of them, as vLLM's ``LLM`` takes them; for a diffusion pipeline a text or
                ``{"prompt": str, "negative_prompt": str, "multi_modal_data": {"image": PIL.Image or a list}}``.
            sampling_params_list: parameters of the stages, for all prompts: by position (one entry a stage) or by name
                (``{"talker": {"temperature": 0}}``); or one set, for the first stage. For a diffusion pipeline
                ``DiffusionParams``, or their fields by name: one for all prompts, or a list with one for each.
            modalities: modalities of the output: "text", "audio", "codec_ids"; by default all of the model.
            use_tqdm: show a progress bar: with the number of requests that each stage has finished; for a diffusion
                pipeline, over the denoise steps.
            lora_request: one for all prompts, or one for each.
            priority: one for each prompt.
            graph: the name of one of the pipeline's graphs, or "graph.call"; its first graph by default.
            speaker: a voice of the checkpoint.
            options: further options of the pipeline, by name: ``language``, ``instructions``.

        Raises:
            InvalidRequest: a prompt or parameter is wrong; other requests of the call are aborted.
            StageFailed: a stage died.
        """
        prompts = _listed(prompts)
        params = _for_each(prompts, "parameters", sampling_params_list, self._are_for_each(sampling_params_list))
        loras = _for_each(prompts, "lora_request", lora_request, isinstance(lora_request, Sequence))
        priorities = _for_each(prompts, "priority", 0 if priority is None else priority, isinstance(priority, Sequence))
        names, has_steps = self.engine.config.stage_names, self.engine.is_diffusion and use_tqdm
        progress = _StepProgress(len(prompts)) if has_steps else _Progress(names, len(prompts), use_tqdm)
        streams = (  # each is made when the loop runs
            self.engine.generate(
                prompt,
                one_params,
                modalities=modalities,
                graph=graph,
                speaker=speaker,
                options=options,
                lora_request=lora,
                priority=one_priority,
                stage_params={names[0]: {"progress": True}} if has_steps else None,
            )
            for prompt, one_params, lora, one_priority in zip(prompts, params, loras, priorities, strict=True)
        )
        with closing(progress):
            return self._collect_all(streams, progress.update)

    def _are_for_each(self, params: ParamsList) -> bool:
        """Whether a list of parameters has one for each prompt, rather than for each stage."""
        if not isinstance(params, list | tuple):
            return False
        of_pictures = self.engine.draws and all(isinstance(one, DiffusionParams) for one in params)
        return self.engine.is_diffusion or of_pictures

    def chat(
        self,
        messages: list[Any],
        sampling_params_list: ParamsList = None,
        modalities: Sequence[str] | None = None,
        use_tqdm: bool = True,
        lora_request: Any = None,
        priority: Sequence[int] | None = None,
        *,
        graph: str | None = None,
        speaker: str | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[OmniRequestOutput]:
        """Answer one conversation or a list of them; messages as for OpenAI's API, media included.

        Other arguments and errors: ``generate``, and ``LLM.chat`` of vLLM.
        """
        if self.engine.is_diffusion:
            raise InvalidRequest("a diffusion pipeline has no chat: give `generate` a prompt")
        messages = [messages] if isinstance(messages, Mapping) else messages
        conversations = messages if messages and isinstance(messages[0], list) else [messages]
        orchestrator = self.engine.orchestrator
        wanted = orchestrator.modalities_of(graph) if modalities is None else modalities
        variables = {**orchestrator.pipeline.chat_template_kwargs(wanted), **(chat_template_kwargs or {})}
        mm_processor_kwargs = {**orchestrator.pipeline.mm_processor_kwargs(wanted), **(mm_processor_kwargs or {})}
        params = ChatParams(
            chat_template=chat_template or orchestrator.pipeline.chat_template,
            chat_template_kwargs={"add_generation_prompt": True, "tokenize": False, **variables},
            mm_processor_kwargs=dict(mm_processor_kwargs) if mm_processor_kwargs else None,
        )
        prompts: list[EngineInput] = self.run(self._render(conversations, params, mm_processor_kwargs))
        return self.generate(
            prompts,
            sampling_params_list,
            modalities,
            use_tqdm,
            lora_request,
            priority,
            graph=graph,
            speaker=speaker,
        )

    def speak(
        self,
        texts: str | Sequence[str],
        sampling_params_list: ParamsList = None,
        *,
        instructions: str | None = None,
        modalities: Sequence[str] = ("audio",),
        graph: str | None = None,
        speaker: str | None = None,
        ref_audio: Recording | None = None,
        ref_text: str | None = None,
        speaker_embedding: Sequence[float] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> list[OmniRequestOutput]:
        """Text to speech for several texts at once; the outputs come in the texts' order.

        Other arguments and errors: ``AsyncOmni.speak``.
        """
        return self._collect_all(
            self.engine.speak(
                text,
                sampling_params_list,
                instructions=instructions,
                modalities=modalities,
                graph=graph,
                speaker=speaker,
                ref_audio=ref_audio,
                ref_text=ref_text,
                speaker_embedding=speaker_embedding,
                options=options,
            )
            for text in ([texts] if isinstance(texts, str) else texts)
        )

    async def _render(
        self, conversations: list[Any], params: ChatParams, mm_processor_kwargs: Mapping[str, Any] | None
    ) -> list[EngineInput]:
        renderer = self.engine.renderer
        try:
            _, prompts = await renderer.render_chat_async(
                conversations,
                params,
                # The template writes the special tokens itself.
                renderer.default_chat_tok_params.with_kwargs(add_special_tokens=False),
                prompt_extras={"mm_processor_kwargs": dict(mm_processor_kwargs)} if mm_processor_kwargs else None,
            )
        except Exception as exc:
            raise rejection(exc) from exc
        return list(prompts)

    def _collect_all(
        self,
        streams: Iterable[AsyncGenerator[OmniRequestOutput, None]],
        on_update: Callable[[OmniRequestOutput], None] | None = None,
    ) -> list[OmniRequestOutput]:
        """Run requests at once; the merged output of each. When one fails, the others are aborted."""

        async def run() -> list[OmniRequestOutput]:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(collect(stream, on_update)) for stream in streams]
            return [task.result() for task in tasks]

        outputs: list[OmniRequestOutput] = self.run(run())
        return outputs

    # -- life ---------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Abort running requests and end the stages' processes; calling it twice does nothing."""
        self._finalizer()

    def __enter__(self) -> OmniLLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def run(self, coroutine: Any) -> Any:
        """Run a coroutine of ``engine`` on its event loop and wait for the result; Ctrl-C cancels it."""
        if not self._finalizer.alive:
            coroutine.close()
            raise OmniError("this OmniLLM is closed: make another one")
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            raise
        except BaseExceptionGroup as group:
            # One request failed, and the call with it: raise its own error rather than the group around it.
            raise group.exceptions[0] from group


def _close(engine: AsyncOmni, loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    if not thread.is_alive():  # a fork of the user's program, at its end
        return
    if threading.current_thread() is thread:  # garbage collection may run in any thread
        threading.Thread(target=_close, args=(engine, loop, thread)).start()
        return
    engine.shutdown()  # called outside the thread of the requests, it aborts them first
    try:
        asyncio.run_coroutine_threadsafe(_end_tasks(), loop).result(END_TIMEOUT_S)
    except TimeoutError:
        logger.warning("tasks of the engines' clients did not end within %g s", END_TIMEOUT_S)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(END_TIMEOUT_S)
    if not thread.is_alive():
        loop.close()


async def _end_tasks() -> None:
    """Cancel the tasks that the engines' clients left on the loop."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _listed(prompts: Any) -> list[Any]:
    """One prompt, which may be a list of token ids, or several, as a list."""
    if isinstance(prompts, Iterator):
        return list(prompts)
    is_list = isinstance(prompts, list | tuple) and not (prompts and isinstance(prompts[0], int))
    return list(prompts) if is_list else [prompts]


def _for_each(prompts: Sequence[Any], name: str, value: Any, is_each: bool) -> Sequence[Any]:
    """One value for each prompt: the given ones, or the same for all."""
    values: Sequence[Any] = value if is_each else [value] * len(prompts)
    if len(values) != len(prompts):
        raise InvalidRequest(f"{len(values)} values of {name} for {len(prompts)} prompts")
    return values


class _Progress:
    """A bar over requests, with the number of finished requests per stage."""

    def __init__(self, stages: Sequence[str], total: int, enabled: bool) -> None:
        self._counts = dict.fromkeys(stages, 0)
        self._bar = tqdm(total=total, desc="requests", disable=not enabled, dynamic_ncols=True)
        self._seen: dict[str, set[str]] = {}

    def close(self) -> None:
        self._bar.close()

    def update(self, output: OmniRequestOutput) -> None:
        """Count the stages that a request has finished."""
        seen = self._seen.setdefault(output.request_id, set())
        for stage in output.stage_durations:
            if stage in self._counts and stage not in seen:
                seen.add(stage)
                self._counts[stage] += 1
        if output.finished:
            self._bar.update()
        self._bar.set_postfix(self._counts, refresh=False)


class _StepProgress(_Progress):
    """A bar over the denoise steps of all requests, so that it moves evenly."""

    def __init__(self, total: int) -> None:
        self._num_requests = total
        self._steps: dict[str, Progress] = {}  # by id of a started request
        self._num_finished = 0
        self._bar = tqdm(total=0, desc="steps", dynamic_ncols=True)

    def update(self, output: OmniRequestOutput) -> None:
        if output.progress is not None:
            self._steps[output.request_id] = output.progress
        if output.finished:
            self._num_finished += 1
            done = self._steps.get(output.request_id, Progress(0, 0)).num_steps
            self._steps[output.request_id] = Progress(done, done)
        # Requests that have not started are assumed to have the average number of steps.
        known = [progress.num_steps for progress in self._steps.values() if progress.num_steps]
        waiting = self._num_requests - len(known)
        self._bar.total = sum(known) + (waiting * round(sum(known) / len(known)) if known else 0)
        self._bar.n = sum(progress.step for progress in self._steps.values())
        self._bar.set_postfix({"requests": f"{self._num_finished}/{self._num_requests}"}, refresh=False)
        self._bar.update(0)
