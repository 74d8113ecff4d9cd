"""What the parameters of a request's stages say to the whole request, checked before any stage computes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from vllm.sampling_params import SamplingParams

from vllm_omni.config import OmniConfig
from vllm_omni.config.diffusion_params import DiffusionParams
from vllm_omni.engine.stage import StageEngine
from vllm_omni.messages.slo import Slo, slo_of


def check_params(
    params: Mapping[str, SamplingParams | DiffusionParams], config: OmniConfig, engines: Iterable[StageEngine]
) -> dict[str, Slo]:
    """The request's latency targets, by stage that has any.

    Raises:
        InvalidRequest: those of the request are malformed, or a diffusion stage's parameters exceed its limits.
    """
    for name, of_stage in params.items():
        if isinstance(of_stage, DiffusionParams):
            of_stage.validate(config.stage(name).diffusion_config.limits)
    slos = {}
    for engine in engines:
        if engine.spec.cache_fields:  # its readers make the tokens of the reply
            continue
        of_engine = params.get(engine.config.name if engine.cache_source is None else engine.cache_source.stage)
        if isinstance(of_engine, SamplingParams) and (slo := slo_of(of_engine.extra_args, engine.default_slo)):
            slos[engine.config.name] = slo
    return slos
