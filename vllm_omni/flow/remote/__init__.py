"""Beyond one process: roles in other processes, replicas of a role, and registries of replicas.

Not yet served: a server runs all nodes in its front end; tests and ``benchmarks/relay.py`` use this package.
"""
