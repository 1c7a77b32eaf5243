"""Settings by environment and by call, and the layer's own arguments."""
import os
import re
import subprocess
import sys
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest

import ms_flashmla as fm
from ms_flashmla import _lib
from small_layer import CFG


MAKE_A_LAYER = "import ms_flashmla as fm; fm.MLALayer(fm.MLAConfig(48, 4, 32, 16, 8, 16))"


@pytest.mark.parametrize("setting, words", [
    (("MS_FLASHMLA_IMPL", "gpu"), "ValueError: MS_FLASHMLA_IMPL: 'gpu'"),
    (("MS_FLASHMLA_ISA", "sse9"), "ValueError: .*MS_FLASHMLA_ISA"),
    (("MS_FLASHMLA_NUM_THREADS", "many"), "ValueError: .*MS_FLASHMLA_NUM_THREADS"),
    (("MS_FLASHMLA_OFF", "next_tile,turbo"), "ValueError: MS_FLASHMLA_OFF names 'turbo', expected one of row_packing,"),
])
def test_settings_are_refused_by_name(setting, words):
    env = {**os.environ, setting[0]: setting[1], "PYTHONPATH": os.pathsep.join([str(Path(fm.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])}
    run = subprocess.run([sys.executable, "-c", MAKE_A_LAYER], env=env, capture_output=True, text=True, timeout=120)
    assert run.returncode == 1
    assert re.search(words, run.stderr), run.stderr


def test_last_error_is_empty_at_first_and_threads_are_checked():
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(fm.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])}
    code = "import ms_flashmla as fm; assert fm.last_error() == ''; fm.set_num_threads(3); from ms_flashmla import _lib; assert _lib.num_threads() == 3"
    assert subprocess.run([sys.executable, "-c", code], env=env, timeout=120).returncode == 0
    for bad, error in ((0, ValueError), (-1, ValueError), (2**31, ValueError), (1.5, TypeError), (True, TypeError), ("2", TypeError)):
        with pytest.raises(error, match="n:"):
            fm.set_num_threads(bad)


def test_backends_that_are_not_here_say_so(monkeypatch):
    monkeypatch.setenv("MS_FLASHMLA_IMPL", "twin")
    monkeypatch.setitem(_lib.IMPLEMENTATIONS, "twin", ("libmissing.so", "twin"))
    _lib.load.cache_clear()
    with pytest.raises(RuntimeError, match="libmissing.so is missing; build it with `bash build.sh twin`"):
        fm.MLALayer(CFG)
    monkeypatch.setenv("MS_FLASHMLA_IMPL", "cpu")
    fm.MLALayer(CFG)
    monkeypatch.delenv("ASCEND_CUSTOM_OPP_PATH", raising=False)
    monkeypatch.setattr(ms, "get_context", lambda key: "Ascend")
    with pytest.raises(RuntimeError, match="device_target Ascend: ASCEND_CUSTOM_OPP_PATH is not set"):
        fm.MLALayer(CFG)


@pytest.mark.parametrize("args, error, words", [
    ((1,), TypeError, "cfg"), ((CFG, ms.int8), TypeError, "dtype"), ((CFG, "float32"), TypeError, "dtype"), ((CFG, np.float32), TypeError, "dtype"),
])
def test_layer_arguments(args, error, words):
    with pytest.raises(error, match=words):
        fm.MLALayer(*args)
