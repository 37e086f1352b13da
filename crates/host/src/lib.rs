//! What the commands need of the machine that they run on.
//!
//! - [`files`] are written whole or not at all, and [`interrupt`] sees to it whatever happens.
//! - [`memory`] says whether a problem fits before anything of it is drawn.
//! - A [`process`] is started with its children, asked over JSON lines, and ended with them.

pub mod files;
pub mod interrupt;
pub mod memory;
pub mod process;
