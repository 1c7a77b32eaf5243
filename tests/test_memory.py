"""What a call holds beside weights and cache: nothing that has the size of all heads' K, V, scores or O."""
from pathlib import Path

import numpy as np
import pytest

import mindspore as ms
import ms_flashmla as fm
from ms_flashmla import weights

MIB = 2**20
HEADS, CONTEXT, TOKENS, PAGE = 32, 8192, 512, 64
CONFIG = fm.MLAConfig(hidden_size=64, num_heads=HEADS, kv_lora_rank=64, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
                      max_position_embeddings=CONTEXT)


def status_mib(field):
    """VmRSS (resident now) or VmHWM (its peak since the last reset) in MiB."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) / 1024
    raise AssertionError(f"no {field}")


def peak_growth_mib(call):
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # resets the peak
    before = status_mib("VmRSS")
    call()
    return status_mib("VmHWM") - before


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_chunk_on_a_long_prefix_holds_no_buffer_of_all_heads(graph, dtype):
    """K, V of all heads would take 320 MiB here, the scores of one head 16 MiB and of all 512, O of all heads 8."""
    dtype = getattr(ms, dtype)
    rng = np.random.default_rng(0)
    layer = fm.MLALayer(CONFIG, dtype=dtype)
    layer.load_hf_weights({name: rng.standard_normal(shape, dtype=np.float32) * 0.1 for name, shape in weights.hf_shapes(CONFIG).items()}, prefix="")
    cache = fm.LatentKVCache(CONFIG, CONTEXT // PAGE, block_size=PAGE, dtype=dtype)
    cache.data.set_data(ms.Tensor(rng.standard_normal(cache.data.shape, dtype=np.float32)).astype(dtype))
    cache.allocate(0, CONTEXT)
    table = cache.block_table([0])
    hidden = ms.Tensor(rng.standard_normal((TOKENS, CONFIG.hidden_size), dtype=np.float32)).astype(dtype)

    def run(tokens):
        lengths = (ms.Tensor([n], ms.int32) for n in (tokens, CONTEXT - TOKENS))
        return layer(hidden[:tokens], cache.data, table, *lengths).asnumpy()
    run(1)  # starts the threads, compiles the graph
    assert peak_growth_mib(lambda: run(TOKENS)) < 100
