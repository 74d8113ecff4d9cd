"""Language models of vLLM, with images or without."""
