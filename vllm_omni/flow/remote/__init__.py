"""Beyond one process: roles in other processes, replicas of a role, and registries of replicas.

Not yet served: a server runs all nodes in its front end, and the instances of its first stage have a router of their
own (``epd/router.py``). Tests and ``benchmarks/relay.py`` use this package.
"""
