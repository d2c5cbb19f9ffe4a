//! Op family `optimizer`.
