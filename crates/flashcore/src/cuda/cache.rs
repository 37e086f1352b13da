//! Machine code on disk, so that a kernel is assembled once per machine and not once per process.
//!
//! A file is named by the hash of everything that its content depends on: the PTX text, the GPU's generation and
//! the driver's version. It is written under a temporary name and renamed, so that processes side by side see a
//! whole file or none, and it starts with the hash of the rest, so that a damaged file is seen and made anew.
//! When the folder grows over its bound, the files that were used longest ago go first.

use std::{
    fs, io,
    path::{Path, PathBuf},
    time::SystemTime,
};

/// The bound on the folder's size where the environment sets none.
const DEFAULT_BOUND: u64 = 256 << 20;

const HASH_BYTES: usize = blake3::OUT_LEN;

/// A folder of machine code.
#[derive(Clone, Debug)]
pub struct CubinCache {
    folder: Option<PathBuf>,
    bound: u64,
}

impl CubinCache {
    /// The user's cache: `$FLASHCORE_CACHE`, else `flashcore` in `$XDG_CACHE_HOME`, else in `~/.cache`. Set
    /// `FLASHCORE_CACHE` to nothing to keep nothing.
    pub fn of_user() -> Self {
        let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let folder = match std::env::var_os("FLASHCORE_CACHE") {
            Some(folder) if folder.is_empty() => None,
            Some(folder) => Some(PathBuf::from(folder)),
            None => set("XDG_CACHE_HOME")
                .or_else(|| set("HOME").map(|home| home.join(".cache")))
                .map(|base| base.join("flashcore")),
        };
        Self { folder, bound: DEFAULT_BOUND }
    }

    /// A folder with a bound on its size in bytes.
    pub fn in_folder(folder: impl Into<PathBuf>, bound: u64) -> Self {
        Self { folder: Some(folder.into()), bound }
    }

    /// The folder, if anything is kept.
    pub fn folder(&self) -> Option<&Path> {
        self.folder.as_deref()
    }

    /// The name under which the code of a PTX text is kept, for a GPU generation and a driver version.
    pub fn key(ptx: &str, gpu: &str, driver: &str) -> String {
        let mut hash = blake3::Hasher::new();
        for part in [ptx, gpu, driver] {
            hash.update(&(part.len() as u64).to_le_bytes());
            hash.update(part.as_bytes());
        }
        hash.finalize().to_hex().to_string()
    }

    fn file(&self, key: &str) -> Option<PathBuf> {
        self.folder.as_ref().map(|folder| folder.join(format!("{key}.cubin")))
    }

    /// The code kept under a key, if it is there and whole.
    pub fn get(&self, key: &str) -> Option<Vec<u8>> {
        let path = self.file(key)?;
        let mut bytes = fs::read(&path).ok()?;
        if bytes.len() < HASH_BYTES || blake3::hash(&bytes[HASH_BYTES..]).as_bytes() != &bytes[..HASH_BYTES] {
            return None;
        }
        // The time of last use is what eviction goes by; a folder that cannot be written evicts nothing.
        let _ = fs::File::options()
            .append(true)
            .open(&path)
            .and_then(|file| file.set_modified(SystemTime::now()));
        bytes.drain(..HASH_BYTES);
        Some(bytes)
    }

    /// Keeps code under a key. That it could not be kept is no reason for a call to fail, so the caller may
    /// ignore the error.
    pub fn put(&self, key: &str, code: &[u8]) -> io::Result<()> {
        let (Some(folder), Some(path)) = (&self.folder, self.file(key)) else { return Ok(()) };
        fs::create_dir_all(folder)?;
        let mut file = tempfile::Builder::new().prefix(".cubin-").tempfile_in(folder)?;
        io::Write::write_all(&mut file, blake3::hash(code).as_bytes())?;
        io::Write::write_all(&mut file, code)?;
        file.persist(path).map_err(|error| error.error)?;
        self.evict()
    }

    /// Removes everything, and says how many files and bytes that were.
    pub fn clear(&self) -> io::Result<(usize, u64)> {
        let entries = self.entries()?;
        for entry in &entries {
            remove(&entry.path)?;
        }
        Ok((entries.len(), entries.iter().map(|entry| entry.bytes).sum()))
    }

    /// How many files and bytes there are.
    pub fn size(&self) -> io::Result<(usize, u64)> {
        let entries = self.entries()?;
        Ok((entries.len(), entries.iter().map(|entry| entry.bytes).sum()))
    }

    fn evict(&self) -> io::Result<()> {
        let mut entries = self.entries()?;
        entries.sort_by_key(|entry| entry.used);
        let mut total: u64 = entries.iter().map(|entry| entry.bytes).sum();
        for entry in entries {
            if total <= self.bound {
                break;
            }
            remove(&entry.path)?;
            total -= entry.bytes;
        }
        Ok(())
    }

    fn entries(&self) -> io::Result<Vec<Entry>> {
        let Some(folder) = &self.folder else { return Ok(Vec::new()) };
        let listing = match fs::read_dir(folder) {
            Ok(listing) => listing,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(error),
        };
        let mut entries = Vec::new();
        for item in listing {
            let path = item?.path();
            if path.extension().is_none_or(|extension| extension != "cubin") {
                continue;
            }
            // Another process may have removed it since.
            if let Ok(data) = fs::metadata(&path) {
                let used = data.modified().unwrap_or(SystemTime::UNIX_EPOCH);
                entries.push(Entry { path, bytes: data.len(), used });
            }
        }
        Ok(entries)
    }
}

struct Entry {
    path: PathBuf,
    bytes: u64,
    used: SystemTime,
}

fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_put_is_got_and_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let cache = CubinCache::in_folder(folder.path().join("deep/down"), 1 << 20);
        let key = CubinCache::key("ptx", "9.0", "13.0");
        assert_eq!(cache.get(&key), None);
        cache.put(&key, b"code").unwrap();
        assert_eq!(cache.get(&key).as_deref(), Some(&b"code"[..]));
        assert_ne!(key, CubinCache::key("ptx", "9.0", "13.1"));
        assert_ne!(CubinCache::key("ab", "c", ""), CubinCache::key("a", "bc", ""));
        assert_eq!(cache.clear().unwrap().0, 1);
        assert_eq!(cache.get(&key), None);
    }

    #[test]
    fn a_damaged_file_is_not_used() {
        let folder = tempfile::tempdir().unwrap();
        let cache = CubinCache::in_folder(folder.path(), 1 << 20);
        cache.put("k", b"machine code").unwrap();
        let path = cache.file("k").unwrap();
        let mut bytes = fs::read(&path).unwrap();
        bytes.pop();
        fs::write(&path, &bytes).unwrap();
        assert_eq!(cache.get("k"), None);
        fs::write(&path, b"").unwrap();
        assert_eq!(cache.get("k"), None);
    }

    #[test]
    fn the_longest_unused_go_first_when_the_bound_is_reached() {
        let folder = tempfile::tempdir().unwrap();
        let cache = CubinCache::in_folder(folder.path(), 3 * (1000 + HASH_BYTES as u64));
        for (age, key) in ["a", "b", "c"].iter().enumerate() {
            cache.put(key, &[0; 1000]).unwrap();
            let used = SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(1000 + age as u64);
            fs::File::options()
                .append(true)
                .open(cache.file(key).unwrap())
                .unwrap()
                .set_modified(used)
                .unwrap();
        }
        assert!(cache.get("a").is_some(), "used now");
        cache.put("d", &[0; 1000]).unwrap();
        let kept: Vec<bool> = ["a", "b", "c", "d"].iter().map(|key| cache.get(key).is_some()).collect();
        assert_eq!(kept, [true, false, true, true]);
    }

    #[test]
    fn writers_side_by_side_leave_one_whole_file() {
        let folder = tempfile::tempdir().unwrap();
        let cache = CubinCache::in_folder(folder.path(), 1 << 24);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..50 {
                        cache.put("k", &[7; 10_000]).unwrap();
                        assert_eq!(cache.get("k"), Some(vec![7; 10_000]));
                    }
                });
            }
        });
        assert_eq!(cache.size().unwrap().0, 1);
    }
}
