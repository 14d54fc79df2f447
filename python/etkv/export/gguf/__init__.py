"""Reads GGUF files: configuration, weights and tokenizer of a model, by what the file says.

A file is read whole or refused: a key or a tensor that no part of this package understands ends the export by its name.
Keys that describe the file and not the model are listed in :mod:`etkv.export.gguf.keys`.
"""

from etkv.export.gguf.architectures import read_config
from etkv.export.gguf.file import GgufFile, find_files
from etkv.export.gguf.tokenizer import read_tokenizer
from etkv.export.gguf.weights import read_weights

__all__ = ["GgufFile", "find_files", "read_config", "read_tokenizer", "read_weights"]
