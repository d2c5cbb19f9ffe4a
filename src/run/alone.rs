//! One `--resume` at a time on a result file: two would find the same runs lacking, and make each twice.

use crate::args::Args;
use crate::commands::{self, Usage};
use crate::report::{Target, writer};
use std::fs::{File, OpenOptions, TryLockError};
use std::path::{Path, PathBuf};

/// Nobody else resumes the file until this is dropped.
///
/// The lock is on a file of its own beside the rows: theirs is taken for each write, by whoever writes. It ends with the
/// process, however that ends; the empty file may then stay, and is taken over.
pub(super) struct Alone {
    _locked: File,
    path: PathBuf,
    /// The default folder, if it is ours: goes again if nothing came into it.
    folder: Option<PathBuf>,
}

impl Drop for Alone {
    fn drop(&mut self) {
        // Before the lock is let go: see `is_in_place`.
        let _ = std::fs::remove_file(&self.path);
        if let Some(folder) = &self.folder {
            let _ = std::fs::remove_dir(folder);
        }
    }
}

/// Locks the output of a run that resumes. `None`: there is nothing to lock, or no way to, which is then said.
///
/// # Errors
/// Another process resumes the file, or something lies in the lock's place that is not one (exit 2).
pub(super) fn alone(args: &Args, target: &Target) -> Result<Option<Alone>, Usage> {
    let Some(rows) = target.file().filter(|rows| args.mbperf.resume && !writer::is_device(rows)) else {
        return Ok(None);
    };
    let mut made = None;
    if let (Target::Default(_), Some(folder)) = (target, rows.parent()) {
        made = (!folder.exists()).then(|| folder.to_owned());
        // What keeps it from being made is told where the rows are opened.
        let _ = std::fs::create_dir_all(folder);
    }
    // Two names of one file are one file.
    let path = name(&std::fs::canonicalize(rows).unwrap_or_else(|_| rows.to_owned()));
    let unlocked = |why: &std::io::Error| {
        commands::say(&format!(
            "--resume: no lock could be had beside {} ({why}): see to it that no other process resumes it",
            rows.display()
        ));
    };
    loop {
        // A lock is empty, always: anything else is somebody's, and opening a pipe would wait for ever.
        if let Ok(there) = path.symlink_metadata()
            && !(there.is_file() && there.len() == 0)
        {
            return Err(Usage(format!(
                "--resume: {} is no lock that mbperf made (an empty file): move it away, or give the rows another file (-o)",
                path.display()
            )));
        }
        let file = match OpenOptions::new().append(true).create(true).open(&path) {
            Ok(file) => file,
            // A folder in which nothing can be made may hold files that can be written.
            Err(why) => {
                unlocked(&why);
                return Ok(None);
            }
        };
        match file.try_lock() {
            Err(TryLockError::WouldBlock) => {
                return Err(Usage(format!(
                    "--resume: another process resumes {} now: start this one when that has ended, or give it a file of \
                     its own (-o)",
                    rows.display()
                )));
            }
            // A file system without locks.
            Err(TryLockError::Error(why)) => {
                unlocked(&why);
                return Ok(None);
            }
            Ok(()) if is_in_place(&file, &path) => {
                return Ok(Some(Alone { _locked: file, path, folder: made }));
            }
            // Its owner took it away after it was opened here: the next may have made another.
            Ok(()) => {}
        }
    }
}

/// `.<name>.resume` beside the rows.
fn name(rows: &Path) -> PathBuf {
    let file = rows.file_name().unwrap_or_default().to_string_lossy();
    rows.with_file_name(format!(".{file}.resume"))
}

/// Whether the open file is the one of that name. Always so where files have no inodes.
fn is_in_place(file: &File, path: &Path) -> bool {
    #[cfg(unix)]
    {
        use std::os::unix::fs::MetadataExt;
        let identity = |m: std::fs::Metadata| (m.dev(), m.ino());
        let (open, named) = (file.metadata().map(identity), path.metadata().map(identity));
        matches!((open, named), (Ok(open), Ok(named)) if open == named)
    }
    #[cfg(not(unix))]
    true
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::{Command, parse};

    #[test]
    fn one_of_two_resumes_a_file_and_leaves_nothing_of_the_lock() {
        let folder = tempfile::tempdir().unwrap();
        let rows = folder.path().join("new").join("x.csv");
        let at = |rows: &Path, more: &str| {
            let words = format!("mbperf -m llama -mr llama3_8b -g h100 {more}");
            let Ok(Command::Run(args)) = parse(words.split_whitespace()) else { panic!("{words}") };
            alone(&args, &Target::Default(rows.to_owned()))
        };
        let first = at(&rows, "--resume").unwrap();
        assert!(first.is_some());
        let said = at(&rows, "--resume").err().unwrap().to_string();
        assert!(said.contains("another process resumes") && said.contains("x.csv"), "{said}");
        // Others may append, and other files be resumed.
        assert!(at(&rows, "").unwrap().is_none());
        assert!(at(&rows.with_file_name("y.csv"), "--resume").unwrap().is_some());
        drop(first);
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
        // What a process that was killed left is no lock.
        std::fs::create_dir(rows.parent().unwrap()).unwrap();
        std::fs::write(name(&rows), "").unwrap();
        assert!(at(&rows, "--resume").unwrap().is_some());
        assert_eq!(std::fs::read_dir(folder.path().join("new")).unwrap().count(), 0);
        // What is somebody else's is left as it is.
        std::fs::write(name(&rows), "precious").unwrap();
        let said = at(&rows, "--resume").err().unwrap().to_string();
        assert!(said.contains(".x.csv.resume is no lock"), "{said}");
        assert_eq!(std::fs::read_to_string(name(&rows)).unwrap(), "precious");
        std::fs::remove_file(name(&rows)).unwrap();
        std::fs::create_dir(name(&rows)).unwrap();
        assert!(at(&rows, "--resume").is_err());
        std::fs::remove_dir(name(&rows)).unwrap();
        #[cfg(unix)]
        {
            std::os::unix::fs::symlink("nowhere", name(&rows)).unwrap();
            assert!(at(&rows, "--resume").is_err());
            std::fs::remove_file(name(&rows)).unwrap();
            // Two names of one file.
            std::fs::write(&rows, "").unwrap();
            let link = rows.with_file_name("link.csv");
            std::os::unix::fs::symlink(&rows, &link).unwrap();
            let first = at(&link, "--resume").unwrap();
            assert!(first.is_some() && at(&rows, "--resume").is_err());
        }
    }
}
