"""MLALayer: the fused operator as an nn.Cell."""

import threading

import mindspore as ms
from mindspore import Tensor, context, nn
from mindspore.ops.primitive import constexpr

from . import checks, dtypes, ops, pynative, rope, tune_table, weights
from ._check import as_bool, as_float
from .config import check_config

_GRAPH_LOCK = threading.RLock()  # MindSpore compiles and runs graphs from one thread at a time: two at once end the process

# The operator's optional inputs, in its order.
OPTIONAL = ("w_q_a", "q_norm", "b_q_a", "b_kv_a", "b_o", "residual")

# The inputs between rope_table and residual, in the operator's order.
_WEIGHTS = ("w_q", "w_kv_a", "kv_norm", "w_uk", "w_uv", "w_o", *OPTIONAL[:-1])

_check_call = constexpr(checks.check_layer_call, check=False)  # unknown dimensions arrive as None


def _attributes(cfg, softmax_phi, deterministic):
    return {
        "num_heads": cfg.num_heads,
        "kv_lora_rank": cfg.kv_lora_rank,
        "qk_nope_head_dim": cfg.qk_nope_head_dim,
        "qk_rope_head_dim": cfg.qk_rope_head_dim,
        "v_head_dim": cfg.v_head_dim,
        "q_lora_rank": cfg.q_lora_rank or 0,
        "rope_mode": int(cfg.rope_mode == "full"),
        "q_norm_eps": cfg.q_norm_eps,
        "kv_norm_eps": cfg.kv_norm_eps,
        "q_lora_scale": cfg.q_lora_scale,
        "kv_lora_scale": cfg.kv_lora_scale,
        "softmax_scale": float(cfg.softmax_scale),
        "index_topk": cfg.index_topk or 0,
        "unified_max": int(softmax_phi is not None),
        "phi": 0.0 if softmax_phi is None else softmax_phi,
        "deterministic": int(deterministic),
    }


class _FusedMLA(nn.Cell):
    """The operator with a layer's parameters; what a graph holds. parameters: name -> Parameter, those of weights.layout(cfg)."""

    def __init__(self, cfg, parameters, rope_table, softmax_phi=None, deterministic=True):
        super().__init__(auto_prefix=False)  # the names stay those the layer gave
        self.hidden_size = cfg.hidden_size
        self.cache_dim = cfg.cache_dim
        self.rope_table = rope_table
        for name in (*weights.layout(cfg), *OPTIONAL[:-1]):
            setattr(self, name, parameters.get(name))
        attributes = _attributes(cfg, softmax_phi, deterministic)
        self.op = ops.primitive("FlashMLA", **attributes)

    def construct(self, hidden_states, kv_cache, block_table, q_seq_lens, context_lens, residual=None):
        if residual is None:
            _check_call(self.hidden_size, self.cache_dim, hidden_states.shape, hidden_states.dtype, kv_cache.shape, kv_cache.dtype,
                        block_table.shape, block_table.dtype, q_seq_lens.shape, q_seq_lens.dtype, context_lens.shape, context_lens.dtype)
        else:
            _check_call(self.hidden_size, self.cache_dim, hidden_states.shape, hidden_states.dtype, kv_cache.shape, kv_cache.dtype,
                        block_table.shape, block_table.dtype, q_seq_lens.shape, q_seq_lens.dtype, context_lens.shape, context_lens.dtype,
                        residual.shape, residual.dtype)
        return self.op(hidden_states, kv_cache, block_table, q_seq_lens, context_lens, self.rope_table, self.w_q, self.w_kv_a, self.kv_norm,
                       self.w_uk, self.w_uv, self.w_o, self.w_q_a, self.q_norm, self.b_q_a, self.b_kv_a, self.b_o, residual)


class MLALayer(_FusedMLA):
    """One multi-head latent attention layer: projections, RoPE, paged causal attention, output projection and residual in one operator.

    cfg: MLAConfig. dtype: of the weights, ms.float32, ms.float16 or ms.bfloat16; activations and cache may each be another of these.
    The weights are 1-D Parameters without gradient, packed for the kernel (weights.py says how) and zero until load_hf_weights or
    mindspore.load_checkpoint fills them.
    softmax_phi: None, or one maximum for all rows of attention over the latent (FlashDecoding++, arXiv 2311.01282; ops.calibrate_phi proposes
      one): exponentials are taken against it, and a row whose largest logit is not within phi - 40 .. phi + 60 is computed again with its own maximum.
    deterministic: True gives a sequence the same bits for any number of threads and whatever else is in the batch. False lets the KV splits
      follow the number of threads and the attention path a tune table.
    tune: None, or the path of a table that `python -m ms_flashmla tune` wrote (as MS_FLASHMLA_TUNE names one): its choices hold from here on for
      every layer of the process with these dimensions; a table of another ISA is left alone, with a warning.
    Construction raises TypeError for a cfg that is no MLAConfig, another dtype and an argument of another type, ValueError for a softmax_phi that is
    not finite, a tune file that is none and a setting of the environment that is unknown, RuntimeError when the backend is not installed.

    layer(hidden_states, kv_cache, block_table, q_seq_lens, context_lens, residual=None) -> out
      hidden_states: [T, hidden_size] packed tokens with T = sum(q_seq_lens), or [B, S, hidden_size] where every q_seq_lens is S.
      kv_cache: LatentKVCache.data, [num_blocks, block_size, kv_lora_rank + qk_rope_head_dim]; rows of the new tokens are written in place,
        so it must not be a view of another Tensor.
      block_table: int32 [B, max_blocks]. q_seq_lens: int32 [B], new tokens. context_lens: int32 [B], tokens in the cache before the call.
      residual: None, or added to the result; shape and dtype of hidden_states. out: shape and dtype of hidden_states.
    Raises ValueError or TypeError, naming the argument, for a wrong rank, shape or dtype. Called from Python it raises RuntimeError, before
    anything runs, for what only the data tells: a needed block id outside the cache, negative lengths, T other than the sum of q_seq_lens, a
    sequence longer than its table or than the RoPE table. Inside a larger graph the kernel raises it with the same words, before it writes.
    In GRAPH_MODE one compiled graph serves every T and B of a signature (dtypes, rank, residual or none, shape of the cache).
    """

    def __init__(self, cfg, dtype=ms.float32, softmax_phi=None, deterministic=True, tune=None):
        check_config(cfg)
        dtypes.check_dtype("dtype", dtype)
        parameters = {name: dtypes.zeros_parameter(name, (weights.size(spec),), dtype) for name, spec in weights.layout(cfg).items()}
        self._softmax_phi = None if softmax_phi is None else as_float("softmax_phi", softmax_phi, positive=False)
        self._deterministic = as_bool("deterministic", deterministic)
        if tune is not None:
            tune_table.use(tune)
        super().__init__(cfg, parameters, rope.shared_rope_table(cfg), self._softmax_phi, self._deterministic)
        self.cfg = cfg
        self.dtype = dtype
        self._limits = (cfg.max_positions, cfg.index_topk or 0)
        self._signature = None  # of the last call that passed its checks
        self._graphs = {}  # signature -> _FusedMLA with its own compiled graph

    def load_hf_weights(self, mapping, prefix="model.layers.0.self_attn."):
        """Takes the layer's weights from a checkpoint.

        mapping: HF name -> numpy array or Tensor, HF layout [out, in]; only names under prefix count. float64, float32, float16 and bfloat16
        are cast to the layer's dtype. Raises ValueError or TypeError, and changes nothing, for a missing or unknown name under
        prefix, a wrong shape or dtype, or an fp8 checkpoint (weight_scale_inv).
        """
        arrays = {name: weights.empty(spec, self.dtype) for name, spec in weights.layout(self.cfg).items()}
        weights.load(self.cfg, mapping, prefix, arrays, self.dtype)
        for name, array in arrays.items():
            dtypes.put(getattr(self, name), array)

    def export_hf_weights(self, prefix="model.layers.0.self_attn."):
        """{prefix + HF name: numpy array of the layer's dtype}: what was loaded, bit for bit as cast.

        bfloat16 is mindspore.common.np_dtype.bfloat16.
        """
        return weights.export(self.cfg, prefix, {name: getattr(self, name).asnumpy() for name in weights.layout(self.cfg)})

    def __call__(self, hidden_states, kv_cache, block_table, q_seq_lens, context_lens, residual=None):
        """Runs when called from Python only; inside a larger graph construct() is compiled instead."""
        self._check_tensors(hidden_states, kv_cache, block_table, q_seq_lens, context_lens, residual)
        in_pynative = context._get_mode() == ms.PYNATIVE_MODE  # get_context("mode") takes 14 us, a decode step has little more
        if in_pynative:
            out = self._call_directly((hidden_states, kv_cache, block_table, q_seq_lens, context_lens), residual)
            if out is not None:
                return out
        shape = hidden_states.shape
        num_tokens, tokens_per_seq = (shape[0], -1) if len(shape) == 2 else (shape[0] * shape[1], shape[1])
        checks.check_lengths(kv_cache.shape, checks.host_int32(block_table), checks.host_int32(q_seq_lens), checks.host_int32(context_lens),
                             num_tokens, tokens_per_seq, *self._limits)
        if in_pynative:
            return self.construct(hidden_states, kv_cache, block_table, q_seq_lens, context_lens, residual)
        with _GRAPH_LOCK:
            graph = self._graph(hidden_states, kv_cache, residual)
            return graph(hidden_states, kv_cache, block_table, q_seq_lens, context_lens, residual)

    def _call_directly(self, batch, residual):
        """The call with its host check through pynative.py; None where that cannot be."""
        direct = self.op.direct
        if direct is None:
            return None
        weights_in_order = (self.rope_table, *(self._params.get(name) for name in _WEIGHTS))
        return pynative.module().call_layer(direct, pynative.batch_check(self.op.implementation), batch, weights_in_order, residual, *self._limits)

    def _check_tensors(self, hidden_states, kv_cache, block_table, q_seq_lens, context_lens, residual):
        """What shapes and dtypes tell. A call like the one before, as the steps of a decode are, is known to be right."""
        tensors = (hidden_states, kv_cache, block_table, q_seq_lens, context_lens)
        is_parameter = isinstance(kv_cache, ms.Parameter)
        if is_parameter:
            signature = tuple([(type(value), value.shape, value.dtype) if isinstance(value, Tensor) else type(value) for value in (*tensors, residual)])
            if signature == self._signature:
                return
        for name, value in zip(("hidden_states", "kv_cache", "block_table", "q_seq_lens", "context_lens"), tensors):
            checks.require_tensor(name, value)
        if residual is not None:
            checks.require_tensor("residual", residual)
        if not is_parameter and checks.is_view(kv_cache):
            raise ValueError("kv_cache: a view (slice, reshape or transpose of another Tensor) is not allowed, because MindSpore hands an operator "
                             "a copy of it and the written rows would be lost; it must be the data of a LatentKVCache or a Tensor of its own")
        checks.check_layer_call(self.hidden_size, self.cache_dim, hidden_states.shape, hidden_states.dtype, kv_cache.shape, kv_cache.dtype,
                                block_table.shape, block_table.dtype, q_seq_lens.shape, q_seq_lens.dtype, context_lens.shape, context_lens.dtype,
                                *((None, None) if residual is None else (residual.shape, residual.dtype)))
        if is_parameter:
            self._signature = signature

    def _graph(self, hidden_states, kv_cache, residual):
        """The cell whose one compiled graph serves this signature, whatever the number of tokens and sequences."""
        is_parameter = isinstance(kv_cache, ms.Parameter)
        rank, dtype = hidden_states.ndim, hidden_states.dtype
        signature = (rank, dtype, residual is None, kv_cache.shape, kv_cache.dtype, is_parameter)
        graph = self._graphs.get(signature)
        if graph is None:
            graph = _FusedMLA(self.cfg, {name: getattr(self, name) for name in weights.layout(self.cfg)}, self.rope_table, self._softmax_phi,
                              self._deterministic)
            # A stand-in of the cache's shape (it costs no memory), so that the graph does not keep this cache alive; set_inputs wants a Parameter for
            # a Parameter, and the compiled graph serves every cache of that shape.
            cache = dtypes.zeros_parameter("kv_cache", kv_cache.shape, kv_cache.dtype) if is_parameter else _dynamic(kv_cache.shape, kv_cache.dtype)
            tokens = _dynamic((None,) * (rank - 1) + (self.hidden_size,), dtype)
            per_sequence = _dynamic((None,), ms.int32)
            graph.set_inputs(tokens, cache, _dynamic((None, None), ms.int32), per_sequence, per_sequence, None if residual is None else tokens)
            # MindSpore's phase for decode steps: once compiled, a call skips the framework's own argument checks (350 us become 110), which
            # check_layer_call has done.
            graph.phase = "increment"
            self._graphs[signature] = graph
        return graph


def _dynamic(shape, dtype):
    return Tensor(shape=list(shape), dtype=dtype)
