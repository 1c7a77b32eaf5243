"""Every variant of an MLA layer that a user may replace, held to the float64 reference over prefill, decode, chunks and ragged batches."""
from dataclasses import replace

import pytest

from cases import FLOATS, MIXES, VARIANTS, LayerCase
from driver import Driver


def named(cases):
    return pytest.mark.parametrize("case", cases, ids=lambda c: c.name)


def serve(run):
    """What a server does to one cache: prefill, decode, chunked prefill over a prefix, several new tokens on a long context, idle sequences."""
    run.step([5, 0, 17])
    run.step([1, 1, 1])
    run.step([4, 0, 150])
    run.step([1, 1, 3])
    run.step([2, 1], sequences=[3, 2])


@named(VARIANTS)
def test_variant(case, mode):
    serve(Driver(case))


@named(MIXES)
def test_mixed_dtypes(case):
    run = Driver(case)
    run.step([9, 0, 70], residual=True)
    run.step([1, 1, 2], residual=True)


@named([case for case in MIXES if case.act == case.weight == case.cache or case.name == "act float32 weight bfloat16 cache bfloat16"])
def test_mixed_dtypes_in_graph_mode(case, graph):
    run = Driver(case)
    run.step([9, 0, 70])
    run.step([1, 1, 2])


@named([replace(case, act="bfloat16", weight="bfloat16", cache="bfloat16", name=f"{case.name} bfloat16") for case in VARIANTS])
def test_variant_in_bfloat16(case):
    serve(Driver(case))


@pytest.mark.parametrize("block_size", [1, 2, 7, 64, 128, 256])
def test_block_sizes(block_size):
    run = Driver(LayerCase("block size", block_size=block_size), num_blocks=4 + 320 // block_size)
    run.step([64, 65, 1])
    run.step([1, 127, 0])


@pytest.mark.parametrize("tokens", [1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 257, 400])
def test_tails_of_every_tile(tokens):
    run = Driver(LayerCase("tails"))
    run.step([tokens])
    run.step([1])
    run.step([5])
    run.step([tokens], sequences=[1])


def test_long_context_splits_the_keys():
    run = Driver(LayerCase("long", dict(max_position_embeddings=6000), block_size=64))
    run.step([3000, 40])
    run.step([1, 1])
    run.step([7, 1])


def cut(run):
    """More tokens than a group holds (128), in sequences that end up with a few rows on one side of the cut and more on the other."""
    for q_lens in ([40] * 43, [3] * 43, [4] * 31 + [8], [129], [127, 2, 6, 1], [2] * 65):
        run.step(q_lens)


@pytest.mark.parametrize("cache", FLOATS)
@pytest.mark.parametrize("heads", [1, 2, 3, 6])
def test_few_rows_of_a_sequence_that_a_group_cuts(heads, cache):
    cut(Driver(LayerCase("cut", dict(num_heads=heads, max_position_embeddings=400), cache=cache), num_blocks=300, sequences=65))


def test_all_three_shapes_of_a_call(mode):
    run = Driver(LayerCase("shapes", dict(q_lora_rank=24)))
    run.step([6, 6], batched=True, residual=True)
    run.step([6, 6], batched=True)
    run.step([3, 9], residual=True)
    run.step([1, 1], batched=True, residual=True)


def test_one_layer_and_several_caches_of_other_dtypes():
    runs = [Driver(LayerCase("several", cache=dtype)) for dtype in ("float32", "float16", "bfloat16")]
    for run in runs:
        run.layer = runs[0].layer
        run.w = runs[0].w
    for _ in range(2):
        for run in runs:
            run.step([3, 1])


def test_empty_call(mode):
    run = Driver(LayerCase("empty"))
    assert run.step([0, 0]).shape == (0, 48)
    run.step([4, 2])
    assert run.step([0, 0], residual=True).shape == (0, 48)
    assert run.step([], sequences=[]).shape == (0, 48)
