"""Registering the plugin adds to vLLM and replaces nothing; in processes of their own, with an unchanged vLLM."""

import subprocess
import sys
import textwrap

import pytest


def run(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.long  # the quick one: tests/test_vllm_patches.py
def test_nothing_of_vllm_is_replaced() -> None:
    """Neither ``register``, twice, nor importing all packages of a server replaces a definition."""
    output = run("""
        import importlib, inspect, pkgutil, sys, types

        UPSTREAM = '''
            vllm.config vllm.engine.arg_utils vllm.model_executor.models.registry vllm.outputs vllm.plugins
            vllm.entrypoints.cli.main vllm.entrypoints.llm vllm.entrypoints.openai.api_server
            vllm.v1.core.kv_cache_manager vllm.v1.core.sched.async_scheduler vllm.v1.core.sched.scheduler
            vllm.v1.engine.async_llm vllm.v1.engine.core vllm.v1.engine.core_client vllm.v1.engine.output_processor
            vllm.v1.executor.multiproc_executor vllm.v1.executor.uniproc_executor
            vllm.v1.worker.cpu_model_runner vllm.v1.worker.cpu_worker vllm.v1.worker.gpu_model_runner
            vllm.v1.worker.gpu_worker vllm.v1.worker.worker_base
        '''.split()
        for name in UPSTREAM:
            importlib.import_module(name)

        def definitions():
            '''Every function and class of vLLM that is loaded, and what each class holds: where -> object.'''
            found = {}
            for name, module in list(sys.modules.items()):
                if name.partition('.')[0] != 'vllm':
                    continue
                for attribute, value in list(vars(module).items()):
                    if inspect.isclass(value) or inspect.isroutine(value):
                        found[name, attribute] = value
                    if inspect.isclass(value) and value.__module__.partition('.')[0] == 'vllm':
                        for member, held in list(vars(value).items()):
                            if isinstance(held, (types.FunctionType, classmethod, staticmethod, property)):
                                found[name, attribute, member] = held
            return found

        before = definitions()
        from vllm_omni.plugin import ARCHITECTURES, register
        from vllm.model_executor.models.registry import ModelRegistry
        register()
        models = dict(ModelRegistry.models)
        register()
        assert ModelRegistry.models == models and set(ARCHITECTURES) <= set(models)

        import vllm_omni
        for package in ('core', 'engine', 'entrypoints', 'model_executor', 'worker'):
            root = importlib.import_module('vllm_omni.' + package)
            for module in pkgutil.walk_packages(root.__path__, root.__name__ + '.'):
                if module.name != 'vllm_omni.engine.preloaded':  # the fork server's alone
                    importlib.import_module(module.name)
        after = definitions()
        changed = [where for where, value in before.items() if after.get(where) is not value]
        assert not changed, changed
        print(len(before))
    """)
    assert int(output.splitlines()[-1]) > 10_000


@pytest.fixture(scope="module")
def output() -> list[str]:
    """Output of a process that vLLM forked for another engine, then the log of the process that registers."""
    return run("""
        import logging, multiprocessing, os, threading
        os.environ['VLLM_LOGGING_STREAM'] = 'ext://sys.stdout'
        from vllm.config.logging import LoggingConfig
        from vllm.logger import configure_logging
        from vllm_omni.plugin import register

        def main():
            register()
            print([thread.name for thread in threading.enumerate()])
            print(logging.getLogger('vllm.v1.engine.core').handlers)

        context = multiprocessing.get_context('fork')  # a script given by -c cannot be spawned
        child = context.Process(target=main)
        child.start()
        child.join()
        assert child.exitcode == 0

        register()
        configure_logging(LoggingConfig(log_level='INFO'))
        logger = logging.getLogger('vllm_omni.engine.stage')
        logger.info('stage %s: starting', 'thinker')
        logger.debug('not shown')
        configure_logging(LoggingConfig(log_level='WARNING'))
        logger.info('not shown')
    """).splitlines()


def test_a_process_of_another_engine_is_unaffected(output: list[str]) -> None:
    """It has no thread and no log handler of ours."""
    place = output.index("['MainThread']")
    assert output[place + 1] == "[]"


def test_our_log_follows_that_of_vllm(output: list[str]) -> None:
    (line,) = [line for line in output if "shown" in line or "stage" in line]
    assert "INFO" in line
    assert line.endswith("stage thinker: starting")
