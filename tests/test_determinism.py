"""The same call gives the same bits: on every run, for every number of threads, and whatever else is in the batch. And every ISA is right."""
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import ms_flashmla as fm
import reference
from cases import FULL, LayerCase, OpCase, bits, to_ms, to_np
from driver import Driver

CASES = [LayerCase("float32", dict(q_lora_rank=24)), LayerCase("bfloat16", {}, "bfloat16", "bfloat16", "bfloat16"), LayerCase("full", FULL),
         LayerCase("128 heads", dict(num_heads=128))]


@pytest.fixture
def threads():
    """Sets the number of threads, and puts the old one back."""
    before = fm_num_threads()
    yield fm.set_num_threads
    fm.set_num_threads(before)


def fm_num_threads():
    from ms_flashmla import _lib
    return _lib.num_threads()


def history(case):
    """Output bits of a served history and the cache at its end."""
    run = Driver(case)
    return [bits(run.step(q_lens)) for q_lens in ([70, 3, 0, 150], [1, 1, 2, 1], [5, 40, 1, 0])] + [run.snapshot()]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_bits_do_not_depend_on_the_threads_or_the_run(case, threads):
    runs = []
    for n in (1, 2, 3, 5, 1):
        threads(n)
        runs.append(history(case))
    assert all(run == runs[0] for run in runs)


def test_long_decode_does_not_depend_on_the_threads(threads):
    q, k, table, seqlens = OpCase("long", (4000, 1, 700), page=64).arrays()
    results = []
    for n in (1, 2, 3, 5):
        threads(n)
        out, lse = fm.ops.flash_mla_with_kvcache(to_ms(q), to_ms(k), to_ms(table, "int32"), to_ms(seqlens, "int32"), 32)
        results.append((bits(out), bits(lse)))
    assert len(set(results)) == 1


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
@pytest.mark.parametrize("tokens", [1, 4, 90])
def test_a_sequence_alone_and_in_a_batch_gives_the_same_bits(case, tokens):
    """A server may batch a request with any others: its answer must not change."""
    together, alone = Driver(case), Driver(case)
    rng = np.random.default_rng(7)
    for step, q_lens in enumerate(([33, 130, 5], [tokens, 1, 9])):
        hidden = reference.rounded(rng.standard_normal((sum(q_lens), 48)), case.act)
        start, contexts = np.cumsum([0, *q_lens]), together.lengths[:3].copy()
        out = together.call(hidden, None, together.table(range(3), contexts + q_lens), np.array(q_lens), contexts)
        for s in range(3):
            table = alone.table([s], [contexts[s] + q_lens[s]])
            single = alone.call(hidden[start[s]:start[s + 1]], None, table, np.array(q_lens[s:s + 1]), contexts[s:s + 1])
            assert (to_np(single) == to_np(out)[start[s]:start[s + 1]]).all(), f"step {step}, sequence {s}"
        together.lengths[:3] += q_lens
        alone.lengths[:3] += q_lens


def test_packed_and_batched_hidden_give_the_same_bits():
    packed, batched = Driver(CASES[0]), Driver(CASES[0])
    for t in (9, 1, 3):
        assert bits(packed.step([t, t])) == bits(batched.step([t, t], batched=True))


# ---- every ISA ---------------------------------------------------------------------------------------------------------------------------------------
NEEDS = {"generic": set(), "avx2": {"avx2", "fma", "f16c"}, "avx512": {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd"}}


def flags_of_this_processor():
    text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    return set(next((line.split(":", 1)[1] for line in text.splitlines() if line.startswith("flags")), "").split())


@pytest.mark.parametrize("isa", NEEDS)
def test_every_isa_is_right_or_says_that_it_cannot_run_here(isa):
    import os
    worker = subprocess.run([sys.executable, str(Path(__file__).parent / "isa_worker.py"), isa], env={**os.environ, "MS_FLASHMLA_ISA": isa},
                            capture_output=True, text=True)
    if NEEDS[isa] <= flags_of_this_processor():
        assert worker.returncode == 0, worker.stderr[-3000:]
    else:
        assert worker.returncode == 1 and "MS_FLASHMLA_ISA" in worker.stderr and isa in worker.stderr
