"""Names of media items in requests."""

import re

_COUNTER = re.compile(r"renderer\d+-mm-\d+-")


def is_counter(identifier: str) -> bool:
    """Whether vLLM has named an item by a counter, as it does where it hashes no content.

    Another engine gives the same name to another item, so such a name must not leave its engine.
    """
    return _COUNTER.match(identifier) is not None
