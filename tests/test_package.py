"""build.sh and the wheel: usage, the list of sources, and a package that runs away from its source tree."""
import ast
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def build(*arguments):
    environment = {**os.environ, "FLASHMLA_PYTHON": sys.executable}
    return subprocess.run(["bash", "build.sh", *arguments], cwd=ROOT, env=environment, capture_output=True, text=True)


def test_oldest_python_reads_every_file():
    """requires-python says 3.10: no newer syntax."""
    for path in [*(ROOT / "ms_flashmla").rglob("*.py"), ROOT / "setup.py", ROOT / "tiling" / "gen_machines.py"]:
        ast.parse(path.read_text(), feature_version=(3, 10))


def test_unknown_entry_prints_usage_and_exits_2():
    for arguments in ((), ("nonsense",)):
        done = build(*arguments)
        assert done.returncode == 2 and "usage:" in done.stderr and not done.stdout


def test_sources_are_those_on_disk():
    on_disk = [path for folder in ("op_proto", "tiling", "op_impl/cpu") for path in (ROOT / folder).glob("*.cc")]
    assert sorted(build("sources").stdout.split()) == sorted(str(path.relative_to(ROOT)) for path in on_disk)


def test_missing_compiler_is_named():
    environment = {**os.environ, "FLASHMLA_PYTHON": sys.executable, "CXX": "no-such-compiler"}
    done = subprocess.run(["bash", "build.sh", "lib"], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 1 and "no-such-compiler" in done.stderr


def test_wheel_runs_away_from_its_source_tree(tmp_path):
    wheels, site = tmp_path / "wheels", tmp_path / "site"
    done = subprocess.run([sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(wheels), str(ROOT)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    (wheel,) = wheels.iterdir()
    assert wheel.name.startswith("ms_flashmla-") and "-py3-none-linux_" in wheel.name
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    packed = {str(path.relative_to(site)) for path in site.rglob("*.py")}
    assert packed == {str(path.relative_to(ROOT)) for path in (ROOT / "ms_flashmla").rglob("*.py")}
    for path in site.rglob("*"):
        assert path.is_dir() or str(ROOT).encode() not in path.read_bytes(), f"{path.name} names the source tree"

    environment = {**os.environ, "PYTHONPATH": str(site)}
    def module(*arguments):
        return subprocess.run([sys.executable, "-m", "ms_flashmla", *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True)

    facts = json.loads(module("doctor", "--json").stdout)
    assert facts["library"] == str(site / "ms_flashmla" / "lib" / "libms_flashmla.so") and not facts["problems"]
    done = module("demo", "--json", "--checkpoint", str(ROOT / "tests" / "hf_cases" / "v2_lite"))
    assert done.returncode == 0 and json.loads(done.stdout)["passed"], done.stderr[-4000:]
    done = module("profile", "--heads", "4", "--head-dim", "32", "--latent", "64", "--rope-dim", "16", "--hidden", "128", "--seq", "256", "--json", "-")
    assert done.returncode == 0 and json.loads(done.stdout)["us"] > 0, done.stderr[-4000:]
    environment["MS_FLASHMLA_IMPL"] = "twin"
    assert json.loads(module("doctor", "--json").stdout)["library"] == str(site / "ms_flashmla" / "lib" / "libms_flashmla_twin.so")


@pytest.mark.parametrize("arguments", [["quickstart.py", str(ROOT / "tests" / "hf_cases" / "v3_yarn")], ["decoder_graph.py"]])
def test_examples_run(arguments, tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, str(ROOT / "examples" / arguments[0]), *arguments[1:]], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count("|y|") >= 3
