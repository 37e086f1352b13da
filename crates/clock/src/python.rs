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
