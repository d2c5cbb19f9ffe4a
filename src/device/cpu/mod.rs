//! The CPU device: the same program run by the ops' references.
