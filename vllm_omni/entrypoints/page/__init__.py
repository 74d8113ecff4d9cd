"""The page ``/omni``: its files, and what it shows of a server (``entrypoints/openai/page.py`` has the routes)."""
