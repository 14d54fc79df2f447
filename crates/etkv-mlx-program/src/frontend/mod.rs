//! Converts the payload in a `.pte` file to a graph.

mod control;
pub mod decode;
pub mod payload;
