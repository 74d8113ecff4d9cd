"""Pipelines of random graphs (``tests/flow/random_graphs.py``) whose nodes run on engines.

A node makes a request of its engine for each step of its behaviour, of the inputs that the step has read, and puts the
engine's answer behind every payload of the step: so a request that is lost, doubled, mixed up or made of other inputs
shows in all payloads behind it. Outputs of the writer that coders alone read also have its rows, which the coders pull
and answer with. ``Answers`` makes the same answers without an engine, for the reference interpreter.
"""

from __future__ import annotations

import hashlib
import random
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaForCausalLM as ReferenceLlama
from transformers import PreTrainedConfig
from vllm.config import VllmConfig
from vllm.inputs import tokens_input
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.outputs import CompletionOutput

from tests.flow.random_graphs import Behaviour, Case, NodeBroke, RandomNode
from tests.flow.reference import Inputs, NodeFails, Yield, interpret
from tests.flow.reference import Path as ActivationPath
from tests.reference import llama
from vllm_omni.flow import (
    ENTRY,
    Activation,
    Chunk,
    Emission,
    Field,
    Graph,
    GraphParser,
    Role,
    StaticPlan,
    interface,
)
from vllm_omni.flow.graph.dsl import Interface
from vllm_omni.messages.payload import Payload, encode
from vllm_omni.messages.stage_output import StageOutput
from vllm_omni.model_executor.generation_model import GenerationConfig, GenerationModel
from vllm_omni.model_executor.pipeline import FunctionSpec, Outputs, Pipeline, StageRequest, StageSpec

ROLES = ("writer", "coder", "tool")  # a language model, a generation stage, a function
ROLE_WEIGHTS = (5, 4, 2)
NUM_TOKENS = 2  # of each reply of the writer
WRITER, CODER = "RandomWriter", "RandomCoder"
ROW_SIZE = 1024  # more than what travels in a message
MARK = "~"  # between what a behaviour has made and the engine's answer
CLOSE = 1e-3  # two tokens whose logits differ by less may change places in a batch
SAID = "said"

VALUE, STREAM = Field("value"), Field("value", streamed=True)


class TooClose(Exception):
    """Which token a greedy reply has depends on rounding."""


def digest(request: str) -> int:
    return int.from_bytes(hashlib.blake2b(request.encode(), digest_size=3).digest())


def with_rows(request: str, rows: Sequence[int]) -> str:
    return f"{request} {list(rows)}" if rows else request


def prompt_of(request: str) -> list[int]:
    """A few ids, made of all of the request."""
    made = hashlib.blake2b(request.encode(), digest_size=8).digest()
    return [1, *(4 + byte % (llama.VOCAB_SIZE - 4) for byte in made)]


class Coder(GenerationModel):
    """Answers with the digest of its request, and of the rows that it pulls."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        return set()

    def read(self, args: Mapping[str, Any]) -> str:
        if args["fails"]:
            raise NodeBroke(args["request"])
        rows = [tree["rows"] for tree in args.get("payloads", ())]
        assert all((row == row[:, :1]).all() for row in rows)
        return with_rows(args["request"], [int(row[0]) for some in rows for row in some])

    def generate(self, batch: Sequence[str]) -> list[dict[str, torch.Tensor]]:
        return [{"audio": torch.tensor([digest(request)], dtype=torch.float32)} for request in batch]


class Writer(LlamaForCausalLM):
    """Publishes the ids that it has read: exact numbers, however requests are batched."""

    def finished_rows(self, input_ids: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        return input_ids.float()[:, None].repeat(1, ROW_SIZE)


def coder_config(config: PreTrainedConfig) -> PreTrainedConfig:
    return GenerationConfig(architectures=[CODER], dtype="float32")


class Answers:
    """What the engines answer, by hand: transformers' model in the writer's place."""

    def __init__(self, checkpoint: Path) -> None:
        self._model = ReferenceLlama.from_pretrained(checkpoint, dtype=torch.float32).eval()
        self.of_writer = cache(self._reply)

    def of(self, role: str, request: str) -> str:
        return self.of_writer(request) if role == "writer" else str(digest(request))

    @torch.inference_mode()
    def _reply(self, request: str) -> str:
        ids = prompt_of(request)
        for _ in range(NUM_TOKENS):
            best, second = self._model(torch.tensor([ids])).logits[0, -1].topk(2)[0]
            if best - second < CLOSE:
                raise TooClose
            ids.append(int(self._model(torch.tensor([ids])).logits[0, -1].argmax()))
        return ".".join(map(str, ids[-NUM_TOKENS:]))


# -- one node ---------------------------------------------------------------------------------------------------------


@dataclass
class Step:
    """One request of an activation."""

    request: str
    yields: list[Yield]
    read: list[Any]  # payloads whose rows go with it
    fails: bool = False

    def answered(self, answer: str) -> list[Yield]:
        return [[(name, f"{payload}{MARK}{answer}") for name, payload in one] for one in self.yields]


@dataclass
class Steps:
    """A behaviour's requests, one for each piece that it forwards and one at the end."""

    behaviour: Behaviour

    def on_chunk(self, head: Inputs, number: int, payload: Any, num_yields: int) -> Step:
        yields = self.behaviour.on_chunk(_plain(head), number, _stripped(payload), num_yields)
        return Step(repr((self.behaviour.name, sorted(head.items()), number, payload)), yields, [payload])

    def at_end(self, inputs: Inputs, num_yields: int) -> Step:
        yields, fails = self.behaviour.at_end(_plain(inputs), num_yields)
        head = self.behaviour.split(inputs)[1]
        read = [payload for _, some in sorted(head.items()) for payload in some]
        return Step(repr((self.behaviour.name, sorted(inputs.items()))), yields, read, fails)


@dataclass
class EngineBehaviour(Steps):
    """For the reference interpreter: the yields of a node with the answers of its engine."""

    role: str
    answers: Answers
    publishing: Collection[str]  # its fields whose payloads have rows
    rows: dict[str, list[int]]  # payload -> its rows, of all nodes of the case

    @property
    def name(self) -> str:
        return self.behaviour.name

    def __call__(self, path: ActivationPath, group: int, inputs: Inputs) -> list[Yield]:
        main, head = self.behaviour.split(inputs)
        yields: list[Yield] = []
        for number, payload in enumerate(main):
            yields += self._answered(self.on_chunk(head, number, payload, len(yields)))
        end = self.at_end(inputs, len(yields))
        yields += self._answered(end)
        if end.fails:
            raise NodeFails(yields)
        return yields

    def _answered(self, step: Step) -> list[Yield]:
        rows = [row for payload in step.read for row in self.rows.get(payload, ())] if self.role == "coder" else []
        answer = self.answers.of(self.role, with_rows(step.request, rows))
        yields = step.answered(answer)
        if self.role == "writer":
            ids = [*prompt_of(step.request), *map(int, answer.split("."))]
            published = [payload for one in yields for name, payload in one if name in self.publishing]
            self.rows.update(dict.fromkeys(published, ids[:-1]))
        return yields


def _stripped(payload: Any) -> Any:
    return payload.partition(MARK)[0] if isinstance(payload, str) else payload


def _plain(inputs: Inputs) -> Inputs:
    return {name: [_stripped(payload) for payload in some] for name, some in inputs.items()}


def said(payload: Any) -> Any:
    """What a node reads: a payload of the entry, or what another node has said."""
    return payload.multimodal_output[SAID] if isinstance(payload, StageOutput) else payload


def saying(text: str, payloads: Sequence[Payload] = ()) -> StageOutput:
    completion = CompletionOutput(0, text, [], None, None)
    return StageOutput("", [completion], payloads=list(payloads), multimodal_output={SAID: text})


class EngineNode(RandomNode):
    """A node of a case: makes the requests of its activations, and sends the answers to its fields.

    Attributes:
        failures: why activations lost their engine.
        num_pulls: requests that read rows of other nodes.
        held: the requests of those that run.
    """

    def __init__(self, behaviour: Behaviour, rng: random.Random, role: str, fields: Mapping[str, str]) -> None:
        super().__init__(behaviour, rng)
        self.role = role
        self.failures: list[str] = []
        self.num_pulls = 0
        self.held: dict[tuple[str, int], deque[Step]] = {}
        self._steps = Steps(behaviour)
        self.fields = fields

    async def combine(self, activation: Activation) -> AsyncIterator[Chunk]:
        """``StageSpec.combine``: the requests of an activation."""
        seq, held = 0, self.held[activation.call_id, activation.activation_id]
        async for step, rows, is_last in self._read_steps(activation):
            held.append(step)
            yield Chunk(self._request(step, rows), seq, last=is_last)
            seq += 1

    async def route(self, outputs: Outputs, activation: Activation) -> AsyncIterator[list[Emission]]:
        """``StageSpec.route``: the answers' payloads, in the fields of the behaviour."""
        key = activation.call_id, activation.activation_id
        answer: list[int] = []
        payloads: list[Payload] = []
        held = self.held[key] = deque()
        self._enter()
        try:
            async for output in outputs:
                answer += self._answer(output)
                payloads += output.payloads
                if output.finished:
                    step = held.popleft()
                    for emissions in self._emit(step, ".".join(map(str, answer)), payloads):
                        await self._pause()
                        yield emissions
                    answer, payloads = [], []
                    if step.fails:
                        raise NodeBroke(self._behaviour.name)
        except Exception as exc:
            if "NodeBroke" not in repr(exc):
                self.failures.append(f"{type(exc).__name__}: {exc}")
            raise
        finally:
            self.num_running -= 1
            del self.held[key]

    async def run(self, activation: Activation) -> AsyncIterator[list[Emission]]:
        """``FunctionSpec.forward``."""
        self._enter()
        try:
            async for step, _, _ in self._read_steps(activation):
                for emissions in self._emit(step, str(digest(step.request))):
                    await self._pause()
                    yield [Emission(one.field, StageOutput.of(one.payload)) for one in emissions]
                if step.fails:
                    raise NodeBroke(self._behaviour.name)
        finally:
            self.num_running -= 1

    def _enter(self) -> None:
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)

    async def _read_steps(
        self, activation: Activation
    ) -> AsyncIterator[tuple[Step, Mapping[Any, Sequence[Payload]], bool]]:
        """The steps of an activation, what the payloads that it has read publish, and whether it is the last."""
        rows: dict[Any, list[Payload]] = {}
        streams = {name: _said(chunks, rows) for name, chunks in activation.inputs.items()}
        main = self._behaviour.main_field(streams)
        others = sorted(name for name in streams if name != main)
        inputs: Inputs = {name: [] for name in sorted(streams)}
        await self._read(streams, others, inputs)
        num_yields = 0
        if main is not None:
            head = {name: inputs[name] for name in others}
            async for chunk in streams[main]:
                inputs[main].append(chunk.payload)
                step = self._steps.on_chunk(head, len(inputs[main]) - 1, chunk.payload, num_yields)
                num_yields += len(step.yields)
                yield step, rows, False
        self.seen.append(inputs)
        self.paths.append(activation.path)
        yield self._steps.at_end(inputs, num_yields), rows, True

    def _request(self, step: Step, rows: Mapping[Any, Sequence[Payload]]) -> StageRequest:
        if self.role == "writer":
            return StageRequest({"prompt_token_ids": prompt_of(step.request)})
        fails = step.fails and self._rng.random() < 0.5  # the model fails on it, or what reads its answer does
        payloads = [encode(one) for read in step.read for one in rows.get(read, ()) if one.tensors]
        self.num_pulls += bool(payloads)
        args = {"request": step.request, "fails": fails} | ({"payloads": payloads} if payloads else {})
        return StageRequest(tokens_input([0]), args)

    def _answer(self, output: StageOutput) -> list[int]:
        if self.role == "writer":
            return list(output.outputs[0].token_ids)
        return [int(one) for one in output.multimodal_output["audio"]] if "audio" in output.multimodal_output else []

    def _emit(self, step: Step, answer: str, payloads: Sequence[Payload] = ()) -> Iterator[list[Emission]]:
        for one in step.answered(answer):
            made = {self.fields[name]: payload for name, payload in one}
            yield [
                Emission(field, saying(payload, payloads if field.startswith("r") else ()))
                for field, payload in made.items()
            ]


async def _said(chunks: AsyncIterator[Chunk], rows: dict[Any, list[Payload]]) -> AsyncIterator[Chunk]:
    async for chunk in chunks:
        text = said(chunk.payload)
        if isinstance(chunk.payload, StageOutput) and chunk.payload.payloads:
            rows[text] = chunk.payload.payloads
        yield Chunk(text, chunk.seq, chunk.last)


# -- one graph --------------------------------------------------------------------------------------------------------


@dataclass
class ServedCase:
    """A case whose nodes are those of one pipeline: its graph is ``g<number>``, and so begin its interfaces' names."""

    number: int
    case: Case  # with the answers of the engines
    nodes: dict[str, EngineNode]  # role of the case -> node
    interfaces: dict[str, Interface] = field(default_factory=dict)  # likewise

    @property
    def name(self) -> str:
        return f"g{self.number}"

    def interface_of(self, role: str) -> str:
        return f"{self.name}_{role}"

    def output_of(self, output: str) -> str:
        """The name of the pipeline's modality for an output of the case."""
        return f"{self.name}_{output}"


def serve_case(number: int, case: Case, answers: Answers, rng: random.Random) -> ServedCase:
    """Bind the nodes of a case to roles.

    Raises:
        GraphError: the case breaks a rule.
        TooClose: a reply is not sure.
    """
    plan = GraphParser(case.graph).parse()
    roles = {call.role: rng.choices(ROLES, ROLE_WEIGHTS)[0] for call in case.graph.declarations.calls}
    fields = {name: _fields(name, plan, roles) for name in plan.nodes}
    rows: dict[str, list[int]] = {}
    behaviours = {
        name: EngineBehaviour(
            behaviour,
            roles[behaviour.name],
            answers,
            {field for field, served in fields[name].items() if served.startswith("r")},
            rows,
        )
        for name, behaviour in case.behaviours.items()
    }
    expected = interpret(case.graph, behaviours, case.inputs, case.outputs)
    made = ServedCase(number, replace(case, behaviours=behaviours, expected=expected), {})  # type: ignore[arg-type]
    for call in case.graph.declarations.calls:
        if call.role in made.nodes:
            continue
        declared = call.interface
        behaviour = case.behaviours[call.node]
        made.nodes[call.role] = EngineNode(behaviour, rng, roles[call.role], fields[call.node])
        made.interfaces[call.role] = interface(
            declared.inputs_or,
            {fields[call.node][name]: spec for name, spec in declared.outputs.items()},
            inputs=declared.inputs,
            activate_by_count=dict(declared.activate_by_count),
            scheduling=declared.scheduling,
            first_wins=declared.first_wins,
            max_iterations=declared.max_iterations,
        )
    return made


def _fields(node: str, plan: StaticPlan, roles: Mapping[str, str]) -> dict[str, str]:
    """The outputs of a node, with what a stage has to know of each: r with rows, f in frames, s streamed, w whole."""
    names = {}
    for name, spec in plan.nodes[node].outputs.items():
        readers = [edge for edge in plan.edges if (edge.source, edge.source_field) == (node, name)]
        is_out = any((edge.source, edge.source_field) == (node, name) for edge in plan.outputs.values())
        to_coders = all(edge.target != ENTRY and roles[plan.nodes[edge.target].role] == "coder" for edge in readers)
        has_rows = roles[plan.nodes[node].role] == "writer" and bool(readers) and to_coders and not is_out
        kind = "f" if any(edge.per_frame for edge in readers) else "s" if spec.streamed else "w"
        names[name] = ("r" if has_rows else "") + kind + name
    return names


def make_graph(served: ServedCase, classes: Mapping[str, type[Role]]) -> Graph:
    """The graph of a case over the roles of the pipeline."""
    graph, declared = Graph(served.name), served.case.graph.declarations
    placeholders = {name: graph.placeholder(name) for name in declared.placeholders}
    roles = {role: graph.role(classes[role], role) for role in sorted({node.role for node in served.nodes.values()})}
    calls: dict[str, Any] = {}

    def source(ref: Any) -> Any:
        if ref.node not in calls:
            return placeholders[ref.field]
        return getattr(calls[ref.node], served.nodes[ref.node.split(".")[0]].fields[ref.field])

    for call in declared.calls:
        add = getattr(roles[served.nodes[call.role].role], served.interface_of(call.role))
        calls[call.node] = add(**{name: source(ref) for name, ref in call.sources.items()})
    graph.output(**{served.output_of(name): source(ref) for name, ref in declared.outputs.items()})
    return graph


# -- one pipeline -----------------------------------------------------------------------------------------------------


class Pass:
    """Frames are what the route has made."""

    def push(self, output: StageOutput) -> Iterator[StageOutput]:
        yield output

    def finish(self) -> Iterator[StageOutput]:
        yield from ()


def plain_interface() -> Interface:
    return interface([["prompt"]], {"text": STREAM})


async def pass_on(activation: Activation) -> AsyncIterator[Emission]:
    async for chunk in activation.inputs["text"]:
        if chunk.payload is not None:
            yield Emission("text", chunk.payload)


def make_pipeline(cases: Sequence[ServedCase]) -> type[Pipeline]:
    """The class of a pipeline that serves the graphs of all cases."""
    nodes: dict[str, dict[str, EngineNode]] = {role: {} for role in ROLES}  # role -> interface -> node
    interfaces: dict[str, dict[str, Any]] = {role: {"plain": plain_interface()} for role in ROLES}
    interfaces["tool"]["plain"] = interface([["text"]], {"text": STREAM})
    for served in cases:
        for role, node in served.nodes.items():
            nodes[node.role][served.interface_of(role)] = node
            interfaces[node.role][served.interface_of(role)] = served.interfaces[role]
    classes = {role: type(role, (Role,), some) for role, some in interfaces.items()}
    outputs = [served.output_of(name) for served in cases for name in served.case.graph.declarations.outputs]

    async def run_tool(activation: Activation) -> AsyncIterator[Any]:
        forward: Callable[[Activation], AsyncIterator[Any]] = (
            pass_on if activation.interface == "plain" else nodes["tool"][activation.interface].run
        )
        async for emissions in forward(activation):
            yield emissions

    class RandomPipeline(Pipeline):
        session_ttl_s = 60.0
        modalities = {"text": "text", "sound": "sound", "passed": "passed"} | {name: name for name in outputs}
        deployment = {
            "stages": {
                "writer": {
                    "engine_type": "ar",
                    "replicas": 2,
                    "balance": "least_work",
                    "engine_args": {
                        "dtype": "float32",
                        "enforce_eager": True,
                        "max_model_len": 64,
                        "max_num_seqs": 16,
                        "block_size": 32,
                        "kv_cache_memory_bytes": 8 << 20,
                        "skip_tokenizer_init": True,
                    },
                },
                "coder": {"engine_type": "generation", "replicas": 2, "balance": "least_work"},
            }
        }

        def __init__(self, model: str, hf_config: PreTrainedConfig, revision: str | None = None) -> None:
            self.graph = self._plain()
            self.further_graphs = [make_graph(served, classes) for served in cases]
            self.stages = (
                self._spec("writer", WRITER, "text"),
                self._spec("coder", CODER, "audio", hf_overrides=coder_config),
            )
            self.functions = (FunctionSpec("tool", run_tool),)

        def _plain(self) -> Graph:
            graph = Graph("plain")
            prompt = graph.placeholder("prompt")
            writer, coder, tool = (graph.role(classes[role], role) for role in ROLES)
            text = writer.plain(prompt=prompt).text  # type: ignore[attr-defined]
            sound = coder.plain(prompt=prompt).text  # type: ignore[attr-defined]
            graph.output(text=text, sound=sound, passed=tool.plain(text=text).text)  # type: ignore[attr-defined]
            return graph

        def _spec(self, role: str, architecture: str, output_type: str, **more: Any) -> StageSpec:
            fields = {name for declared in interfaces[role].values() for name in declared.outputs}
            return StageSpec(
                role,
                architecture,
                output_type,
                combine={name: node.combine for name, node in nodes[role].items()},
                route={name: node.route for name, node in nodes[role].items()},
                frames={name: Pass for name in fields if name.startswith(("f", "rf"))},
                publishing_fields=frozenset(name for name in fields if name.startswith("r")),
                **more,
            )

        def validate(self, options: Mapping[str, Any]) -> dict[str, Any]:
            return {}

        def inputs(self, prompt: Any, options: Mapping[str, Any]) -> Mapping[str, Any]:
            """A case's inputs, as they are."""
            return dict(prompt)

    return RandomPipeline
