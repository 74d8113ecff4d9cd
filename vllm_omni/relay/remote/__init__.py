"""Backends that work between hosts: ``tcp``, ``nixl`` and ``mooncake``."""
