"""vLLM workers and runners that let a stage publish what it computed and consume what an earlier stage published."""
