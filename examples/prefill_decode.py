"""Prefill and decode as two stages of a graph: the KV cache of the prompt travels from one engine to the other.

vllm serve MODEL --omni --pipeline examples/prefill_decode.py:PrefillDecode
python examples/prefill_decode.py MODEL "Hello, who are you?"

Any language model of vLLM whose prompts are texts. `--epd P:1,D:1` splits one stage in the same way, with any number of
instances, and for models that read images; a graph says which stage follows which, and what else reads the prompt.
"""

import sys

from vllm_omni import OmniLLM
from vllm_omni.flow import Field, Graph, Role, interface
from vllm_omni.model_executor.models.language.pipeline import LanguagePipeline
from vllm_omni.model_executor.pipeline import StageSpec
from vllm_omni.model_executor.transfers import pass_cache


class Prefill(Role):
    read = interface([["prompt"]], {"cache": Field("kv_cache")})


class Decode(Role):
    reply = interface([["cache"]], {"text": Field("text", streamed=True)})


class PrefillDecode(LanguagePipeline):
    deployment = {"stages": {"prefill": {"engine_type": "ar"}, "decode": {"engine_type": "ar"}}}

    def __init__(self, model, hf_config, revision=None):
        super().__init__(model, hf_config, revision)
        self.graph = Graph("prefill_decode")
        cache = self.graph.role(Prefill, "prefill").read(prompt=self.graph.placeholder("prompt")).cache
        self.graph.output(text=self.graph.role(Decode, "decode").reply(cache=cache.via(pass_cache)).text)
        self.stages = (
            StageSpec("prefill", "", "text", cache_fields=frozenset({"cache"})),
            StageSpec("decode", "", "text"),
        )


if __name__ == "__main__":
    with OmniLLM(sys.argv[1], pipeline=PrefillDecode) as omni:
        (output,) = omni.generate([sys.argv[2]], {"max_tokens": 64})
    print(output.outputs[0].text)
