"""Reference implementations the package is compared with."""
