"""Compares etkv's speed and memory with other programs in one run; see ``__main__``."""
