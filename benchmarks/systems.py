"""The systems of a case: {(system, dtype, variant): timing.System}. variant is "" for what a user calls; fused.py names
the others."""

import numpy as np

import fused
import mindspore_peer
import pool

# Against the float32 composition: 16-bit systems round weights, cache and activations as well, which their own tests bound tighter.
TOLERANCE = {"float32": 4e-5, "float16": 4e-3, "bfloat16": 3e-2}


def _optional_peers():
    """{name: module} of benchmarks/peers that can be imported."""
    found = {}
    try:
        from peers import torch_mla
        found["torch"] = torch_mla
    except ImportError:
        return found
    try:
        from peers import hf_layer
        found["transformers"] = hf_layer
    except ImportError:
        pass
    return found


PEERS = _optional_peers()


def build(case, threads, peers):
    """Every system of a case; peers: those that are not ours too."""
    systems = {}
    for dtype in case.dtypes:
        systems.update({("ms_flashmla", dtype, variant): system for variant, system in fused.build(case, dtype, threads).items()})
    if not peers:
        return systems
    systems["mindspore", "float32", ""] = mindspore_peer.build(case)
    for name, module in PEERS.items():
        if name == "transformers" and not case.transformers:
            continue
        for dtype in case.dtypes:
            if dtype != "float16" or case.phase == "decode_core":
                systems[name, dtype, ""] = module.build(case, dtype)
    return systems


def check(case, systems, prepare):
    """RuntimeError unless every system gives the same output as the float32 composition within its dtype's tolerance; without peers, as our own
    in the case's first dtype."""
    base_key = ("mindspore", "float32", "")
    if base_key not in systems:
        base_key = ("ms_flashmla", case.dtypes[0], "")
    prepare(systems[base_key])
    base = systems[base_key].output().astype(np.float64).reshape(-1)
    for (name, dtype, variant), system in systems.items():
        prepare(system)
        out = system.output().astype(np.float64).reshape(-1)
        error = np.abs(out - base).max() / np.abs(base).max()
        if not error <= TOLERANCE[dtype]:
            raise RuntimeError(f"{case.name}: {name} {variant} in {dtype} differs from the composition by {error:.1e} of the largest output, "
                               f"allowed {TOLERANCE[dtype]:.1e}")


def release(case):
    """Drops what cases of other models hold."""
    fused.release(case)
    mindspore_peer.release(case)
    if "torch" in PEERS:
        PEERS["torch"].release(case)
    pool.Pool.release(case.cfg.cache_dim)
