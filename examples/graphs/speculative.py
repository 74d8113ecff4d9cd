"""First of two: a small and a large model answer; the judge takes the first answer, the other model is cancelled."""

import asyncio

from standins import FunctionNode, show

from vllm_omni.flow import Field, Graph, Role, interface


class Model(Role):
    answer = interface([["prompt"]], {"text": Field("text")})


class Judge(Role):
    take = interface([["fast"], ["good"]], {"text": Field("text")}, first_wins=True)


graph = Graph("speculative")
prompt = graph.placeholder("prompt")
judge = graph.role(Judge, "judge")
answer = judge.take(fast=graph.role(Model, "small").answer(prompt=prompt).text)
judge.take(good=graph.role(Model, "large").answer(prompt=prompt).text)
graph.output(text=answer.text)


class SlowNode:
    """Takes an hour, unless it is cancelled."""

    def __init__(self):
        self.state = "idle"

    async def forward(self, activation):
        self.state = "running"
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            self.state = "cancelled"
            raise
        yield


def make_nodes():
    return {
        "small": FunctionNode("text", lambda prompt: f"small says {prompt}", delay=2),
        "large": SlowNode(),
        "judge": FunctionNode("text", lambda text: text),
    }


INPUTS = {"prompt": "hello"}

if __name__ == "__main__":
    show(graph, make_nodes(), INPUTS, ["text"])
