"""The Python face of the kernels: one function per kernel, its plain-torch twin beside it."""
