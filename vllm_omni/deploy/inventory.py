"""``read_inventory``: the hosts of a file, with their devices; ``this_host``: the one of this process."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

from vllm_omni.config.documents import Document, read_yaml_file
from vllm_omni.deploy.resources import Host
from vllm_omni.engine.memory import find_closed_device, find_device, visible_devices
from vllm_omni.errors import ConfigError
from vllm_omni.process.memory import Device, parse_bytes

HOST_KEYS = ("address", "devices", "memory")
MAX_DEVICES = 64  # of a host
EXAMPLE = "for example {box-a: {devices: 8, memory: 80GiB, address: 10.0.0.1}}"


def read_inventory(path: Path) -> list[Host]:
    """Read hosts from a YAML file: ``hosts:``, a mapping of names to their ``HOST_KEYS``.

    ``devices`` is a number of cards with ``memory`` each, or a list of their sizes; without it, the host has no cards,
    and ``memory`` is its own.

    Raises:
        ConfigError: with file and line.
    """
    file = read_yaml_file(path, "inventory", ("hosts",))
    file.reject_unknown_keys((), ("hosts",))
    hosts = [_read_host(file, name) for name in file.mapping("hosts")]
    if not hosts:
        raise ConfigError(f"{path}: hosts: there are none: give {EXAMPLE}")
    return hosts


def _read_host(file: Document, name: str) -> Host:
    at = ("hosts", name)
    file.reject_unknown_keys(at, HOST_KEYS)
    given = file.mapping(*at)
    for key in ("devices", "memory", "address"):
        if key in given and given[key] is None:
            raise ConfigError(f"{file.at((*at, key))}: has no value")
    address = given.get("address", "")
    if not isinstance(address, str):
        raise ConfigError(f"{file.at((*at, 'address'))} = {address!r}: must be text")
    devices, memory = given.get("devices"), given.get("memory")
    if devices is None:
        if memory is None:
            raise ConfigError(f"{file.at(at)}: give memory, and devices if it has cards: {EXAMPLE}")
        size = _size(file, (*at, "memory"), memory)
        return Host(name, (Device(name="cpu", total=size, free=size, is_host=True),), address, has_cards=False)
    sizes = _card_sizes(file, at, devices, memory)
    cards = (Device(name=f"cuda:{number}", total=size, free=size) for number, size in enumerate(sizes))
    return Host(name, tuple(cards), address)


def _card_sizes(file: Document, at: tuple[str, ...], devices: object, memory: object) -> list[int]:
    where = file.at((*at, "devices"))
    if isinstance(devices, list) and 0 < len(devices) <= MAX_DEVICES:
        if memory is not None:
            raise ConfigError(f"{where}: a list has the memory of each device: leave memory out, or give a number")
        return [_size(file, (*at, "devices"), size) for size in devices]
    if type(devices) is not int or not 1 <= devices <= MAX_DEVICES:
        raise ConfigError(f"{where} = {devices!r}: must be a number from 1 to {MAX_DEVICES}, or a list of sizes")
    if memory is None:
        raise ConfigError(f"{where}: give the memory of a device as well, for example memory: 80GiB")
    return [_size(file, (*at, "memory"), memory)] * devices


def _size(file: Document, at: tuple[str, ...], value: Any) -> int:
    try:
        return parse_bytes(str(value))
    except ValueError as exc:
        raise ConfigError(f"{file.at(at)}: {exc}") from None


def this_host(size: int | None = None, *, opens_devices: bool = True) -> Host:
    """The host of this process.

    Args:
        size: of each device, instead of what is found.
        opens_devices: read what is free; it takes some of the memory of each GPU until this process ends. Otherwise all
            of a device counts as free.
    """
    find = find_device if opens_devices else find_closed_device
    names = visible_devices()
    devices = (find(name) if size is None else Device(name=name, total=size, free=size) for name in names)
    return Host(socket.gethostname(), tuple(devices), "127.0.0.1", has_cards=names != ["cpu"])
