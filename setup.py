"""Builds the kernel libraries through build.sh and packs them into a platform wheel; the metadata stands in pyproject.toml."""

import os
import subprocess
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.build_py import build_py

try:
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:  # setuptools before 70.1
    from wheel.bdist_wheel import bdist_wheel

ROOT = Path(__file__).resolve().parent


class BuildWithLibrary(build_py):
    """Python modules, then the libraries next to them: the CPU's, and the twin's for MS_FLASHMLA_IMPL=twin and the profile command."""

    def run(self):
        super().run()
        package_dir = ROOT if self.editable_mode else Path(self.build_lib).resolve()
        environment = dict(os.environ, FLASHMLA_PYTHON=sys.executable,
                           FLASHMLA_LIB=str(package_dir / "ms_flashmla" / "lib" / "libms_flashmla.so"))
        for entry in ("lib", "twin"):
            subprocess.run(["bash", str(ROOT / "build.sh"), entry], check=True, env=environment)


class PlatformWheel(bdist_wheel):
    """The libraries are loaded with ctypes and by MindSpore, so any python 3 will do: only the platform counts."""

    def get_tag(self):
        return ("py3", "none", super().get_tag()[2])


class PlatformDistribution(Distribution):
    """Puts the package into the platform-specific site-packages though setuptools itself compiles nothing."""

    def has_ext_modules(self):
        return True


setup(cmdclass={"build_py": BuildWithLibrary, "bdist_wheel": PlatformWheel}, distclass=PlatformDistribution)
