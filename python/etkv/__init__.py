"""The KV cache of an ExecuTorch program, from Python.

Importing this package imports neither torch nor ExecuTorch; its modules do so when they are used.
"""

__version__ = "0.1.0"
