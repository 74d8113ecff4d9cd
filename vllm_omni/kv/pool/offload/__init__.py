"""The pool's parts in vLLM's offloading connector: spec, worker, tier and eviction policy. All else is free of vLLM."""
