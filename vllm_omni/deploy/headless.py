"""``serve_stages``: run stages on this host for a front end on another one (``vllm serve M --omni --headless``).

Whatever starts it, a command line or an actor of a cluster's scheduler, gets the processes that a server on one host
has for these stages. The deployment is the front end's: a host brings its checkpoint, and the secret.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import secrets
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from msgspec.structs import replace

from vllm_omni import envs
from vllm_omni.config.travel import on_host, unpack_config
from vllm_omni.deploy.needs import place_here
from vllm_omni.engine.engine_maker import list_instances
from vllm_omni.engine.host_controllers import HostControllers
from vllm_omni.engine.hosted_engine import HostedEngine
from vllm_omni.engine.hosting import identity_of
from vllm_omni.engine.memory import memory_sections
from vllm_omni.engine.orchestrator import Orchestrator
from vllm_omni.engine.stage import StageEngine
from vllm_omni.engine.startup import prepare_environment
from vllm_omni.errors import ConfigError, OmniError
from vllm_omni.hosts import messages as msg
from vllm_omni.hosts.connection import FrontEndLost, HostConnection
from vllm_omni.hosts.endpoint import Endpoint
from vllm_omni.process.leftovers import find_leftovers, remove_leftover
from vllm_omni.process.run_directory import RunDirectory
from vllm_omni.relay.secret import Secret

logger = logging.getLogger(__name__)


def serve_stages(
    model: str,
    stages: Sequence[str],
    join: str,
    token_file: str | os.PathLike[str],
    *,
    pipeline: type | None = None,
    revision: str | None = None,
) -> None:
    """Join a front end, and run stages for it until it ends; everything that was started ends with this call.

    Args:
        model: where the checkpoint is on this host.
        stages: their names, or those of replicas, "talker/1", of instances, "thinker/PD0", or of parts of an
            engine that spans hosts, "thinker/node1".
        join: HOST:PORT of the front end. One that is not up is awaited for ``VLLM_OMNI_JOIN_TIMEOUT_S``, and one that
            is lost for ``VLLM_OMNI_ORPHAN_S``.
        token_file: the secret.
        pipeline: the front end's, if it is not the one of the model's type.

    Raises:
        ConfigError: an argument is wrong, or the front end rejects this host.
        FrontEndLost: the front end cannot be reached, any longer or at all.
    """
    envs.reject_unknown()
    endpoint, secret_file = Endpoint.parse(join, "--join"), os.path.abspath(token_file)
    connection = HostConnection(endpoint, Secret.read(secret_file))
    prepare_environment()
    address, program = _relay_address(endpoint), secrets.token_hex(16)
    try:
        link = connection.listen(address)
        request = msg.Join(msg.PROTOCOL, identity_of(model, revision), list(stages), address, program, link)
        joined = connection.join(request, envs.VLLM_OMNI_JOIN_TIMEOUT_S)
        _remove_leftovers()
        with _run_directory() as run_directory, run_directory.inherited():
            host = _Host(connection, run_directory, model, pipeline, request.address, secret_file)
            try:
                host.prepare(joined)
                while not host.serve():
                    host.prepare(_join_again(connection, request, endpoint))
            finally:
                host.end()
        logger.info("the front end at %s has ended, and so do the stages of this host", endpoint)
    finally:
        connection.close()


def _relay_address(endpoint: Endpoint) -> str:
    """Where the relays of this host listen: as the environment says, or at the interface towards the front end."""
    if "VLLM_OMNI_RELAY_HOST" in os.environ:
        return str(envs.VLLM_OMNI_RELAY_HOST)
    try:
        return endpoint.own_address()
    except OSError as exc:
        raise ConfigError(f"--join {endpoint}: {exc}") from exc


def _remove_leftovers() -> None:
    """Remove what killed hosts have left here: Ray kills an actor together with what would remove it."""
    leftovers, _ = find_leftovers(Path(envs.VLLM_OMNI_RUNTIME_DIR), time.time())
    for one in leftovers:
        if remove_leftover(one, time.time()):
            logger.info("removed %s, which a killed server had left", one.path)


@contextlib.contextmanager
def _run_directory() -> Iterator[RunDirectory]:
    directory = RunDirectory()
    try:
        yield directory
    finally:
        directory.announce_end()
        directory.kill_starting()
        directory.remove()


def _join_again(connection: HostConnection, request: msg.Join, endpoint: Endpoint) -> msg.Joined:
    """Join again after the connection was lost. Engines continue meanwhile, and what they send is not heard.

    Raises:
        FrontEndLost: it cannot be reached for ``VLLM_OMNI_ORPHAN_S``.
        ConfigError: another deployment is there, or another host has taken this one's place.
    """
    orphan_s = envs.VLLM_OMNI_ORPHAN_S
    logger.error("the front end at %s is lost; this host joins it again, or ends after %g s", endpoint, orphan_s)
    try:
        return connection.join(request, orphan_s)
    except FrontEndLost as exc:
        raise FrontEndLost(
            f"the front end at {endpoint} was not reached for {orphan_s:g} s (VLLM_OMNI_ORPHAN_S): "
            "the engines of this host were ended"
        ) from exc


class _Host:
    """The engines of this host."""

    def __init__(
        self,
        connection: HostConnection,
        run_directory: RunDirectory,
        model: str,
        pipeline: type | None,
        address: str,
        secret_file: str,
    ) -> None:
        self._connection, self._run_directory = connection, run_directory
        self._model, self._pipeline = model, pipeline
        self._address, self._secret_file = address, secret_file
        self._engines: dict[str, HostedEngine] = {}
        self._controllers: HostControllers | None = None  # of some of these engines
        self._joined: msg.Joined | None = None

    def prepare(self, joined: msg.Joined) -> None:
        """Make the engines of a connection, not started; those of an earlier one for the same deployment stay.

        Raises:
            ConfigError: the deployment does not fit this host.
        """
        if self._joined is None or joined != replace(self._joined, session=joined.session):
            self._end_engines()
            first, later = self._make_engines(joined)
            made = [*first, *later]
            memory = memory_sections(first)
            for one in later:  # what is free at its start
                memory |= {name: replace(section, division=name) for name, section in memory_sections([one]).items()}
            self._engines = {
                one.name: HostedEngine(
                    one,
                    self._connection,
                    self._run_directory,
                    num_here=len(made),
                    memory=memory.get(one.name),
                    address=self._address,
                    secret_file=self._secret_file,
                    controllers=self._controllers if self._controllers and self._controllers.serves(one) else None,
                )
                for one in made
            }
            self._joined = joined
        logger.info("joined the front end, for %s", ", ".join(self._engines))

    def _make_engines(self, joined: msg.Joined) -> tuple[list[StageEngine], list[StageEngine]]:
        """The engines with which the front end starts, and those that it may start later."""
        whole = unpack_config(joined.config, self._model, self._pipeline)
        config = place_here(on_host(whole, joined.engines), has_parts=True)
        orchestrator = Orchestrator(config)
        first: list[StageEngine] = []
        later: list[StageEngine] = []
        try:
            for stage in config.stages:
                several = list_instances(stage)
                for number, name in enumerate(stage.part_names):
                    if name in joined.engines:
                        made = first if stage.nodes > 1 or number < stage.num_started else later
                        engine = orchestrator.maker.make_engine(stage, several[number] if several else None)
                        engine.name = name  # that of this host's part, if it spans several
                        made.append(engine)
            hosts = orchestrator.controllers_on_hosts(whole)
            if joined.host in hosts.values():
                self._controllers = HostControllers(
                    joined.host,
                    hosts,
                    orchestrator.plans,
                    orchestrator.specs,
                    {engine.name: engine for engine in (*first, *later)},
                    self._connection,
                    self._secret_file,
                )
        finally:
            orchestrator.shutdown()
        return first, later

    def serve(self) -> bool:
        """Do what the front end says until the connection ends; returns whether the front end has ended by itself."""
        while True:
            try:
                message = self._connection.inbox.get(timeout=1.0)  # with a deadline, signals are seen
            except queue.Empty:
                continue
            match message:
                case None:
                    return False
                case msg.Bye():
                    return True
                case msg.Start(_, name):
                    self._start(name, message)
                case msg.Kill(number):
                    for engine in self._engines.values():
                        engine.kill(number)

    def _start(self, name: str, start: msg.Start) -> None:
        try:
            self._engines[name].start(start)
        except (KeyError, OmniError) as exc:
            self._connection.send(msg.Ended(start.number, str(exc) or repr(exc)))

    def end(self) -> None:
        self._end_engines(is_last=True)

    def _end_engines(self, *, is_last: bool = False) -> None:
        for engine in self._engines.values():
            engine.end(is_last=is_last)
        if self._controllers is not None:
            self._controllers.close()
            self._controllers = None
