"""A layer and its float64 reference side by side on one paged cache."""
import numpy as np

import ms_flashmla as fm
import mindspore as ms
import reference
from cases import assert_close, bits, to_ms, to_np


class Driver:
    """Runs steps through fm.MLALayer and checks each one: the output, every cache row that was written, and that no other row changed.

    The cache starts as NaN everywhere, pages are handed out in random order, and tables are padded with -1, so that every step also shows that memory
    which no valid token owns is never read.
    """

    def __init__(self, case, weights=None, config=None, prefix="model.layers.0.self_attn.", num_blocks=96, sequences=4, layer_kwargs=None):
        self.case = case
        self.cfg = config or fm.MLAConfig(**case.kwargs())
        self.ref_cfg = config or case.reference_config()
        self.w = weights or case.weights()
        self.layer = fm.MLALayer(self.cfg, dtype=getattr(ms, case.weight), **(layer_kwargs or {}))
        self.layer.load_hf_weights({prefix + name: x for name, x in self.w.items()}, prefix=prefix)
        self.cache = fm.LatentKVCache(self.cfg, num_blocks, block_size=case.block_size, dtype=getattr(ms, case.cache))
        self.rng = np.random.default_rng(case.seed + 1)
        self.free = list(self.rng.permutation(num_blocks))
        self.pages = [[] for _ in range(sequences)]
        self.lengths = np.zeros(sequences, np.int64)
        self.poison(np.nan)

    def poison(self, value):
        shape = self.cache.data.shape
        self.cache.data.set_data(to_ms(np.full(shape, value), self.case.cache))

    def table(self, sequences, totals, padding=-1):
        """int32 [B, m]: pages for `totals` tokens of each sequence, taking new ones from the pool."""
        size = self.case.block_size
        for s, n in zip(sequences, totals):
            while len(self.pages[s]) * size < n:
                self.pages[s].append(self.free.pop())
        table = np.full((len(sequences), max((len(self.pages[s]) for s in sequences), default=0) + 2), padding, np.int32)
        for row, s in zip(table, sequences):
            row[:len(self.pages[s])] = self.pages[s]
        return table

    def inputs(self, q_lens, sequences=None, batched=False, residual=False, padding=-1):
        """hidden, residual or None, block_table, q_seq_lens, context_lens as numpy; hidden is [B, S, hidden] when batched."""
        sequences = range(len(q_lens)) if sequences is None else sequences
        contexts = self.lengths[np.asarray(sequences, np.int64)]
        lead = (len(q_lens), q_lens[0]) if batched else (sum(q_lens),)

        def draw():
            return reference.rounded(self.rng.standard_normal((*lead, self.ref_cfg.hidden_size)), self.case.act)
        return draw(), draw() if residual else None, self.table(sequences, contexts + q_lens, padding), np.asarray(q_lens, np.int32), contexts.astype(np.int32)

    def call(self, hidden, residual, table, q_lens, contexts):
        args = [to_ms(table, "int32"), to_ms(q_lens, "int32"), to_ms(contexts, "int32")]
        kwargs = {} if residual is None else {"residual": to_ms(residual, self.case.act)}
        return self.layer(to_ms(hidden, self.case.act), self.cache.data, *args, **kwargs)

    def check(self, out, before, hidden, residual, table, q_lens, contexts):
        """Hold out and the cache to the reference; `before` is the cache's float64 content before the call."""
        assert str(out.dtype).lower() == self.case.act and out.shape == hidden.shape
        after = to_np(self.cache.data)
        expected = before.copy()
        out_ref, biggest = reference.mla_layer(self.ref_cfg, self.w, hidden, expected, self.case.cache, table, q_lens, contexts, residual, attend_to=after)
        written = self.written_slots(table, q_lens, contexts)
        rows, rows_ref = (x.reshape(-1, x.shape[-1]) for x in (after, expected))
        assert_close(rows[written], rows_ref[written], self.case.cache, what="cache rows")
        others = np.setdiff1d(np.arange(len(rows)), written)
        assert rows[others].tobytes() == before.reshape(rows.shape)[others].tobytes(), "a row that no new token owns was written"
        assert_close(to_np(out), out_ref, self.case.act, biggest, layer=True)

    def written_slots(self, table, q_lens, contexts):
        size = self.case.block_size
        at = [(row, np.arange(c, c + t)) for row, t, c in zip(table, q_lens, contexts)]
        return np.concatenate([row[p // size].astype(np.int64) * size + p % size for row, p in at] or [np.zeros(0, np.int64)])

    def step(self, q_lens, sequences=None, **how):
        """One checked call; sequences grow by q_lens. Returns out."""
        args = self.inputs(list(q_lens), sequences, **how)
        before = to_np(self.cache.data)
        out = self.call(*args)
        self.check(out, before, *args)
        self.lengths[np.asarray(range(len(q_lens)) if sequences is None else sequences, np.int64)] += np.asarray(q_lens, np.int64)
        return out

    def snapshot(self):
        return bits(self.cache.data)
