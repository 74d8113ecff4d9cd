"""Beyond one process: controllers in other processes, the form in which errors and payloads travel, and registries of
the replicas of several servers.
"""
