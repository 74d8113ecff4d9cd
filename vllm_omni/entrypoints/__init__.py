"""The interfaces for users: ``OmniLLM``, ``AsyncOmni``, the command line, the HTTP server."""
