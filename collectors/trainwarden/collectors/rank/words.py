"""What a training script writes: phases and values. Plain integers, since they index lists on the way of every step."""

from typing import Final, Literal, NewType, TypeAlias

from trainwarden.core.records import PHASES, STAMPED

Phase = NewType("Phase", int)
Feature = NewType("Feature", int)
Scope: TypeAlias = Literal["local", "global"]

OPTIMIZER: Final = Phase(PHASES.index("optimizer"))
WAIT: Final = Phase(PHASES.index("wait"))
BACKWARD: Final = Phase(PHASES.index("backward"))
FORWARD: Final = Phase(PHASES.index("forward"))
DATA: Final = Phase(PHASES.index("data"))
OTHER: Final = Phase(PHASES.index("other"))
BETWEEN: Final = Phase(PHASES.index("between"))
INIT: Final = Phase(PHASES.index("init"))
CHECKPOINT: Final = Phase(PHASES.index("checkpoint"))
EVAL: Final = Phase(PHASES.index("eval"))
COMPILE: Final = Phase(PHASES.index("compile"))
BACKWARD_INPUT: Final = Phase(PHASES.index("backward_input"))
BACKWARD_WEIGHT: Final = Phase(PHASES.index("backward_weight"))

# A row in stamps relies on it: what a plain step goes through has the lowest ids, and goes down.
assert tuple(range(STAMPED)) == (OPTIMIZER, WAIT, BACKWARD, FORWARD, DATA, OTHER)

LOSS: Final = Feature(STAMPED)
GRAD_NORM: Final = Feature(STAMPED + 1)
LEARNING_RATE: Final = Feature(STAMPED + 2)
"""The first two stand behind the stamps in the list that Rank keeps of a plain step, the third beyond its end."""

FEATURE_NAMES: Final[dict[int | str, str]] = {LOSS: "loss", GRAD_NORM: "grad_norm", LEARNING_RATE: "learning_rate"}
FEATURE_NAMES.update({name: name for name in [*FEATURE_NAMES.values()]})
