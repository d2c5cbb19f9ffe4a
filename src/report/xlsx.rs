//! `--xlsx`: the rows and steps of a run, or of result files, as a workbook. Numbers are numbers, empty cells stay
//! empty, and text is text whatever it begins with.

use super::columns::{COLUMNS, Kind, Value};
use super::steps;
use rust_xlsxwriter::{Format, Workbook, Worksheet, XlsxError};

/// What a workbook holds: rows in the order of [`COLUMNS`], steps in that of [`steps::COLUMNS`].
#[derive(Debug, Default)]
pub struct Book {
    pub rows: Vec<Vec<Value>>,
    pub steps: Vec<[Value; 14]>,
    /// Rows of earlier runs that `--resume` found and did not make again: on no sheet.
    pub found: Vec<Vec<Value>>,
}

/// Rows of a sheet, the header among them (the format's limit).
const SHEET_ROWS: usize = 1_048_576;
/// Characters of a cell (the format's limit).
const CELL_CHARS: usize = 32_767;
/// Integers that a cell's double holds exactly.
const LARGEST_EXACT: u64 = 1 << 53;
/// Widths of columns in characters: a number of nine digits and its sign fit the least, a window the widest.
const WIDTHS: (usize, usize) = (12, 48);
/// Rows that are looked at for a column's width.
const SAMPLED: usize = 200;
/// What the first bytes of a workbook are: it is a zip file.
pub const MAGIC: &[u8] = b"PK\x03\x04";

impl Book {
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty() && self.steps.is_empty()
    }

    /// The file's bytes: sheets `rows`, `steps` (continued in `steps 2` ... where one is full) and `columns`.
    ///
    /// # Errors
    /// What the writer of workbooks refuses.
    pub fn bytes(&self) -> Result<Vec<u8>, XlsxError> {
        let mut workbook = Workbook::new();
        let names: Vec<&str> = COLUMNS.iter().map(|c| c.name).collect();
        sheet(workbook.add_worksheet(), "rows", &names, &self.rows)?;
        let names = steps::COLUMNS.map(|(name, _)| name);
        let mut parts = self.steps.chunks(SHEET_ROWS - 1).collect::<Vec<_>>();
        if parts.is_empty() {
            parts.push(&[]);
        }
        for (at, part) in parts.into_iter().enumerate() {
            let name = if at == 0 { "steps".to_owned() } else { format!("steps {}", at + 1) };
            sheet(workbook.add_worksheet(), &name, &names, part)?;
        }
        let columns = COLUMNS.iter().map(|c| ("rows", c.name, c.kind, c.meaning));
        let of_steps = steps::COLUMNS.iter().zip(steps::MEANINGS);
        let of_steps = of_steps.map(|((name, kind), meaning)| ("steps", *name, *kind, meaning));
        let meanings: Vec<[Value; 4]> = columns
            .chain(of_steps)
            .map(|(of, name, kind, meaning): (&str, &str, Kind, &str)| {
                [of, name, kind.name(), meaning].map(|t| Value::Text(t.into()))
            })
            .collect();
        sheet(workbook.add_worksheet(), "columns", &["sheet", "column", "type", "meaning"], &meanings)?;
        workbook.save_to_buffer()
    }
}

fn sheet<R: AsRef<[Value]>>(
    sheet: &mut Worksheet,
    name: &str,
    names: &[&str],
    rows: &[R],
) -> Result<(), XlsxError> {
    sheet.set_name(name)?;
    sheet.set_freeze_panes(1, 0)?;
    let bold = Format::new().set_bold();
    for (at, name) in (0u16..).zip(names) {
        sheet.write_string_with_format(0, at, *name, &bold)?;
        let longest =
            rows.iter().take(SAMPLED).map(|r| r.as_ref().get(usize::from(at)).map_or(0, width)).max();
        let chars = longest.unwrap_or(0).max(name.len() + 2).clamp(WIDTHS.0, WIDTHS.1);
        sheet.set_column_width(at, chars as f64)?;
    }
    for (row, values) in (1u32..).zip(rows) {
        for (at, value) in (0u16..).zip(values.as_ref()) {
            cell(sheet, row, at, value)?;
        }
    }
    // Filters need a row under the header.
    if !rows.is_empty() {
        sheet.autofilter(0, 0, rows.len() as u32, (names.len() - 1) as u16)?;
    }
    Ok(())
}

fn width(value: &Value) -> usize {
    match value {
        Value::Text(text) => text.chars().count(),
        other => other.cell().len(),
    }
}

fn cell(sheet: &mut Worksheet, row: u32, at: u16, value: &Value) -> Result<(), XlsxError> {
    match value {
        Value::Empty => {}
        Value::Bool(b) => {
            sheet.write_boolean(row, at, *b)?;
        }
        Value::Int(n) if *n <= LARGEST_EXACT => {
            sheet.write_number(row, at, *n as f64)?;
        }
        Value::Int(n) => {
            sheet.write_string(row, at, n.to_string())?;
        }
        // As in the CSV, to the last digit.
        Value::Float(_) => {
            if let Ok(x) = value.cell().parse::<f64>() {
                sheet.write_number(row, at, x)?;
            }
        }
        Value::Text(text) => {
            sheet.write_string(row, at, text.chars().take(CELL_CHARS).collect::<String>())?;
        }
    }
    Ok(())
}
