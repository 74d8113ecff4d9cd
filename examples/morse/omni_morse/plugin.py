"""What vLLM runs in each of its processes."""


def register() -> None:
    """Tell vLLM of our model class; may be called more than once."""
    from vllm.model_executor.models.registry import ModelRegistry

    if "Morse" not in ModelRegistry.get_supported_archs():
        ModelRegistry.register_model("Morse", "omni_morse.model:Morse")
