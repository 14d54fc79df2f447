"""Compares etkv's speed and memory with others, side by side in one run; see ``__main__``."""
