//! Files: safetensors in and out, and writing that either happens whole or not at all.

use std::ffi::OsString;
use std::io::{self, BufWriter, Read, Write};
use std::path::{Path, PathBuf};

use flashcore::{DType, Element, F8E4M3, Name};
use half::{bf16, f16};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};

use crate::{interrupt, memory};

/// Writes a file under a temporary name in the same folder, and renames it when all of it is on the disk. Anything but
/// a regular file (a pipe, /dev/stdout) is written directly.
pub fn write_whole(path: &Path, write: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> io::Result<()> {
    match std::fs::metadata(path) {
        Ok(meta) if meta.is_dir() => {
            return Err(io::Error::new(io::ErrorKind::IsADirectory, "it is a folder"));
        }
        Ok(meta) if !meta.is_file() => {
            let mut file = std::fs::OpenOptions::new().write(true).open(path)?;
            write(&mut file)?;
            return file.flush();
        }
        Ok(_) | Err(_) => {}
    }
    // A link stays a link, and its target is replaced.
    let name = std::fs::canonicalize(path).unwrap_or_else(|_| path.to_path_buf());
    let partial = partial_name(&name)?;
    let result = interrupt::create_partial(&partial).and_then(|file| {
        let mut file = BufWriter::new(file);
        write(&mut file)?;
        let file = file.into_inner().map_err(io::IntoInnerError::into_error)?;
        file.sync_all()?;
        interrupt::keep(&partial, &name)
    });
    if result.is_err() {
        interrupt::discard(&partial);
    }
    result
}

fn partial_name(name: &Path) -> io::Result<PathBuf> {
    let file =
        name.file_name().ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "it names no file"))?;
    let mut partial = OsString::from(".");
    partial.push(file);
    partial.push(format!(".{}.partial", std::process::id()));
    Ok(name.with_file_name(partial))
}

/// The most bytes of a text file. A larger or endless one, such as /dev/zero, is not a text that a user means.
const LONGEST_TEXT: u64 = 1 << 30;

/// The bytes of a file, unless they are more than half of the memory.
pub fn read(path: &Path) -> Result<Vec<u8>, String> {
    read_up_to(path, memory::available().map_or(u64::MAX, |free| free / 2))
}

/// The text of a file.
pub fn read_text(path: &Path) -> Result<String, String> {
    let most = memory::available().map_or(LONGEST_TEXT, |free| LONGEST_TEXT.min(free / 2));
    String::from_utf8(read_up_to(path, most)?).map_err(|error| {
        format!("{} is no text: byte {} is not UTF-8", path.display(), error.utf8_error().valid_up_to())
    })
}

fn read_up_to(path: &Path, most: u64) -> Result<Vec<u8>, String> {
    let too_large = || format!("{} is larger than the {most} bytes that are read here", path.display());
    let explained = |error: io::Error| explain("read", path, &error);
    let file = std::fs::File::open(path).map_err(explained)?;
    let size = file.metadata().map_err(explained)?.len();
    if size > most {
        return Err(too_large());
    }
    let mut bytes = Vec::new();
    file.take(most.saturating_add(1)).read_to_end(&mut bytes).map_err(explained)?;
    if bytes.len() as u64 > most { Err(too_large()) } else { Ok(bytes) }
}

/// An error of a file in words that say what to do.
pub fn explain(what: &str, path: &Path, error: &io::Error) -> String {
    let advice = match error.kind() {
        io::ErrorKind::NotFound => "check the path",
        io::ErrorKind::PermissionDenied => "check who may write there, or choose another place",
        io::ErrorKind::StorageFull | io::ErrorKind::FileTooLarge | io::ErrorKind::QuotaExceeded => {
            "free some space or choose another place; nothing was left behind"
        }
        io::ErrorKind::IsADirectory => "name a file in it",
        _ => "nothing was left behind",
    };
    format!("cannot {what} {}: {error}; {advice}", path.display())
}

/// An element that files hold as little-endian bytes.
pub trait Stored: Element {
    /// The name of its dtype in safetensors.
    const STORED: Dtype;

    /// From its bytes, as many as the dtype's size.
    fn from_bytes(bytes: &[u8]) -> Self;

    /// Appends its bytes.
    fn append(self, bytes: &mut Vec<u8>);
}

macro_rules! stored {
    ($($element:ty = $dtype:ident),*) => {$(
        impl Stored for $element {
            const STORED: Dtype = Dtype::$dtype;

            fn from_bytes(bytes: &[u8]) -> Self {
                Self::from_le_bytes(bytes.try_into().expect("as many bytes as an element has"))
            }

            fn append(self, bytes: &mut Vec<u8>) {
                bytes.extend(self.to_le_bytes());
            }
        }
    )*};
}

stored!(f16 = F16, bf16 = BF16, f32 = F32, i32 = I32);

impl Stored for F8E4M3 {
    const STORED: Dtype = Dtype::F8_E4M3;

    fn from_bytes(bytes: &[u8]) -> Self {
        Self::from_bits(bytes[0])
    }

    fn append(self, bytes: &mut Vec<u8>) {
        bytes.push(self.to_bits());
    }
}

/// Elements from their bytes.
pub fn elements<T: Stored>(bytes: &[u8]) -> Vec<T> {
    bytes.chunks_exact(size_of::<T>()).map(T::from_bytes).collect()
}

/// Bytes of elements.
pub fn bytes<T: Stored>(elements: &[T]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(size_of_val(elements));
    for element in elements {
        element.append(&mut bytes);
    }
    bytes
}

/// The dtype of a stored tensor, if attention runs on it.
pub fn dtype(stored: Dtype) -> Option<DType> {
    match stored {
        Dtype::F16 => Some(DType::F16),
        Dtype::BF16 => Some(DType::BF16),
        Dtype::F32 => Some(DType::F32),
        Dtype::F8_E4M3 => Some(DType::F8E4M3),
        _ => None,
    }
}

/// The elements of a stored tensor as f32, if attention runs on its dtype.
pub fn floats(tensor: &TensorView<'_>) -> Option<Vec<f32>> {
    dtype(tensor.dtype()).map(|dtype| widened(tensor.data(), dtype))
}

/// Elements of a dtype from their bytes, as f32.
pub fn widened(bytes: &[u8], dtype: DType) -> Vec<f32> {
    match dtype {
        DType::F16 => elements::<f16>(bytes).into_iter().map(f16::to_f32).collect(),
        DType::BF16 => elements::<bf16>(bytes).into_iter().map(bf16::to_f32).collect(),
        DType::F32 => elements::<f32>(bytes),
        DType::F8E4M3 => elements::<F8E4M3>(bytes).iter().map(F8E4M3::to_f32).collect(),
        DType::I32 => elements::<i32>(bytes).into_iter().map(|x| x as f32).collect(),
    }
}

/// The descales of q, k and v that a file holds, in f32.
pub fn descales(file: &SafeTensors<'_>) -> Result<[Option<Vec<f32>>; 3], String> {
    let mut descales = [const { None }; 3];
    for (name, descale) in Name::DESCALES.into_iter().zip(&mut descales) {
        let Ok(tensor) = file.tensor(&name.to_string()) else { continue };
        if tensor.dtype() != Dtype::F32 {
            return Err(format!(
                "{name} is {:?}; descales are F32. Convert it before saving",
                tensor.dtype()
            ));
        }
        *descale = Some(elements(tensor.data()));
    }
    Ok(descales)
}

/// The tensors of a file as a list for messages: name, dtype and shape of each.
pub fn contents(file: &SafeTensors<'_>) -> String {
    let mut names: Vec<String> = file
        .iter()
        .map(|(name, tensor)| format!("{name} {:?} {:?}", tensor.dtype(), tensor.shape()))
        .collect();
    names.sort();
    if names.is_empty() { "no tensors".into() } else { names.join(", ") }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn leftovers(folder: &Path) -> Vec<OsString> {
        std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name()).collect()
    }

    #[test]
    fn a_file_appears_whole_and_replaces_what_was_there() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("out");
        std::fs::write(&path, "old and longer").unwrap();
        write_whole(&path, |out| out.write_all(b"new")).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"new");
        assert_eq!(leftovers(folder.path()), ["out"]);
    }

    #[test]
    fn a_write_that_fails_leaves_the_old_file_and_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("out");
        std::fs::write(&path, "old").unwrap();
        let error = write_whole(&path, |out| {
            out.write_all(b"half of")?;
            Err(io::ErrorKind::StorageFull.into())
        });
        assert!(explain("write", &path, &error.unwrap_err()).contains("free some space"));
        assert_eq!(std::fs::read(&path).unwrap(), b"old");
        assert_eq!(leftovers(folder.path()), ["out"]);
    }

    #[cfg(unix)]
    #[test]
    fn a_link_stays_a_link() {
        let folder = tempfile::tempdir().unwrap();
        let (target, link) = (folder.path().join("target"), folder.path().join("link"));
        std::fs::write(&target, "old").unwrap();
        std::os::unix::fs::symlink(&target, &link).unwrap();
        write_whole(&link, |out| out.write_all(b"new")).unwrap();
        assert!(link.is_symlink());
        assert_eq!(std::fs::read(&target).unwrap(), b"new");
    }

    #[test]
    fn a_file_without_end_or_without_text_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("in");
        std::fs::write(&path, b"ab\xff").unwrap();
        assert!(read_text(&path).unwrap_err().contains("byte 2 is not UTF-8"));
        assert_eq!(read(&path).unwrap(), b"ab\xff");
        assert!(read_up_to(&path, 2).unwrap_err().contains("larger than the 2 bytes"));
        if cfg!(unix) {
            assert!(read_up_to(Path::new("/dev/zero"), 1000).unwrap_err().contains("larger than"));
        }
        assert!(read(&folder.path().join("none")).unwrap_err().contains("check the path"));
    }

    #[test]
    fn elements_and_bytes_are_inverse() {
        let values = [1.5_f32, -0.0, f32::MAX];
        assert_eq!(elements::<f32>(&bytes(&values)), values);
        let values = [f16::ONE, f16::MIN_POSITIVE_SUBNORMAL];
        assert_eq!(elements::<f16>(&bytes(&values)), values);
    }
}
