"""Several front ends (``--api-server-count``): processes that serve HTTP, and share the engines of one."""
