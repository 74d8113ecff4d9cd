"""Graph nodes bound to vLLM engines, and the orchestrator that runs requests through them."""
