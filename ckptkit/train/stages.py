"""The models that training knows, by the name of their schema."""

from ckptkit.train.baseline import Baseline
from ckptkit.train.model import Stage

AnyStage = Stage | Baseline
STAGES: dict[str, type[AnyStage]] = {"zaya": Stage, "mixtral": Baseline}
