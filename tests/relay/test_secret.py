"""What the secret of a deployment on several hosts protects, on real sockets."""

import os
import socket
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest
import torch

from tests.relay.io import await_io_thread
from tests.strangers import count_descriptors, resident_bytes, strangers, wait_for
from vllm_omni.errors import ConfigError, RelayError
from vllm_omni.relay.remote import wire
from vllm_omni.relay.remote.newcomers import MAX_NEWCOMERS
from vllm_omni.relay.remote.tcp import TcpRelay
from vllm_omni.relay.secret import MIN_BYTES, Secret
from vllm_omni.relay.select import make_relay

TENSOR = torch.arange(1 << 18)
TIMEOUT_S = 20.0
MAX_GROWTH = 64 << 20


@pytest.fixture
def secret() -> Secret:
    return Secret(b"1" * MIN_BYTES)


@pytest.fixture
def producer(secret: Secret) -> Iterator[TcpRelay]:
    relay = TcpRelay(4 << 20, secret=secret)
    yield relay
    relay.close()
    relay.check_integrity()


def write(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def test_relays_with_one_secret_exchange_tensors(producer: TcpRelay) -> None:
    with closing(TcpRelay(0, secret=Secret(b"1" * MIN_BYTES))) as consumer:
        ref = producer.put_nowait("request", TENSOR)
        assert torch.equal(consumer.get_blocking(ref, TIMEOUT_S), TENSOR)
        consumer.release(ref)


@pytest.mark.parametrize("other", [Secret(b"2" * MIN_BYTES), None], ids=["another secret", "no secret"])
def test_a_relay_without_the_secret_reads_nothing(producer: TcpRelay, other: Secret | None) -> None:
    ref = producer.put_nowait("request", TENSOR)
    with closing(TcpRelay(0, secret=other)) as consumer, pytest.raises(RelayError):
        consumer.get_blocking(ref, TIMEOUT_S)
    assert producer.statistics().num_bytes_leased
    producer.abort("request")


def test_a_relay_with_a_secret_reads_from_none_without(secret: Secret) -> None:
    with closing(TcpRelay(4 << 20)) as open_to_all, closing(TcpRelay(0, secret=secret)) as consumer:
        ref = open_to_all.put_nowait("request", TENSOR)
        with pytest.raises(RelayError):
            consumer.get_blocking(ref, TIMEOUT_S)


def test_random_bytes_at_a_port_change_nothing(producer: TcpRelay, secret: Secret) -> None:
    ref = producer.put_nowait("request", TENSOR)
    host, port = producer.address.removeprefix("tcp://").split(":")
    for size in (1, 64, 100_000):
        # The listener ends the connection when it likes.
        with socket.create_connection((host, int(port)), TIMEOUT_S) as stranger, suppress(OSError):
            stranger.sendall(os.urandom(size))
            stranger.shutdown(socket.SHUT_WR)
            while stranger.recv(4096):
                pass
    await_io_thread()
    with closing(TcpRelay(0, secret=secret)) as consumer:
        assert torch.equal(consumer.get_blocking(ref, TIMEOUT_S), TENSOR)
        consumer.release(ref)


def test_ten_thousand_half_open_connections_change_nothing(monkeypatch: pytest.MonkeyPatch, secret: Secret) -> None:
    """And ten thousand more in the place of those that are ended; not by the deadline of their handshakes."""
    monkeypatch.setattr(wire, "CONNECT_MS", 600_000)
    with closing(TcpRelay(4 << 20, secret=secret)) as producer, closing(TcpRelay(0, secret=secret)) as consumer:
        host, port = producer.address.removeprefix("tcp://").split(":")

        def pull(consumer: TcpRelay) -> None:
            ref = producer.put_nowait("request", TENSOR)
            assert torch.equal(consumer.get_blocking(ref, TIMEOUT_S), TENSOR)
            consumer.release(ref)

        pull(consumer)
        num_descriptors, num_bytes = count_descriptors(), resident_bytes()
        with strangers(host, int(port), at_once=10_000, total=20_000) as crowd:
            while crowd.is_making():
                pull(consumer)
            with closing(TcpRelay(0, secret=secret)) as other:
                pull(other)
            wait_for(lambda: count_descriptors() < num_descriptors + MAX_NEWCOMERS + 64)
            assert crowd.process.poll() is None
            assert resident_bytes() - num_bytes < MAX_GROWTH


def test_a_relay_is_made_with_the_secret_of_a_file(tmp_path: Path, producer: TcpRelay) -> None:
    file = write(tmp_path / "token", "1" * MIN_BYTES + "\n")
    ref = producer.put_nowait("request", TENSOR)
    with closing(make_relay("tcp", 0, secret_file=str(file))) as consumer:
        assert torch.equal(consumer.get_blocking(ref, TIMEOUT_S), TENSOR)
        consumer.release(ref)


@pytest.mark.parametrize(
    ("text", "mode", "said"),
    [
        ("1" * 31, 0o600, "it has 31 bytes, not 32 to 4096"),
        ("1" * 64, 0o640, "other users can read it: chmod 600"),
        (None, 0, "No such file or directory"),
    ],
    ids=["short", "readable", "missing"],
)
def test_a_wrong_token_file_is_rejected(tmp_path: Path, text: str | None, mode: int, said: str) -> None:
    file = tmp_path / "token"
    if text is not None:
        write(file, text, mode)
    with pytest.raises(ConfigError, match=said):
        Secret.read(file)
