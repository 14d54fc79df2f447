//! What generated runs have found, in short.
