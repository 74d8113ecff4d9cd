"""vLLM schedulers for what is not a language model."""
