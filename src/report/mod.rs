//! Results: one column table for CSV, JSON, terminal and the page in `results/`. Knows rows only.

pub mod blocks;
pub mod columns;
pub mod compare;
pub mod dialect;
pub mod file;
pub mod page;
pub mod paths;
pub mod profile;
pub mod progress;
pub mod recommend;
pub mod row;
pub mod run_id;
pub mod steps;
pub mod summary;
pub mod writer;
pub mod xlsx;

#[cfg(test)]
mod tests;

pub use columns::{COLUMNS, Column, SCHEMA_VERSION, Value};
pub use dialect::Dialect;
pub use paths::Paths;
pub use progress::Terminal;
pub use row::{Row, RunFacts};
pub use writer::{OutputError, Target, Writer};
