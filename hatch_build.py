"""Compiles the CPU kernels when the package is built or installed; without a compiler, the package has none."""

import os
import runpy
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

# Set to 1 to build without kernels.
SKIP = "INLINEVIT_SKIP_KERNELS"


class KernelsBuildHook(BuildHookInterface):
    """Adds the library of inlinevit.kernels to wheels and editable installs."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile the library next to its sources, unless it is newer than they are."""
        if self.target_name != "wheel" or os.environ.get(SKIP) == "1":
            return
        kernels = runpy.run_path(str(Path(self.root, "src", "inlinevit", "kernels", "build.py")))
        library: Path = kernels["LIBRARY"]
        try:
            if not kernels["is_current"]():
                kernels["build"]()
        except kernels["BuildError"] as error:
            self.app.display_warning(f"inlinevit is installed without native CPU kernels: {error}")
            return
        # It is ignored by git, hence not part of the package unless it is named here.
        build_data["artifacts"].append(str(library.relative_to(self.root)))
        build_data["pure_python"] = False
        # It depends on the platform, but on no version of Python.
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{platform}"
