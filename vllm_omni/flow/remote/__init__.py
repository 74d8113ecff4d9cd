"""Beyond one process: roles in other processes, replicas of a role, and registries of replicas.

Not yet served: a server runs all nodes in its front end, and balances the instances and replicas of its stages by
``epd/router.py``. Tests and ``benchmarks/relay.py`` use this package.
"""
