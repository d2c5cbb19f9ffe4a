//! Op family `collective`.
