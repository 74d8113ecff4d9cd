"""Resolve the parameters of a request: what it gives for each stage, over the stage's defaults."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import msgspec
from vllm.config import ModelConfig
from vllm.sampling_params import SamplingParams

from vllm_omni.config import OmniConfig, StageConfig
from vllm_omni.config.checks import Problem
from vllm_omni.config.diffusion_params import DiffusionParams
from vllm_omni.config.vllm_args import make_sampling_params
from vllm_omni.engine.decodable import check_params
from vllm_omni.errors import InvalidRequest
from vllm_omni.messages.slo import SLO_ARGS, Slo
from vllm_omni.names import suggest

TRANSFER_ARGS = ("kv_transfer_params", "ec_transfer_params")  # vLLM passes them to its connectors in ``extra_args``

StageParams: TypeAlias = SamplingParams | DiffusionParams | Mapping[str, Any] | None
"""Parameters of one stage: vLLM's object, for a diffusion stage ours; or its fields by name."""

ParamsList: TypeAlias = StageParams | Sequence[StageParams] | Mapping[str, StageParams]
"""Parameters of one request: of the first stage; of the stages by position; or by name."""


class StageParamsResolver:
    """Checks and completes the parameters of requests to one deployment.

    Args:
        model_config: of the first stage, whose checkpoint has defaults of its own.
        check: raises ``InvalidRequest`` for parameters that the engine of the named stage cannot honour; called with
            its name, the parameters, and those of their fields that the request gives.
    """

    def __init__(
        self,
        config: OmniConfig,
        model_config: ModelConfig,
        check: Callable[[str, SamplingParams, Mapping[str, Any]], None],
    ) -> None:
        self._config = config
        self._first = config.stages[0]
        self._model_config = model_config
        self._check_engine = check

    def resolve(
        self, given: ParamsList, over: Mapping[str, Mapping[str, Any]] | None = None
    ) -> dict[str, SamplingParams | DiffusionParams]:
        """The parameters of every stage, defaults filled in.

        Args:
            over: stage -> fields that win over the given ones.

        Raises:
            InvalidRequest: an unknown stage or parameter, with the nearest valid name; a wrong value.
        """
        by_name, over = self.by_stage(given), over or {}
        params: dict[str, SamplingParams | DiffusionParams] = {}
        for stage in self._config.stages:
            resolve = self._resolve_diffusion if stage.is_diffusion else self._resolve_sampling
            params[stage.name] = resolve(stage, by_name.get(stage.name), over.get(stage.name, {}))
        for name, of_stage in params.items():
            self._check(name, of_stage, _given_fields(by_name.get(name), over.get(name, {})))
        return params

    def by_stage(self, given: ParamsList) -> dict[str, StageParams]:
        """The parameters by name of their stage; raises ``InvalidRequest`` for an unknown stage, or too many."""
        names = self._config.stage_names
        if isinstance(given, Mapping) and self._is_by_name(given):
            for name in given:
                if name not in names:
                    raise InvalidRequest(f"sampling parameters for unknown stage {name!r}: {suggest(str(name), names)}")
            by_name = dict(given)
        elif isinstance(given, Sequence) and not isinstance(given, str):
            if len(given) > len(names):
                raise InvalidRequest(f"{len(given)} sets of sampling parameters for the stages {', '.join(names)}")
            by_name = dict(zip(names, given, strict=False))
        else:
            by_name = {names[0]: given}
        for name, params in by_name.items():
            if not isinstance(params, SamplingParams | DiffusionParams | Mapping | None):
                raise InvalidRequest(f"sampling parameters of stage {name!r} = {params!r}: must be fields by name")
        return by_name

    def check_overrides(self, given: ParamsList) -> dict[str, Mapping[str, Any]]:
        """Stage -> fields, checked, as ``resolve`` takes them for ``over``.

        Raises:
            InvalidRequest: an unknown stage or parameter, a wrong value, or an object instead of fields by name.
        """
        over: dict[str, Mapping[str, Any]] = {}
        for name, params in self.by_stage(given).items():
            if isinstance(params, SamplingParams | DiffusionParams):
                raise InvalidRequest(f"sampling parameters of stage {name!r}: give the fields to change, by name")
            if not params:
                continue
            if self._config.stage(name).is_diffusion:
                over[name] = diffusion_fields(name, params)
                continue
            validated = _make_sampling_params(name, params)
            self._check(name, validated, params)
            over[name] = {key: getattr(validated, key) for key in params}
        return over

    def _check(self, stage: str, params: SamplingParams | DiffusionParams, given: Mapping[str, Any]) -> None:
        if isinstance(params, SamplingParams):
            if params.n > 1 and stage != self._first.name:
                said = f"n = {params.n}: it answers once; give n = 1"
                raise InvalidRequest(f"sampling parameters of stage {stage!r}: {said}")
            self._check_engine(stage, params, given)

    def _is_by_name(self, given: Mapping[Any, Any]) -> bool:
        """Whether the keys are names of stages, even misspelt, rather than fields of the first stage's parameters."""
        if set(given) & set(self._config.stage_names):
            return True
        fields = DiffusionParams if self._first.is_diffusion else SamplingParams
        are_params = all(isinstance(one, SamplingParams | DiffusionParams | Mapping | None) for one in given.values())
        return bool(given) and are_params and not set(given) & set(fields.__struct_fields__)

    def _resolve_diffusion(self, stage: StageConfig, given: StageParams, over: Mapping[str, Any]) -> DiffusionParams:
        if isinstance(given, SamplingParams):
            raise InvalidRequest(f"parameters of stage {stage.name!r}: it samples no tokens; give DiffusionParams")
        fields = diffusion_fields(stage.name, given or {})
        return DiffusionParams(**{**stage.default_sampling_params, **fields, **over})

    def _resolve_sampling(self, stage: StageConfig, given: StageParams, over: Mapping[str, Any]) -> SamplingParams:
        if isinstance(given, DiffusionParams):
            raise InvalidRequest(f"parameters of stage {stage.name!r}: it samples tokens; give SamplingParams")
        if "extra_args" in over:  # those of the request that are not given again stay
            of_request = given.extra_args if isinstance(given, SamplingParams) else (given or {}).get("extra_args")
            over = {**over, "extra_args": {**(of_request or {}), **over["extra_args"]}}
        if isinstance(given, SamplingParams):
            _check_values(stage.name, given)
            check_params(stage.name, given)  # the caller may have set any field
            # The set of all stop ids is derived from the fields; a copy would share it.
            return msgspec.structs.replace(given, **over, _all_stop_token_ids=set()) if over else given
        values = {**stage.default_sampling_params, **(given or {}), **over}
        if stage is self._first:
            values = {**self._model_config.get_diff_sampling_param(), **values}
        return _make_sampling_params(stage.name, values)


def _given_fields(given: StageParams, over: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that a request gives for a stage; of an object, those that differ from the defaults."""
    if isinstance(given, SamplingParams | DiffusionParams):
        given, default = msgspec.structs.asdict(given), type(given)()
        given = {name: value for name, value in given.items() if value != getattr(default, name)}
    return {**(given or {}), **over}


def _make_sampling_params(stage: str, values: Mapping[str, Any]) -> SamplingParams:
    try:
        params: SamplingParams = make_sampling_params(values)
    except Problem as exc:
        said = exc.at(".".join(exc.path), values) if exc.path else str(exc)
        param = exc.path[0] if exc.path else None
        raise InvalidRequest(f"sampling parameters of stage {stage!r}: {said}", param=param) from exc
    _check_values(stage, params)
    return params


def diffusion_fields(stage: str, given: DiffusionParams | Mapping[str, Any]) -> dict[str, Any]:
    """The fields that were given, checked; of an object, those that differ from the defaults."""
    try:
        params = given if isinstance(given, DiffusionParams) else DiffusionParams.of(given)
        params.validate()
    except InvalidRequest as exc:
        raise InvalidRequest(f"stage {stage!r}: {exc}", param=exc.param) from exc
    if not isinstance(given, DiffusionParams):
        return {name: getattr(params, name) for name in given}
    default = DiffusionParams()
    fields = {name: getattr(params, name) for name in params.__struct_fields__}
    return {name: value for name, value in fields.items() if value != getattr(default, name)}


def _check_values(stage: str, params: SamplingParams) -> None:
    """Check values that vLLM's class accepts, and that would fail after the engine's client has noted the request."""
    where = f"sampling parameters of stage {stage!r}"
    seed, extra_args = params.seed, params.extra_args or {}
    if seed is not None and not -(2**63) <= seed < 2**64:  # it travels as a 64-bit integer
        raise InvalidRequest(f"{where}: seed = {seed}: valid: -2**63 to 2**64 - 1", param="seed")
    for name in TRANSFER_ARGS:
        if not isinstance(extra_args.get(name), Mapping | None):
            raise InvalidRequest(f"{where}: {name} = {extra_args[name]!r}: must be an object", param=name)
    Slo.parse(extra_args.get(SLO_ARGS))
