"""The runtime: calls of a compiled graph, with one controller per node."""
