"""What users touch: ``OmniLLM``, ``AsyncOmni``, the command line, the HTTP server."""
