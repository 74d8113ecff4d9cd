"""What travels between processes: outputs, step structs, timelines, latency targets."""
