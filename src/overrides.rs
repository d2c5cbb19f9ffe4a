//! overrides
