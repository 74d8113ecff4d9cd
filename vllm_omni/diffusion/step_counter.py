"""``StepCounter``: count a pipeline's denoise steps in the place of its progress bar."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any


class StepCounter:
    """Counts the steps of one request, and the network calls within each step."""

    def __init__(self) -> None:
        self.step_index = 0  # steps done
        self.num_steps = 0  # of the whole run; 0: not known yet
        self._calls: dict[str, int] = {}  # component -> calls since the last step

    def count_call(self, component: str) -> int:
        """Number of earlier calls of ``component`` in this step."""
        number = self._calls.get(component, 0)
        self._calls[component] = number + 1
        return number

    def progress_bar(self, iterable: Iterable[Any] | None = None, total: int | None = None) -> CountingBar:
        """Replace ``DiffusionPipeline.progress_bar``. A pipeline with several passes has a bar for each."""
        values = None if iterable is None else list(iterable)
        self.num_steps += (total or 0) if values is None else len(values)
        return CountingBar(self, values)

    def advance(self, count: int) -> None:
        self.step_index += count
        self._calls.clear()


class CountingBar:
    """The part of tqdm's interface that pipelines use."""

    def __init__(self, counter: StepCounter, values: list[Any] | None):
        self._counter = counter
        self._values = values or []

    def __enter__(self) -> CountingBar:
        return self

    def __exit__(self, *exc_info: object) -> None:
        pass

    def __iter__(self) -> Iterator[Any]:
        for value in self._values:
            yield value
            self._counter.advance(1)

    def __len__(self) -> int:
        return len(self._values)

    def update(self, n: int = 1) -> None:
        self._counter.advance(int(n))

    def close(self) -> None:
        pass

    def set_description(self, desc: str | None = None, refresh: bool = True) -> None:
        pass

    def set_postfix(self, *args: Any, **kwargs: Any) -> None:
        pass
