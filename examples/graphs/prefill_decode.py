"""Prefill and decode by two engines: decode starts with the first token and the KV cache handle, and streams the rest.

Both parts of the join come from one activation of `prefill`; the tokens of both engines are one output.
"""

from standins import show

from vllm_omni.flow import Emission, Field, Graph, Role, interface


class Prefill(Role):
    run = interface([["prompt"]], {"first_token": Field("text"), "kv_handle": Field("handle")})


class Decode(Role):
    run = interface([["first_token", "kv_handle"]], {"tokens": Field("text", streamed=True)})


graph = Graph("prefill_decode")
prefilled = graph.role(Prefill, "prefill").run(prompt=graph.placeholder("prompt"))
decoded = graph.role(Decode, "decode").run(first_token=prefilled.first_token, kv_handle=prefilled.kv_handle)
graph.output(tokens=decoded.tokens)


class PrefillNode:
    async def forward(self, activation):
        async for prompt in activation.inputs["prompt"]:
            words = prompt.payload.split()
            yield [Emission("first_token", words[0]), Emission("kv_handle", {"blocks": words})]


class DecodeNode:
    """Repeats the prompt, one word at a time."""

    async def forward(self, activation):
        async for first_token in activation.inputs["first_token"]:
            yield Emission("tokens", first_token.payload)
        async for handle in activation.inputs["kv_handle"]:
            for word in handle.payload["blocks"][1:]:
                yield Emission("tokens", word)


def make_nodes():
    return {"prefill": PrefillNode(), "decode": DecodeNode()}


INPUTS = {"prompt": "so it goes"}

if __name__ == "__main__":
    show(graph, make_nodes(), INPUTS, ["tokens"])
