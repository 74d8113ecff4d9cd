"""The HTTP server: vLLM's own, with the routes that answer in other modalities in the place of vLLM's."""
