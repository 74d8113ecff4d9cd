"""Beyond one process: roles in other processes, several instances of a role, and the registry of instances.

Not yet served: a server uses ``registry.memory`` and the policies of ``replicas`` among instances of its first stage.
"""
