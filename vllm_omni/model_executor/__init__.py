"""Model code that runs inside engines."""
