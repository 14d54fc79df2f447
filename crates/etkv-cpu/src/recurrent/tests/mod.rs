//! Scans and convolutions against plain loops in float64, and the bits of one text cut in many ways.

mod cache;
mod convolutions;
mod reference;
mod refusals;
mod scans;
