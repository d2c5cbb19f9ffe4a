//! Files that are written whole (pages, workbooks): tried before the work, and replaced only when the new one is
//! complete.

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Read, Write};
use std::path::{Path, PathBuf};

/// What some options take for standard output.
pub const STDOUT: &str = "-";

/// Why nothing is written to what stands at `path`: a pipe would be waited for, or the rows lost in it. A device such as
/// /dev/null may be named.
///
/// # Errors
/// The reason, for a person.
pub fn check_output(path: &Path) -> Result<(), String> {
    if path == Path::new(STDOUT) {
        return Err(format!(
            "this goes into a file, not to standard output (a file of that name is ./{STDOUT})"
        ));
    }
    let Ok(found) = path.metadata() else { return Ok(()) };
    match kind(&found) {
        Kind::Plain | Kind::Device => Ok(()),
        Kind::Pipe => Err("it is a pipe".into()),
        Kind::Other(what) => Err(format!("it is {what}")),
    }
}

/// Why what stands at `path` is not read: it has no end, or nobody may write to it. Standard input and the shell's
/// `<(command)` are pipes without a name, and are read.
///
/// # Errors
/// The reason, for a person.
pub fn check_input(path: &Path) -> Result<(), String> {
    let Ok(found) = path.metadata() else { return Ok(()) };
    match kind(&found) {
        Kind::Plain => Ok(()),
        // The link of a descriptor names no place.
        Kind::Pipe if path.canonicalize().is_err() => Ok(()),
        Kind::Pipe => Err("it is a pipe, no plain file".into()),
        Kind::Device => Err("it is a device, no plain file".into()),
        Kind::Other(what) => Err(format!("it is {what}, no plain file")),
    }
}

/// The bytes of a file that [`check_input`] lets pass.
///
/// # Errors
/// As [`check_input`], and the system's.
pub fn read(path: &Path) -> io::Result<Vec<u8>> {
    check_input(path).map_err(io::Error::other)?;
    fs::read(path)
}

/// The bytes of a result file: [`STDOUT`]'s name is standard input here, and what is packed (gzip) is unpacked.
///
/// # Errors
/// As [`read`], and what does not unpack.
pub fn read_results(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    if path == Path::new(STDOUT) {
        io::stdin().lock().read_to_end(&mut bytes)?;
    } else {
        bytes = read(path)?;
    }
    if bytes.starts_with(GZIP) { unpacked(&bytes[..]) } else { Ok(bytes) }
}

/// What a packed file begins with.
const GZIP: &[u8] = b"\x1f\x8b";
/// Most bytes that a packed file may unfold to: a thousand hours of steps.
const MOST_BYTES: u64 = 4 << 30;

/// Unpacks gzip.
///
/// # Errors
/// What is cut off or none, and what unfolds to gigabytes.
pub fn unpacked(packed: impl Read) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    flate2::read::MultiGzDecoder::new(packed).take(MOST_BYTES).read_to_end(&mut bytes)?;
    if bytes.len() as u64 == MOST_BYTES {
        return Err(io::Error::other(format!("it unfolds to more than {MOST_BYTES} bytes")));
    }
    Ok(bytes)
}

/// What stands at a place.
enum Kind {
    Plain,
    /// Takes any bytes and says nothing of them: /dev/null, a terminal.
    Device,
    Pipe,
    Other(&'static str),
}

fn kind(found: &fs::Metadata) -> Kind {
    #[cfg(unix)]
    {
        use std::os::unix::fs::FileTypeExt;
        let of = found.file_type();
        if of.is_char_device() {
            return Kind::Device;
        }
        if of.is_fifo() {
            return Kind::Pipe;
        }
        if of.is_socket() {
            return Kind::Other("a socket");
        }
        if of.is_block_device() {
            return Kind::Other("a disk");
        }
    }
    match found.is_dir() {
        true => Kind::Other("a directory"),
        false => Kind::Plain,
    }
}

/// Why no file could be made at `path`, where none is; makes none.
///
/// # Errors
/// The reason, for a person.
pub fn check_new(path: &Path) -> Result<(), String> {
    let folder = folder(path);
    if !folder.is_dir() {
        return Err(format!("the folder {} does not exist", folder.display()));
    }
    match path.symlink_metadata() {
        // Not followed: it leads nowhere, or round.
        Ok(_) => return path.metadata().map(drop).map_err(|e| link_reason(&e)),
        Err(e) if e.kind() != ErrorKind::NotFound => return Err(reason(&e)),
        Err(_) => {}
    }
    probe(&folder)
}

/// Why `path` is no folder and none can be made there; makes none.
///
/// # Errors
/// The reason, for a person.
pub fn check_folder(path: &Path) -> Result<(), String> {
    for place in path.ancestors() {
        let place = if place.as_os_str().is_empty() { Path::new(".") } else { place };
        match place.metadata() {
            Ok(found) if !found.is_dir() => return Err(format!("{} is no folder", place.display())),
            Ok(_) if place == path => return Ok(()),
            Ok(_) => return probe(place),
            Err(e) if place.is_symlink() => return Err(format!("{}: {}", place.display(), link_reason(&e))),
            // Whatever stands above is told by its own name.
            Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {}
            Err(e) => return Err(reason(&e)),
        }
    }
    Err("no folder above it exists".into())
}

/// Makes a file of ours in `folder`, which goes again.
fn probe(folder: &Path) -> Result<(), String> {
    let probe = beside(&folder.join("mbperf"));
    File::create_new(&probe).map_err(|e| reason(&e))?;
    let _ = fs::remove_file(&probe);
    Ok(())
}

/// Why a link is not followed.
fn link_reason(error: &io::Error) -> String {
    match error.kind() {
        ErrorKind::NotFound => "it is a link to a place that does not exist".into(),
        _ => format!("it is a link that cannot be followed: {error}"),
    }
}

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
    check_output(path)?;
    if !path.exists() {
        return check_new(path);
    }
    let is_file = path.is_file();
    let mut file = OpenOptions::new().read(is_file).append(true).open(path).map_err(|e| reason(&e))?;
    if !is_file {
        return Ok(());
    }
    let mut start = vec![0; offset + magic.len()];
    match file.read_exact(&mut start) {
        Ok(()) if start[offset..].eq_ignore_ascii_case(magic) => Ok(()),
        Err(e) if e.kind() == ErrorKind::UnexpectedEof && start_is_empty(path) => Ok(()),
        _ => Err(format!("{} is there and is no {kind}: it is left as it is", path.display())),
    }
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
        for (name, fine) in [("", true), ("new/er", true), ("rows.csv", false), ("rows.csv/er", false)] {
            assert_eq!(check_folder(&at(name)).is_ok(), fine, "{name}");
        }
        assert!(check_new(&at(&"x".repeat(300))).is_err());
        assert!(!at("new").exists());
        replace(&at("old.html"), b"<!DOCTYPE new").unwrap();
        assert_eq!(fs::read(at("old.html")).unwrap(), b"<!DOCTYPE new");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 3);
    }
}
