"""An example of a package that adds a pipeline; docs/adding_a_model.md goes through it."""
