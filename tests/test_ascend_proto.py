"""The Ascend package: its operator definition against MindSpore's registration, its staged sources, and what it says when it is not there."""
import os
import re
import subprocess

import pytest

from ms_flashmla import _lib, ops

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

# Stands in for CANN's header: records what the definition declares.
RECORDER = r"""
#pragma once
#include <iostream>
#include <string>
#include <vector>
namespace ge {
enum DataType { DT_FLOAT, DT_FLOAT16, DT_BF16, DT_INT32 };
enum Format { FORMAT_ND };
}
enum Option { OPTIONAL, REQUIRED };
struct OpParamDef {
  OpParamDef &ParamType(Option o) { std::cout << (o == REQUIRED ? " required" : " optional"); return *this; }
  OpParamDef &DataType(std::vector<ge::DataType> types) { for (auto t : types) std::cout << ' ' << t; return *this; }
  OpParamDef &Format(std::vector<ge::Format>) { return *this; }
  OpParamDef &UnknownShapeFormat(std::vector<ge::Format>) { return *this; }
  OpParamDef &AutoContiguous() { return *this; }
};
struct OpAttrDef {
  OpAttrDef &AttrType(Option o) { std::cout << (o == REQUIRED ? " required" : " optional"); return *this; }
  OpAttrDef &Int() { std::cout << " int"; return *this; }
  OpAttrDef &Float() { std::cout << " float"; return *this; }
};
struct OpAICoreConfig {
  OpAICoreConfig &DynamicCompileStaticFlag(bool) { return *this; }
  OpAICoreConfig &DynamicRankSupportFlag(bool) { return *this; }
  OpAICoreConfig &DynamicShapeSupportFlag(bool) { return *this; }
  OpAICoreConfig &NeedCheckSupportFlag(bool) { return *this; }
};
struct OpAICoreDef {
  OpAICoreDef &AddConfig(const char *soc, OpAICoreConfig &) { std::cout << "\nsoc " << soc; return *this; }
};
struct OpDef {
  OpParamDef param; OpAttrDef attr; OpAICoreDef core;
  explicit OpDef(const char *name) { std::cout << "op " << name; }
  OpParamDef &Input(const char *name) { std::cout << "\ninput " << name; return param; }
  OpParamDef &Output(const char *name) { std::cout << "\noutput " << name; return param; }
  OpAttrDef &Attr(const char *name) { std::cout << "\nattr " << name; return attr; }
  OpAICoreDef &AICore() { return core; }
};
#define OP_ADD(op) } int main() { ops::op def(#op); std::cout << '\n'; } namespace ops {
"""


@pytest.fixture(scope="module")
def definition(tmp_path_factory):
    folder = tmp_path_factory.mktemp("opdef")
    (folder / "register").mkdir()
    (folder / "register" / "op_def_registry.h").write_text(RECORDER)
    program = folder / "definition"
    subprocess.run([os.environ.get("CXX", "g++"), "-std=c++17", f"-I{folder}", f"-I{ROOT}", "-o", program,
                    os.path.join(ROOT, "op_impl", "ascendc", "op_host", "flash_mla_def.cpp")], check=True)
    return [line.split() for line in subprocess.run([program], check=True, capture_output=True, text=True).stdout.splitlines()]


def test_definition_equals_registration(definition):
    info = ops._registration("FlashMLA", "Ascend")
    assert definition[0] == ["op", info["op_name"]]
    declared = {kind: [line[1:] for line in definition if line[0] == kind] for kind in ("input", "output", "attr", "soc")}
    assert [line[:2] for line in declared["input"]] == [[entry["name"], entry["paramType"]] for entry in info["inputs"]]
    assert [line[0] for line in declared["output"]] == [entry["name"] for entry in info["outputs"]]
    assert declared["attr"] == [[entry["name"], entry["paramType"], entry["type"]] for entry in info["attr"]]
    assert declared["soc"] == [["ascend950"]]


def test_integer_and_table_inputs_keep_their_dtypes(definition):
    types = {line[1]: line[3:] for line in definition if line[0] == "input"}
    assert {name: kinds for name, kinds in types.items() if kinds != ["1", "2"]} == {
        "block_table": ["3", "3"], "q_seq_lens": ["3", "3"], "context_lens": ["3", "3"], "rope_table": ["0", "0"]}


def test_kernel_entry_takes_the_operator_list():
    with open(os.path.join(ROOT, "op_impl", "ascendc", "op_kernel", "flash_mla.cpp"), encoding="utf-8") as f:
        entry = f.read()
    assert re.search(r"void flash_mla\(FLASH_MLA_INPUTS\(FLASHMLA_PARAMETER\) GM_ADDR out, GM_ADDR workspace, GM_ADDR tiling\)", entry)


def build_ascend(tmp_path, *arguments):
    env = {k: v for k, v in os.environ.items() if not k.startswith("ASCEND_")} | {"FLASHMLA_BUILD_DIR": str(tmp_path)}
    return subprocess.run(["bash", os.path.join(ROOT, "build.sh"), "ascend", *arguments], env=env, capture_output=True, text=True)


def test_build_stages_flat_folders_that_compile(tmp_path):
    assert build_ascend(tmp_path, "--stage-only").returncode == 0
    staged = tmp_path / "ascend"
    for folder in ("op_host", "op_kernel"):
        assert all(entry.is_file() for entry in (staged / folder).iterdir())
        for path in (staged / folder).iterdir():
            for name in re.findall(r'#include "([^"]+)"', path.read_text()):
                own = (staged / folder / name).exists()
                assert own or name in ("kernel_operator.h", "register/op_def_registry.h", "register/op_impl_registry.h", "tiling/platform/platform_ascendc.h")
    subprocess.run([os.environ.get("CXX", "g++"), "-std=c++17", "-fsyntax-only", staged / "op_host" / "make_kernel_data.cpp"], check=True)


def test_build_says_what_is_missing(tmp_path):
    result = build_ascend(tmp_path)
    assert result.returncode == 1
    assert "neither ASCEND_HOME_PATH nor ASCEND_TOOLKIT_HOME is set" in result.stderr


def test_missing_package_says_what_to_set(monkeypatch, tmp_path):
    monkeypatch.delenv("ASCEND_CUSTOM_OPP_PATH", raising=False)
    with pytest.raises(RuntimeError, match="ASCEND_CUSTOM_OPP_PATH is not set.*build.sh ascend --install"):
        _lib.require_ascend_package()
    monkeypatch.setenv("ASCEND_CUSTOM_OPP_PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match="where no FlashMLA for ascend950 is"):
        _lib.require_ascend_package()
    config = tmp_path / "op_impl" / "ai_core" / "tbe" / "config" / "ascend950"
    config.mkdir(parents=True)
    (config / "aic-ascend950-ops-info.json").write_text('{"FlashMLA": {}}')
    _lib.require_ascend_package()
