"""Everything that etkv's speed and memory are compared by, side by side in one run; see ``__main__``."""
