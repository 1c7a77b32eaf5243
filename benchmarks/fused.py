"""ms_flashmla itself: the layer and the core as a user calls them in PyNative, the layer in GRAPH_MODE as well, and each kernel alone."""

import mindspore as ms
import numpy as np

import cases
import ceilings
import kernel
import roof
import timing
from ms_flashmla import dtypes, ops
from ms_flashmla import layer as layer_module
from ms_flashmla.layer import MLALayer
from pool import DTYPES, Pool, to_dtype, to_float32

_layers = {}  # (model, dtype) -> layers of the same weights


def _layers_of(model, dtype, count):
    layers = _layers.setdefault((model, dtype), [])
    while len(layers) < count:
        layer = MLALayer(cases.config(model), dtype=DTYPES[dtype])
        layer.load_hf_weights(cases.random_weights(model), prefix="")
        layers.append(layer)
    return layers[:count]


def release(case):
    for key in [key for key in _layers if key[0] != case.model]:
        del _layers[key]


def build(case, dtype, threads):
    """{variant: System}: "" as a user calls it in PyNative, "graph" for the layer of a decode step called in GRAPH_MODE (a graph of this one operator,
    whose own start is in the time), "kernel" through the AOT entry, and "1 thread" where the case asks for it."""
    through, alone = (_core if case.phase == "decode_core" else _layer)(case, dtype)
    systems = {"": through(None), "kernel": alone(None)}
    if case.phase == "decode":
        systems["graph"] = through(None, pynative=False)
    if case.scaling and threads > 1 and dtype == "float32":
        systems["1 thread"] = through(1)
    return systems


def kernels_without(case, dtype, switches):
    """{switch: System}: the kernel alone with that part off (switches.py); "" with all on."""
    alone = (_core if case.phase == "decode_core" else _layer)(case, dtype)[1]
    return {switch: alone(None, unified=switch == "unified_max") for switch in ("", *switches)}


def _core(case, dtype):
    cfg, pool = case.cfg, Pool.of(case.cfg, dtype)
    q = ms.Tensor.from_numpy(to_dtype(case.queries(), dtype))
    seqlens = ms.Tensor.from_numpy(np.full(case.batch, case.length, np.int32))
    tables = [pool.table(case, place) for place in pool.places(case)]
    causal = case.tokens > 1
    pages = f"{dtype} cache {_pages(pool.cache.data)}"

    def through(threads):
        calls = [lambda table=table: ops.flash_mla_with_kvcache(q, pool.cache.data, table, seqlens, cfg.kv_lora_rank, causal=causal)[0].asnumpy()
                 for table in tables]
        return timing.System(calls, lambda: to_float32(calls[0]()), threads=threads, pages=pages, pynative=True)

    def alone(threads, unified=False):
        itemsize = roof.DTYPE_BYTES[dtype]
        out, out_argument = kernel.output((case.batch, case.tokens, case.num_heads, cfg.kv_lora_rank), dtype, itemsize)
        lse, lse_argument = kernel.output((case.batch, case.num_heads, case.tokens), "float32", 4)
        attributes = {"head_dim_v": cfg.kv_lora_rank, "default_scale": 1, "causal": int(causal), "unified_max": int(unified)}
        kernels = [kernel.KernelCall("FlashMLAWithKVCache", [*map(kernel.argument, (q, pool.cache.data, table, seqlens)), out_argument, lse_argument],
                                     attributes) for table in tables]
        return _kernel_system(kernels, out, dtype, threads, (lse, q, seqlens, tables))

    return through, alone


def _kernel_system(kernels, out, dtype, threads, kept):
    """kept: what the kernels' pointers point into."""
    def output(_kept=kept):
        kernels[0].call()
        return to_float32(out.view(dtypes.NUMPY[DTYPES[dtype]]))
    return timing.System([k.call for k in kernels], output, seconds=lambda i: kernels[i].call(), threads=threads)


def _layer(case, dtype):
    cfg, pool = case.cfg, Pool.of(case.cfg, dtype)
    itemsize = roof.DTYPE_BYTES[dtype]
    weight_bytes = roof.weight_elements(cfg) * itemsize
    cache_bytes = case.batch * case.length * cfg.cache_dim * itemsize
    copies = 2 if case.phase == "prefill" else timing.copies_for(weight_bytes + cache_bytes)
    layers = _layers_of(case.model, dtype, max(copies, 2))
    tables = [pool.table(case, place) for place in pool.places(case)][:max(copies, 2)]
    hidden, residual = (ms.Tensor.from_numpy(to_dtype(x, dtype)) for x in case.hidden_and_residual())
    lengths = [ms.Tensor.from_numpy(np.full(case.batch, n, np.int32)) for n in (case.tokens, case.context)]
    pairs = [(layer, tables[i % len(tables)]) for i, layer in enumerate(layers)]
    pages = f"{dtype} cache {_pages(pool.cache.data)}, weights {_pages(layers[0].w_o)}"

    def through(threads, pynative=True):
        calls = [lambda layer=layer, table=table: layer(hidden, pool.cache.data, table, *lengths, residual=residual).asnumpy()
                 for layer, table in pairs]
        return timing.System(calls, lambda: to_float32(calls[0]()), threads=threads, pages=pages, pynative=pynative)

    def alone(threads, unified=False):
        out, out_argument = kernel.output(hidden.shape, dtype, itemsize)
        kernels = [layer_kernel(layer, hidden, pool.cache.data, table, lengths, residual, out_argument, unified) for layer, table in pairs]
        return _kernel_system(kernels, out, dtype, threads, (hidden, residual, lengths, pairs))

    return through, alone


def layer_kernel(layer, hidden, cache, table, lengths, residual, out_argument, unified=False):
    """The KernelCall of a layer call; unified: the softmax with one maximum, 0."""
    names = ("w_q", "w_kv_a", "kv_norm", "w_uk", "w_uv", "w_o", *layer_module.OPTIONAL[:-1])
    tensors = [hidden, cache, table, *lengths, layer.rope_table, *(getattr(layer, name) for name in names), residual]
    operator = layer.op
    return kernel.KernelCall("FlashMLA", [*map(kernel.argument, tensors), out_argument], {**operator.attrs, "unified_max": int(unified)})


def _pages(parameter):
    return f"{100 * ceilings.huge_share(parameter.data_ptr(), parameter.nbytes):.0f} %"
