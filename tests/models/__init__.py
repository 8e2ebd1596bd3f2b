"""Small models that are difficult for an engine which unshards, gathers and reduces implicitly.

Each `Specimen` has functions that build a model, that make the micro-batch of a step, index and rank, and that train
one micro-batch. This package does not import the engine: the oracle trains the same specimens in plain PyTorch.

Reading order: `specimen` and `plain`, on which the others are built; `shared`, `adapters`, `unused`, `recomputed`,
`training_variants`, `unusual_inputs`, `buffers`, `unusual_modules`, `layers` and `adversarial`, for one difficulty
each; `zoo`, the table of most specimens; `rank_dependent`, models that run different modules on different ranks.
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
