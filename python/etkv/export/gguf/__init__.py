"""Reads configuration, weights and tokenizer of a model from a GGUF file.

A file is read whole or refused: an unknown key or tensor ends the export with an error that names it.
:mod:`etkv.export.gguf.keys` lists keys that describe the file and not the model.
"""

from etkv.export.gguf.architectures import read_config
from etkv.export.gguf.file import GgufFile, find_files
from etkv.export.gguf.tokenizer import read_tokenizer

__all__ = ["GgufFile", "find_files", "read_config", "read_tokenizer"]
