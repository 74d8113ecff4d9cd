"""``vllm-omni undrain ENGINE``."""

from vllm_omni.entrypoints.cli.drain import undrain as undrain
