//! Races: who accessed which bytes when, and whether anything orders two accesses.
//!
//! `clock` says what is ordered, the shadows remember the accesses: `shared_shadow` those to the shared memory of a block
//! (page by page, and by `shared_cells` where that does not say enough), `global_shadow` those to global memory, line by
//! line. `sync_words` carries what blocks tell each other through words of global memory.

pub mod clock;
pub mod global_shadow;
pub mod lanes;
pub mod shared_cells;
pub mod shared_shadow;
pub mod sync_words;
