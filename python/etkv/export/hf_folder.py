"""Writes the exported weights as a Hugging Face folder that transformers and mlx-lm both read."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etkv.export.staging import TemporaryFolder

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


_WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?")
"""The files of weights that an export writes."""


class Staged(TemporaryFolder):
    """A Hugging Face folder under construction, in a temporary folder inside its target.

    The target does not change before :meth:`publish`.
    """

    def write(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, generation: dict[str, Any]) -> None:
        """Write configuration, weights, tokenizer and generation settings.

        Quantized weights are dequantized to the model's dtype, so the folder has the same values as the program.
        """
        model.save_pretrained(self.path, state_dict=_plain_weights(model))
        tokenizer.save_pretrained(self.path)
        for file in self.path.glob("*.safetensors"):
            # safetensors ignores the umask, so only the owner can read its files. Give them the mode of other files.
            file.chmod((self.path / "config.json").stat().st_mode)
        (self.path / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n", encoding="utf-8")
        name_for_mlx_lm(self.path / "config.json")

    def publish(self) -> None:
        """Replace the files of an earlier export atomically, one by one, with the configuration last."""
        written = {file.name for file in self.path.iterdir()}
        for stale in self.folder.glob("model*.safetensors*"):
            if stale.name not in written and _WEIGHTS.fullmatch(stale.name):
                stale.unlink()
        for name in sorted(written, key=lambda name: name == "config.json"):
            if (self.path / name).is_dir() and (self.folder / name).is_dir():
                # This is the folder of named chat templates. A rename cannot replace a folder that is not empty.
                shutil.rmtree(self.folder / name)
            (self.path / name).replace(self.folder / name)


def name_for_mlx_lm(config_file: Path) -> None:
    """Repeat entries of a configuration under the names that mlx-lm reads.

    transformers 5 writes ``rope_parameters``. mlx-lm reads ``rope_theta``, ``partial_rotary_factor`` and
    ``rope_scaling`` at the top level, and uses a default for an absent entry. The number of experts has one name in
    transformers and two names in mlx-lm.
    """
    config = json.loads(config_file.read_text(encoding="utf-8"))
    rope = config.get("rope_parameters")
    if isinstance(rope, dict) and "rope_theta" in rope:
        config |= {key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in rope}
        if rope.get("rope_type", "default") != "default":
            config["rope_scaling"] = {key: value for key, value in rope.items() if key != "rope_theta"}
    if "num_local_experts" in config:
        config.setdefault("num_experts", config["num_local_experts"])
    config_file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _plain_weights(model: PreTrainedModel) -> dict[str, Any]:
    """Return the dequantized weights of ``model`` by name. Tied weights appear once."""
    from etkv.export import experts, packing

    state = experts.plain_weights(model)
    tied = set(model.all_tied_weights_keys) if model.config.get_text_config().tie_word_embeddings else set()
    of_experts = tuple(f"{name}." for name in state)
    packed = set()
    for path, layer in packing.layers(model):
        packed |= {f"{path}.{name}" for name, _ in layer.named_buffers(recurse=False)}
        if f"{path}.weight" not in tied:
            state[f"{path}.weight"] = layer.weight
    for name, tensor in model.state_dict().items():
        if name not in tied | packed and not name.startswith(of_experts):
            state[name] = tensor
    return state
