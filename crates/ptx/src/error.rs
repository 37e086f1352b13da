//! What can be wrong with a kernel, told to its author: which line, what was given, what is possible.

use std::fmt;
use std::panic::Location;

use crate::types::Target;

/// A shared-memory layout that is not possible.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SharedError {
    /// An alignment that is not a power of two.
    #[error("shared allocation `{name}` is aligned to {align} bytes, which is not a power of two")]
    Alignment {
        /// The allocation.
        name: String,
        /// Its alignment.
        align: u32,
    },
    /// An alias that does not fit within the allocations it reuses.
    #[error(
        "shared allocation `{name}` of {bytes} bytes does not fit over the allocations it reuses, which have \
         {available} bytes in a row"
    )]
    Alias {
        /// The allocation.
        name: String,
        /// Its size.
        bytes: u32,
        /// What there is.
        available: u32,
    },
    /// More than a block of the target can have.
    #[error("shared memory of {bytes} bytes is over the {limit} that a block of {target} can have: {}", list(.sizes))]
    TooLarge {
        /// The target.
        target: Target,
        /// The size of the layout.
        bytes: u32,
        /// What a block can opt in to.
        limit: u32,
        /// Every allocation: its name, its size, and whether it has bytes of its own.
        sizes: Vec<(String, u32, bool)>,
    },
}

fn list(sizes: &[(String, u32, bool)]) -> String {
    let parts = sizes.iter().map(|(name, bytes, own)| {
        let note = if *own { "" } else { " (reuses others)" };
        format!("{name} {bytes}{note}")
    });
    parts.collect::<Vec<_>>().join(", ")
}

/// A fault of a kernel, with the Rust line that made it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BuildError {
    /// The kernel.
    pub kernel: String,
    /// The kernel author's line, where the fault belongs to one.
    pub loc: Option<&'static Location<'static>>,
    /// The section and comment that the instruction belongs to.
    pub place: Option<String>,
    /// The fault.
    pub fault: Fault,
}

impl fmt::Display for BuildError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(loc) = self.loc {
            write!(f, "{loc}: ")?;
        }
        write!(f, "kernel `{}`", self.kernel)?;
        if let Some(place) = &self.place {
            write!(f, " ({place})")?;
        }
        write!(f, ": {}", self.fault)
    }
}

impl std::error::Error for BuildError {}

/// All faults found in a kernel or module.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BuildErrors(pub Vec<BuildError>);

impl fmt::Display for BuildErrors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, error) in self.0.iter().enumerate() {
            if i > 0 {
                f.write_str("\n")?;
            }
            write!(f, "{error}")?;
        }
        Ok(())
    }
}

impl std::error::Error for BuildErrors {}

/// What is wrong.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// The target does not have the instruction.
    #[error("`{syntax}` needs {needs} or later; the kernel is for {target}")]
    Target {
        /// The instruction's line in the table.
        syntax: &'static str,
        /// The oldest target that has it.
        needs: Target,
        /// The kernel's.
        target: Target,
    },
    /// A combination that PTX forbids.
    #[error("{0}")]
    Forbidden(String),
    /// Shared memory that is not possible.
    #[error(transparent)]
    Shared(#[from] SharedError),
    /// A register read where a path reaches it without a write.
    #[error("register {reg} may be read before it is written")]
    Unwritten {
        /// The register's printed name.
        reg: String,
    },
    /// A register used with another class than its own, or one that does not exist.
    #[error("operand {operand} of `{syntax}` is {found}, but must be {expected}")]
    Operand {
        /// The instruction's line in the table.
        syntax: &'static str,
        /// Which operand.
        operand: String,
        /// What was given.
        found: String,
        /// What is expected.
        expected: String,
    },
    /// A label that is not where it must be.
    #[error("label {label} {problem}")]
    Label {
        /// The label's printed name.
        label: String,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// Barriers that do not agree.
    #[error("barrier {id}: {problem}")]
    Barrier {
        /// The barrier.
        id: u32,
        /// What is wrong.
        problem: String,
    },
    /// A wgmma stage that is not well formed.
    #[error("{problem}{}", .code.map_or_else(String::new, |c| format!(" (ptxas: C{c})")))]
    Wgmma {
        /// The number of the note that ptxas 13.0 makes of it; for some it silently makes wrong code.
        code: Option<u16>,
        /// What is wrong.
        problem: String,
    },
    /// A constant shared address outside its allocation.
    #[error("bytes {start}..{end} of shared allocation `{name}`, which has {bytes}")]
    OutOfBounds {
        /// The allocation.
        name: String,
        /// The first byte.
        start: i64,
        /// The byte after the last.
        end: i64,
        /// The allocation's size.
        bytes: u32,
    },
    /// A constant shared address that is not aligned as the access needs.
    #[error("offset {offset} in shared allocation `{name}` is not a multiple of {needs}")]
    Misaligned {
        /// The allocation.
        name: String,
        /// The address from the start of shared memory.
        offset: i64,
        /// The alignment needed.
        needs: u32,
    },
}
