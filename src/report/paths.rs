//! Every file that a command will read or write, looked at together before the first is touched: none may be written
//! that another option reads or writes too, and none may be replaced that is of another kind.

use super::file;
use std::fs;
use std::path::{Path, PathBuf};

/// What happens to a file.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Access {
    Reads,
    /// Records are added to it; whoever does so checks what is in it.
    Appends,
    /// Written whole. One that is there has `mark` at `offset`, whatever the case of letters.
    Replaces {
        offset: usize,
        mark: Vec<u8>,
        kind: &'static str,
    },
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Use {
    option: String,
    path: PathBuf,
    access: Access,
}

/// The files of one command. Options are named as a user types them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Paths(Vec<Use>);

/// What tells two files apart.
#[derive(Debug, PartialEq, Eq)]
enum Identity {
    #[cfg(unix)]
    Inode(u64, u64),
    Name(PathBuf),
}

/// Links that are followed by hand, as many as Linux follows.
const LINKS: usize = 40;

impl Paths {
    /// `option` reads `path`.
    pub fn reads(&mut self, option: &str, path: &Path) -> &mut Self {
        self.add(option, path, Access::Reads)
    }

    /// `option` adds records to `path`.
    pub fn appends(&mut self, option: &str, path: &Path) -> &mut Self {
        self.add(option, path, Access::Appends)
    }

    /// `option` replaces `path`, which is no file yet, or an empty one, or a `kind` that begins with `start`.
    pub fn replaces(&mut self, option: &str, path: &Path, start: &[u8], kind: &'static str) -> &mut Self {
        self.replaces_at(option, path, 0, start, kind)
    }

    /// [`Paths::replaces`] of a kind whose mark stands `offset` bytes from the start.
    pub fn replaces_at(
        &mut self,
        option: &str,
        path: &Path,
        offset: usize,
        mark: &[u8],
        kind: &'static str,
    ) -> &mut Self {
        self.add(option, path, Access::Replaces { offset, mark: mark.to_vec(), kind })
    }

    fn add(&mut self, option: &str, path: &Path, access: Access) -> &mut Self {
        self.0.push(Use { option: option.into(), path: path.into(), access });
        self
    }

    /// Looks, and touches nothing. Devices such as /dev/null may be named as often as one likes, and a file may be
    /// read as often.
    ///
    /// # Errors
    /// The options and the file, and what to do: for a usage error (exit 2).
    pub fn check(&self) -> Result<(), String> {
        for u in &self.0 {
            let path = u.path.display();
            match u.written() {
                true => file::check_output(&u.path).map_err(|e| ("write", e)),
                false => file::check_input(&u.path).map_err(|e| ("read", e)),
            }
            .map_err(|(what, reason)| {
                format!("{}: cannot {what} {path}: {reason}; choose another file", u.option)
            })?;
        }
        let known: Vec<Option<Identity>> = self.0.iter().map(|u| identity(&u.path)).collect();
        for (at, b) in self.0.iter().enumerate() {
            let same = (0..at).find(|i| known[*i].is_some() && known[*i] == known[at]);
            let Some(a) = same.map(|i| &self.0[i]).filter(|a| a.written() || b.written()) else { continue };
            let (a, b) = if a.written() { (a, b) } else { (b, a) };
            let path = a.path.display();
            return Err(match (b.written(), a.option == b.option) {
                (true, false) => {
                    format!("{} and {} would both write {path}: give two files", a.option, b.option)
                }
                (true, true) => format!("{} would write {path} twice: give two files", a.option),
                (false, _) => {
                    format!("{} would write {path}, which {} reads: give another file", a.option, b.option)
                }
            });
        }
        for u in &self.0 {
            if let Access::Replaces { offset, mark, kind } = &u.access {
                file::check_at(&u.path, *offset, mark, kind).map_err(|reason| {
                    format!("{}: cannot write {}: {reason}; choose another file", u.option, u.path.display())
                })?;
            }
        }
        Ok(())
    }
}

impl Use {
    fn written(&self) -> bool {
        self.access != Access::Reads
    }
}

/// `None` for what is no plain file. A file that is not there yet is known by its folder and name.
fn identity(path: &Path) -> Option<Identity> {
    if let Ok(meta) = fs::metadata(path) {
        if !meta.is_file() {
            return None;
        }
        #[cfg(unix)]
        {
            use std::os::unix::fs::MetadataExt;
            return Some(Identity::Inode(meta.dev(), meta.ino()));
        }
        #[cfg(not(unix))]
        return path.canonicalize().ok().map(Identity::Name);
    }
    let folder = |p: &Path| match p.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder.to_path_buf(),
        _ => PathBuf::from("."),
    };
    let mut path = path.to_path_buf();
    for _ in 0..LINKS {
        match fs::read_link(&path) {
            Ok(to) => path = folder(&path).join(to),
            Err(_) => break,
        }
    }
    let name = path.file_name()?.to_owned();
    // A folder that is made later is known by how it is written.
    let folder = folder(&path);
    Some(Identity::Name(folder.canonicalize().or_else(|_| std::path::absolute(&folder)).ok()?.join(name)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_file_is_not_used_twice() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        fs::write(at("old.csv"), "rows").unwrap();
        fs::hard_link(at("old.csv"), at("hard.csv")).unwrap();
        fs::create_dir(at("folder")).unwrap();
        #[cfg(unix)]
        {
            std::os::unix::fs::symlink("old.csv", at("soft.csv")).unwrap();
            std::os::unix::fs::symlink("new.csv", at("dangling.csv")).unwrap();
        }
        let both = |a: &str, b: &str| Paths::default().appends("-o", &at(a)).appends("--x", &at(b)).check();
        for (a, b) in [
            ("old.csv", "old.csv"),
            ("new.csv", "new.csv"),
            ("old.csv", "hard.csv"),
            ("new.csv", "folder/../new.csv"),
        ] {
            assert!(both(a, b).unwrap_err().contains("-o and --x would both write"), "{a} {b}");
        }
        #[cfg(unix)]
        for (a, b) in [("old.csv", "soft.csv"), ("new.csv", "dangling.csv")] {
            assert!(both(a, b).is_err(), "{a} {b}");
        }
        assert_eq!(both("old.csv", "new.csv"), Ok(()));
        let mut paths = Paths::default();
        paths.reads("BASE", &at("old.csv")).reads("--new", &at("old.csv"));
        assert_eq!(paths.check(), Ok(()));
        let said = paths.replaces("--json", &at("hard.csv"), b"{", "report").check().unwrap_err();
        assert!(said.contains("--json would write") && said.contains("which BASE reads"), "{said}");
        if Path::new("/dev/null").exists() {
            let null = Path::new("/dev/null");
            assert_eq!(
                Paths::default().appends("-o", null).replaces("--json", null, b"{", "report").check(),
                Ok(())
            );
        }
        assert_eq!(fs::read(at("old.csv")).unwrap(), b"rows");
    }

    #[test]
    fn a_file_of_another_kind_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        fs::write(at("notes.txt"), "mine").unwrap();
        fs::write(at("report.json"), "{}").unwrap();
        let json = |name: &str| Paths::default().replaces("--json", &at(name), b"{", "report").check();
        assert_eq!((json("report.json"), json("new.json")), (Ok(()), Ok(())));
        assert!(json("notes.txt").unwrap_err().contains("--json: cannot write"));
        assert!(!at("new.json").exists());
    }
}
