//! Files that are written whole (pages, workbooks): tried before the work, and replaced only when the new one is
//! complete.

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Read, Write};
use std::path::{Path, PathBuf};

/// Why `path` could not be written whole; leaves everything as it was. A file that is there must be of the kind that
/// replaces it: it begins with `magic`, whatever the case of letters.
///
/// # Errors
/// The reason, for a person.
pub fn check(path: &Path, magic: &[u8], kind: &str) -> Result<(), String> {
    check_at(path, 0, magic, kind)
}

/// [`check`] of a kind whose mark stands `offset` bytes from the start.
///
/// # Errors
/// As [`check`].
pub fn check_at(path: &Path, offset: usize, magic: &[u8], kind: &str) -> Result<(), String> {
    let name = path.display();
    if path.is_dir() {
        return Err(format!("{name} is a directory"));
    }
    let folder = folder(path);
    if !folder.is_dir() {
        return Err(format!("the folder {} does not exist", folder.display()));
    }
    let there = path.symlink_metadata().is_ok();
    if there && !path.exists() {
        return Err(format!("{name} is a link to a place that does not exist"));
    }
    if there {
        let is_file = path.is_file();
        let mut file = OpenOptions::new().read(is_file).append(true).open(path).map_err(|e| reason(&e))?;
        if !is_file {
            return Ok(());
        }
        let mut start = vec![0; offset + magic.len()];
        return match file.read_exact(&mut start) {
            Ok(()) if start[offset..].eq_ignore_ascii_case(magic) => Ok(()),
            Err(e) if e.kind() == ErrorKind::UnexpectedEof && start_is_empty(path) => Ok(()),
            _ => Err(format!("{name} is there and is no {kind}: it is left as it is")),
        };
    }
    // A file of ours that goes again.
    let probe = beside(path);
    File::create_new(&probe).map_err(|e| reason(&e))?;
    let _ = fs::remove_file(&probe);
    Ok(())
}

/// Writes `bytes` to `path`; a plain file is replaced at once or stays what it was.
///
/// # Errors
/// The system's.
pub fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    if path.exists() && !path.is_file() {
        // A device such as /dev/full.
        let mut device = OpenOptions::new().append(true).open(path)?;
        return device.write_all(bytes).and_then(|()| device.flush());
    }
    // Through a link: the file that it names.
    let path = &path.canonicalize().unwrap_or_else(|_| path.to_path_buf());
    let new = beside(path);
    let written = File::create_new(&new)
        .and_then(|mut file| file.write_all(bytes).and_then(|()| file.sync_all()))
        .and_then(|()| fs::rename(&new, path));
    if written.is_err() {
        let _ = fs::remove_file(&new);
    }
    written
}

fn start_is_empty(path: &Path) -> bool {
    path.metadata().is_ok_and(|m| m.len() == 0)
}

fn folder(path: &Path) -> PathBuf {
    match path.parent() {
        Some(p) if !p.as_os_str().is_empty() => p.to_path_buf(),
        _ => PathBuf::from("."),
    }
}

/// A name in the same folder that nobody else has.
fn beside(path: &Path) -> PathBuf {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    path.with_file_name(format!(".{name}.{}.new", std::process::id()))
}

fn reason(error: &io::Error) -> String {
    match error.kind() {
        ErrorKind::PermissionDenied => "no permission to write there".into(),
        _ => error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_of_another_kind_stays_and_its_own_kind_is_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        fs::write(at("rows.csv"), "schema_version\n").unwrap();
        fs::write(at("old.html"), "<!doctype html>old").unwrap();
        fs::write(at("empty"), "").unwrap();
        for (name, fine) in
            [("rows.csv", false), ("old.html", true), ("empty", true), ("new", true), ("no/x", false)]
        {
            assert_eq!(check(&at(name), b"<!DOCTYPE", "page").is_ok(), fine, "{name}");
        }
        assert!(check(folder.path(), b"PK", "workbook").is_err());
        assert!(!at("new").exists());
        replace(&at("old.html"), b"<!DOCTYPE new").unwrap();
        assert_eq!(fs::read(at("old.html")).unwrap(), b"<!DOCTYPE new");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 3);
    }
}
