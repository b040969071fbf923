"""A Vulkan adapter in software, SwiftShader out of Debian's chromium-common, for machines without a GPU."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.processors.emulated import Apt, run

PACKAGES = ("chromium-common", "libvulkan1")
ICD = "usr/lib/chromium/vk_swiftshader_icd.json"


def environment(folder: Path) -> dict[str, str]:
    """Variables of a process in which WebGPU finds the adapter, which is unpacked into the folder where it is not yet."""
    root = folder / "adapter"
    if not (root / ICD).is_file():
        architecture = run("dpkg", ["dpkg", "--print-architecture"]).strip()
        apt = Apt(folder / "apt", architecture)
        apt("update")
        for package in apt.download(*PACKAGES):
            subprocess.run(["dpkg-deb", "--extract", str(package), str(root)], check=True)
    libraries = next(root.glob("usr/lib/*-linux-*/libvulkan.so.1")).parent
    path = os.pathsep.join(filter(None, (str(libraries), os.environ.get("LD_LIBRARY_PATH", ""))))
    return {"VK_ICD_FILENAMES": str(root / ICD), "LD_LIBRARY_PATH": path, "ORT_WEBGPU_EP_ALLOW_SOFTWARE_ADAPTER": "1"}
