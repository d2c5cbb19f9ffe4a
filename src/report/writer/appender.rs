//! One result file: looked at before it is used, appended to by whole records under its lock, cut back when a write fails.

use super::{OutputError, is_device};
use crate::report::columns::{self, Kind};
use crate::report::dialect::Dialect;
use crate::report::file;
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, ErrorKind, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// What a line of the runs file begins with.
const RUN_START: &[u8] = b"{\"run_id\"";
/// How long another process's lock is waited for in silence, and how often it is asked for.
const SILENT_WAIT: Duration = Duration::from_secs(1);
const LOCK_POLL: Duration = Duration::from_millis(20);

/// A CSV file, or a device such as `/dev/null`, that records are appended to.
pub(super) struct Appender {
    pub path: PathBuf,
    file: File,
    header: Vec<&'static str>,
    kinds: Vec<Kind>,
    dialect: Dialect,
    crlf: bool,
    /// Plain file: can be locked, measured and cut.
    pub regular: bool,
    /// Made by us and still empty: taken away again if nothing comes.
    pub created: bool,
}

impl Appender {
    /// Opens without writing; `columns` is what the header of a file that holds something must name.
    pub fn open(
        path: &Path,
        columns: Vec<(&'static str, Kind)>,
        dialect: Dialect,
    ) -> Result<Self, OutputError> {
        let refused = |reason: String| OutputError::Refused { path: path.display().to_string(), reason };
        let created = !path.exists();
        file::check_output(path).map_err(refused)?;
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
            let locked = lock(&appender.file, path).map_err(|e| refused(e.to_string()))?;
            let checked = appender.check().and_then(|()| appender.check_rows());
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

    /// Refuses rows of another schema version under this header, and lines that are no rows. Looks at files that name
    /// the version alone.
    fn check_rows(&mut self) -> Result<(), OutputError> {
        let path = self.path.display().to_string();
        let refused = |reason: String| OutputError::Refused { path: path.clone(), reason };
        let Some(at) = self.header.iter().position(|name| *name == "schema_version") else { return Ok(()) };
        self.file.seek(SeekFrom::Start(0)).map_err(|e| refused(e.to_string()))?;
        let mut reader = csv::ReaderBuilder::new()
            .delimiter(self.dialect.separator())
            .from_reader(io::BufReader::new(&self.file));
        for (number, row) in reader.records().enumerate() {
            let row = row.map_err(|e| refused(format!("row {} is none of mbperf's: {e}", number + 1)))?;
            let version = row.get(at).unwrap_or_default();
            if version.parse() != Ok(columns::SCHEMA_VERSION) {
                return Err(refused(format!(
                    "row {} is of schema version {version:?}, this is version {}",
                    number + 1,
                    columns::SCHEMA_VERSION
                )));
            }
        }
        Ok(())
    }

    /// The runs file: lines of JSON, of which the last is whole.
    pub fn open_runs(path: PathBuf, dialect: Dialect) -> Result<Self, OutputError> {
        let name = path.display().to_string();
        let refused = |reason: String| OutputError::Refused { path: name.clone(), reason };
        // A pipe would be waited for.
        if is_device(&path) {
            return Err(refused("it is there and is no plain file".into()));
        }
        let created = !path.exists();
        let file = OpenOptions::new()
            .read(true)
            .append(true)
            .create(true)
            .open(&path)
            .map_err(|e| refused(io_reason(&e, &path)))?;
        let mut runs =
            Self { path, file, header: vec![], kinds: vec![], dialect, crlf: false, regular: true, created };
        let locked = lock(&runs.file, &runs.path).map_err(|e| refused(e.to_string()))?;
        let checked = runs.check_lines();
        let unlocked = if locked { runs.file.unlock() } else { Ok(()) };
        checked.map_err(refused)?;
        unlocked.map_err(|e| refused(e.to_string()))?;
        Ok(runs)
    }

    /// Why no line can be added to a runs file.
    fn check_lines(&mut self) -> Result<(), String> {
        let told = |e: io::Error| e.to_string();
        if self.file.metadata().map_err(told)?.len() == 0 {
            return Ok(());
        }
        let mut start = Vec::new();
        self.file.seek(SeekFrom::Start(0)).map_err(told)?;
        (&mut self.file).take(RUN_START.len() as u64).read_to_end(&mut start).map_err(told)?;
        if start != RUN_START {
            return Err("it holds something else".into());
        }
        let mut last = [0];
        self.file.seek(SeekFrom::End(-1)).and_then(|_| self.file.read_exact(&mut last)).map_err(told)?;
        if last != *b"\n" {
            return Err("its last line is not complete: remove that line first".into());
        }
        Ok(())
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
    pub fn append<R: AsRef<[String]>>(&mut self, records: &[R]) -> io::Result<()> {
        self.in_turn(|file| {
            let begun = file.regular && file.file.metadata()?.len() > 0;
            let with_header = if file.regular { !begun } else { file.created };
            // Another process may have begun the file since it was opened.
            if begun {
                file.check().map_err(|e| io::Error::other(e.to_string()))?;
            }
            let header = with_header.then_some(&file.header);
            let bytes = encode(header, &file.kinds, records, file.dialect, file.crlf)?;
            file.write_whole(&bytes)
        })
    }

    /// Appends a line of the runs file.
    pub fn append_line(&mut self, line: &str) -> io::Result<()> {
        self.in_turn(|file| {
            file.check_lines().map_err(io::Error::other)?;
            file.write_whole(format!("{line}\n").as_bytes())
        })
    }

    /// `write` under the file's lock, on the file that has the name now.
    fn in_turn(&mut self, write: impl FnOnce(&mut Self) -> io::Result<()>) -> io::Result<()> {
        let mut locked = self.regular && lock(&self.file, &self.path)?;
        while self.regular && !self.is_in_place() {
            // Whoever made the file left nothing in it and took it away after it was opened here.
            self.file = OpenOptions::new().read(true).append(true).create(true).open(&self.path)?;
            locked = lock(&self.file, &self.path)?;
        }
        let written = write(self);
        let unlocked = if locked { self.file.unlock() } else { Ok(()) };
        written.and(unlocked)
    }

    /// All of `bytes` at the end, or none of them.
    fn write_whole(&mut self, bytes: &[u8]) -> io::Result<()> {
        let length = if self.regular { self.file.metadata()?.len() } else { 0 };
        let written = self.file.write_all(bytes).and_then(|()| self.file.flush());
        if written.is_err() && self.regular {
            // The first error is told; a file that cannot be cut keeps half a row, which the next open refuses.
            let _ = self.file.set_len(length);
        }
        written?;
        self.created = false;
        Ok(())
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
}

impl Drop for Appender {
    fn drop(&mut self) {
        // Under the lock, so that no other process begins the file between the look and the removal.
        if self.created && self.regular && !matches!(self.file.try_lock(), Err(TryLockError::WouldBlock)) {
            let empty = self.file.metadata().is_ok_and(|m| m.len() == 0);
            if empty && self.is_in_place() {
                let _ = std::fs::remove_file(&self.path);
            }
        }
    }
}

/// Locks a file; false where the file system knows no locks (one appending write is then the best there is).
/// Whoever is kept waiting is told so.
fn lock(file: &File, path: &Path) -> io::Result<bool> {
    let begun = Instant::now();
    let mut told = false;
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(true),
            Err(TryLockError::Error(e)) if e.kind() == ErrorKind::Unsupported => return Ok(false),
            Err(TryLockError::Error(e)) => return Err(e),
            Err(TryLockError::WouldBlock) => {}
        }
        if !told && begun.elapsed() >= SILENT_WAIT {
            told = true;
            // A closed standard error is no reason to stop.
            let _ = writeln!(
                io::stderr(),
                "mbperf: {} is locked by another process: waiting until it is free",
                path.display()
            );
        }
        std::thread::sleep(LOCK_POLL);
    }
}

/// What is wrong with a place, in words.
pub(super) fn io_reason(error: &io::Error, path: &Path) -> String {
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

/// Records as text of a dialect; the header with its mark, if the file begins here.
pub(super) fn encode<R: AsRef<[String]>>(
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
