"""Give every index head a mirrored twin, so that no two entries tie at exactly zero.

With a ReLU an entry that no head likes scores exactly 0, and several such entries at the border of the top-k make
the selected set depend on how a kernel breaks ties. A twin with the negated query and a small share of the head's
weight turns the ReLU into a leaky ReLU, `relu(s) + LEAK * relu(-s)`: scores are distinct, the order of the liked
entries stays, and the layer is still an ordinary lightning indexer with twice the heads.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from tools.tiny_dsv4_model import TinyDeepseekV4

LEAK = 2.0**-4  # a power of two: exact in bf16


def with_mirrored_index_heads(model: TinyDeepseekV4) -> TinyDeepseekV4:
    """A copy of the model with twice the index heads."""
    config = replace(model.config, index_n_heads=2 * model.config.index_n_heads)
    mirrored = TinyDeepseekV4(config)
    state = dict(model.state_dict())
    for name, value in state.items():
        if name.endswith("indexer.wq_b.weight"):
            state[name] = torch.cat([value, -value])
        elif name.endswith("indexer.weights_proj.weight"):
            state[name] = torch.cat([value, LEAK * value])
    mirrored.load_state_dict(state)
    return mirrored
