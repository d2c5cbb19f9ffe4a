//! The fake device: scripted times and faults, for tests of measuring.
