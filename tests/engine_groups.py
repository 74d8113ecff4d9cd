"""Which tests share engines, and in which order a run takes them.

A group is the unit of work of ``pytest -n N --dist loadgroup``: one worker runs all of its tests, one after the other,
so that their engines are started once. Groups that start engines come first, the longest at the front; every other test
file is a group of its own and fills the workers at the end. "pipelines" starts no engine: its files use the same tiny
pipelines, which a worker builds, loads and checks once.

Engines of each group in ``make test``, and the processes that they need beside the test's own. Any three neighbouring
rows run at the same time, and must fit into 24 GB together; a row needs 8 GB at most.

| group | engines | processes |
|---|---|---|
| lifecycle | a program with one stage | 2 |
| omni | Qwen2.5-Omni (``OmniLLM``), beside transformers' model of it | 3 |
| qwen3-omni | the same of Qwen3-Omni | 3 |
| server | ``vllm serve`` with Qwen2.5-Omni | 4 |
| instances | LLaVA as six instances | 6 |
| images | Qwen-Image, Stable Audio, image to video, edits of images | 1, 2, 1, 1 |
| language | LLaVA in the test's process, once for each kind of budgets; one in a process of its own | 1 |
| migration | LLaVA that prefills, and one that encodes, each beside a LLaVA in the test's process | 1; 1 |
| graphs | two LLaVAs and Stable Diffusion 3 in one pipeline | 3 |
| graphs here | engine cores as threads of the test's process (`tests/engine_threads.py`) | 0 |
| image server | ``vllm serve`` with Qwen-Image | 2 |
| commands | ``vllm-omni generate`` with image to video | 1 |

The groups before "omni" are mostly long tests, with two to six processes for each. Those of "long, without engines" are
early because of their length: one that is the last lets the other worker wait. The page's tests are among those of
"hosts" because a browser ends its connections when this machine gets or loses a network (ERR_NETWORK_CHANGED).
"""

GROUPS: dict[str, tuple[str, ...]] = {
    "documented commands": ("tests/entrypoints/test_documented_commands.py",),
    "examples": ("tests/entrypoints/test_examples.py",),
    "transports": ("tests/e2e/test_transports.py", "tests/e2e/test_tensor_parallel.py"),
    "epd models": ("tests/e2e/test_epd_models.py",),
    "epd transports": ("tests/e2e/test_epd_transports.py", "tests/e2e/test_epd_ranks.py"),
    "pages": ("tests/e2e/test_kv_tensor_parallel.py", "tests/e2e/test_nixl_connector.py"),
    "replicas": ("tests/e2e/test_replicas.py", "tests/e2e/graphs/test_replicas.py"),
    "scaling": ("tests/e2e/test_scaling.py",),
    "replica engines": ("tests/e2e/test_replica_engines.py", "tests/e2e/graphs/test_policies.py"),
    "hosts": (
        "tests/hosts/test_stages.py",
        "tests/hosts/test_replicas.py",
        "tests/hosts/test_placed_replicas.py",
        "tests/hosts/test_chaos.py",
        "tests/hosts/test_nodes.py",
        "tests/hosts/test_front_end.py",
        "tests/hosts/test_silence.py",
        "tests/hosts/test_epd.py",
        "tests/hosts/test_graphs.py",
        "tests/hosts/test_pool.py",
        "tests/hosts/test_transports.py",
        "tests/hosts/test_ray.py",
        "tests/e2e/test_page.py",
    ),
    "shared weights": ("tests/e2e/test_shared_weights.py",),
    "served graphs": ("tests/e2e/test_served_graphs.py", "tests/e2e/test_given_pipeline.py"),
    "readers": ("tests/e2e/graphs/test_readers.py",),
    "videos": ("tests/e2e/test_video_jobs.py",),
    "lifecycle": ("tests/e2e/test_lifecycle.py",),
    # long, without engines
    "golden": ("tests/reference/test_qwen3_tts.py",),
    "storm": ("tests/kv/pool/directory/test_storm.py", "tests/kv/pool/directory/test_random_operations.py"),
    "fuzz": ("tests/flow/test_fuzz.py",),
    "store": ("tests/kv/pool/test_store.py",),
    "aborts": ("tests/relay/test_aborts.py",),
    "omni": (
        "tests/entrypoints/test_omni_llm.py",
        "tests/e2e/test_qwen2_5_omni_parity.py",
        "tests/entrypoints/test_async_omni.py",  # last: it kills a stage
    ),
    "qwen3-omni": ("tests/e2e/test_qwen3_omni_parity.py",),
    "server": (
        "tests/entrypoints/openai/test_server.py",
        "tests/entrypoints/openai/test_oversized_media.py",
        "tests/entrypoints/openai/test_speech.py",
        "tests/entrypoints/openai/test_documented_requests.py",
        "tests/entrypoints/openai/test_stage_death.py",  # last: it stops the server
    ),
    "instances": ("tests/e2e/test_epd_instances.py", "tests/e2e/test_epd_recovery.py"),
    "images": (
        "tests/e2e/test_diffusion.py",
        "tests/entrypoints/test_omni_llm_diffusion.py",
        "tests/entrypoints/openai/test_media_routes.py",
    ),
    "language": ("tests/e2e/test_epd.py", "tests/e2e/test_latency.py"),
    "migration": ("tests/e2e/test_kv_migration.py", "tests/e2e/test_ec_migration.py"),
    "graphs": ("tests/e2e/graphs/test_graphs.py",),
    "graphs here": (
        "tests/e2e/graphs/test_random_graphs.py",
        "tests/e2e/graphs/test_paper_graphs.py",
        "tests/e2e/graphs/test_speech_and_image.py",
    ),
    "image server": ("tests/e2e/test_images.py",),
    "commands": ("tests/entrypoints/cli/test_generate.py", "tests/entrypoints/cli/test_generate_media.py"),
    "pipelines": (
        "tests/diffusion/test_parity.py",
        "tests/diffusion/test_stepper.py",
        "tests/diffusion/test_merge_check.py",
        "tests/diffusion/test_limits.py",
        "tests/diffusion/test_request.py",
        "tests/diffusion/test_outputs.py",
        "tests/diffusion/test_suspended_call.py",
        "tests/testing/test_diffusion.py",
    ),
}

_PLACES = {
    file: (number, place, name)
    for number, (name, files) in enumerate(GROUPS.items())
    for place, file in enumerate(files)
}


def place_of(nodeid: str) -> tuple[int, int, str]:
    """Where a test stands in a run: the number of its group, its file's place in the group, and the group's name."""
    file = nodeid.partition("::")[0]
    return _PLACES.get(file, (len(GROUPS), 0, file))
