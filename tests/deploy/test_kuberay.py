"""The manifest for KubeRay: against its schema, and its parts against each other and against the code."""

import copy
import os
import shlex
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import vllm.envs
import yaml

from tests.documents import ROOT
from vllm_omni import envs
from vllm_omni.entrypoints.cli.serve import parse_serve_args
from vllm_omni.testing import qwen2_5_omni as tiny

CLUSTER, SERVICE = yaml.safe_load_all((ROOT / "examples" / "kuberay" / "qwen2_5_omni.yaml").read_text())
SCHEMA = yaml.safe_load((Path(__file__).parent / "kuberay" / "schema.yaml").read_text())
HEAD = CLUSTER["spec"]["headGroupSpec"]
GROUPS = {group["groupName"]: group for group in CLUSTER["spec"]["workerGroupSpecs"]}
SHUTDOWN_S = 30  # for what follows the requests: engines, hosts, Ray


def container_of(group: dict[str, Any]) -> dict[str, Any]:
    (container,) = group["template"]["spec"]["containers"]
    assert isinstance(container, dict)
    return container


FRONT = container_of(GROUPS["front"])
CONTAINERS = [container_of(group) for group in (HEAD, *GROUPS.values())]


def command_of_the_server() -> list[str]:
    """The words that follow ``exec``."""
    (script,) = FRONT["args"]
    (line,) = [line for line in script.replace("\\\n", " ").splitlines() if line.startswith("exec ")]
    return shlex.split(line)[1:]


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint by the real one's name."""
    tiny.build(tmp_path / "Qwen" / "Qwen2.5-Omni-7B")
    monkeypatch.chdir(tmp_path)


def test_the_manifest_follows_the_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    for document in (CLUSTER, SERVICE):
        jsonschema.validate(document, SCHEMA)


@pytest.mark.parametrize(
    ("path", "key", "value"),
    [
        ((), "kind", "RayClusters"),
        (("spec",), "headGroup", {}),
        (("spec", "headGroupSpec", "rayStartParams"), "num-cpus", 0),
        (("spec", "workerGroupSpecs", 0), "replica", 1),
        (("spec", "workerGroupSpecs", 0, "template", "spec"), "terminationGracePeriod", 1),
        (("spec", "workerGroupSpecs", 0, "template", "spec", "containers", 0), "readyProbe", {}),
        (("spec", "workerGroupSpecs", 0, "template", "spec", "containers", 0, "resources", "limits"), "memory", "96GB"),
        (("spec", "workerGroupSpecs", 0, "template", "spec", "containers", 0, "env", 0), "value", 1),
        (("spec", "workerGroupSpecs", 0, "template", "spec", "volumes", 0, "emptyDir"), "size", "1Gi"),
    ],
    ids=str,
)
def test_the_schema_rejects_what_the_cluster_would(path: tuple[str | int, ...], key: str, value: object) -> None:
    wrong: Any = copy.deepcopy(CLUSTER)
    inner = wrong
    for step in path:
        inner = inner[step]
    inner[key] = value
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(wrong, SCHEMA)


def test_its_command_is_accepted_and_places_engines_by_ray(checkout: None) -> None:
    vllm, serve, *words = command_of_the_server()
    assert (vllm, serve) == ("vllm", "serve")
    assert "--omni" in words
    config = parse_serve_args([word for word in words if word != "--omni"]).load_config()
    assert config.worker_backend == "ray"
    assert config.stage("talker").layer == 0


def test_the_front_end_reaches_the_head(checkout: None) -> None:
    """KubeRay gives the head a Service, by the name of the cluster."""
    args = parse_serve_args([word for word in command_of_the_server()[2:] if word != "--omni"]).args
    (port,) = [port["containerPort"] for port in container_of(HEAD)["ports"] if port["name"] == "gcs-server"]
    assert args.ray_address == f"{CLUSTER['metadata']['name']}-head-svc:{port}"


def test_the_service_and_the_probes_reach_the_servers_port(checkout: None) -> None:
    args = parse_serve_args([word for word in command_of_the_server()[2:] if word != "--omni"]).args
    ports = {port["name"]: port["containerPort"] for port in FRONT["ports"]}
    (service_port,) = SERVICE["spec"]["ports"]
    assert ports[service_port["targetPort"]] == service_port["port"] == args.port
    probes = [FRONT[name]["httpGet"] for name in ("startupProbe", "readinessProbe", "livenessProbe")]
    assert [(probe["path"], ports[probe["port"]]) for probe in probes] == [
        ("/health", args.port),
        ("/ready", args.port),
        ("/health", args.port),
    ]


def test_the_service_selects_the_one_pod_of_the_front_end() -> None:
    assert SERVICE["spec"]["selector"] == {"ray.io/cluster": CLUSTER["metadata"]["name"], "ray.io/group": "front"}
    assert {GROUPS["front"][key] for key in ("replicas", "minReplicas", "maxReplicas")} == {1}


def test_the_server_is_the_containers_process_beside_rays() -> None:
    assert GROUPS["front"]["template"]["metadata"]["annotations"] == {"ray.io/overwrite-container-cmd": "true"}
    (script,) = FRONT["args"]
    assert '/bin/bash -c "$KUBERAY_GEN_RAY_START_CMD" &' in script.splitlines()


def test_its_environment_variables_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {entry["name"]: entry for container in CONTAINERS for entry in container.get("env", ())}
    ours = {name for name in given if name.startswith("VLLM_OMNI_")}
    assert ours <= set(envs.VARIABLES)
    assert {name for name in given if name.startswith("VLLM_")} - ours <= set(vllm.envs.environment_variables)
    for name in ours:
        monkeypatch.setenv(name, given[name]["value"])
        getattr(envs, name)


def test_the_pod_gives_requests_and_engines_their_time(checkout: None, monkeypatch: pytest.MonkeyPatch) -> None:
    args = parse_serve_args([word for word in command_of_the_server()[2:] if word != "--omni"]).args
    grace_s = GROUPS["front"]["template"]["spec"]["terminationGracePeriodSeconds"]
    sleep, before_s = FRONT["lifecycle"]["preStop"]["exec"]["command"]
    assert sleep == "sleep"
    assert grace_s >= int(before_s) + args.shutdown_timeout + SHUTDOWN_S
    (ready,) = [entry["value"] for entry in FRONT["env"] if entry["name"] == "VLLM_OMNI_STAGE_READY_TIMEOUT_S"]
    start, live = FRONT["startupProbe"], FRONT["livenessProbe"]
    assert start["periodSeconds"] * start["failureThreshold"] > float(ready)
    monkeypatch.delenv("VLLM_OMNI_STAGE_RESTART_WINDOW_S", raising=False)
    assert live["periodSeconds"] * live["failureThreshold"] > envs.VLLM_OMNI_STAGE_RESTART_WINDOW_S


@pytest.mark.parametrize("group", GROUPS)
def test_each_pod_with_engines_has_a_card_shared_memory_and_the_models(group: str) -> None:
    container, spec = container_of(GROUPS[group]), GROUPS[group]["template"]["spec"]
    assert int(container["resources"]["limits"]["nvidia.com/gpu"]) == 1
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
    assert mounts["/dev/shm"]["emptyDir"]["medium"] == "Memory"
    env = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert os.fspath(env["HF_HOME"]) in mounts


def test_all_pods_have_one_image_and_a_ray_that_the_package_takes() -> None:
    assert len({container["image"] for container in CONTAINERS}) == 1
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (ray,) = extras["ray"]
    least = ray.removeprefix("ray>=").split(".")
    assert [int(part) for part in CLUSTER["spec"]["rayVersion"].split(".")[:2]] >= [int(part) for part in least]
