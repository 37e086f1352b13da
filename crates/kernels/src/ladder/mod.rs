//! The first rungs of the ladder: kernels that show what each step brings.

pub mod mma;
pub mod scalar;
