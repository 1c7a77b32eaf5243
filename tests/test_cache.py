"""The block allocator and the cache Parameter."""
import copy

import mindspore as ms
import numpy as np
import pytest

import ms_flashmla as fm

CFG = fm.MLAConfig(hidden_size=48, num_heads=4, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16)


@pytest.mark.parametrize("dtype", [ms.float32, ms.float16, ms.bfloat16])
def test_data_is_a_zero_parameter_of_its_own_name(dtype):
    a, b = (fm.LatentKVCache(CFG, 6, block_size=4, dtype=dtype) for _ in range(2))
    assert isinstance(a.data, ms.Parameter) and a.data.shape == (6, 4, 40) and a.data.dtype == dtype and not a.data.requires_grad
    assert a.data.name != b.data.name
    assert not a.data.asnumpy().view(np.uint8).any()


def test_tables_are_padded_and_blocks_disjoint():
    cache = fm.LatentKVCache(CFG, 8, block_size=4)
    cache.allocate("a", 9)
    cache.allocate(7, 4)
    cache.allocate("empty", 0)
    table = cache.block_table(["a", "empty", 7])
    assert table.dtype == ms.int32 and table.shape == (3, 3)
    rows = table.asnumpy()
    assert (rows[1] == -1).all() and (rows[2, 1:] == -1).all()
    used = rows[rows >= 0]
    assert len(used) == len(set(used)) == 4 and used.max() < 8


def test_num_tokens_is_a_total_and_blocks_stay():
    cache = fm.LatentKVCache(CFG, 8, block_size=4)
    cache.allocate("a", 4)
    first = cache.block_table(["a"]).asnumpy()[0, 0]
    cache.allocate("a", 5)
    cache.allocate("a", 8)
    assert cache.block_table(["a"]).asnumpy()[0, 0] == first and cache.block_table(["a"]).shape == (1, 2)
    cache.allocate("a", 1)
    assert cache.block_table(["a"]).shape == (1, 2) and cache.num_free_blocks == 6


def test_an_exhausted_pool_takes_nothing():
    cache = fm.LatentKVCache(CFG, 3, block_size=4)
    cache.allocate("a", 4)
    with pytest.raises(RuntimeError, match="'b' needs 3 more blocks.* 2 of 3 are free"):
        cache.allocate("b", 12)
    with pytest.raises(RuntimeError, match="'a' needs 3 more"):
        cache.allocate("a", 16)
    assert cache.num_free_blocks == 2
    with pytest.raises(ValueError, match="'b'"):
        cache.block_table(["b"])
    cache.allocate("b", 8)
    cache.free("a")
    cache.allocate("c", 3)
    assert cache.num_free_blocks == 0


def test_free_returns_every_block_once():
    cache = fm.LatentKVCache(CFG, 5, block_size=4)
    for _ in range(3):
        cache.allocate("a", 20)
        assert sorted(cache.block_table(["a"]).asnumpy()[0]) == list(range(5))
        cache.free("a")
        with pytest.raises(ValueError, match="'a'"):
            cache.free("a")


def test_a_copy_is_a_cache_of_its_own():
    cache = fm.LatentKVCache(CFG, 5, block_size=4)
    cache.allocate("a", 9)
    cache.data.asnumpy()[:] = 7
    other, parameter = copy.deepcopy((cache, cache.data))
    assert parameter is other.data
    assert other.data.name != cache.data.name and (other.data.asnumpy() == 7).all()
    other.allocate("b", 8)
    other.data.asnumpy()[:] = 8
    assert cache.num_free_blocks == 2 and (cache.data.asnumpy() == 7).all()
    assert (other.block_table(["a"]).asnumpy() == cache.block_table(["a"]).asnumpy()).all()


def test_more_than_the_system_gives_is_named():
    with pytest.raises(RuntimeError, match="num_blocks: 2147483647 blocks of 2147483647 tokens: .* GiB, more than this system gives"):
        fm.LatentKVCache(CFG, 2**31 - 1, block_size=2**31 - 1)


def test_no_sequences():
    assert fm.LatentKVCache(CFG, 5).block_table([]).shape == (0, 1)


@pytest.mark.parametrize("kwargs, error, words", [
    (dict(cfg={"hidden_size": 8}, num_blocks=1), TypeError, "cfg"),
    (dict(num_blocks=0), ValueError, "num_blocks"),
    (dict(num_blocks=True), TypeError, "num_blocks"),
    (dict(num_blocks=4, block_size=0), ValueError, "block_size"),
    (dict(num_blocks=4, block_size=4.0), TypeError, "block_size"),
    (dict(num_blocks=4, dtype=ms.int8), TypeError, "dtype"),
])
def test_arguments(kwargs, error, words):
    with pytest.raises(error, match=words):
        fm.LatentKVCache(**{"cfg": CFG, **kwargs})


@pytest.mark.parametrize("num_tokens, error", [(-1, ValueError), (1.5, TypeError), (True, TypeError)])
def test_allocate_arguments(num_tokens, error):
    with pytest.raises(error, match="num_tokens"):
        fm.LatentKVCache(CFG, 4).allocate("a", num_tokens)
