//! Op family `cross_entropy`.
