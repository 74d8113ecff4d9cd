"""``AdmissionGate``: holds new requests before the first stage while generation is paused."""

from __future__ import annotations

import asyncio


class AdmissionGate:
    """Admits requests while it is open; a request that waits can be cancelled."""

    def __init__(self) -> None:
        self.admitted: set[str] = set()  # ids of requests that have entered and not left
        self._opened = asyncio.Event()
        self._opened.set()
        self._emptied = asyncio.Event()
        self._emptied.set()

    @property
    def is_open(self) -> bool:
        return self._opened.is_set()

    def close(self) -> None:
        self._opened.clear()

    def open(self) -> None:
        self._opened.set()

    async def enter(self, request_id: str) -> None:
        """Wait until the gate is open. A request that was admitted before passes at once."""
        if request_id not in self.admitted:
            while not self._opened.is_set():  # it may be closed again before this request resumes
                await self._opened.wait()
            self.admitted.add(request_id)
            self._emptied.clear()

    def leave(self, request_id: str) -> None:
        """Do nothing for a request that was not admitted."""
        self.admitted.discard(request_id)
        if not self.admitted:
            self._emptied.set()

    async def wait_until_empty(self) -> None:
        await self._emptied.wait()
