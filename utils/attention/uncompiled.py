"""`attention` for callers inside of torch.compile: it decides and launches outside of their graphs, as it does elsewhere.

A file of its own, because `torch.compiler.disable` imports Triton, whose mode (TRITON_INTERPRET) is settled at its first
import. Whoever gets here runs torch.compile, which has imported Triton already.
"""

import torch

from utils.attention.call import decide_and_call

attention_outside_of_graphs = torch.compiler.disable(decide_and_call)
