"""HunyuanImage-3: one mixture of experts that reads, writes and denoises pictures."""
