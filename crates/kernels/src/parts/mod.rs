//! What the kernels are made of.

pub(crate) mod copy;
pub(crate) mod epilogue;
pub(crate) mod fragment;
pub(crate) mod lane;
pub(crate) mod params;
pub(crate) mod sequence;
pub(crate) mod shares;
pub(crate) mod softmax;
pub(crate) mod swizzle;
pub(crate) mod work;
