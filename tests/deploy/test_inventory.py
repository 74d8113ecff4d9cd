"""Hosts of a file, and this one."""

from pathlib import Path

import pytest

from vllm_omni.deploy.inventory import read_inventory, this_host
from vllm_omni.errors import ConfigError

GIB = 1 << 30


def read(tmp_path: Path, text: str) -> list[str]:
    """Each host as "name address: sizes in GiB"."""
    file = tmp_path / "inventory.yaml"
    file.write_text(text)
    return [
        f"{one.name} {one.address}: {', '.join(f'{device.name} {device.total // GIB}' for device in one.devices)}"
        for one in read_inventory(file)
    ]


def test_hosts_have_cards_or_memory(tmp_path: Path) -> None:
    text = """
    hosts:
      box-a: {devices: 2, memory: 80GiB, address: 10.0.0.1}
      box-b: {devices: [24GiB, 80GiB]}
      box-c: {memory: 64GiB}
    """
    assert read(tmp_path, text) == [
        "box-a 10.0.0.1: cuda:0 80, cuda:1 80",
        "box-b : cuda:0 24, cuda:1 80",
        "box-c : cpu 64",
    ]
    assert [one.has_cards for one in read_inventory(tmp_path / "inventory.yaml")] == [True, True, False]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"inventory.yaml: hosts: there are none: give for example {box-a: {devices: 8"),
        ("host: {}", r"inventory.yaml:1: host: unknown key 'host': did you mean 'hosts'"),
        ("[]", r"inventory.yaml: must be a mapping with the keys hosts"),
        ("hosts: 3", r"inventory.yaml:1: hosts = 3: must be a mapping"),
        ("hosts:\n  a: {}", r"inventory.yaml:2: hosts.a: give memory, and devices if it has cards"),
        ("hosts:\n  a: {memory: 3 TiB}", r"inventory.yaml:2: hosts.a.memory: '3 TiB' is not a size: give for example"),
        ("hosts:\n  a: {memory: }", r"inventory.yaml:2: hosts.a.memory: has no value"),
        ("hosts:\n  a: {devices: 0, memory: 1GiB}", r"hosts.a.devices = 0: must be a number from 1 to 64, or a list"),
        ("hosts:\n  a: {devices: true, memory: 1GiB}", r"hosts.a.devices = True: must be a number from 1 to 64"),
        ("hosts:\n  a: {devices: 2}", r"hosts.a.devices: give the memory of a device as well"),
        ("hosts:\n  a: {devices: [1GiB], memory: 1GiB}", r"hosts.a.devices: a list has the memory of each device"),
        ("hosts:\n  a: {memory: 1GiB, gpus: 3}", r"hosts.a.gpus: unknown key 'gpus': valid: address, devices, memory"),
        ("hosts:\n  a: {memory: 1GiB, address: 10}", r"hosts.a.address = 10: must be text"),
        (
            "hosts:\n  a: {memory: 1GiB}\n  a: {memory: 1GiB}",
            r"inventory.yaml:3: hosts.a: given twice, first on line 2",
        ),
    ],
)
def test_what_is_wrong_is_named_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, text)


def test_a_file_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"inventory '.*none.yaml' cannot be read: No such file or directory"):
        read_inventory(tmp_path / "none.yaml")


def test_this_host_without_cards_is_its_memory() -> None:
    found = this_host()
    (device,) = found.devices
    assert (device.name, device.is_host, found.has_cards) == ("cpu", True, False)
    assert 0 < device.free < device.total
    (given,) = this_host(24 * GIB).devices
    assert (given.name, given.total, given.free) == ("cpu", 24 * GIB, 24 * GIB)


class Gpus:
    """Two of a host's GPUs are visible."""

    device_type = "cuda"

    @staticmethod
    def visible_device_id_to_physical_device_id(ordinal: int) -> int:
        return (3, 5)[ordinal]

    @staticmethod
    def get_device_total_memory(ordinal: int) -> int:
        return (80 * GIB, 24 * GIB)[ordinal]


def test_gpus_have_the_order_of_device_ids_and_their_numbers_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_omni.engine.memory.current_platform", Gpus)
    monkeypatch.setattr("torch.accelerator.device_count", lambda: 2)
    found = this_host(opens_devices=False)
    assert [(one.name, one.total, one.is_host) for one in found.devices] == [
        ("cuda:3", 80 * GIB, False),
        ("cuda:5", 24 * GIB, False),
    ]
    assert found.has_cards
