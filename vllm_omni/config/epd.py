"""``EPDDeployment``: the ``epd:`` section of a stage: its instances, how requests are balanced, and its budgets.

From: HydraInfer, sections 4.2 (budgets) and 4.4 (instances of any mix of encode, prefill and decode).
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Flag
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BeforeValidator

from vllm_omni.config.budgets import BUDGET_KEYS, EPDConfig
from vllm_omni.config.checks import NumBytes, Problem, Seconds, Transport, check_section
from vllm_omni.config.vllm_args import check_engine_args
from vllm_omni.names import suggest


class Tasks(Flag):
    """A set of the tasks of a request. A request passes through its tasks in this order.

    The name of a set is its text form: in YAML, in names of instances (``thinker/PD0``) and in labels of metrics.
    (``messages.timeline.Task`` is what a timeline calls the whole of what one engine did for a request.)
    """

    E = 1  # encode the images
    P = 2  # prefill the prompt
    D = 4  # decode the reply
    G = 8  # generate the reply that has a picture: decode its text, and denoise
    EP = E | P
    ED = E | D
    PD = P | D
    EPD = E | P | D

    def __str__(self) -> str:
        return "".join(str(task.name) for task in self)

    @property
    def first(self) -> Tasks:
        """The next task; the set must not be empty."""
        return next(iter(self))

    def leading(self, kind: Tasks) -> Tasks:
        """The tasks of this set, from the first, up to one that an instance of this kind does not do."""
        leading = Tasks(0)
        for task in self:
            if task not in kind:
                break
            leading |= task
        return leading


KINDS = tuple(Tasks.__members__)
REPLIES = Tasks.D | Tasks.G
VERBS = {Tasks.E: "encodes", Tasks.P: "prefills", Tasks.D: "decodes"}
Balance = Literal["least_work", "round_robin", "session", "affinity"]
MAX_INSTANCES = 64  # of one kind


def _read_instances(value: object) -> object:
    """The mix of a section, as text or as a mapping, with kinds by their names here."""
    if isinstance(value, str):
        try:
            mix = parse_instances(value)
        except Problem as exc:
            raise Problem(str(exc)) from None  # the path leads into the text
    else:
        mix = _read_mix(_mapping(value).items())
    return {str(kind): number for kind, number in mix.items()}


def _read_engine_args(value: object) -> object:
    """Engine arguments of instances, ``PD`` or ``PD1``, with kinds by their names here."""
    args: dict[str, dict[str, Any]] = {}
    for name, values in _mapping(value).items():
        letters = name.rstrip("0123456789")
        try:
            own = args.setdefault(f"{_kind(letters)}{name.removeprefix(letters)}", {})
            own.update(check_engine_args(dict(_mapping(values))))
        except Problem as exc:
            raise Problem(str(exc), name, *(exc.path if exc.path != (letters,) else ())) from None
    return args


def _mapping(value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise Problem("must be a mapping, as in {E: 1, PD: 1}")
    return value


@dataclass(frozen=True, kw_only=True)
class EPDDeployment:
    """Split a stage into instances, each an engine of its own. Without ``instances`` the stage is one engine."""

    # name of the kind -> number of instances; in the order given
    instances: Annotated[dict[str, int], BeforeValidator(_read_instances)] = field(default_factory=dict)
    balance: Balance | None = None  # None: what the graph says
    transport: Transport = "auto"  # relay backend for caches between instances
    relay_bytes: NumBytes | None = None  # per instance; None: VLLM_OMNI_RELAY_BYTES
    # Embeddings that each encoding instance keeps in its relay for later requests with the same image.
    # None: a quarter of ``relay_bytes``. 0: none are kept.
    image_cache_bytes: NumBytes | None = None
    admission_timeout_s: Seconds = 10.0  # after which a request that has not started moves to another instance
    recovery_timeout_s: Seconds = 120.0  # how long a request waits for an instance to restart
    # "PD", or one instance, "PD1" -> field of vLLM's EngineArgs -> value; wins over the stage's own
    engine_args: Annotated[dict[str, dict[str, Any]], BeforeValidator(_read_engine_args)] = field(default_factory=dict)

    @classmethod
    def of(cls, section: Mapping[str, Any]) -> EPDDeployment:
        """Convert a section that has been checked."""
        return cls(**{key: value for key, value in section.items() if key not in BUDGET_KEYS})

    @property
    def mix(self) -> dict[Tasks, int]:
        """Kind -> number of instances; in the order given."""
        return {Tasks[name]: number for name, number in self.instances.items()}

    @property
    def numbered(self) -> list[tuple[Tasks, int]]:
        """Kind and number of each instance; in the order given."""
        return [(kind, number) for kind, count in self.mix.items() for number in range(count)]

    @property
    def is_split(self) -> bool:
        """Whether requests are routed: a single instance that does everything is the plain stage."""
        return bool(self.instances) and self.mix != {Tasks.EPD: 1}

    @property
    def separates_encode(self) -> bool:
        """Whether embeddings travel: an instance encodes what another one prefills."""
        return any(kind in (Tasks.E, Tasks.ED) for kind in self.mix)

    @property
    def separates_decode(self) -> bool:
        """Whether a KV cache travels: an instance prefills what another one decodes."""
        return any(kind == Tasks.G or kind & Tasks.PD in (Tasks.P, Tasks.D) for kind in self.mix)

    @property
    def separates_pictures(self) -> bool:
        """Whether replies with a picture are generated apart from the others. Otherwise what decodes also denoises."""
        return Tasks.G in self.mix


class Instance(NamedTuple):
    """One engine of a stage that has several."""

    stage: str  # name of the stage
    kind: Tasks | None  # None: a replica, which does all that the stage does
    number: int  # among the instances of this kind, from 0
    engine_args: Mapping[str, Any]  # field of vLLM's EngineArgs -> value; wins over the stage's own
    is_front: bool = False  # this instance's front half renders the prompts for all of them

    @property
    def name(self) -> str:
        """As in logs, metrics and ``/health``: ``thinker/PD0``; of a replica ``talker/0``."""
        return f"{self.stage}/{self.kind or ''}{self.number}"


def parse_instances(text: str) -> dict[Tasks, int]:
    """Read ``E:1,PD:2``; a kind without a number means one instance.

    Raises:
        Problem: another form, an unknown kind, no instance, or a task that no instance does.
    """
    pairs = []
    for part in text.split(","):
        pair = re.fullmatch(r"\s*([^\s:]+)\s*(?::\s*(\d+)\s*)?", part)
        if pair is None:
            raise Problem(f"{part.strip()!r}: must be KIND:NUMBER, as in E:1,PD:1")
        pairs.append((pair[1], int(pair[2] or 1)))
    return _read_mix(pairs)


def _read_mix(pairs: Iterable[tuple[str, Any]]) -> dict[Tasks, int]:
    mix: dict[Tasks, int] = {}
    for name, number in pairs:
        kind = _kind(name)
        if type(number) is not int or not 1 <= number <= MAX_INSTANCES:
            raise Problem(f"{name} = {number!r}: must be a number of instances, from 1 to {MAX_INSTANCES}", name)
        if kind in mix:
            raise Problem(f"{kind} is given twice: give {kind}:{mix[kind] + number}", name)
        mix[kind] = number
    done = functools.reduce(operator.or_, mix, Tasks(0))
    for task in Tasks.PD & ~done if mix else ():
        raise Problem(f"no instance {VERBS[task]}: {_completed(mix, task)}")
    return mix


def no_encoder(mix: Mapping[Tasks, int]) -> str:
    """Error text for a mix without an encoding instance, for a model that reads images."""
    return f"no instance encodes, and this model reads images: {_completed(mix, Tasks.E)}"


def needless_encoder(mix: Mapping[Tasks, int]) -> str:
    """Error text for a mix with an encoder, for a model that reads text alone; any model may have EPD instances."""
    without: dict[Tasks, int] = {}
    for kind, number in mix.items():
        if rest := kind & ~Tasks.E:
            without[rest] = without.get(rest, 0) + number
    if without.keys() == {Tasks.PD}:
        without = {Tasks.EPD: without[Tasks.PD]}
    return f"this model reads text alone, there is nothing to encode: give {_written(without)}"


def _completed(mix: Mapping[Tasks, int], task: Tasks) -> str:
    """Advice for a mix without a task: add an instance of that kind, or widen the kinds beside it."""
    neighbours = {Tasks.E: [Tasks.P], Tasks.P: [Tasks.D, Tasks.E], Tasks.D: [Tasks.P]}[task]
    widened = next((one for one in neighbours if any(one in kind for kind in mix)), None)
    wide: dict[Tasks, int] = {}
    for kind, number in mix.items():
        wider = kind | task if widened is not None and widened in kind else kind
        wide[wider] = wide.get(wider, 0) + number
    return f"give {_written({**mix, task: 1})}" + (f", or {_written(wide)}" if wide != mix else "")


def _written(mix: Mapping[Tasks, int]) -> str:
    return ",".join(f"{kind}:{number}" for kind, number in mix.items())


def _kind(name: str) -> Tasks:
    letters, kind = name.upper(), Tasks(0)
    for task in Tasks:
        if str(task) in letters:
            kind |= task
    if str(kind) not in KINDS or len(letters) != len(kind):
        said = "E encodes, P prefills, D decodes, G generates pictures"
        raise Problem(f"no kind {name!r} ({said}): {suggest(letters, KINDS)}", name)
    return kind


def check_epd_section(section: Mapping[str, Any]) -> dict[str, Any]:
    """Check a section and return it with ``instances`` as a mapping.

    Raises:
        Problem: a key or value is wrong.
    """
    return check_section(EPDDeployment, section, EPDConfig)
