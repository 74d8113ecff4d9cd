"""BAGEL: one language model that reads, writes and denoises pictures."""
