"""The costs of a machine that the schedulers' tests think up."""

from dataclasses import astuple

from vllm_omni.epd.cost import CostModel

# About what a tiny LLaVA-1.5 takes on two cores of a CPU.
TRUE = CostModel(
    step_s=2.7e-3,
    decode_s=8e-5,
    decode_context_s=4e-7,
    prefill_token_s=6.5e-5,
    prefill_pair_s=1e-7,
    encode_s=1e-3,
    embed_s=1.4e-4,
)


def scaled(factor: float) -> CostModel:
    """The costs of a machine on which everything takes ``factor`` times as long."""
    return CostModel(*(factor * seconds for seconds in astuple(TRUE)))
