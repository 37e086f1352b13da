//! What is kept from one run for the next, in the user's cache folder and separately per machine: baselines to compare
//! with, and the ceilings that rates are fractions of.

use std::path::PathBuf;

use flashcore::cuda::CubinCache;
use serde::Serialize;

use crate::files;

/// The file of a kind (`baselines`, `ceilings`) and a name, for a machine.
pub fn path(kind: &str, machine: &str, name: &str) -> Result<PathBuf, String> {
    let cache = CubinCache::of_user();
    let folder = cache.folder().ok_or(
        "nothing is kept: FLASHCORE_CACHE is empty, or there is no home; set FLASHCORE_CACHE to a folder",
    )?;
    Ok(folder.join(kind).join(slug(machine)).join(format!("{name}.json")))
}

/// Writes a file of that place, and says where it is.
pub fn keep(kind: &str, machine: &str, name: &str, content: &impl Serialize) -> Result<PathBuf, String> {
    let path = path(kind, machine, name)?;
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder).map_err(|error| files::explain("make", folder, &error))?;
    }
    write_json(&path, content)?;
    Ok(path)
}

/// Writes JSON to a file, whole or not at all.
pub fn write_json(path: &std::path::Path, content: &impl Serialize) -> Result<(), String> {
    files::write_whole(path, |out| {
        serde_json::to_writer_pretty(&mut *out, content)?;
        out.write_all(b"\n")
    })
    .map_err(|error| files::explain("write", path, &error))
}

/// A name for a folder: letters and digits, the rest as single dashes.
fn slug(machine: &str) -> String {
    let mut slug = String::new();
    for letter in machine.chars() {
        if letter.is_ascii_alphanumeric() {
            slug.push(letter.to_ascii_lowercase());
        } else if !slug.is_empty() && !slug.ends_with('-') {
            slug.push('-');
        }
    }
    let slug = slug.trim_end_matches('-');
    if slug.is_empty() { "unknown".into() } else { slug.into() }
}

/// Whether a text may be the name of a baseline: a single path component that needs no quoting in a shell.
pub fn baseline_name(text: &str) -> Result<String, String> {
    let fits = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    if !text.is_empty() && text.len() <= 80 && !text.starts_with('.') && text.chars().all(fits) {
        Ok(text.into())
    } else {
        Err("a name has letters, digits, '-', '_' and '.', and starts with none of the last".into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn machines_have_folders_of_their_own_with_plain_names() {
        assert_eq!(slug("NVIDIA H200"), "nvidia-h200");
        assert_eq!(
            slug("cpu-avx2 on Intel(R) Xeon(R) @ 2.00GHz, 2 threads"),
            "cpu-avx2-on-intel-r-xeon-r-2-00ghz-2-threads"
        );
        assert_eq!(slug("/../"), "unknown");
    }

    #[test]
    fn a_baseline_stays_in_its_folder() {
        for bad in ["", "..", "../x", "a/b", "a b", ".hidden"] {
            assert!(baseline_name(bad).is_err(), "{bad}");
        }
        assert_eq!(baseline_name("main-2.1_x"), Ok("main-2.1_x".into()));
    }
}
