//! Op family `attention`.
