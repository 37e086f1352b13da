//! Kernel parameters: one Rust struct for the kernel that reads them and for the launcher that fills them.
//!
//! [`kernel_params!`](crate::kernel_params) declares the struct. Its fields hold the values of a launch, and
//! [`KernelParams::pack`] lays them out as PTX does. For each field there is an associated constant of the same
//! name, the handle that a kernel under construction reads the parameter through.
//!
//! ```
//! use flashcore_ptx::{GlobalPtr, KernelBuilder, KernelParams, Target, kernel_params};
//!
//! kernel_params! {
//!     /// What the scaling kernel is given.
//!     pub struct ScaleParams {
//!         /// The data.
//!         x: GlobalPtr,
//!         /// How many.
//!         n: u32,
//!         /// The factor.
//!         scale: f32,
//!     }
//! }
//!
//! let launch = ScaleParams { x: GlobalPtr(0x7f00_0000_0000), n: 3, scale: 0.5 };
//! assert_eq!(launch.pack().len(), 16);
//!
//! let mut k = KernelBuilder::new("scale", Target::Sm80).params::<ScaleParams>();
//! let n = k.param(ScaleParams::n); // a Reg<B32>
//! let scale = k.param(ScaleParams::scale); // a Reg<F32>
//! # let _ = (n, scale);
//! ```

use std::marker::PhantomData;

use crate::types::{B32, B64, F32, RegType};

/// A parameter as the kernel declares it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Param {
    /// Its name.
    pub name: String,
    /// Its type.
    pub ty: ParamType,
    /// Where it starts in the packed bytes.
    pub offset: u32,
}

/// The type of a parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ParamType {
    /// 32 unsigned bits.
    U32,
    /// 32 signed bits.
    S32,
    /// 64 unsigned bits.
    U64,
    /// 64 signed bits.
    S64,
    /// Single precision.
    F32,
    /// An address in global memory.
    GlobalPtr,
    /// A tensor map by value: 128 bytes, aligned to 64.
    TensorMap,
}

impl ParamType {
    /// Its size.
    pub const fn bytes(self) -> u32 {
        match self {
            ParamType::U32 | ParamType::S32 | ParamType::F32 => 4,
            ParamType::U64 | ParamType::S64 | ParamType::GlobalPtr => 8,
            ParamType::TensorMap => 128,
        }
    }

    /// Its alignment.
    pub const fn align(self) -> u32 {
        match self {
            ParamType::TensorMap => 64,
            other => other.bytes(),
        }
    }
}

/// An address in global memory, as a launch gives it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct GlobalPtr(pub u64);

/// A tensor map (the driver's `CUtensorMap`), as a launch gives it: opaque bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(C, align(64))]
pub struct TensorMap(pub [u8; 128]);

impl Default for TensorMap {
    fn default() -> Self {
        TensorMap([0; 128])
    }
}

/// A Rust type that a kernel parameter can have.
pub trait ParamValue: Copy {
    /// The type in PTX.
    const TYPE: ParamType;
    /// Writes the value's bytes.
    fn write(&self, bytes: &mut [u8]);
}

/// A parameter that is loaded into a register; all but tensor maps.
pub trait ScalarParam: ParamValue {
    /// The register it is loaded into.
    type Class: RegType;
}

macro_rules! param_values {
    ($($ty:ty: $variant:ident, |$v:ident| $bytes:expr $(, $class:ident)?;)*) => {
        $(impl ParamValue for $ty {
            const TYPE: ParamType = ParamType::$variant;
            fn write(&self, bytes: &mut [u8]) {
                let $v = *self;
                bytes.copy_from_slice(&$bytes);
            }
        }
        $(impl ScalarParam for $ty {
            type Class = $class;
        })?)*
    };
}

param_values! {
    u32: U32, |v| v.to_le_bytes(), B32;
    i32: S32, |v| v.to_le_bytes(), B32;
    u64: U64, |v| v.to_le_bytes(), B64;
    i64: S64, |v| v.to_le_bytes(), B64;
    f32: F32, |v| v.to_le_bytes(), F32;
    GlobalPtr: GlobalPtr, |v| v.0.to_le_bytes(), B64;
    TensorMap: TensorMap, |v| v.0;
}

/// A struct of kernel parameters; made by [`kernel_params!`](crate::kernel_params).
pub trait KernelParams: 'static {
    /// The struct's name.
    const NAME: &'static str;
    /// The fields, in order.
    const FIELDS: &'static [(&'static str, ParamType)];
    /// Writes the values as the bytes that a launch passes, laid out by [`layout`], and returns how many there are.
    /// Panics if they do not fit.
    fn pack_into(&self, bytes: &mut [u8]) -> usize;

    /// Where each field starts in the packed bytes.
    const OFFSETS: &'static [u16];

    /// How many bytes the packed values have.
    fn packed_bytes() -> usize {
        let last = Self::OFFSETS.last().zip(Self::FIELDS.last());
        last.map_or(0, |(&start, &(_, ty))| usize::from(start) + ty.bytes() as usize)
    }

    /// The values as the bytes that a launch passes.
    fn pack(&self) -> Vec<u8> {
        let mut bytes = vec![0; Self::packed_bytes()];
        self.pack_into(&mut bytes);
        bytes
    }
}

/// The handle of the parameter `T` of the struct `P`: what a kernel reads it through.
pub struct ParamHandle<P, T> {
    index: u32,
    of: PhantomData<fn() -> (P, T)>,
}

impl<P, T> ParamHandle<P, T> {
    /// The handle of the field with this index. For [`kernel_params!`](crate::kernel_params).
    #[doc(hidden)]
    pub const fn new(index: u32) -> Self {
        ParamHandle { index, of: PhantomData }
    }

    /// Which field it is.
    pub const fn index(self) -> u32 {
        self.index
    }
}

impl<P, T> Clone for ParamHandle<P, T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<P, T> Copy for ParamHandle<P, T> {}

/// Where each type starts and ends: at the next multiple of its alignment.
fn place(start: usize, types: impl Iterator<Item = ParamType>) -> impl Iterator<Item = (usize, usize)> {
    types.scan(start, |end, ty| {
        let offset = end.next_multiple_of(ty.align() as usize);
        *end = offset + ty.bytes() as usize;
        Some((offset, *end))
    })
}

/// Places fields as PTX does.
pub fn layout(fields: &[(&str, ParamType)]) -> Vec<Param> {
    let places = place(0, fields.iter().map(|&(_, ty)| ty));
    let param = |(&(name, ty), (offset, _)): (&(&str, ParamType), (usize, usize))| Param {
        name: name.to_owned(),
        ty,
        offset: offset as u32,
    };
    fields.iter().zip(places).map(param).collect()
}

/// Where each of `N` fields starts, by the rules of [`layout`]; for [`kernel_params!`](crate::kernel_params).
#[doc(hidden)]
pub const fn offsets<const N: usize>(fields: &[(&str, ParamType)]) -> [u16; N] {
    let (mut offsets, mut end, mut i) = ([0; N], 0_u32, 0);
    while i < N {
        let ty = fields[i].1;
        let start = end.next_multiple_of(ty.align());
        // The hardware's limit is far below what 16 bits hold.
        offsets[i] = start as u16;
        end = start + ty.bytes();
        i += 1;
    }
    offsets
}

/// Writes one field's bytes; for [`kernel_params!`](crate::kernel_params).
#[doc(hidden)]
pub type Writer<'a> = &'a dyn Fn(&mut [u8]);

/// Packs field values by [`layout`]; for [`kernel_params!`](crate::kernel_params).
#[doc(hidden)]
pub fn pack_into(fields: &[(&str, ParamType)], write: &[Writer<'_>], bytes: &mut [u8]) -> usize {
    let mut last = 0;
    for ((start, end), write) in place(0, fields.iter().map(|&(_, ty)| ty)).zip(write) {
        write(&mut bytes[start..end]);
        last = end;
    }
    last
}

/// Declares a struct of kernel parameters. See the [module](crate::params).
#[macro_export]
macro_rules! kernel_params {
    ($(#[$meta:meta])* $vis:vis struct $name:ident { $($(#[$fmeta:meta])* $field:ident: $ty:ty),* $(,)? }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq)]
        $vis struct $name { $($(#[$fmeta])* pub $field: $ty),* }

        $crate::kernel_params!(@handles $name, 0u32, $($field: $ty,)*);

        impl $crate::KernelParams for $name {
            const NAME: &'static str = stringify!($name);
            const FIELDS: &'static [(&'static str, $crate::ParamType)] =
                &[$((stringify!($field), <$ty as $crate::ParamValue>::TYPE)),*];
            const OFFSETS: &'static [u16] =
                &$crate::params::offsets::<{ <$name as $crate::KernelParams>::FIELDS.len() }>(
                    <$name as $crate::KernelParams>::FIELDS,
                );
            fn pack_into(&self, bytes: &mut [u8]) -> usize {
                $crate::params::pack_into(
                    Self::FIELDS,
                    &[$(&|bytes: &mut [u8]| $crate::ParamValue::write(&self.$field, bytes)),*],
                    bytes,
                )
            }
        }
    };
    (@handles $name:ident, $index:expr, $field:ident: $ty:ty, $($rest:tt)*) => {
        #[allow(non_upper_case_globals)]
        impl $name {
            /// The handle of the parameter of this name.
            pub const $field: $crate::ParamHandle<$name, $ty> = $crate::ParamHandle::new($index);
        }
        $crate::kernel_params!(@handles $name, $index + 1u32, $($rest)*);
    };
    (@handles $name:ident, $index:expr,) => {};
}
