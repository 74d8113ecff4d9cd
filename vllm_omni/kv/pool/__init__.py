"""The pool of pages that any stage, replica and host reuses.

From: Omni-Flow section 4.1, Global Params Pool.
"""
