"""The directory of several processes and hosts, in Redis 6 or later (extra ``redis``).

``scripts.py`` has the data model.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, Protocol, cast

from vllm_omni.errors import ConfigError, MissingDependency, Unavailable, how_to_install
from vllm_omni.kv.pool.directory.base import (
    MAX_CHAIN_PAGES,
    MAX_MATCH_PAGES,
    NO_MATCH,
    SWEEP_PAGES,
    Directory,
    Match,
    Member,
    Outcome,
    Page,
    Reason,
    Statistics,
    check_name,
    check_seconds,
)
from vllm_omni.kv.pool.directory.breaker import Breaker, BreakerStatistics
from vllm_omni.kv.pool.directory.layout import Layout
from vllm_omni.kv.pool.directory.listener import Listener
from vllm_omni.kv.pool.directory.records import (
    CHUNK_PAGES,
    REPLICA_BYTES,
    chunks,
    cut,
    pack_claim,
    pack_claimed,
    pack_epoch,
    pack_page,
    pack_versions,
    read_claims,
    read_deadline,
    read_epoch,
    read_match,
    read_write,
)
from vllm_omni.kv.pool.directory.scripts import REDIS_CLOCK, Script, make_scripts
from vllm_omni.kv.pool.directory.subscription import Subscription
from vllm_omni.names import hide_password

try:
    from redis import ConnectionPool
    from redis.backoff import NoBackoff
    from redis.exceptions import NoScriptError, RedisError, ResponseError
    from redis.retry import Retry
except ImportError as exc:
    raise MissingDependency(f"a directory in Redis needs redis; {how_to_install('redis')} ({exc})") from exc

logger = logging.getLogger(__name__)

TIMEOUT_S = 0.05
CLOCK_DRIFT = 1.1  # by which a lease may last longer here than in Redis
SCAN_COUNT = 1000  # of the entries that one command of a tool reads
SILENCE_S = 2.0  # of a subscribed connection, after which it is asked whether it still works


class NoAnswer(Unavailable):
    """A command may have been sent, and may have been run, or may yet be."""


class Connection(Protocol):
    """What is used of redis-py's connections."""

    def send_command(self, *args: bytes | str | int) -> None: ...

    def read_response(self) -> Any: ...

    def can_read(self, timeout: float) -> bool: ...

    def disconnect(self) -> None: ...


class RedisServer:
    """The connection of a process to one Redis server, for the directories of all its layouts.

    Nothing is connected until the first call, so that a server which is away prevents no start. Every exchange is
    bounded by ``timeout_s``, a new connection by ``TIMEOUT_S`` at least, and none is repeated. After the first one
    without an answer all calls raise ``Unavailable`` at once, until a thread, which runs only then, has reached the
    server again. An answer that is an error (no memory, read-only, records of others) costs no time, and fails its own
    call alone.

    Threads take turns with a few connections of redis-py, below its client, whose retries, pool and instrumentation
    take longer than an exchange does.

    Args:
        url: a URL of redis-py: ``redis://host:port/0``, ``unix:///path``.

    Raises:
        ConfigError: not a URL of Redis.
    """

    def __init__(self, url: str, *, timeout_s: float = TIMEOUT_S, clock: Callable[[], float] = time.monotonic):
        self.where = hide_password(url)
        self.clock = clock
        connect_s = max(timeout_s, TIMEOUT_S)  # with TLS, that takes longer than an exchange
        options: dict[str, Any] = {"socket_timeout": timeout_s, "socket_connect_timeout": connect_s, "protocol": 2}
        try:
            self._pool = ConnectionPool.from_url(url, retry=Retry(NoBackoff(), 0), **options)
        except ValueError as exc:
            raise ConfigError(f"{self.where!r} is no URL of Redis, such as redis://HOST:6379/0: {exc}") from exc
        self._idle: list[Connection] = []  # the last one used is taken first
        self._breaker = Breaker(clock)
        self._last_error = ""  # that was logged
        self._closing = threading.Event()
        self._prober: threading.Thread | None = None

    def run(self, script: Script, key: str, *args: bytes | str | int) -> Any:
        """Run a script, atomically, and return its answer.

        Raises:
            Unavailable: the server does not answer, or did not when it was last asked, or the script failed.
        """
        with self._call() as connection:
            try:
                return _exchange(connection, "EVALSHA", script.sha, 1, key, *args)
            except NoScriptError:
                return _exchange(connection, "EVAL", script.text, 1, key, *args)

    def command(self, *args: bytes | str | int) -> Any:
        """Run a command, for tools. Raises ``Unavailable``, too."""
        with self._call() as connection:
            return _exchange(connection, *args)

    def scan_names(self, pattern: str) -> set[bytes]:
        """Return the names of all keys that match."""
        cursor, found = b"0", set[bytes]()
        while True:
            cursor, names = self.command("SCAN", cursor, "MATCH", pattern, "COUNT", SCAN_COUNT)
            found.update(names)
            if cursor == b"0":
                return found

    def scan_hash(self, key: bytes) -> dict[bytes, bytes]:
        """Return a whole hash, read in steps."""
        cursor, found = b"0", dict[bytes, bytes]()
        while True:
            cursor, pairs = self.command("HSCAN", key, cursor, "COUNT", SCAN_COUNT)
            found.update(zip(pairs[::2], pairs[1::2], strict=True))
            if cursor == b"0":
                return found

    def listen(self, channel: str) -> Feed:
        """Return a subscription to a channel; it connects when it is read."""
        return Feed(self._connect(), channel)

    @property
    def is_away(self) -> bool:
        """Whether it did not answer, and has not been reached since."""
        return self._breaker.is_open

    def statistics(self) -> BreakerStatistics:
        return self._breaker.statistics()

    def close(self) -> None:
        self._closing.set()
        if self._prober is not None:
            self._prober.join()
        while self._idle:
            self._idle.pop().disconnect()

    def _connect(self) -> Connection:
        """Return a connection, which connects when it is used."""
        return cast("Connection", self._pool.make_connection())

    @contextlib.contextmanager
    def _call(self) -> Iterator[Connection]:
        """A connection, unless the breaker is open; a failure of it opens the breaker."""
        if self._breaker.is_open:
            raise Unavailable(f"Redis at {self.where} did not answer, and is not asked until it does")
        try:
            with self._connection() as connection:
                yield connection
        except ResponseError as exc:
            if str(exc) != self._last_error:
                self._last_error = str(exc)
                logger.warning("The page directory at %s answers with an error: %s", self.where, exc)
            raise Unavailable(f"Redis at {self.where} answers with an error: {exc}") from exc
        except (RedisError, OSError) as exc:
            self._fail(exc)
            raise NoAnswer(f"Redis at {self.where} does not answer: {exc}") from exc
        self._breaker.succeed()

    @contextlib.contextmanager
    def _connection(self) -> Iterator[Connection]:
        try:
            connection = self._idle.pop()
        except IndexError:
            connection = self._connect()
        try:
            yield connection
        except BaseException:
            connection.disconnect()  # an answer may still be on its way
            raise
        finally:
            self._idle.append(connection)

    def _fail(self, cause: Exception) -> None:
        if self._breaker.fail() and not self._closing.is_set():
            logger.warning("The page directory at %s is not used until it answers: %s", self.where, cause)
            self._prober = threading.Thread(target=self._probe, name="pool-directory-probe", daemon=True)
            self._prober.start()

    def _probe(self) -> None:
        while not self._closing.wait(self._breaker.seconds_until_probe()):
            for connection in self._idle:
                connection.disconnect()  # to the server as it was
            try:
                with self._connection() as connection:
                    _exchange(connection, "PING")
            except (RedisError, OSError):
                self._breaker.probe_failed()
            else:
                self._breaker.probe_succeeded()
                logger.info("The page directory at %s answers again.", self.where)
                return


class Feed:
    """The messages of one channel, for a thread of its own."""

    def __init__(self, connection: Connection, channel: str):
        self._connection = connection
        self._channel = channel

    def read(self) -> Iterator[bytes | None]:
        """Yield messages; first, and after a silence, None: the connection works. Blocks.

        Raises:
            Unavailable: the connection has ended; to be called again, later.
        """
        try:
            self._connection.send_command("SUBSCRIBE", self._channel)
            while True:
                if not self._connection.can_read(timeout=SILENCE_S):
                    self._connection.send_command("PING")
                    if not self._connection.can_read(timeout=SILENCE_S):
                        raise TimeoutError("it is silent")
                kind, *_, data = self._connection.read_response()
                yield data if kind == b"message" else None
        except (RedisError, OSError, ValueError) as exc:  # the last: it was closed meanwhile
            self._connection.disconnect()
            raise Unavailable(f"no messages from Redis: {exc}") from exc

    def close(self) -> None:
        """End the connection, which wakes its reader."""
        self._connection.disconnect()


class RedisDirectory(Directory):
    """See ``Directory``. Each call is one script, or one for every ``CHUNK_PAGES`` pages.

    When Redis does not answer, releases are dropped: their claims expire. When it has lost its data, as after a
    restart, every member has lost its lease: ``renew`` returns False, and ``Membership`` joins again.

    A command without an answer may be run later, even after commands that were sent later on other connections. For
    most this is harmless; but a late ``publish`` would announce a place that has been reused meanwhile. Hence a member
    whose publication had no answer can change nothing until it has joined again: commands of its earlier epoch are
    ignored from then on.

    Args:
        server: may be shared with directories of other layouts.
        prefix: of all keys in Redis.
        clock_script: see ``scripts.make_scripts``.
    """

    def __init__(
        self, server: RedisServer, layout: Layout, *, prefix: str = "vllm_omni:pool:", clock_script: str = REDIS_CLOCK
    ):
        layout.check()
        self.layout = layout
        self._server = server
        self._prefix = f"{prefix}{{{layout.id}}}:"
        self._scripts = make_scripts(clock_script)
        self._lapses_at: dict[int, float] = {}  # epoch -> when its lease has certainly ended, by the clock here
        self._in_doubt: set[int] = set()  # epochs of members one of whose publications had no answer
        self._listener: Listener | None = None
        self._lock = threading.Lock()

    @property
    def is_available(self) -> bool:
        return not self._server.is_away

    # --- members

    def join(self, node: str, lease_s: float) -> Member | None:
        check_name(node)
        try:
            epoch = self._run("join", node, _milliseconds(lease_s))
        except Unavailable:
            return None
        member = Member(node, read_epoch(epoch), lease_s)
        self._lapses_at[member.epoch] = self._server.clock() + lease_s * CLOCK_DRIFT
        return member

    def renew(self, member: Member) -> bool:
        if member.epoch in self._in_doubt:
            return False
        try:
            is_renewed = self._run("renew", pack_epoch(member), _milliseconds(member.lease_s)) is not None
        except NoAnswer:  # Redis may renew it late, but not after it has ended
            if member.epoch in self._lapses_at:
                self._lapses_at[member.epoch] += member.lease_s * CLOCK_DRIFT
            return False
        except Unavailable:
            return False
        if is_renewed:
            self._lapses_at[member.epoch] = self._server.clock() + member.lease_s * CLOCK_DRIFT
        return is_renewed

    def leave(self, member: Member) -> None:
        self._lapses_at.pop(member.epoch, None)
        self._in_doubt.discard(member.epoch)
        with contextlib.suppress(Unavailable):
            self._run("leave", pack_epoch(member), member.node)

    def sweep(self, limit: int = SWEEP_PAGES) -> int:
        try:
            return int(self._run("sweep", min(limit, MAX_MATCH_PAGES)))
        except Unavailable:
            return 0

    # --- pages

    def begin_write(self, member: Member, keys: Sequence[bytes], write_s: float) -> Outcome:
        return self._change("begin_write", member, keys, _milliseconds(write_s))

    def abandon(self, member: Member, keys: Sequence[bytes]) -> None:
        self._check_keys(keys)
        with contextlib.suppress(Unavailable):
            for part in chunks(keys):
                self._run("abandon", pack_epoch(member), b"".join(part))

    def publish(self, member: Member, pages: Sequence[Page]) -> Outcome:
        self._check_pages(pages)
        return self._change("publish", member, [page.key for page in pages], records=[pack_page(one) for one in pages])

    def match_and_claim(self, member: Member, keys: Sequence[bytes], claim_s: float) -> Match:
        keys = keys[:MAX_MATCH_PAGES]
        self._check_keys(keys)
        args = pack_epoch(member), b"".join(keys), _milliseconds(claim_s), self.layout.full_mask
        try:
            answer = self._run("match", *args) if keys else b""
            return read_match(answer, keys) if answer else NO_MATCH
        except Unavailable:
            return NO_MATCH

    def verify(self, match: Match) -> list[bool]:
        try:
            stands = b"".join(self._run("verify", b"".join(part)) for part in chunks(pack_versions(match)))
        except Unavailable:
            return [False] * len(match.pages)
        each = iter(stands)
        return [b"0"[0] not in list(islice(each, len(replicas))) for _, replicas in match.pages]

    def release(self, member: Member, match: Match) -> None:
        with contextlib.suppress(Unavailable):
            for part in chunks(pack_claimed(match)):
                self._run("release", pack_claim(member, match), b"".join(part))

    def evict(self, member: Member, keys: Sequence[bytes], *, discard: bool = False) -> Outcome:
        return self._change("evict", member, keys, int(discard))

    # --- sessions and events

    def append_chain(self, session: str, keys: Sequence[bytes], *, keep_s: float, at: int | None = None) -> int:
        self._check_chain(session, keys, at)
        keep_ms, at = _milliseconds(keep_s), -1 if at is None else at
        joined = b"".join(keys[:MAX_CHAIN_PAGES])
        try:
            return int(self._run("append_chain", session, joined, keep_ms, at, MAX_CHAIN_PAGES))
        except Unavailable:
            return 0

    def chain(self, session: str) -> tuple[bytes, ...]:
        check_name(session)
        keys: list[bytes] = []
        size = self.layout.key_bytes
        with contextlib.suppress(Unavailable):
            while True:
                part = self._run("chain", session, len(keys), CHUNK_PAGES, self.layout.full_mask)
                keys += cut(part, size)
                if len(part) < CHUNK_PAGES * size:
                    break
        return tuple(keys)

    def subscribe(self, session: str | None = None, max_events: int = 1024) -> Subscription:
        """Events arrive by a thread with a connection of its own, which starts with the first subscription."""
        with self._lock:
            if self._listener is None:
                self._listener = Listener(self._server.listen(self._prefix + "e"), self.layout.key_bytes)
            return self._listener.subscribe(session, max_events)

    # --- tools

    def statistics(self) -> Statistics:
        epochs, now_ms = self._run("members")
        live = set(epochs)
        holders = [cut(replicas, REPLICA_BYTES) for replicas in self._scan_hash(b"p").values()]
        num_held = [sum(one[:8] in live for one in replicas) for replicas in holders]
        claimed = [data for epoch in epochs for data in self._scan_hash(b"c" + epoch).values()]
        claims = [one for data in claimed for one in read_claims(data)]
        writes = [read_write(data) for data in self._scan_hash(b"w").values()]
        chains = [self._server.command("GETRANGE", name, 0, 7) for name in self._server.scan_names(self._prefix + "s*")]
        return Statistics(
            num_members=len(live),
            num_pages=sum(map(bool, num_held)),
            num_replicas=sum(num_held),
            num_stale=sum(map(len, holders)) - sum(num_held),
            num_claims=sum(reader in live and deadline > now_ms for reader, deadline in claims),
            num_writes=sum(writer in live and deadline > now_ms for writer, deadline in writes),
            num_chains=sum(read_deadline(header) > now_ms for header in chains if header),
        )

    def check_integrity(self) -> None:
        """Each step is atomic, so that it may be called while nodes are at work."""
        wrong: list[bytes] = []
        for part in (*chunks(list(self._scan_hash(b"p"))), ()):
            wrong += self._run("check_pages", b"".join(part))
        for epoch in self._run("members")[0]:
            listed = {*self._server.command("SMEMBERS", self._prefix.encode() + b"h" + epoch)}
            listed.update(self._scan_hash(b"c" + epoch))
            for part in chunks(list(listed)):
                wrong += self._run("check_member", epoch, b"".join(part))
        assert not wrong, f"{len(wrong)} things are wrong, such as {wrong[0]!r}"

    def close(self) -> None:
        """End subscriptions; the server, which others may use, stays open."""
        if self._listener is not None:
            self._listener.close()

    # --- parts

    def _run(self, name: str, *args: bytes | str | int) -> Any:
        return self._server.run(self._scripts[name], self._prefix, self.layout.key_bytes, *args)

    def _scan_hash(self, name: bytes) -> dict[bytes, bytes]:
        return self._server.scan_hash(self._prefix.encode() + name)

    def _change(
        self, name: str, member: Member, keys: Sequence[bytes], *args: int, records: Sequence[bytes] = ()
    ) -> Outcome:
        """Run a script that answers for each key with 0 or the reason why nothing was done."""
        self._check_keys(keys)
        reasons = b""
        for first in range(0, len(keys), CHUNK_PAGES):
            part = slice(first, first + CHUNK_PAGES)
            joined = [b"".join(one[part]) for one in (keys, records) if one]
            reasons += self._try_change(name, member, *joined, *args) or bytes(
                [Reason.LOST if self._has_lapsed(member) else Reason.UNAVAILABLE] * len(keys[part])
            )
        done = tuple(key for key, reason in zip(keys, reasons, strict=True) if not reason)
        return Outcome(done, {key: Reason(reason) for key, reason in zip(keys, reasons, strict=True) if reason})

    def _try_change(self, name: str, member: Member, *args: bytes | int) -> bytes | None:
        if member.epoch in self._in_doubt:
            return None
        try:
            reasons: bytes | None = self._run(name, pack_epoch(member), *args)
        except NoAnswer:
            if name == "publish":
                self._in_doubt.add(member.epoch)
            return None
        except Unavailable:
            return None
        if reasons is None:
            self._lapses_at[member.epoch] = -math.inf
        return reasons

    def _has_lapsed(self, member: Member) -> bool:
        return self._server.clock() > self._lapses_at.get(member.epoch, math.inf)


def _exchange(connection: Connection, *args: bytes | str | int) -> Any:
    connection.send_command(*args)
    return connection.read_response()


def _milliseconds(seconds: float) -> int:
    return math.ceil(check_seconds(seconds) * 1000)
