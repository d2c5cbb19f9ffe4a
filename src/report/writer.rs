//! Result files: checked before the run, appended to by whole records, never left with half a row.
//!
//! RFC 4180 with its CRLF line ends; a file whose header ends in LF alone (a checkout that converted it)
//! is continued in LF. Records are appended by one write under a file lock, so that several processes may
//! share a file. When a write fails the file is cut back to what it held.

use super::columns::{self, Value};
use super::dialect::Dialect;
use super::row::Row;
use super::xlsx::Book;
use super::{blocks, file, profile, steps};
use crate::measure::outcome::BlockRecord;
use crate::measure::{StepRecord, StepSink};
use crate::profile::Profile;
use crate::ranks::control::RankStep;
use appender::{Appender, encode, io_reason};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

mod appender;

/// Standard output has its header: a sweep opens a writer a scope, the watchdog one of its own, and all write one table.
static STDOUT_BEGUN: AtomicBool = AtomicBool::new(false);

/// Why results cannot be written.
#[derive(Debug, thiserror::Error)]
pub enum OutputError {
    /// Exit 2: found before the run, nothing was touched.
    #[error(
        "cannot write results to {path}: {reason}; choose another file with -o/--output, or -o - for standard output"
    )]
    Refused { path: String, reason: String },
    /// Exit 1: a write failed.
    #[error(
        "writing results to {path} failed: {source}; make room there or choose another file with -o/--output; rows \
         written before are whole"
    )]
    Write { path: String, source: io::Error },
}

impl OutputError {
    /// The exit code that README.md lists.
    pub fn exit_code(&self) -> u8 {
        match self {
            OutputError::Refused { .. } => 2,
            OutputError::Write { .. } => 1,
        }
    }
}

/// Where rows go.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Target {
    /// `-o -`: rows on standard output, no side files.
    Stdout,
    /// `-o FILE`: its folder must exist.
    File(PathBuf),
    /// The default file: its folder is made if need be.
    Default(PathBuf),
}

impl Target {
    /// From `-o`; by default `results/<recipe>_<gpu>_<dtype>.csv` under the working directory.
    pub fn new(output: Option<&str>, recipe: &str, gpu: &str, dtype: &str) -> Self {
        match output {
            Some("-") => Target::Stdout,
            Some(file) => Target::File(file.into()),
            None => Target::Default(Path::new("results").join(format!("{recipe}_{gpu}_{dtype}.csv"))),
        }
    }

    /// The rows' file.
    pub fn file(&self) -> Option<&Path> {
        match self {
            Target::Stdout => None,
            Target::File(path) | Target::Default(path) => Some(path),
        }
    }
}

/// Ends of the names of what stands beside the rows in every run.
const NEIGHBOURS: [&str; 3] = ["steps.csv", "blocks.csv", "runs.jsonl"];
/// Every file that a run of `target` adds to.
pub fn files(target: &Target) -> Vec<PathBuf> {
    let Some(path) = target.file() else { return Vec::new() };
    let neighbours = NEIGHBOURS.iter().filter(|_| !is_device(path)).map(|n| beside(path, n));
    std::iter::once(path.to_path_buf()).chain(neighbours).collect()
}

/// Whether something stands there that is no plain file.
pub fn is_device(path: &Path) -> bool {
    path.metadata().is_ok_and(|m| !m.is_file())
}

/// `<name>.<suffix>` beside `<name>.csv`; any other ending is part of the name.
pub fn beside(path: &Path, suffix: &str) -> PathBuf {
    let file = path.file_name().unwrap_or_default().to_string_lossy();
    path.with_file_name(format!("{}.{suffix}", file.strip_suffix(".csv").unwrap_or(&file)))
}

/// Writes the rows, steps and run lines of one or more runs.
pub struct Writer {
    rows: Option<Appender>,
    steps: Option<Appender>,
    blocks: Option<Appender>,
    /// Of `--profile` alone.
    profile: Option<Appender>,
    runs: Option<Appender>,
    /// Steps as each rank saw them: of several processes alone.
    ranks: Vec<Appender>,
    dialect: Dialect,
    /// Keeps what is written, for a workbook at the end.
    book: Option<Arc<Mutex<Book>>>,
    run_id: String,
    /// The default folder, if it is ours: goes again if nothing comes into it.
    _made: MadeFolder,
}

/// A folder that was made for the results.
struct MadeFolder(Option<PathBuf>);

impl Drop for MadeFolder {
    fn drop(&mut self) {
        // Fails, as it should, while there is a file in it.
        if let Some(folder) = &self.0 {
            let _ = std::fs::remove_dir(folder);
        }
    }
}

impl Writer {
    /// [`Writer::open_in`] the usual dialect.
    pub fn open(target: &Target) -> Result<Self, OutputError> {
        Self::open_in(target, Dialect::default())
    }

    /// What [`Writer::open_in`] and, with `profiled`, [`Writer::expect_profile`] would refuse; makes nothing.
    ///
    /// # Errors
    /// As [`Writer::open_in`].
    pub fn judge(target: &Target, dialect: Dialect, profiled: bool) -> Result<(), OutputError> {
        let Some(rows) = target.file() else { return Ok(()) };
        let refused = |path: &Path, reason| OutputError::Refused { path: path.display().to_string(), reason };
        if let (Target::Default(_), Some(folder)) = (target, rows.parent()) {
            file::check_folder(folder).map_err(|reason| refused(folder, reason))?;
            if !folder.is_dir() {
                return Ok(());
            }
        }
        let open = |path: &Path, columns: Option<Vec<_>>| match columns {
            _ if !path.exists() => file::check_new(path).map_err(|reason| refused(path, reason)),
            Some(columns) => Appender::open(path, columns, dialect).map(drop),
            None => Appender::open_runs(path.into(), dialect).map(drop),
        };
        open(rows, Some(columns::kinds()))?;
        if !is_device(rows) {
            open(&beside(rows, "steps.csv"), Some(steps::COLUMNS.to_vec()))?;
            open(&beside(rows, "blocks.csv"), Some(blocks::COLUMNS.to_vec()))?;
            open(&beside(rows, "runs.jsonl"), None)?;
            if profiled {
                open(&beside(rows, "profile.csv"), Some(profile::COLUMNS.to_vec()))?;
            }
        }
        Ok(())
    }

    /// Opens and checks every file before the run, and writes to none.
    pub fn open_in(target: &Target, dialect: Dialect) -> Result<Self, OutputError> {
        let mut made = MadeFolder(None);
        let path = match target {
            Target::Stdout => {
                return Ok(Self {
                    rows: None,
                    steps: None,
                    blocks: None,
                    profile: None,
                    runs: None,
                    ranks: Vec::new(),
                    dialect,
                    book: None,
                    run_id: String::new(),
                    _made: MadeFolder(None),
                });
            }
            Target::File(path) => path,
            Target::Default(path) => {
                if let Some(folder) = path.parent() {
                    made.0 = (!folder.exists()).then(|| folder.to_owned());
                    std::fs::create_dir_all(folder).map_err(|e| OutputError::Refused {
                        path: folder.display().to_string(),
                        reason: io_reason(&e, folder),
                    })?;
                }
                path
            }
        };
        let rows = Appender::open(path, columns::kinds(), dialect)?;
        // A device such as /dev/null has no neighbours.
        let (steps, blocks, runs) = if rows.regular {
            let steps = Appender::open(&beside(path, "steps.csv"), steps::COLUMNS.to_vec(), dialect)?;
            let blocks = Appender::open(&beside(path, "blocks.csv"), blocks::COLUMNS.to_vec(), dialect)?;
            let runs = Appender::open_runs(beside(path, "runs.jsonl"), dialect)?;
            (Some(steps), Some(blocks), Some(runs))
        } else {
            (None, None, None)
        };
        Ok(Self {
            rows: Some(rows),
            steps,
            blocks,
            profile: None,
            runs,
            ranks: Vec::new(),
            dialect,
            book: None,
            run_id: String::new(),
            _made: made,
        })
    }

    /// Rows and steps that follow go into `book` too.
    pub fn keep(&mut self, book: Arc<Mutex<Book>>) {
        self.book = Some(book);
    }

    /// Tells the book of the rows of an earlier run that is not made again.
    pub fn found(&self, rows: Vec<Vec<Value>>) {
        if let Some(Ok(mut book)) = self.book.as_ref().map(|b| b.lock()) {
            book.found.extend(rows);
        }
    }

    /// The rows' file; `None` for standard output.
    pub fn path(&self) -> Option<&Path> {
        self.rows.as_ref().map(|r| r.path.as_path())
    }

    /// Files that hold nothing unless something is written to them.
    pub fn made(&self) -> Vec<PathBuf> {
        let all = [&self.rows, &self.steps, &self.blocks, &self.profile, &self.runs];
        all.into_iter()
            .flatten()
            .chain(&self.ranks)
            .filter(|f| f.created && f.regular)
            .map(|f| f.path.clone())
            .collect()
    }

    /// Whether files stand beside the rows: not on standard output, nor beside a device.
    pub fn has_neighbours(&self) -> bool {
        self.steps.is_some()
    }

    /// Opens and checks the profile's file too.
    ///
    /// # Errors
    /// As [`Writer::open_in`].
    pub fn expect_profile(&mut self) -> Result<(), OutputError> {
        if let Some(path) = self.path().filter(|_| self.has_neighbours()) {
            let path = beside(path, "profile.csv");
            self.profile = Some(Appender::open(&path, profile::COLUMNS.to_vec(), self.dialect)?);
        }
        Ok(())
    }

    /// Opens and checks a file of steps for each of so many ranks.
    ///
    /// # Errors
    /// As [`Writer::open_in`].
    pub fn expect_ranks(&mut self, ranks: usize) -> Result<(), OutputError> {
        let Some(path) = self.path().filter(|_| self.has_neighbours()).map(Path::to_path_buf) else {
            return Ok(());
        };
        let open = |rank| {
            let path = beside(&path, &format!("rank{rank}.steps.csv"));
            Appender::open(&path, steps::COLUMNS.to_vec(), self.dialect)
        };
        self.ranks = (0..ranks).map(open).collect::<Result<_, _>>()?;
        Ok(())
    }

    /// Begins a run: steps that follow belong to it. `run` (configuration, machine, command) becomes one line
    /// of the runs file, with the run's id first.
    pub fn begin_run(&mut self, run_id: &str, run: &serde_json::Value) -> Result<(), OutputError> {
        self.run_id = run_id.to_string();
        let Some(runs) = &mut self.runs else { return Ok(()) };
        let mut line = serde_json::json!({ "run_id": run_id, "schema_version": columns::SCHEMA_VERSION });
        match (line.as_object_mut(), run.as_object()) {
            (Some(line), Some(run)) => line.extend(run.clone()),
            (Some(line), None) => {
                line.insert("run".into(), run.clone());
            }
            _ => {}
        }
        runs.append_line(&line.to_string())
            .map_err(|source| OutputError::Write { path: runs.path.display().to_string(), source })
    }

    /// Writes the rows of a finished run by one write.
    pub fn rows(&mut self, rows: &[Row]) -> Result<(), OutputError> {
        if rows.is_empty() {
            return Ok(());
        }
        if let Some(Ok(mut book)) = self.book.as_ref().map(|b| b.lock()) {
            book.rows.extend(rows.iter().map(columns::values));
        }
        let records: Vec<Vec<String>> = rows.iter().map(columns::cells).collect();
        match &mut self.rows {
            Some(file) => file
                .append(&records)
                .map_err(|source| OutputError::Write { path: file.path.display().to_string(), source }),
            None => {
                let (header, kinds): (Vec<_>, Vec<_>) = columns::kinds().into_iter().unzip();
                let mut stdout = io::stdout().lock();
                let begun = STDOUT_BEGUN.swap(true, Ordering::SeqCst);
                encode((!begun).then_some(&header), &kinds, &records, self.dialect, true)
                    .and_then(|bytes| stdout.write_all(&bytes).and_then(|()| stdout.flush()))
                    .map_err(|source| OutputError::Write { path: "standard output".into(), source })
            }
        }
    }

    /// Writes the profiles of the run's arms, where [`Writer::expect_profile`] opened a file.
    ///
    /// # Errors
    /// The file's.
    pub fn profiles(&mut self, profiles: &[Profile]) -> Result<(), OutputError> {
        let Some(file) = self.profile.as_mut().filter(|_| !profiles.is_empty()) else { return Ok(()) };
        let records: Vec<_> = profiles.iter().flat_map(|p| profile::cells(&self.run_id, p)).collect();
        file.append(&records)
            .map_err(|source| OutputError::Write { path: file.path.display().to_string(), source })
    }

    /// Writes the blocks of a finished measurement: the card's state over its time.
    pub fn blocks(&mut self, blocks: &[BlockRecord]) -> Result<(), OutputError> {
        let Some(file) = self.blocks.as_mut().filter(|_| !blocks.is_empty()) else { return Ok(()) };
        let records: Vec<_> = blocks.iter().map(|b| blocks::cells(&self.run_id, b)).collect();
        file.append(&records)
            .map_err(|source| OutputError::Write { path: file.path.display().to_string(), source })
    }
}

impl StepSink for Writer {
    fn steps(&mut self, steps: &[StepRecord]) -> io::Result<()> {
        if let Some(Ok(mut book)) = self.book.as_ref().map(|b| b.lock()) {
            book.steps.extend(steps.iter().map(|s| steps::values(&self.run_id, s)));
        }
        let Some(file) = &mut self.steps else { return Ok(()) };
        let records: Vec<Vec<String>> =
            steps.iter().map(|s| steps::values(&self.run_id, s).iter().map(Value::cell).collect()).collect();
        file.append(&records).map_err(|e| io::Error::new(e.kind(), format!("{}: {e}", file.path.display())))
    }

    fn rank_steps(&mut self, steps: &[StepRecord], of_ranks: &[Vec<RankStep>]) -> io::Result<()> {
        for (rank, file) in self.ranks.iter_mut().enumerate() {
            let seen = steps.iter().zip(of_ranks).filter_map(|(s, ranks)| {
                let r = ranks.get(rank)?;
                let own = StepRecord {
                    submit_ms: r.submit_ms,
                    wait_ms: r.wait_ms,
                    device_span_ms: r.device_span_ms,
                    wall_ms: r.wall_ms,
                    loss: r.loss,
                    grad_norm: r.grad_norm,
                    ..*s
                };
                Some(steps::values(&self.run_id, &own).iter().map(Value::cell).collect::<Vec<String>>())
            });
            let records: Vec<Vec<String>> = seen.collect();
            file.append(&records)
                .map_err(|e| io::Error::new(e.kind(), format!("{}: {e}", file.path.display())))?;
        }
        Ok(())
    }
}
