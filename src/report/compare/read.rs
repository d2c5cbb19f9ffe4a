//! Result files as records by column name. Strict: whole records of a known header, or a reason why not. Either
//! dialect; a record holds plain cells, as [`crate::report::Value::cell`] gives them.

use super::keys::{SIDE_OF_AA, SIDES_OF_AA};
use crate::report::columns::{COLUMNS, Kind, SCHEMA_VERSION, Value, possible};
use crate::report::dialect::{Dialect, without_sep};
use std::collections::HashMap;
use std::sync::Arc;

/// One file as it was read, or why it could not be.
#[derive(Debug, Clone)]
pub struct Source {
    /// As the user gave it.
    pub name: String,
    pub bytes: Result<Vec<u8>, String>,
}

/// One row of a file.
#[derive(Debug, Clone)]
pub struct Record {
    source: Arc<str>,
    /// Counts rows after the header from 1.
    row: usize,
    columns: Arc<HashMap<String, usize>>,
    cells: csv::StringRecord,
}

impl Record {
    /// The cell of a column; `None` when the file has no such column.
    pub fn get(&self, column: &str) -> Option<&str> {
        self.columns.get(column).and_then(|at| self.cells.get(*at))
    }

    /// The cell of a column; empty when the file has no such column.
    pub fn cell(&self, column: &str) -> &str {
        self.get(column).unwrap_or_default()
    }

    /// Names of the file's columns, in no order.
    pub fn columns(&self) -> impl Iterator<Item = &str> {
        self.columns.keys().map(String::as_str)
    }

    /// Whether every cell is the same.
    pub fn same_cells(&self, other: &Record) -> bool {
        self.cells == other.cells && *self.columns == *other.columns
    }

    /// Values in the order of [`COLUMNS`]; empty where the file has no such column, or no value of its kind.
    pub fn values(&self) -> Vec<Value> {
        COLUMNS.iter().map(|c| Value::parse(self.cell(c.name), c.kind).unwrap_or(Value::Empty)).collect()
    }

    /// Where the row stands, for messages.
    pub fn place(&self) -> String {
        let name = |column| Some(self.cell(column)).filter(|c| !c.is_empty()).unwrap_or("?");
        format!("{}, row {} ({} {})", self.source, self.row, name("model_recipe"), name("arm"))
    }

    /// What is wrong with a cell, with its place.
    pub fn wrong(&self, column: &str, what: &str) -> String {
        format!("{}, column {column}: {what}", self.place())
    }

    /// A cell that must hold a finite number above 0.
    ///
    /// # Errors
    /// The row, the column and what stands there.
    pub fn positive(&self, column: &str) -> Result<f64, String> {
        match self.number(column)? {
            Some(x) => Ok(x),
            None => Err(self.wrong(column, "empty: it was not measured")),
        }
    }

    /// The same for a cell that may be empty.
    ///
    /// # Errors
    /// As [`Record::positive`].
    pub fn number(&self, column: &str) -> Result<Option<f64>, String> {
        let text = match self.get(column) {
            None => return Err(self.wrong(column, "the file has no such column")),
            Some("") => return Ok(None),
            Some(text) => text,
        };
        match text.parse::<f64>() {
            Ok(x) if x.is_finite() && x > 0.0 => Ok(Some(x)),
            _ => Err(self.wrong(column, &format!("{text:?} is not a finite number above 0"))),
        }
    }
}

/// Columns without which a row cannot be placed; the others may be absent and then count as empty.
const NEEDED: [&str; 5] = ["schema_version", "run_id", "status", "model_recipe", "arm"];

/// Whether the file is a table of something else: a first line that has none of the columns without which a row cannot be placed.
pub fn is_other_table(source: &Source) -> bool {
    let Ok(bytes) = source.bytes.as_ref() else { return false };
    let bytes = without_sep(bytes);
    let mut reader = csv::ReaderBuilder::new().delimiter(Dialect::of(bytes).separator()).from_reader(bytes);
    let header = reader.headers().ok().filter(|h| h.len() > 1);
    header.is_some_and(|h| !NEEDED.iter().any(|needed| h.iter().any(|column| column == *needed)))
}

/// All rows of a file that holds at least one.
///
/// # Errors
/// As [`records`].
pub fn read(source: &Source) -> Result<Vec<Record>, String> {
    let records = records(source)?;
    if records.is_empty() {
        return Err(format!("{} holds no row", source.name));
    }
    Ok(records)
}

/// All rows of a file.
///
/// # Errors
/// One sentence that names the file and, where there is one, the row and the column.
pub fn records(source: &Source) -> Result<Vec<Record>, String> {
    let name = &source.name;
    let bytes = source.bytes.as_ref().map_err(|e| format!("{name} cannot be read: {e}"))?;
    if bytes.is_empty() {
        return Err(format!("{name} is empty"));
    }
    let bytes = without_sep(bytes);
    let dialect = Dialect::of(bytes);
    let mut reader =
        csv::ReaderBuilder::new().delimiter(dialect.separator()).flexible(false).from_reader(bytes);
    let header = reader.headers().map_err(|e| format!("{name} is no CSV file: {e}"))?.clone();
    let mut columns = HashMap::new();
    for (at, column) in header.iter().enumerate() {
        if columns.insert(column.to_owned(), at).is_some() {
            return Err(format!("{name} has two columns of the name {column:?}"));
        }
    }
    if let Some(column) = NEEDED.iter().find(|c| !columns.contains_key(**c)) {
        return Err(format!("{name} holds no results of mbperf: it has no column {column}"));
    }
    // A number that was cut short is a number, and the row looks whole. Row and end are written at once: without the end
    // nothing says that the row is.
    // Half of an end is none, as for who appends to the file.
    if !bytes.ends_with(b"\n") {
        return Err(format!(
            "{name}: its last line has no line end, as if it was cut short while it was written: remove that line, or end it \
             if it is whole"
        ));
    }
    let kinds: Vec<Kind> = header
        .iter()
        .map(|name| COLUMNS.iter().find(|c| c.name == name).map_or(Kind::Text, |c| c.kind))
        .collect();
    let (source, columns): (Arc<str>, _) = (name.as_str().into(), Arc::new(columns));
    let mut records = Vec::new();
    for (at, cells) in reader.into_records().enumerate() {
        let cells = cells.map_err(|e| format!("{name}, row {}: {e}", at + 1))?;
        // As spreadsheets leave them below the last row.
        if cells.iter().all(str::is_empty) {
            continue;
        }
        let plain = cells.iter().zip(&kinds).zip(&header).map(|((cell, kind), column)| {
            dialect.read(cell, *kind).map_err(|e| format!("{name}, row {}, column {column}: {e}", at + 1))
        });
        let cells = plain.collect::<Result<csv::StringRecord, String>>()?;
        let record = Record { source: source.clone(), row: at + 1, columns: columns.clone(), cells };
        check(&record)?;
        records.push(record);
    }
    Ok(records)
}

/// Words of text columns that hold no others; any of them may be empty.
const WORDS: [(&str, &[&str]); 3] = [
    ("verdict", &["faster", "slower", "equivalent", "undecided"]),
    (SIDE_OF_AA, &SIDES_OF_AA),
    ("stopped_by", &["precision", "max_time", "max_steps"]),
];

/// Cells must be what their columns hold, whether they are used or not: garbage in one says that the row is not what
/// was measured. Of another version's rows nothing is known.
///
/// # Errors
/// The row, the column and what stands there.
pub fn typed(record: &Record) -> Result<(), String> {
    if record.cell("schema_version") != SCHEMA_VERSION.to_string() {
        return Ok(());
    }
    for column in COLUMNS {
        let cell = record.cell(column.name);
        if Value::parse(cell, column.kind).is_none() {
            return Err(record.wrong(column.name, &format!("{cell:?} is no {}", column.kind.name())));
        }
    }
    Ok(())
}

/// Text must be one of its column's words, where those are few. A page shows text as it is; a gate passes on it.
///
/// # Errors
/// The row, the column and what stands there.
pub fn worded(record: &Record) -> Result<(), String> {
    if record.cell("schema_version") != SCHEMA_VERSION.to_string() {
        return Ok(());
    }
    for (column, words) in WORDS {
        let cell = record.cell(column);
        if !cell.is_empty() && !words.contains(&cell) {
            return Err(record.wrong(column, &format!("{cell:?} is none of {}", words.join(", "))));
        }
    }
    Ok(())
}

/// Cells that say what a row is.
fn check(record: &Record) -> Result<(), String> {
    let one_of = |column: &str, choices: &[&str]| {
        let cell = record.cell(column);
        if choices.contains(&cell) {
            return Ok(());
        }
        Err(record.wrong(column, &format!("{cell:?} is none of {}", choices.join(", "))))
    };
    one_of("status", &["ok", "failed", "skipped"])?;
    one_of("arm", &["eager", "graph"])?;
    if let Some(column) =
        ["run_id", "model_recipe", "schema_version"].iter().find(|c| record.cell(c).is_empty())
    {
        return Err(record.wrong(column, "empty"));
    }
    // Of another version's rows nothing is known.
    let known = record.cell("schema_version") == SCHEMA_VERSION.to_string();
    for column in COLUMNS.iter().filter(|c| known && c.kind == Kind::Float) {
        // What is no number is told where the cell is used.
        if let Ok(x) = record.cell(column.name).parse::<f64>()
            && x.is_finite()
        {
            possible(column.name, x).map_err(|e| record.wrong(column.name, &e))?;
        }
    }
    Ok(())
}
