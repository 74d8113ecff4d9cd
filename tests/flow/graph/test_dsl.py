import copy

import pytest

from tests.flow.builders import Talker, Thinker
from vllm_omni.errors import GraphError
from vllm_omni.flow import Field, GlobalParameters, Graph, Role, interface


def make_thinker():
    graph = Graph("g")
    return graph, graph.placeholder("prompt"), graph.role(Thinker, "thinker")


def test_unknown_input_names_node_and_nearest():
    _, prompt, thinker = make_thinker()
    with pytest.raises(GraphError, match=r"'thinker.generate' has no input 'promt'; did you mean 'prompt'\?"):
        thinker.generate(promt=prompt)


def test_unknown_output_field_names_node_and_suggestion():
    _, prompt, thinker = make_thinker()
    reply = thinker.generate(prompt=prompt)
    with pytest.raises(
        GraphError, match=r"'thinker.generate' has no output 'row'; did you mean 'rows'\? valid: text, rows"
    ):
        _ = reply.row


def test_source_that_is_not_a_field_is_rejected():
    graph, prompt, thinker = make_thinker()
    reply = thinker.generate(prompt=prompt)
    with pytest.raises(GraphError, match=r"'talker.generate', input 'rows': needs .* got NodeCall"):
        graph.role(Talker, "talker").generate(rows=reply)


def test_source_of_another_graph_is_rejected():
    _, prompt, _ = make_thinker()
    _, _, stranger = make_thinker()
    with pytest.raises(GraphError, match=r"entry.prompt belongs to graph 'g'"):
        stranger.generate(prompt=prompt)


def test_output_of_another_graph_is_rejected():
    _, prompt, thinker = make_thinker()
    with pytest.raises(GraphError, match=r"output 'text': thinker.generate.text belongs to graph 'g', not to 'other'"):
        Graph("other").output(text=thinker.generate(prompt=prompt).text)


def test_placeholder_declared_twice_is_rejected():
    graph, _, _ = make_thinker()
    with pytest.raises(GraphError, match="placeholder 'prompt' is declared twice"):
        graph.placeholder("prompt")


def test_role_declared_twice_is_rejected():
    graph, _, _ = make_thinker()
    with pytest.raises(GraphError, match="role 'thinker' is declared twice"):
        graph.role(Thinker, "thinker")


@pytest.mark.parametrize("name", ["", "a.b"])
def test_role_name_with_a_dot_or_empty_is_rejected(name):
    with pytest.raises(GraphError, match="without a dot"):
        Graph("g").role(Thinker, name)


def test_output_declared_twice_is_rejected():
    graph, prompt, thinker = make_thinker()
    reply = thinker.generate(prompt=prompt)
    graph.output(text=reply.text)
    with pytest.raises(GraphError, match=r"output 'text' is declared twice; it is thinker.generate.text"):
        graph.output(text=reply.rows)


@pytest.mark.parametrize("inputs_or", [[], [[]], ["prompt"]])
def test_inputs_or_must_be_groups_of_names(inputs_or):
    with pytest.raises(GraphError, match=r"write \[\['prompt'\]\]"):
        interface(inputs_or=inputs_or, outputs={"y": Field("text")})


def test_interface_without_outputs_is_rejected():
    with pytest.raises(GraphError, match="declares no outputs"):
        interface(inputs_or=[["x"]], outputs={})


def test_type_of_an_input_that_does_not_exist_is_rejected():
    with pytest.raises(GraphError, match="no input 'rowz'; did you mean 'rows'"):
        interface(inputs_or=[["rows"]], inputs={"rowz": Field("text")}, outputs={"y": Field("text")})


@pytest.mark.parametrize("name", ["_private", "two words"])
def test_field_name_must_be_readable_as_an_attribute(name):
    with pytest.raises(GraphError, match=name):
        interface(inputs_or=[["x"]], outputs={name: Field("text")})


def test_transfer_function_that_does_not_yield_is_rejected():
    async def not_a_generator(chunks, call):
        return chunks

    _, prompt, _ = make_thinker()
    with pytest.raises(GraphError, match=r"entry.prompt.via\(.*not_a_generator\): needs an async generator function"):
        prompt.via(not_a_generator)


def test_second_transfer_function_on_an_edge_is_rejected():
    async def identity(chunks, call):
        async for chunk in chunks:
            yield chunk

    _, prompt, _ = make_thinker()
    with pytest.raises(GraphError, match="has a transfer function already"):
        prompt.via(identity).via(identity)


def test_via_leaves_the_field_itself_without_transfer():
    async def identity(chunks, call):
        async for chunk in chunks:
            yield chunk

    _, prompt, _ = make_thinker()
    assert prompt.via(identity).transfer is identity
    assert prompt.transfer is None


def test_two_roles_of_one_class_are_two_nodes():
    graph, prompt, thinker = make_thinker()
    other = graph.role(Thinker, "other")
    assert str(thinker.generate(prompt=prompt).text) == "thinker.generate.text"
    assert str(other.generate(prompt=prompt).text) == "other.generate.text"


def test_interface_is_readable_on_the_class():
    assert Thinker.generate.inputs_or == (("prompt",),)


def test_node_call_survives_being_copied():
    _, prompt, thinker = make_thinker()
    assert str(copy.copy(thinker.generate(prompt=prompt)).text) == "thinker.generate.text"


def test_role_has_as_many_interfaces_as_it_declares():
    class Vae(Role):
        encode = interface(inputs_or=[["pixels"]], outputs={"latents": Field("latents")})
        decode = interface(inputs_or=[["latents"]], outputs={"pixels": Field("image")})

    graph = Graph("g")
    vae = graph.role(Vae, "vae")
    latents = vae.encode(pixels=graph.placeholder("pixels")).latents
    assert str(vae.decode(latents=latents).pixels) == "vae.decode.pixels"


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        ({"first_wins": True}, r"first_wins chooses among groups, but there is one"),
        ({"max_iterations": -1}, r"max_iterations = -1 must be at least 0"),
        ({"activate_by_count": {"x": 0}}, r"activate_by_count\['x'\] = 0 must be at least 1"),
        ({"activate_by_count": {"x": "y"}}, r"activate_by_count\['x'\] = 'y' must be a number, or an input"),
        ({"activate_by_count": {"x": "x"}}, r"activate_by_count\['x'\] = 'x' must be a number, or an input"),
    ],
)
def test_declaration_that_contradicts_itself_is_rejected(arguments, complaint):
    with pytest.raises(GraphError, match=complaint):
        interface(inputs_or=[["x", "n"]], outputs={"y": Field("text")}, **arguments)


def test_counted_node_has_no_group_that_could_win():
    with pytest.raises(GraphError, match="activate_by_count gathers all groups, so no group can win"):
        interface([["x"], ["z"]], {"y": Field("text")}, activate_by_count={"x": 2}, first_wins=True)


def make_graph_with_output():
    graph = Graph("g")
    graph.output(y=graph.role(Thinker, "thinker").generate(prompt=graph.placeholder("x")).text)
    return graph


@pytest.mark.parametrize(
    "outputs, until, complaint",
    [
        ([], (), "asks for no output"),
        (["z"], (), "no output 'z'; valid: y"),
        (["y"], ["z"], "waits for 'z', which is not among its outputs"),
    ],
)
def test_graph_call_that_cannot_be_made_is_rejected(outputs, until, complaint):
    with pytest.raises(GraphError, match=f"graph 'g', graph call 'call': {complaint}"):
        make_graph_with_output().graph_call("call", outputs, until=until)


def test_graph_call_declared_twice_is_rejected():
    graph = make_graph_with_output()
    graph.graph_call("call", ["y"])
    with pytest.raises(GraphError, match="graph call 'call': is declared twice"):
        graph.graph_call("call", ["y"])


def test_two_different_parameters_of_one_name_are_rejected():
    graph = Graph("g")
    graph.role(Thinker, "one", parameters=[GlobalParameters("cache", list)])
    with pytest.raises(GraphError, match="two different parameters named 'cache'"):
        graph.role(Thinker, "two", parameters=[GlobalParameters("cache", dict)])


def test_role_ref_to_a_role_of_the_same_graph_is_rejected():
    graph = Graph("g")
    role = graph.role(Thinker, "thinker")
    with pytest.raises(GraphError, match="role 'thinker' is its own; use it without role_ref"):
        graph.role_ref(role)
