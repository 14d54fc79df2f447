"""The method ``modelopt`` of NVIDIA's Model Optimizer: FP8 and NVFP4."""

from __future__ import annotations

from collections.abc import Mapping

from etkv.export.published.format import Format, beside
from etkv.export.published.fp4 import nvfp4
from etkv.export.published.fp8 import FLOAT8, scaled
from etkv.export.published.settings import Settings
from etkv.export.published.stored import Stored
from etkv.export.published.weight import Weight

_PARTS = {".weight_scale": "scale", ".weight_scale_2": "whole"}


class ModelOpt(Format):
    """Decodes ``modelopt``."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        algorithm = settings.one_of("quant_algo", ("FP8", "NVFP4"), None)
        self.activations = "in 8 bits" if algorithm == "FP8" else "in 4 bits"

    def owner(self, name: str, tensors: Mapping[str, Stored]) -> tuple[str, str] | None:
        return beside(name, tensors, _PARTS)

    def weight(self, name: str, parts: Mapping[str, Stored]) -> Weight:
        settings = self._settings
        codes, scale = settings.part(parts, name, "weight"), settings.part(parts, name, "scale")
        if codes.dtype in FLOAT8 and len(codes.shape) == 2 and "whole" not in parts:
            return scaled(settings, codes, scale, None)
        return nvfp4(settings, codes, scale, settings.part(parts, name, "whole"), divides=False)
