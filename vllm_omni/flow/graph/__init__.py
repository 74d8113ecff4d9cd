"""The language of pipelines: a declared graph (``dsl``) is checked and compiled (``parser``) to tables (``plan``)."""
