"""Files that outlive a request: uploaded voices, results that are fetched by URL, and videos made as jobs. No vLLM."""
