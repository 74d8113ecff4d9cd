"""The backends that this machine can load, by what they promise. Importing this loads their libraries."""

from tests.contract.relays import BACKENDS

USABLE = [name for name, backend in BACKENDS.items() if backend.is_usable]
"""``test_relay.test_the_backend_can_be_loaded`` skips once for each of the others."""
LEASING = [name for name in USABLE if BACKENDS[name].leases]
CROSSING = [name for name in USABLE if BACKENDS[name].crosses]
STREAMING = [name for name in USABLE if BACKENDS[name].streams]
COPYING = [name for name in USABLE if BACKENDS[name].copies]
POOLED = [name for name in LEASING if BACKENDS[name].copies]
ONE_SIDED = [name for name in USABLE if name in ("nixl", "mooncake")]
