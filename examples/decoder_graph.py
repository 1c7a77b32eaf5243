"""Two layers with their caches inside one compiled graph, a ragged batch in one call: what a model's forward pass looks like."""

import mindspore as ms
import numpy as np
from mindspore import nn

import ms_flashmla as fm


class TwoLayers(nn.Cell):
    """Stands for a decoder: attention layers with residuals. The caches are Parameters of this graph, written in place."""

    def __init__(self, cfg, caches):
        super().__init__()
        self.first, self.second = fm.MLALayer(cfg), fm.MLALayer(cfg)
        self.first_cache, self.second_cache = (cache.data for cache in caches)

    def construct(self, x, block_table, q_seq_lens, context_lens):
        x = self.first(x, self.first_cache, block_table, q_seq_lens, context_lens, x)
        return self.second(x, self.second_cache, block_table, q_seq_lens, context_lens, x)


def main():
    ms.set_context(mode=ms.GRAPH_MODE)
    cfg = fm.MLAConfig(hidden_size=256, num_heads=4, kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32)
    caches = [fm.LatentKVCache(cfg, num_blocks=8, block_size=16) for _ in range(2)]
    model = TwoLayers(cfg, caches)
    # Sizes that change from call to call are None: one compiled graph serves them all.
    model.set_inputs(ms.Tensor(shape=[None, cfg.hidden_size], dtype=ms.float32), ms.Tensor(shape=[None, None], dtype=ms.int32),
                     ms.Tensor(shape=[None], dtype=ms.int32), ms.Tensor(shape=[None], dtype=ms.int32))
    rng = np.random.default_rng(0)
    for layer in (model.first, model.second):
        shapes = layer.export_hf_weights("")
        layer.load_hf_weights({name: rng.standard_normal(array.shape) / np.sqrt(array.shape[-1]) for name, array in shapes.items()}, prefix="")

    contexts = np.zeros(2, np.int32)
    for q_lens in ([20, 5], [1, 1], [1, 3]):  # prefill of both, a decode step, and one sequence with three tokens at once
        for cache in caches:  # the same blocks in every layer: one table serves them
            for sequence in range(2):
                cache.allocate(sequence, int(contexts[sequence]) + q_lens[sequence])
        x = ms.Tensor(rng.standard_normal((sum(q_lens), cfg.hidden_size)), ms.float32)
        y = model(x, caches[0].block_table(range(2)), ms.Tensor(q_lens, ms.int32), ms.Tensor(contexts, ms.int32))
        contexts += np.asarray(q_lens, np.int32)
        print(f"new tokens {q_lens}, contexts {contexts.tolist()}: |y| {np.linalg.norm(y.asnumpy()):.3f}")


if __name__ == "__main__":
    main()
