"""Language models that vLLM serves, with images or without."""
