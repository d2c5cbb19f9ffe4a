//! Result files: checked before the run, appended to by whole records, never left with half a row.
//!
//! RFC 4180 with its CRLF line ends; a file whose header ends in LF alone (a checkout that converted it)
//! is continued in LF. Records are appended by one write under a file lock, so that several processes may
//! share a file. When a write fails the file is cut back to what it held.

use super::columns::{self, Kind, Value};
use super::dialect::Dialect;
use super::row::Row;
use super::xlsx::Book;
use super::{blocks, profile, steps};
use crate::profile::Profile;
use crate::measure::outcome::BlockRecord;
use crate::measure::{StepRecord, StepSink};
use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

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
    /// The exit code of DESIGN 6.
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
}

/// A CSV file, or a device such as `/dev/null`, that records are appended to.
struct Appender {
    path: PathBuf,
    file: File,
    header: Vec<&'static str>,
    kinds: Vec<Kind>,
    dialect: Dialect,
    crlf: bool,
    /// Plain file: can be locked, measured and cut.
    regular: bool,
    /// Made by us and still empty: taken away again if nothing comes.
    created: bool,
}

impl Appender {
    /// Opens without writing; `columns` is what the header of a file that holds something must name.
    fn open(path: &Path, columns: Vec<(&'static str, Kind)>, dialect: Dialect) -> Result<Self, OutputError> {
        let refused = |reason: String| OutputError::Refused { path: path.display().to_string(), reason };
        let created = !path.exists();
        if path.is_dir() {
            return Err(refused("it is a directory".into()));
        }
        let file = OpenOptions::new()
            .read(true)
            .append(true)
            .create(true)
            .open(path)
            .map_err(|e| refused(io_reason(&e, path)))?;
        let regular = file.metadata().is_ok_and(|m| m.is_file());
        let (header, kinds) = columns.into_iter().unzip();
        let mut appender =
            Self { path: path.into(), file, header, kinds, dialect, crlf: true, regular, created };
        if regular {
            // Under the lock: another process's record may be half written at this moment.
            let locked = lock(&appender.file).map_err(|e| refused(e.to_string()))?;
            let checked = appender.check();
            let unlocked = if locked { appender.file.unlock() } else { Ok(()) };
            checked?;
            unlocked.map_err(|e| refused(e.to_string()))?;
        }
        Ok(appender)
    }

    /// Refuses a file that is not ours or ends in half a row.
    fn check(&mut self) -> Result<(), OutputError> {
        let path = self.path.display().to_string();
        let refused = |reason: String| OutputError::Refused { path: path.clone(), reason };
        let Some(first) = self.first_line().map_err(|e| refused(e.to_string()))? else { return Ok(()) };
        let header = first.trim_end_matches(['\r', '\n']);
        if header != self.dialect.header(&self.header) {
            let other =
                [Dialect::Rfc4180, Dialect::ExcelEu].into_iter().find(|d| header == d.header(&self.header));
            if let Some(other) = other {
                return Err(refused(format!(
                    "it is written in another dialect: continue it with --csv_dialect {}",
                    other.name()
                )));
            }
            return Err(refused(format!(
                "it holds something else, or rows of another schema version (this is version {})",
                columns::SCHEMA_VERSION
            )));
        }
        self.crlf = first.ends_with("\r\n");
        let mut last = [0];
        let end = self.file.seek(SeekFrom::End(-1)).and_then(|_| self.file.read_exact(&mut last));
        match end {
            Ok(()) if last == *b"\n" => Ok(()),
            Ok(()) => Err(refused("its last row is not complete: remove that line first".into())),
            Err(e) => Err(refused(e.to_string())),
        }
    }

    /// First line with its end; `None` for an empty file. Reads no further than a header can be.
    fn first_line(&mut self) -> io::Result<Option<String>> {
        const LONGEST: u64 = 64 * 1024;
        self.file.seek(SeekFrom::Start(0))?;
        let mut bytes = Vec::new();
        (&mut self.file).take(LONGEST).read_to_end(&mut bytes)?;
        if bytes.is_empty() {
            return Ok(None);
        }
        let end = bytes.iter().position(|b| *b == b'\n').map_or(bytes.len(), |at| at + 1);
        Ok(Some(String::from_utf8_lossy(&bytes[..end]).into_owned()))
    }

    /// Appends records, and the header to a file that is still empty.
    fn append<R: AsRef<[String]>>(&mut self, records: &[R]) -> io::Result<()> {
        let mut locked = self.regular && lock(&self.file)?;
        while self.regular && !self.is_in_place() {
            // Whoever made the file left nothing in it and took it away after it was opened here.
            self.file = OpenOptions::new().read(true).append(true).create(true).open(&self.path)?;
            locked = lock(&self.file)?;
        }
        let written = self.append_locked(records);
        let unlocked = if locked { self.file.unlock() } else { Ok(()) };
        written.and(unlocked)
    }

    /// Whether the open file is still the one of that name. Always so where files have no inodes.
    fn is_in_place(&self) -> bool {
        #[cfg(unix)]
        {
            use std::os::unix::fs::MetadataExt;
            let identity = |m: std::fs::Metadata| (m.dev(), m.ino());
            let (open, named) = (self.file.metadata().map(identity), self.path.metadata().map(identity));
            matches!((open, named), (Ok(open), Ok(named)) if open == named)
        }
        #[cfg(not(unix))]
        true
    }

    fn append_locked<R: AsRef<[String]>>(&mut self, records: &[R]) -> io::Result<()> {
        let length = if self.regular { self.file.metadata()?.len() } else { 0 };
        let with_header = if self.regular { length == 0 } else { self.created };
        // Another process may have begun the file since it was opened.
        if length > 0 {
            self.check().map_err(|e| io::Error::other(e.to_string()))?;
        }
        let header = with_header.then_some(&self.header);
        let bytes = encode(header, &self.kinds, records, self.dialect, self.crlf)?;
        let written = self.file.write_all(&bytes).and_then(|()| self.file.flush());
        if let (Err(_), true) = (&written, self.regular) {
            // The first error is told; a file that cannot be cut keeps half a row, which the next open refuses.
            let _ = self.file.set_len(length);
        }
        written?;
        self.created = false;
        Ok(())
    }
}

impl Drop for Appender {
    fn drop(&mut self) {
        // Under the lock, so that no other process begins the file between the look and the removal.
        if self.created && self.regular && lock(&self.file).is_ok() {
            let empty = self.file.metadata().is_ok_and(|m| m.len() == 0);
            if empty && self.is_in_place() {
                let _ = std::fs::remove_file(&self.path);
            }
        }
    }
}

/// Locks a file; false where the file system knows no locks (one appending write is then the best there is).
fn lock(file: &File) -> io::Result<bool> {
    match file.lock() {
        Ok(()) => Ok(true),
        Err(e) if e.kind() == ErrorKind::Unsupported => Ok(false),
        Err(e) => Err(e),
    }
}

fn io_reason(error: &io::Error, path: &Path) -> String {
    match error.kind() {
        ErrorKind::NotFound if path.is_symlink() => "it is a link to a place that does not exist".into(),
        ErrorKind::NotFound => match path.parent().filter(|p| !p.as_os_str().is_empty()) {
            Some(folder) if !folder.exists() => format!("the folder {} does not exist", folder.display()),
            Some(folder) => format!("no file can be made in {}", folder.display()),
            None => "the working directory is gone".into(),
        },
        ErrorKind::AlreadyExists => "there is a file of that name".into(),
        ErrorKind::PermissionDenied => "no permission to write there".into(),
        _ => error.to_string(),
    }
}

/// `<name>.<suffix>` beside `<name>.csv`; any other ending is part of the name.
pub fn beside(path: &Path, suffix: &str) -> PathBuf {
    let file = path.file_name().unwrap_or_default().to_string_lossy();
    path.with_file_name(format!("{}.{suffix}", file.strip_suffix(".csv").unwrap_or(&file)))
}

/// Records as text of a dialect; the header with its mark, if the file begins here.
fn encode<R: AsRef<[String]>>(
    header: Option<&Vec<&str>>,
    kinds: &[Kind],
    records: &[R],
    dialect: Dialect,
    crlf: bool,
) -> io::Result<Vec<u8>> {
    let terminator = if crlf { csv::Terminator::CRLF } else { csv::Terminator::Any(b'\n') };
    let start = if header.is_some() { dialect.mark() } else { "" };
    let mut writer = csv::WriterBuilder::new()
        .terminator(terminator)
        .delimiter(dialect.separator())
        .from_writer(start.as_bytes().to_vec());
    if let Some(header) = header {
        writer.write_record(header).map_err(io::Error::other)?;
    }
    for record in records {
        let cells = record.as_ref().iter().zip(kinds).map(|(cell, kind)| dialect.write(cell, *kind));
        writer.write_record(cells.collect::<Vec<_>>()).map_err(io::Error::other)?;
    }
    writer.into_inner().map_err(|e| io::Error::other(e.to_string()))
}

/// Writes the rows, steps and run lines of one or more runs.
pub struct Writer {
    rows: Option<Appender>,
    steps: Option<Appender>,
    blocks: Option<Appender>,
    /// Of `--profile` alone.
    profile: Option<Appender>,
    runs: Option<Appender>,
    dialect: Dialect,
    /// Keeps what is written, for a workbook at the end.
    book: Option<Arc<Mutex<Book>>>,
    run_id: String,
    stdout_begun: bool,
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
                    dialect,
                    book: None,
                    run_id: String::new(),
                    stdout_begun: false,
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
            let runs_path = beside(path, "runs.jsonl");
            let runs = OpenOptions::new().append(true).create(true).open(&runs_path);
            let created = runs.as_ref().is_ok_and(|f| f.metadata().is_ok_and(|m| m.len() == 0));
            let file = runs.map_err(|e| OutputError::Refused {
                path: runs_path.display().to_string(),
                reason: io_reason(&e, &runs_path),
            })?;
            let runs = Appender {
                path: runs_path,
                file,
                header: vec![],
                kinds: vec![],
                dialect,
                crlf: false,
                regular: true,
                created,
            };
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
            dialect,
            book: None,
            run_id: String::new(),
            stdout_begun: false,
            _made: made,
        })
    }

    /// Rows and steps that follow go into `book` too.
    pub fn keep(&mut self, book: Arc<Mutex<Book>>) {
        self.book = Some(book);
    }

    /// The rows' file; `None` for standard output.
    pub fn path(&self) -> Option<&Path> {
        self.rows.as_ref().map(|r| r.path.as_path())
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
        let written = lock(&runs.file).and_then(|locked| {
            let length = runs.file.metadata()?.len();
            let written = runs.file.write_all(format!("{line}\n").as_bytes());
            if written.is_err() {
                let _ = runs.file.set_len(length);
            }
            let unlocked = if locked { runs.file.unlock() } else { Ok(()) };
            written.and(unlocked)
        });
        written.map_err(|source| OutputError::Write { path: runs.path.display().to_string(), source })?;
        runs.created = false;
        Ok(())
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
                encode((!self.stdout_begun).then_some(&header), &kinds, &records, self.dialect, true)
                    .and_then(|bytes| stdout.write_all(&bytes).and_then(|()| stdout.flush()))
                    .map_err(|source| OutputError::Write { path: "standard output".into(), source })?;
                self.stdout_begun = true;
                Ok(())
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
        let records: Vec<_> =
            blocks.iter().enumerate().map(|(number, b)| blocks::cells(&self.run_id, number, b)).collect();
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
}
