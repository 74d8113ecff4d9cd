"""``EPDDeployment``: the ``epd:`` section of a stage: its instances, how requests are spread, and its budgets.

From: HydraInfer, sections 4.2 (budgets) and 4.4 (instances of any mix of encode, prefill and decode).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import msgspec

from vllm_omni.names import suggest

KINDS = ("E", "P", "D", "EP", "ED", "PD", "EPD")
"""What an instance may do of encode, prefill and decode."""

STAGES = {"E": "encode", "P": "prefill", "D": "decode"}
BALANCES = ("least_work", "round_robin", "affinity")
MAX_INSTANCES = 64  # of one kind

BUDGET_KEYS = (
    "token_budget image_budget num_encode_layers tpot_ms ttft_ms tpot_share margin min_prefill_tokens patience "
    "cost profile_s encode_in"
).split()
"""Fields of ``core.sched.budget.EPDConfig``, which may stand in the same section."""

Seconds = Annotated[float, msgspec.Meta(gt=0, le=86400)]
NumBytes = Annotated[int, msgspec.Meta(ge=0, le=2**62)]


class EPDDeployment(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a stage is split into instances, each an engine of its own. Without ``instances`` it is one engine."""

    instances: dict[str, int] = {}  # kind -> how many; in the order given
    balance: str = "least_work"  # one of BALANCES
    transport: str = "auto"  # of caches between instances: a backend of the relay
    relay_bytes: NumBytes | None = None  # of each instance; None: VLLM_OMNI_RELAY_BYTES
    # Of each encoding instance: embeddings that are kept for the next request with the same image. They lie in its
    # relay; None: a quarter of that. 0: none are kept.
    image_cache_bytes: NumBytes | None = None
    admission_timeout_s: Seconds = 10.0  # after which a request that was not begun goes to another instance
    recovery_timeout_s: Seconds = 120.0  # how long a request waits for an instance that is started again
    # "PD", or one instance alone, "PD1" -> field of vLLM's EngineArgs -> value, over the stage's own
    engine_args: dict[str, dict[str, Any]] = {}

    @classmethod
    def of(cls, section: Mapping[str, Any]) -> EPDDeployment:
        """A section that has been checked."""
        return msgspec.convert({key: value for key, value in section.items() if key not in BUDGET_KEYS}, cls)

    @property
    def is_split(self) -> bool:
        """Whether there is anything to route: one instance that does everything is the stage as it always was."""
        return bool(self.instances) and self.instances != {"EPD": 1}

    @property
    def separates_encode(self) -> bool:
        """Whether embeddings travel: some instance encodes what another prefills."""
        return any("E" in kind and "P" not in kind for kind in self.instances)

    @property
    def separates_decode(self) -> bool:
        """Whether a KV cache travels: some instance prefills what another decodes."""
        return any(("P" in kind) != ("D" in kind) for kind in self.instances if kind != "E")


class Instance(NamedTuple):
    """One engine of a stage that has several."""

    stage: str  # its name
    kind: str  # one of KINDS
    number: int  # among those of its kind, from 0
    engine_args: Mapping[str, Any]  # field of vLLM's EngineArgs -> value, over the stage's own
    is_front: bool = False  # its front half reads the prompts of all

    @property
    def name(self) -> str:
        """As people see it: ``thinker/PD0``."""
        return f"{self.stage}/{self.kind}{self.number}"


class Problem(ValueError):
    """What is wrong with a section; ``path`` leads to it."""

    def __init__(self, message: str, *path: str) -> None:
        super().__init__(message)
        self.path = path


def parse_instances(text: str) -> dict[str, int]:
    """``E:1,PD:2`` as a mapping; a kind without a number is one.

    Raises:
        Problem: not of this form, an unknown kind, no instance, or a stage that nobody does.
    """
    instances: dict[str, int] = {}
    for part in text.split(","):
        kind, colon, number = (one.strip() for one in part.partition(":"))
        if not kind or (colon and not number.isdecimal()):
            raise Problem(f"{part.strip()!r}: must be KIND:NUMBER, as in E:1,PD:1")
        kind = _kind(kind)
        if kind in instances:
            raise Problem(f"{kind} is given twice: give {kind}:{instances[kind] + int(number or 1)}")
        instances[kind] = int(number) if colon else 1
    return check_instances(instances)


def check_instances(instances: Mapping[str, Any]) -> dict[str, int]:
    """The mix, with kinds as they are written here: ``DP`` is ``PD``.

    Raises:
        Problem: see ``parse_instances``.
    """
    mix: dict[str, int] = {}
    for name, number in instances.items():
        kind = _kind(name)
        if type(number) is not int or not 1 <= number <= MAX_INSTANCES:
            raise Problem(f"{name} = {number!r}: must be a number of instances, from 1 to {MAX_INSTANCES}", name)
        if kind in mix:
            raise Problem(f"{name}: {kind} is given twice", name)
        mix[kind] = number
    for letter, stage in STAGES.items():
        if letter != "E" and mix and not any(letter in kind for kind in mix):
            raise Problem(f"nobody would {stage}: {_completed(mix, letter)}")
    return mix


def no_encoder(mix: Mapping[str, int]) -> str:
    """What to say of a mix without an instance that encodes, for a model that reads images."""
    return f"nobody would encode, and this model reads images: {_completed(mix, 'E')}"


def needless_encoder(mix: Mapping[str, int]) -> str:
    """What to say of a mix for a model that reads text alone; an EPD instance is any model's."""
    without: dict[str, int] = {}
    for kind, number in mix.items():
        if rest := kind.replace("E", ""):
            without[rest] = without.get(rest, 0) + number
    if without == {"PD": without.get("PD")}:
        without = {"EPD": without["PD"]}
    return f"this model reads text alone, there is nothing to encode: give {_written(without)}"


def _completed(mix: Mapping[str, int], letter: str) -> str:
    neighbours = [one for one in {"E": "P", "P": "DE", "D": "P"}[letter] if any(one in kind for kind in mix)]
    wide: dict[str, int] = {}
    for kind, number in mix.items():
        does = kind + letter if neighbours and neighbours[0] in kind else kind
        wider = "".join(one for one in "EPD" if one in does)
        wide[wider] = wide.get(wider, 0) + number
    return f"give {_written({**mix, letter: 1})}" + (f", or {_written(wide)}" if wide != mix else "")


def _written(mix: Mapping[str, int]) -> str:
    return ",".join(f"{kind}:{number}" for kind, number in mix.items())


def _kind(name: str) -> str:
    kind = "".join(letter for letter in "EPD" if letter in name.upper())
    if not name or sorted(name.upper()) != sorted(kind):
        raise Problem(f"no kind {name!r} (E encodes, P prefills, D decodes): {suggest(name.upper(), KINDS)}", name)
    return kind


def check_section(section: Mapping[str, Any], transports: Sequence[str]) -> dict[str, Any]:
    """The section with its mix as a mapping.

    Budgets are left to the scheduler's own check, engine arguments to vLLM's.

    Raises:
        Problem: what is wrong, and where.
    """
    section = dict(section)
    known = (*EPDDeployment.__struct_fields__, *BUDGET_KEYS)
    for key in section:
        if key not in known:
            raise Problem(f"unknown key: {suggest(key, known)}", key)
    mix = section.get("instances")
    if mix is not None:
        try:
            section["instances"] = parse_instances(mix) if isinstance(mix, str) else check_instances(_mapping(mix))
        except Problem as exc:
            path = () if isinstance(mix, str) else exc.path
            raise Problem(str(exc), "instances", *path) from None
    for key, valid in (("balance", BALANCES), ("transport", transports)):
        if key in section and section[key] not in valid:
            raise Problem(suggest(str(section[key]), valid), key)
    args: dict[str, dict[str, Any]] = {}
    for name, values in _mapping(section.get("engine_args", {})).items():
        try:
            letters = name.rstrip("0123456789")
            args.setdefault(_kind(letters) + name.removeprefix(letters), {}).update(_mapping(values))
        except Problem as exc:
            raise Problem(str(exc), "engine_args", name) from None
    if args:
        section["engine_args"] = args
    for key, value in section.items():
        if key not in BUDGET_KEYS and (problem := _field_problem(key, value)) is not None:
            raise Problem(problem, key)
    return section


def _mapping(value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise Problem("must be a mapping, as in {E: 1, PD: 1}")
    return value


def _field_problem(key: str, value: object) -> str | None:
    try:
        msgspec.convert({key: value}, EPDDeployment)
    except msgspec.ValidationError as exc:
        return _WORDS.get(key, str(exc).partition(" - at ")[0].replace("`", ""))
    return None


_WORDS = {
    "relay_bytes": "must be a number of bytes",
    "image_cache_bytes": "must be a number of bytes, 0 for none",
    "admission_timeout_s": "must be a number of seconds, above 0 and at most 86400",
    "recovery_timeout_s": "must be a number of seconds, above 0 and at most 86400",
}
