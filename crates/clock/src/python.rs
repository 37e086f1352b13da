//! The Python that peers run in.

/// The environment variable that names the Python to look for torch in.
pub const PYTHON_VARIABLE: &str = "FLASHCORE_PYTHON";

/// The Python to look for torch in.
pub fn python() -> String {
    std::env::var(PYTHON_VARIABLE)
        .ok()
        .filter(|python| !python.is_empty())
        .unwrap_or_else(|| "python3".into())
}

/// The checksum of zlib's crc32, which Python has too.
pub fn crc32(bytes: &[u8]) -> u32 {
    let table: [u32; 256] = std::array::from_fn(|i| {
        (0..8).fold(i as u32, |crc, _| if crc & 1 == 1 { 0xedb8_8320 ^ (crc >> 1) } else { crc >> 1 })
    });
    !bytes.iter().fold(!0, |crc, &byte| table[((crc ^ u32::from(byte)) & 0xff) as usize] ^ (crc >> 8))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_checksum_is_the_well_known_one() {
        assert_eq!(crc32(b"123456789"), 0xcbf4_3926);
        assert_eq!(crc32(b""), 0);
    }
}
