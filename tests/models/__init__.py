"""The zoo: small models that are awkward for an engine that releases, gathers and reduces behind the user's back.

Each `Specimen` says how to build a model, how a micro-batch looks at a given place (step, micro-batch, rank) and how
one micro-batch is trained. Nothing here knows of the engine: the oracle trains the same specimens in plain PyTorch.

In reading order: `specimen` and `plain`, which the others are made of; `shared`, `adapters`, `unused`, `recomputed`,
`trained`, `packed`, `buffers`, `strange` and `layers`, by what is awkward; `zoo`, the table of all; `differing`, of
which each rank runs other modules.
"""

from tests.models.adapters import LoraBlock, lora
from tests.models.plain import Block, Regressor, mlp
from tests.models.rank_dependent import DIFFERING
from tests.models.recomputed import Checkpointed
from tests.models.specimen import (
    ROWS,
    VOCABULARY,
    WIDTH,
    Batch,
    Place,
    Specimen,
    cast,
    cross_entropy,
    mse,
    one_loss,
    rows,
    tokens,
)
from tests.models.unusual_inputs import LossOutside
from tests.models.zoo import ZOO

__all__ = [
    "DIFFERING",
    "ROWS",
    "VOCABULARY",
    "WIDTH",
    "ZOO",
    "Batch",
    "Block",
    "Checkpointed",
    "LoraBlock",
    "LossOutside",
    "Place",
    "Regressor",
    "Specimen",
    "cast",
    "cross_entropy",
    "lora",
    "mlp",
    "mse",
    "one_loss",
    "rows",
    "tokens",
]
