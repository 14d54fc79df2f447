"""The KV cache of an ExecuTorch program, from Python.

.. code-block:: python

    config = etkv.CacheConfig(etkv.read_kv_cache_metadata("model.pte").layers, capacity=4096)
    with etkv.DecodeSession(config) as session, etkv.load("model.pte", session, logits="last") as program:
        tokenizer = etkv.Tokenizer.from_pretrained("model.pte")
        messages = [{"role": "user", "content": "What is a KV cache?"}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        for response in etkv.stream_generate(program, tokenizer, prompt):
            print(response.text, end="", flush=True)

Importing this package does not import torch or ExecuTorch. The functions that need them import them.
"""

from etkv._capi import set_log_level
from etkv.answer import Answer, GenerationResponse, generate, stream_generate
from etkv.cache import Cache, SeqCache, TreeCache, fingerprint
from etkv.chat import Chat, Reuse
from etkv.config import CacheConfig, LayerConfig
from etkv.description import describe_program
from etkv.errors import (
    CacheFileError,
    CapacityError,
    EtkvError,
    KindError,
    NoCacheError,
    PositionError,
    ProgramError,
    Status,
    StatusError,
    StepError,
    UnsupportedError,
    VersionError,
)
from etkv.generation import Generation, generate_tokens
from etkv.graph_cache import GraphCache
from etkv.memory import (
    LayerMemory,
    Memory,
    MemoryBudget,
    RecurrentLayerMemory,
    estimate,
    estimate_shared,
    memory_budget,
    process_report,
    row_bytes,
    set_memory_budget,
    set_memory_callback,
)
from etkv.metadata import ModelCacheParams, read_kv_cache_metadata, write_kv_cache_metadata
from etkv.prefix import Prefix
from etkv.prefix_cache import PrefixCache, PrefixPin, PrefixStatistics
from etkv.prefix_store import PrefixStore
from etkv.recurrent_layer import Convolution, Recurrence, RecurrentLayer
from etkv.runtime import Program, load, register_backend
from etkv.session import DecodeSession, SeqSession, Session, TreeSession
from etkv.tokenizer import StreamingDetokenizer, Tokenizer

__all__ = [
    "Answer",
    "Cache",
    "CacheConfig",
    "CacheFileError",
    "CapacityError",
    "Chat",
    "Convolution",
    "DecodeSession",
    "EtkvError",
    "Generation",
    "GenerationResponse",
    "GraphCache",
    "KindError",
    "LayerConfig",
    "LayerMemory",
    "Memory",
    "MemoryBudget",
    "ModelCacheParams",
    "NoCacheError",
    "PositionError",
    "Prefix",
    "PrefixCache",
    "PrefixPin",
    "PrefixStatistics",
    "PrefixStore",
    "Program",
    "ProgramError",
    "Recurrence",
    "RecurrentLayer",
    "RecurrentLayerMemory",
    "Reuse",
    "SeqCache",
    "SeqSession",
    "Session",
    "Status",
    "StatusError",
    "StepError",
    "StreamingDetokenizer",
    "Tokenizer",
    "TreeCache",
    "TreeSession",
    "UnsupportedError",
    "VersionError",
    "describe_program",
    "estimate",
    "estimate_shared",
    "fingerprint",
    "generate",
    "generate_tokens",
    "load",
    "memory_budget",
    "process_report",
    "read_kv_cache_metadata",
    "register_backend",
    "row_bytes",
    "set_log_level",
    "set_memory_budget",
    "set_memory_callback",
    "stream_generate",
    "write_kv_cache_metadata",
]

__version__ = "0.1.0"
