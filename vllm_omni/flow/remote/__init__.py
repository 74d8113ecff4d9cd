"""Beyond one process: controllers in other processes (not served yet), the form in which errors and payloads travel,
and registries of the replicas of several servers.
"""
