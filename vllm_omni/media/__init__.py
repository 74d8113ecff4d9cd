"""Image, audio and video files: encode, decode, limits."""
