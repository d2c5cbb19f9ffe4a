//! A folder of small files by content key, for compiled kernels and chosen algorithms.
//!
//! Each file is the SHA-256 of its payload, then the payload: a torn or altered file reads as absent and is
//! written anew. A folder that cannot be written only costs time.

use sha2::{Digest, Sha256};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes of the checksum in front of a payload.
const CHECKSUM: usize = 32;

#[derive(Debug, Clone)]
pub struct DiskCache {
    folder: PathBuf,
}

/// `$XDG_CACHE_HOME/mbperf`, or `~/.cache/mbperf`; `None` without either variable.
pub fn default_folder() -> Option<PathBuf> {
    let set = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    let base = set("XDG_CACHE_HOME").filter(|p| p.is_absolute());
    base.or_else(|| set("HOME").map(|h| h.join(".cache"))).map(|p| p.join("mbperf"))
}

/// Key of a piece of content: the hex SHA-256 of its parts, each with its length.
pub fn key(parts: &[&str]) -> String {
    let mut hash = Sha256::new();
    for part in parts {
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part.as_bytes());
    }
    hex(&hash.finalize())
}

pub(super) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

impl DiskCache {
    pub fn new(folder: PathBuf) -> Self {
        Self { folder }
    }

    /// The payload stored under `file`, if it is there and whole.
    pub fn get(&self, file: &str) -> Option<Vec<u8>> {
        let mut bytes = std::fs::read(self.folder.join(file)).ok()?;
        if bytes.len() <= CHECKSUM || Sha256::digest(&bytes[CHECKSUM..]).as_slice() != &bytes[..CHECKSUM] {
            return None;
        }
        bytes.drain(..CHECKSUM);
        Some(bytes)
    }

    /// Stores a payload: written beside and renamed, so that readers see all of it or nothing.
    pub fn put(&self, file: &str, payload: &[u8]) -> std::io::Result<()> {
        static SERIAL: AtomicU64 = AtomicU64::new(0);
        std::fs::create_dir_all(&self.folder)?;
        let serial = SERIAL.fetch_add(1, Ordering::Relaxed);
        let part = self.folder.join(format!("{file}.{}.{serial}.part", std::process::id()));
        let bytes = [Sha256::digest(payload).as_slice(), payload].concat();
        let stored =
            std::fs::write(&part, bytes).and_then(|()| std::fs::rename(&part, self.folder.join(file)));
        if stored.is_err() {
            let _ = std::fs::remove_file(&part);
        }
        stored
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_stored_is_read_back_and_damage_reads_as_absent() {
        let folder = tempfile::tempdir().unwrap();
        let cache = DiskCache::new(folder.path().join("new/folder"));
        assert_eq!(cache.get("a.cubin"), None);
        cache.put("a.cubin", b"payload").unwrap();
        assert_eq!(cache.get("a.cubin").as_deref(), Some(b"payload".as_slice()));
        let path = folder.path().join("new/folder/a.cubin");
        let whole = std::fs::read(&path).unwrap();
        for damaged in [&whole[..whole.len() - 1], &whole[..10], &[][..]] {
            std::fs::write(&path, damaged).unwrap();
            assert_eq!(cache.get("a.cubin"), None);
        }
        let mut flipped = whole.clone();
        flipped[CHECKSUM] ^= 1;
        std::fs::write(&path, flipped).unwrap();
        assert_eq!(cache.get("a.cubin"), None);
        cache.put("a.cubin", b"payload").unwrap();
        assert_eq!(cache.get("a.cubin").as_deref(), Some(b"payload".as_slice()));
        assert_eq!(std::fs::read_dir(path.parent().unwrap()).unwrap().count(), 1, "no part files stay");
    }

    #[test]
    fn keys_tell_where_parts_end() {
        assert_ne!(key(&["ab", "c"]), key(&["a", "bc"]));
        assert_eq!(key(&["ab", "c"]).len(), 64);
    }

    #[test]
    fn a_folder_that_cannot_be_made_is_an_error_not_a_panic() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        std::fs::write(&file, "x").unwrap();
        assert!(DiskCache::new(file).put("a", b"x").is_err());
    }
}
