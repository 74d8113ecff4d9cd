"""``vllm-omni graph MODEL_OR_FILE``: print the graph of a model, and check it."""

import runpy
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from vllm_omni.compat import require_vllm
from vllm_omni.entrypoints.cli.parser import RejectingParser
from vllm_omni.errors import ConfigError, GraphError
from vllm_omni.flow import Graph, GraphParser, StaticPlan
from vllm_omni.flow.graph.parser import with_called
from vllm_omni.flow.graph.render import to_mermaid, to_svg, to_text

FORMATS = {"text": to_text, "mermaid": to_mermaid, "svg": to_svg}

DESCRIPTION = """Print the graph of a model, or each graph that a Python file defines, as text, Mermaid or SVG, with its
joins, loops and critical edges, after the checks of a start. Remarks of the checks follow the graph; an error names
node and field, and exits with 1. No stage is started."""


def graph(args: Sequence[str]) -> None:
    """Print graphs.

    Raises:
        ConfigError: there is no such model or file, or it has no graph.
        GraphError: a graph is wrong; the others have been printed.
    """
    parser = RejectingParser(prog="vllm-omni graph", description=DESCRIPTION)
    parser.add_argument("source", metavar="MODEL_OR_FILE", help="a checkpoint, or a Python file, which is run")
    parser.add_argument(
        "--deploy-config", metavar="FILE", help="check a model's graph with this deployment, as a start"
    )
    parser.add_argument("--pipeline", metavar="FILE.py:CLASS", help="a pipeline of your own for the model, as a start")
    parser.add_argument("--format", choices=FORMATS, default="text", help="%(choices)s (default: %(default)s)")
    parser.add_argument("--output", metavar="FILE", type=Path, help="output file (default: stdout)")
    options = parser.parse_args(args)
    plans: list[StaticPlan] = []
    errors: list[GraphError] = []
    for one in with_called(_read_graphs(options.source, options.deploy_config, options.pipeline)):
        try:
            plans.append(GraphParser(one).parse())
        except GraphError as exc:
            errors.append(exc)
    _write("\n".join(FORMATS[options.format](plan) for plan in plans), options.output)
    for error in errors[:-1]:
        print(f"vllm-omni: error: {error}", file=sys.stderr)
    if errors:
        raise errors[-1]


def _read_graphs(source: str, deploy_config: str | None, pipeline: str | None) -> list[Graph]:
    if not source.endswith(".py"):
        return _of_model(source, deploy_config, pipeline)
    if deploy_config is not None or pipeline is not None:
        flag = "--deploy-config" if pipeline is None else "--pipeline"
        raise ConfigError(f"{flag}: for a model; a file of graphs has no deployment")
    return _of_file(Path(source))


def _of_file(path: Path) -> list[Graph]:
    if not path.is_file():
        raise ConfigError(f"{path}: no such file")
    neighbours = str(path.parent.resolve())
    sys.path.insert(0, neighbours)  # as `python FILE` does
    try:
        names = runpy.run_path(str(path), run_name="__graph__")
    except GraphError:
        raise
    except Exception as exc:
        raise ConfigError(f"{path}: running it failed: {type(exc).__name__}: {exc}") from exc
    finally:
        if neighbours in sys.path:  # unless the file took it off
            sys.path.remove(neighbours)
    graphs = {id(value): value for value in names.values() if isinstance(value, Graph)}
    if not graphs:
        raise ConfigError(f"{path}: defines no Graph at its top level")
    return list(graphs.values())


def _of_model(model: str, deploy_config: str | None, pipeline: str | None) -> list[Graph]:
    """The graphs of a model; only those of other packages, and the checks of a deployment, need vLLM."""
    from vllm_omni.config import bundled_model_types, load_config, read_model_type

    if deploy_config is None and pipeline is None and (model_type := read_model_type(model)) in bundled_model_types():
        module = import_module(f"vllm_omni.model_executor.models.{model_type}.graph")
        return [module.graph_of(model)]
    require_vllm("vllm-omni graph MODEL")
    from vllm_omni.engine.orchestrator import Orchestrator

    made = Orchestrator(load_config(model, pipeline=pipeline, deploy_config=deploy_config)).pipeline
    return [made.graph, *made.further_graphs]


def _write(text: str, path: Path | None) -> None:
    if path is None:
        print(text, end="")
        return
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as exc:
        raise ConfigError(f"--output {path}: {exc.strerror}") from exc
