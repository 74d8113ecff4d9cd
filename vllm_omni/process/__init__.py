"""The life of a server's processes: their private directory, and what ends them with the server."""
