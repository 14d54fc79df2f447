//! Scans and convolutions, compared with simple loops in float64. The bits of a text's results must not
//! depend on its steps.

mod cache;
mod convolutions;
mod reference;
mod refusals;
mod scans;
