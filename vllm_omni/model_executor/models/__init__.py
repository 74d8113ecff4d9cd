"""One package per model family."""
