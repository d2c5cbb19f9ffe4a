//! Op family `dropout`.
