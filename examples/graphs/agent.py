"""An agent: the thinker calls tools, possibly several at once, reads their results, and thinks again.

An iteration starts when every called tool has answered. The loop ends when the thinker calls none, at the latest after
`max_iterations`.
"""

from standins import FunctionNode, show

from vllm_omni.flow import Emission, Field, Graph, Role, interface


class Thinker(Role):
    think = interface(
        [["question"], ["results"]],
        {"calls": Field("tool_call", streamed=True), "answer": Field("text", streamed=True)},
        max_iterations=3,
    )


class Tool(Role):
    run = interface([["call"]], {"result": Field("text")}, inputs={"call": Field("tool_call")})


graph = Graph("agent")
thinker = graph.role(Thinker, "thinker")
thought = thinker.think(question=graph.placeholder("question"))
thinker.think(results=graph.role(Tool, "tool").run(call=thought.calls).result)
graph.output(answer=thought.answer)


class ThinkerNode:
    """Calls a tool for each word, then for each result, and then answers."""

    async def forward(self, activation):
        (name,) = activation.inputs
        texts = [chunk.payload async for chunk in activation.inputs[name]]
        words = texts[0].split() if activation.iteration == 0 else texts
        yield Emission("answer", f"round {activation.iteration}: {' '.join(words)}")
        if activation.iteration < 2:
            for word in words:
                yield Emission("calls", word)


def make_nodes():
    return {"thinker": ThinkerNode(), "tool": FunctionNode("result", lambda call: f"[{call}]", delay=3)}


INPUTS = {"question": "who knows"}

if __name__ == "__main__":
    show(graph, make_nodes(), INPUTS, ["answer"])
