"""``EngineMaker``: makes the engines of a deployment's stages, not started, and the nodes that represent them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from vllm_omni.config import StageConfig
from vllm_omni.config.epd import Instance
from vllm_omni.config.vllm_args import make_sampling_params
from vllm_omni.config.weights import check_files
from vllm_omni.engine.cache_edges import CacheSource
from vllm_omni.engine.controller_places import expect_two_clients
from vllm_omni.engine.group import balance_of
from vllm_omni.engine.instance_args import check_mix, check_pictures, make_instances
from vllm_omni.engine.instances import InstanceGroup
from vllm_omni.engine.node import StageNode
from vllm_omni.engine.replicas import ReplicaGroup, make_replicas
from vllm_omni.engine.request_processor import RequestProcessor
from vllm_omni.engine.stage import StageEngine
from vllm_omni.errors import ConfigError, InvalidRequest
from vllm_omni.flow import StaticPlan
from vllm_omni.model_executor.pipeline import StageSpec
from vllm_omni.process.shared_weights import LOAD_FORMAT
from vllm_omni.relay.hub import RelayHub

CHECKED_FORMATS = ("auto", "hf", "safetensors", "fastsafetensors", LOAD_FORMAT)  # of weights, before engines load them


class EngineMaker:
    """Makes engines.

    Args:
        specs: of the pipeline's stages, with their connectors.
        cache_sources: stage -> where the KV cache of its requests comes from.
        hub: the front end's.
        make_reader: of what bounds how many prompts are read at a time.
        on_hosts: engines beside which their controllers run.
        engine_class: theirs.
        log_stats: whether engines count what they do.
    """

    def __init__(
        self,
        specs: Mapping[str, StageSpec],
        cache_sources: Mapping[str, CacheSource],
        plans: Mapping[str, StaticPlan],
        hub: RelayHub,
        make_reader: Callable[[], RequestProcessor],
        on_hosts: Collection[str] = (),
        engine_class: type[StageEngine] = StageEngine,
        *,
        log_stats: bool,
    ) -> None:
        self._specs = specs
        self._cache_sources = cache_sources
        self._plans = plans
        self._hub = hub
        self._make_reader = make_reader
        self._on_hosts = on_hosts
        self._engine_class = engine_class
        self._log_stats = log_stats
        self._checked: set[tuple[str, str, str | None]] = set()  # model, folder and revision of weights

    def make_node(self, stage: StageConfig) -> tuple[list[StageEngine], StageNode]:
        """Make the engines with which a stage starts, and the node that represents them in the graph.

        Raises:
            ConfigError: as ``make_engine``; or a mix of instances does not suit this model.
        """
        check_pictures(stage, self._specs[stage.name])
        instances = list_instances(stage)[: stage.num_started]
        if not instances:
            engine = self.make_engine(stage)
            return [engine], engine
        balance = balance_of(stage, self._plans.values())
        front = next(instance for instance in instances if instance.is_front)
        front_engine = self.make_engine(stage, front)
        if stage.deployment.is_split:  # before vLLM complains of the others in its own words
            check_mix(stage, front_engine.vllm_config.model_config)
        engines = [front_engine if one is front else self.make_engine(stage, one) for one in instances]
        if stage.deployment.is_split:
            return engines, InstanceGroup(stage, engines, self._hub, balance)
        return engines, ReplicaGroup(stage, engines, balance)

    def make_engine(self, stage: StageConfig, instance: Instance | None = None) -> StageEngine:
        """Make the engine of a stage, or one of its several.

        Raises:
            ConfigError: an engine argument is wrong, or a file of the weights is missing or not whole.
        """
        reads = stage.stage_id == 0 and (instance is None or instance.is_front)
        engine = self._engine_class(
            stage,
            self._specs[stage.name],
            log_stats=self._log_stats,
            instance=instance,
            reader=self._make_reader() if reads else None,
            cache_source=self._cache_sources.get(stage.name),
        )
        if engine.name in self._on_hosts:
            expect_two_clients(engine.vllm_config)
        check_default_params(engine)
        self._check_weights(engine)
        return engine

    def _check_weights(self, engine: StageEngine) -> None:
        """Check the files that a stage's engines on this host load, once, where these are safetensors."""
        config, load_format = engine.vllm_config.model_config, engine.vllm_config.load_config.load_format
        if engine.config.host_of() is not None or load_format not in CHECKED_FORMATS:
            return
        folders = config.hf_config.model_config if engine.config.is_diffusion else [engine.spec.weight_folder]
        for checked in [(config.model, folder, config.revision) for folder in folders]:
            if checked not in self._checked:
                check_files(*checked)
                self._checked.add(checked)


def list_instances(stage: StageConfig) -> list[Instance]:
    """The engines of a stage that may have several, as ``StageConfig.engine_names``; none: it is one engine.

    Raises:
        ConfigError: see ``make_instances``.
    """
    if stage.deployment.is_split:
        return make_instances(stage)
    return make_replicas(stage) if stage.max_engines > 1 else []


def check_default_params(engine: StageEngine) -> None:
    """Check the parameters that a deployment gives to requests without their own.

    Raises:
        ConfigError: the engine cannot honour one.
    """
    given = engine.config.default_sampling_params
    if not engine.config.is_diffusion:
        try:
            engine.check_params(make_sampling_params(given), given)
        except InvalidRequest as exc:
            raise ConfigError(f"default_sampling_params: {exc}") from exc
