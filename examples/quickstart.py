"""One layer of a checkpoint: prefill, then decode steps. Usage: python examples/quickstart.py CHECKPOINT_FOLDER"""

import sys

import mindspore as ms
import numpy as np

import ms_flashmla as fm
from ms_flashmla.checkpoint import Checkpoint, attention_prefix


def main(folder, prompt=48, steps=4):
    ms.set_context(mode=ms.GRAPH_MODE)
    cfg = fm.MLAConfig.from_hf(folder)
    checkpoint = Checkpoint(folder)
    layer = fm.MLALayer(cfg, dtype=ms.float32)
    layer.load_hf_weights(checkpoint, prefix=attention_prefix(checkpoint, 0))
    cache = fm.LatentKVCache(cfg, num_blocks=16, block_size=16)

    rng = np.random.default_rng(0)
    context = 0
    for tokens in [prompt] + [1] * steps:
        cache.allocate("request", context + tokens)
        x = ms.Tensor(rng.standard_normal((tokens, cfg.hidden_size)), ms.float32)
        y = layer(x, cache.data, cache.block_table(["request"]), ms.Tensor([tokens], ms.int32), ms.Tensor([context], ms.int32), residual=x)
        context += tokens
        print(f"{tokens:3} tokens, context {context:3}: |y| {np.linalg.norm(y.asnumpy()):.3f}")


if __name__ == "__main__":
    main(sys.argv[1])
