//! The memory that instructions address: global and shared memory, how copies and `wgmma` find tiles in them, and what
//! accesses cost.

pub mod banks;
pub mod descriptor;
pub mod global;
pub mod lines;
pub mod shared;
pub mod tensor_map;
