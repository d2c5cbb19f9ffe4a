//! Op family `router`.
