"""Paths and fixtures shared by all tests."""
import os
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

os.environ.setdefault("GLOG_v", "3")  # MindSpore warns of every empty tensor

import mindspore as ms  # noqa: E402  (after the paths)

MODES = {"graph": ms.GRAPH_MODE, "pynative": ms.PYNATIVE_MODE}


@pytest.fixture(params=MODES)
def mode(request):
    """Runs the test once in GRAPH_MODE and once in PyNative."""
    ms.set_context(mode=MODES[request.param])
    yield request.param
    ms.set_context(mode=ms.PYNATIVE_MODE)


@pytest.fixture
def graph():
    ms.set_context(mode=ms.GRAPH_MODE)
    yield
    ms.set_context(mode=ms.PYNATIVE_MODE)


@pytest.fixture(autouse=True, scope="session")
def start_in_pynative():
    ms.set_context(mode=ms.PYNATIVE_MODE)
