//! Results: one column table for CSV, JSON, terminal and the page in `results/`. Knows rows only.

pub mod columns;
pub mod compare;
pub mod progress;
pub mod row;
pub mod run_id;
pub mod steps;
pub mod summary;
pub mod writer;

#[cfg(test)]
mod tests;

pub use columns::{COLUMNS, Column, SCHEMA_VERSION, Value};
pub use progress::Terminal;
pub use row::{Row, RunFacts};
pub use writer::{OutputError, Target, Writer};
