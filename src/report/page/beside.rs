//! The files beside the rows: steps, blocks, and the profile's times by part. Read by column name; the steps also
//! compressed (`.gz`).

use crate::report::columns::{Kind, possible};
use crate::report::dialect::{Dialect, without_sep};
use crate::report::writer;
use crate::report::{Value, blocks, file, steps};
use std::collections::HashMap;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// A steps file by run.
#[derive(Debug, Default)]
pub struct StepsFile {
    pub runs: HashMap<String, Vec<Step>>,
    /// All cells in the file's order, when they were asked for.
    pub cells: Vec<[Value; 14]>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Pacing {
    RunAhead,
    Sync,
    Drained,
    Modelled,
}

/// A step as far as it is drawn.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Step {
    /// 0 for `a`, 1 for `b`.
    pub side: usize,
    pub phase: Phase,
    pub pacing: Pacing,
    pub block: Option<u64>,
    pub wall_ms: f64,
}

/// Phases that steps belong to, in the steps file's words.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Phase {
    Equality,
    Warmup,
    /// Capture, instantiation, upload: no step, but drawn where it was.
    Capture,
    FirstReplay,
    Switch,
    Steady,
    /// After timing, like the equality check.
    FinalCheck,
}

impl Phase {
    pub fn name(self) -> &'static str {
        match self {
            Phase::Equality => "equality check",
            Phase::Warmup => "warm-up",
            Phase::Capture => "capture, instantiation, upload",
            Phase::FirstReplay => "first replay",
            Phase::Switch => "switch of arms",
            Phase::Steady => "steady",
            Phase::FinalCheck => "final check",
        }
    }

    /// Whether its steps are in the statistics.
    pub fn counts(self) -> bool {
        self == Phase::Steady
    }

    fn of(cell: &str) -> Option<Self> {
        use crate::device::Phase as Of;
        Some(match Of::named(cell)? {
            // It has neither a step nor a place among them.
            Of::Prepare => return None,
            Of::Equality => Phase::Equality,
            Of::Warmup => Phase::Warmup,
            Of::Capture | Of::Instantiate | Of::Upload => Phase::Capture,
            Of::FirstReplay => Phase::FirstReplay,
            Of::Switch => Phase::Switch,
            Of::Steady => Phase::Steady,
            Of::FinalCheck => Phase::FinalCheck,
        })
    }
}

/// The card while a block's last step ran.
#[derive(Debug, Clone, PartialEq)]
pub struct Block {
    pub side: usize,
    pub sm_clock_mhz: Option<f64>,
    pub temperature_c: Option<f64>,
    pub power_w: Option<f64>,
}

/// A line of `<name>.profile.csv`: device time of one kernel in one part of a step.
#[derive(Debug, Clone, PartialEq)]
pub struct PartTime {
    pub run_id: String,
    pub arm: String,
    pub part: String,
    pub launches: f64,
    pub device_ms: f64,
}

/// Columns of the profile that are read.
const PROFILE: [(&str, Kind); 6] = [
    ("run_id", Kind::Text),
    ("arm", Kind::Text),
    ("part", Kind::Text),
    ("kernel", Kind::Text),
    ("launches", Kind::Float),
    ("device_ms", Kind::Float),
];

/// The steps beside the rows at `path`; `None` where there are none. `whole`: every cell is kept.
///
/// # Errors
/// A file that is there and cannot be read.
pub fn steps(path: &Path, whole: bool) -> Result<Option<StepsFile>, String> {
    let Some((name, bytes)) = bytes(&writer::beside(path, "steps.csv"))? else { return Ok(None) };
    let mut file = StepsFile::default();
    each(&name, &bytes, &steps::COLUMNS, |line| {
        let phase = line.text("phase");
        let step = Step {
            side: line.side()?,
            phase: Phase::of(phase).ok_or_else(|| line.wrong("phase"))?,
            pacing: match line.text("pacing") {
                "run_ahead" => Pacing::RunAhead,
                "sync" => Pacing::Sync,
                "drained" => Pacing::Drained,
                "modelled" => Pacing::Modelled,
                _ => return Err(line.wrong("pacing")),
            },
            block: line.number("block").map(|b| b as u64),
            wall_ms: line.number("wall_ms").ok_or_else(|| line.wrong("wall_ms"))?,
        };
        let run = line.text("run_id");
        match file.runs.get_mut(run) {
            Some(steps) => steps.push(step),
            None => {
                file.runs.insert(run.to_owned(), vec![step]);
            }
        }
        if whole {
            file.cells.push(std::array::from_fn(|at| line.values[at].clone()));
        }
        Ok(())
    })?;
    Ok(Some(file))
}

/// The blocks beside the rows at `path`, by run.
///
/// # Errors
/// A file that is there and cannot be read.
pub fn blocks(path: &Path) -> Result<Option<HashMap<String, Vec<Block>>>, String> {
    let Some((name, bytes)) = bytes(&writer::beside(path, "blocks.csv"))? else { return Ok(None) };
    let mut runs: HashMap<String, Vec<Block>> = HashMap::new();
    each(&name, &bytes, &blocks::COLUMNS, |line| {
        let block = Block {
            side: line.side()?,
            sm_clock_mhz: line.number("sm_clock_mhz"),
            temperature_c: line.number("temperature_c"),
            power_w: line.number("power_w"),
        };
        runs.entry(line.text("run_id").to_owned()).or_default().push(block);
        Ok(())
    })?;
    Ok(Some(runs))
}

/// The profile beside the rows at `path`.
///
/// # Errors
/// A file that is there and cannot be read.
pub fn parts(path: &Path) -> Result<Option<Vec<PartTime>>, String> {
    let Some((name, bytes)) = bytes(&writer::beside(path, "profile.csv"))? else { return Ok(None) };
    let mut parts = Vec::new();
    each(&name, &bytes, &PROFILE, |line| {
        parts.push(PartTime {
            run_id: line.text("run_id").into(),
            arm: line.text("arm").into(),
            part: line.text("part").into(),
            launches: line.number("launches").ok_or_else(|| line.wrong("launches"))?,
            device_ms: line.number("device_ms").ok_or_else(|| line.wrong("device_ms"))?,
        });
        Ok(())
    })?;
    Ok(Some(parts))
}

/// A line with its wanted columns as values.
struct Line<'a> {
    file: &'a str,
    row: usize,
    columns: &'a [(&'a str, Kind)],
    values: Vec<Value>,
}

impl Line<'_> {
    fn value(&self, column: &str) -> &Value {
        let at = self.columns.iter().position(|(name, _)| *name == column);
        at.map_or(&Value::Empty, |at| &self.values[at])
    }

    fn text(&self, column: &str) -> &str {
        match self.value(column) {
            Value::Text(text) => text,
            _ => "",
        }
    }

    fn number(&self, column: &str) -> Option<f64> {
        match self.value(column) {
            Value::Float(x) => Some(*x),
            Value::Int(n) => Some(*n as f64),
            _ => None,
        }
    }

    fn side(&self) -> Result<usize, String> {
        match self.text("side") {
            "a" => Ok(0),
            "b" => Ok(1),
            _ => Err(self.wrong("side")),
        }
    }

    fn wrong(&self, column: &str) -> String {
        let cell = self.value(column).cell();
        format!("{}, row {}, column {column}: {cell:?} is none of its values", self.file, self.row)
    }
}

/// Gives every line of a file to `take`.
fn each(
    name: &str,
    bytes: &[u8],
    columns: &[(&str, Kind)],
    mut take: impl FnMut(&Line) -> Result<(), String>,
) -> Result<(), String> {
    // mbperf ends every line. A number that lost its last digits would still be one.
    if bytes.last().is_some_and(|b| *b != b'\n') {
        return Err(format!(
            "{name}: its last line is cut off; take that line out, or end it if it is whole"
        ));
    }
    let bytes = without_sep(bytes);
    let dialect = Dialect::of(bytes);
    let mut reader =
        csv::ReaderBuilder::new().delimiter(dialect.separator()).flexible(false).from_reader(bytes);
    let header = reader.headers().map_err(|e| format!("{name} is no CSV file: {e}"))?.clone();
    let mut at = Vec::new();
    for (column, _) in columns {
        let found = header.iter().position(|h| h == *column);
        at.push(found.ok_or_else(|| {
            format!("{name} has no column {column}: it is none of mbperf's, or of another version")
        })?);
    }
    let mut line = Line { file: name, row: 0, columns, values: Vec::new() };
    for record in reader.records() {
        line.row += 1;
        let row = line.row;
        let record = record.map_err(|e| format!("{name}, row {row}: {e}"))?;
        // As spreadsheets leave them below the last row.
        if record.iter().all(str::is_empty) {
            continue;
        }
        line.values.clear();
        for ((column, kind), at) in columns.iter().zip(&at) {
            let cell = record.get(*at).unwrap_or_default();
            let wrong = |what: &str| format!("{name}, row {row}, column {column}: {what}");
            let plain = dialect.read(cell, *kind).map_err(|e| wrong(&e))?;
            let value = Value::parse(&plain, *kind);
            let value = value.ok_or_else(|| wrong(&format!("{cell:?} is no {}", kind.name())))?;
            if let Value::Float(x) = value {
                possible(column, x).map_err(|e| wrong(&e))?;
            }
            line.values.push(value);
        }
        take(&line)?;
    }
    Ok(())
}

/// The bytes of a file, or of the same name with `.gz`, and which it was; `None` when there is neither.
fn bytes(path: &Path) -> Result<Option<(String, Vec<u8>)>, String> {
    let failed = |path: &Path, e: &dyn std::fmt::Display| format!("{} cannot be read: {e}", path.display());
    match file::read(path) {
        Ok(bytes) => return Ok(Some((path.display().to_string(), bytes)).filter(|(_, b)| !b.is_empty())),
        Err(e) if e.kind() == ErrorKind::NotFound => {}
        Err(e) => return Err(failed(path, &e)),
    }
    let packed = PathBuf::from(format!("{}.gz", path.display()));
    file::check_input(&packed).map_err(|e| failed(&packed, &e))?;
    let file = match std::fs::File::open(&packed) {
        Ok(file) => file,
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(failed(&packed, &e)),
    };
    let bytes = file::unpacked(file).map_err(|e| failed(&packed, &e))?;
    Ok(Some((packed.display().to_string(), bytes)))
}
