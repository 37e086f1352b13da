//! Family: a kind of generated code. What every family says of its schedules, and the text that names a schedule.

use std::{fmt, str::FromStr};

use flashcore_ptx::{BuildErrors, KernelBuilder, SharedError, Target, TensorMap};

use crate::{
    ElementType, FwdParams, Kernel, MAX_TENSOR_CORE_HEAD_DIM, Order, Spec,
    bind::{Args, BindError, Map, Packed},
    packed_tiles,
};

/// A kind of generated code. Its schedule type implements this: for a spec and a target it emits one kernel, and it
/// knows how to bind that kernel's parameters.
pub trait Family: Copy + fmt::Display {
    /// Whether its kernels wait for the previous launch themselves (`griddepcontrol.wait`), so that they may start
    /// before that one has ended.
    const PROGRAMMATIC: bool = false;

    /// Whether the schedule fits the spec and the target, judged from the knobs alone.
    fn check(self, spec: &Spec, target: Target) -> Result<(), ScheduleError>;

    /// Rows, threads, shared memory and blocks of a launch. The schedule fits the spec.
    fn geometry(self, spec: &Spec) -> Geometry;

    /// The kernel. The schedule fits the spec and the target.
    fn emit(self, spec: &Spec, target: Target) -> KernelBuilder;

    /// The roles of a block, one track each, where its kernels can be traced; else none.
    fn roles(self) -> Vec<String> {
        Vec::new()
    }

    /// Whether a launch can be bound to these tensors.
    fn check_args(self, _args: &Args) -> Result<(), BindError> {
        Ok(())
    }

    /// Packs the parameters of a launch: [`FwdParams`], unless the family has others. `encode` makes the tensor maps that
    /// the kernel copies with, if it does. Nothing is allocated.
    fn bind<E>(
        self,
        _spec: &Spec,
        args: &Args,
        _encode: &mut dyn FnMut(&Map) -> Result<TensorMap, E>,
        packed: &mut Packed,
    ) -> Result<(), E> {
        packed.push(&FwdParams::bind(args));
        Ok(())
    }
}

/// The shape that a schedule gives a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Queries per block, or keys where blocks are those of keys.
    pub rows: u32,
    /// Threads per block.
    pub threads: u32,
    /// Bytes of shared memory per block.
    pub shared_bytes: u32,
    /// Which blocks there are.
    pub blocks: Blocks,
}

/// Which blocks a launch has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Blocks {
    /// One per query tile, in this order.
    Each(Order),
    /// One per key tile and kv head, in this order: the first keys are those that the most queries see.
    EachKeys(Order),
    /// A one-dimensional grid of blocks, one per key tile and kv head, that find theirs themselves.
    KeyRow,
    /// A one-dimensional grid: a block per query tile of so many rows and query head, then one per key tile and kv head.
    QueriesThenKeys {
        /// Rows of a query tile.
        queries: u32,
    },
    /// A one-dimensional grid of blocks that find their tiles themselves.
    Row {
        /// Blocks per cluster, which share a tile.
        cluster: u32,
        /// Persistent blocks per multiprocessor, which run until all tiles are done; `None`: each block ends with its
        /// tile.
        resident: Option<u32>,
        /// Parts of the keys; each has its own row of blocks.
        parts: u32,
    },
    /// So many blocks per multiprocessor, which share the keys of all tiles by length, if there are any tiles.
    Shares {
        /// Blocks per multiprocessor.
        resident: u32,
    },
    /// A block for every tile that packed sequences of so many rows in all may have, and per head: see
    /// [`packed_tiles`].
    EachPacked,
    /// The same for tiles of packed sequences, which only the GPU knows: so many persistent blocks per multiprocessor.
    Packed {
        /// Blocks per multiprocessor.
        resident: u32,
    },
}

impl Geometry {
    /// Whether its tiles are those of keys and kv heads rather than of queries and query heads.
    pub fn is_of_keys(&self) -> bool {
        matches!(self.blocks, Blocks::EachKeys(_) | Blocks::KeyRow | Blocks::QueriesThenKeys { .. })
    }

    /// The blocks of query tiles and query heads that a grid has before those of keys.
    pub fn query_blocks(&self, batch: u32, heads: u32, len: u32) -> u64 {
        let Blocks::QueriesThenKeys { queries } = self.blocks else { return 0 };
        Geometry { rows: queries, ..*self }.tiles(batch, heads, len)
    }

    /// The number of tiles for these batch entries, heads and rows per head. For packed sequences, the most there can be of
    /// so many sequences with so many rows in all.
    pub fn tiles(&self, batch: u32, heads: u32, len: u32) -> u64 {
        match self.blocks {
            // Each sequence has at most one tile that is not full.
            Blocks::Packed { .. } => u64::from(len / self.rows + batch.min(len)) * u64::from(heads),
            Blocks::EachPacked => u64::from(packed_tiles(self.rows, len, batch)) * u64::from(heads),
            _ => u64::from(len.div_ceil(self.rows)) * u64::from(heads) * u64::from(batch),
        }
    }

    /// The grid for these batch entries, heads and rows per head on this many multiprocessors.
    pub fn grid(&self, batch: u32, heads: u32, len: u32, sms: u32) -> [u32; 3] {
        match self.blocks {
            Blocks::Each(order) | Blocks::EachKeys(order) => {
                order.grid(len.div_ceil(self.rows), heads, batch)
            }
            Blocks::EachPacked => [packed_tiles(self.rows, len, batch), heads, 1],
            Blocks::KeyRow | Blocks::QueriesThenKeys { .. } => {
                [u32::try_from(self.tiles(batch, heads, len)).unwrap_or(u32::MAX), 1, 1]
            }
            Blocks::Row { cluster, resident, parts } => {
                let tiles = self.tiles(batch, heads, len);
                let most = resident.map_or(u64::MAX, |blocks| u64::from((sms * blocks / cluster).max(1)));
                [u32::try_from(tiles.min(most) * u64::from(cluster)).unwrap_or(u32::MAX), parts, 1]
            }
            Blocks::Shares { resident } => {
                [if self.tiles(batch, heads, len) > 0 { sms * resident } else { 0 }, 1, 1]
            }
            Blocks::Packed { resident } => {
                let tiles = self.tiles(batch, heads, len).min(u64::from(sms * resident));
                [tiles as u32, 1, 1]
            }
        }
    }

    /// Blocks per cluster.
    pub fn cluster(&self) -> u32 {
        match self.blocks {
            Blocks::Each(_)
            | Blocks::EachKeys(_)
            | Blocks::KeyRow
            | Blocks::EachPacked
            | Blocks::Packed { .. }
            | Blocks::Shares { .. }
            | Blocks::QueriesThenKeys { .. } => 1,
            Blocks::Row { cluster, .. } => cluster,
        }
    }
}

/// Why a schedule was refused. Nothing was emitted.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ScheduleError {
    /// The knobs do not make a kernel, or their text does not name them.
    #[error("{reason}")]
    Malformed {
        /// What is wrong and what is possible.
        reason: String,
    },
    /// More shared memory than a block of the target can have.
    #[error(transparent)]
    Shared(#[from] SharedError),
    /// More registers than a thread can have.
    #[error(
        "about {needs} registers per thread are needed, but a thread can have {limit}: take smaller tiles, more warps, or leave the queries in shared memory"
    )]
    Registers {
        /// The estimate.
        needs: u32,
        /// What a thread can have.
        limit: u32,
    },
    /// A head dim that the kernels do not take.
    #[error("head_dim {head_dim} and head_dim_v {head_dim_v}: possible are {possible}")]
    HeadDim {
        /// Elements of a query.
        head_dim: u32,
        /// Elements of a value.
        head_dim_v: u32,
        /// What the kernel takes.
        possible: &'static str,
    },
    /// An element type that tensor cores do not multiply exactly.
    #[error("f32: {kernel} takes f16 and bf16; scalar takes f32")]
    F32 {
        /// The kernel asked for.
        kernel: Kernel,
    },
    /// 8-bit floats, for a kernel that does not take them.
    #[error("e4m3: {kernel} does not take it; sm80_fwd (from sm_89 on) and sm90_fwd do")]
    Fp8 {
        /// The kernel asked for.
        kernel: Kernel,
    },
    /// Keys and values of another type than the queries, for a kernel that does not take them.
    #[error("{kernel} with keys and values of e4m3: only sm80_decode takes 16-bit queries with such")]
    Cache {
        /// The kernel asked for.
        kernel: Kernel,
    },
    /// An output type that does not go with the inputs' type.
    #[error(
        "q, k and v of {dtype:?} with an output type of its own, {out:?}: e4m3 needs f16 or bf16, others have none"
    )]
    Out {
        /// Of q, k and v.
        dtype: ElementType,
        /// Of o.
        out: Option<ElementType>,
    },
    /// The kernel's own code is wrong; this is a fault of FlashCore.
    #[error("the kernel was built wrongly, please report this:\n{0}")]
    Build(#[from] BuildErrors),
}

impl ScheduleError {
    pub(crate) fn malformed(reason: impl Into<String>) -> Self {
        ScheduleError::Malformed { reason: reason.into() }
    }
}

/// The most registers that a thread can have.
pub(crate) const MAX_REGISTERS: u32 = 255;

/// Whether a thread can have this many registers for fragments plus `others`. Each kernel's `others` is large enough
/// that ptxas spills in none of its schedules.
pub(crate) fn check_registers(fragments: u32, others: u32, limit: u32) -> Result<(), ScheduleError> {
    let needs = fragments + others;
    if needs > limit { Err(ScheduleError::Registers { needs, limit }) } else { Ok(()) }
}

/// Whether the key tiles of a kernel for 8-bit floats lie each in one of the blocks that have descales of their own.
pub(crate) fn check_blocks(spec: &Spec, block_n: u32) -> Result<(), ScheduleError> {
    let Some(keys) = spec.descale_keys else { return Ok(()) };
    if !keys.is_multiple_of(block_n) {
        return Err(ScheduleError::malformed(format!(
            "descales of blocks of {keys} keys: possible are multiples of {block_n}, the keys of a tile (32 at least); for others \
             copy the tensors to the host and call Device::cpu()"
        )));
    }
    if !spec.scaled_scores {
        return Err(ScheduleError::malformed(
            "descales of blocks of keys need scaled scores: see Spec::scaled_scores",
        ));
    }
    Ok(())
}

/// Whether a kernel takes the element types of a spec, and its rows.
pub(crate) fn check_types(kernel: Kernel, spec: &Spec) -> Result<(), ScheduleError> {
    let (dtype, out) = (spec.dtype, spec.out);
    let takes_fp8 = matches!(kernel, Kernel::Sm80Fwd | Kernel::Sm90Fwd);
    let cache = spec.kv == Some(ElementType::E4m3);
    // What merges parts has nothing to do with keys, and what appends writes either type.
    if cache && !matches!(kernel, Kernel::Sm80Decode | Kernel::Combine | Kernel::Append) {
        return Err(ScheduleError::Cache { kernel });
    }
    let in_blocks = takes_fp8
        || matches!(kernel, Kernel::Sm80Decode | Kernel::Combine | Kernel::Quantize | Kernel::Append);
    if spec.descale_keys.is_some() && !in_blocks {
        let possible = "descales of blocks of keys are for sm80_fwd, sm90_fwd and, with 16-bit queries, sm80_decode; give one \
                        per kv head, or copy the tensors to the host and call Device::cpu()";
        return Err(ScheduleError::malformed(format!("{kernel}: {possible}")));
    }
    let takes_rows = matches!(kernel, Kernel::Sm90Fwd | Kernel::Sm80Decode | Kernel::Combine);
    if spec.rows_per_query != 1 && !takes_rows {
        return Err(ScheduleError::malformed(format!(
            "{kernel} for heads that share keys as rows of one tile: only sm90_fwd and sm80_decode take them so"
        )));
    }
    match (dtype, out) {
        (ElementType::E4m3, _) if !takes_fp8 => Err(ScheduleError::Fp8 { kernel }),
        (ElementType::E4m3, Some(ElementType::F16 | ElementType::Bf16)) => Ok(()),
        (ElementType::E4m3, _) | (_, Some(_)) => Err(ScheduleError::Out { dtype, out }),
        (ElementType::F16 | ElementType::Bf16 | ElementType::F32, None) => Ok(()),
    }
}

/// Whether a kernel takes tensors that lie as a spec has them.
pub(crate) fn check_layout(kernel: Kernel, spec: &Spec) -> Result<(), ScheduleError> {
    let refuse =
        |what: &str, only: &str| Err(ScheduleError::malformed(format!("{kernel} with {what}: {only}")));
    // What merges parts has nothing to do with keys, and knows where sequences of queries end.
    let takes = matches!(
        kernel,
        Kernel::Sm80Fwd | Kernel::Sm90Fwd | Kernel::Sm80Decode | Kernel::Combine | Kernel::Append
    );
    let backward =
        Kernel::BACKWARD.contains(&kernel) || matches!(kernel, Kernel::BwdRows | Kernel::Sm90BwdFinish);
    if (spec.packed_q || spec.packed_k) && !(takes || backward) {
        let only = "only sm80_fwd, sm90_fwd, sm80_decode and the backward kernels take them so";
        return refuse("packed sequences", only);
    }
    if spec.page.is_some() && !takes {
        return refuse("keys in pages", "only sm80_fwd, sm90_fwd and sm80_decode take them so");
    }
    match spec.page {
        Some(_) if spec.packed_k => Err(ScheduleError::malformed("keys are packed or in pages, not both")),
        Some(0) => Err(ScheduleError::malformed("pages of no keys")),
        Some(page) if kernel == Kernel::Sm90Fwd && !page.is_multiple_of(16) => {
            let possible = "sm90_fwd copies multiples of 16; sm80_fwd takes pages of any size";
            Err(ScheduleError::malformed(format!("pages of {page} keys: {possible}")))
        }
        _ => Ok(()),
    }
}

/// Whether tensor cores can compute a spec.
pub(crate) fn check_tensor_cores(kernel: Kernel, spec: &Spec) -> Result<(), ScheduleError> {
    let Spec { dtype, head_dim, head_dim_v, .. } = *spec;
    if dtype == ElementType::F32 {
        return Err(ScheduleError::F32 { kernel });
    }
    // Rows are copied by 16 bytes at a time.
    let (step, range) = if dtype == ElementType::E4m3 {
        (16, "multiples of 16 from 16 to 256")
    } else {
        (8, "multiples of 8 from 8 to 256")
    };
    let possible = |dim: u32| (step..=MAX_TENSOR_CORE_HEAD_DIM).contains(&dim) && dim.is_multiple_of(step);
    if possible(head_dim) && possible(head_dim_v) {
        return Ok(());
    }
    Err(ScheduleError::HeadDim { head_dim, head_dim_v, possible: range })
}

/// A type that a knob can have.
pub(crate) trait Knob: Copy + PartialEq {
    /// The value as text.
    fn text(self) -> String;
    /// Parses a value; the error says what is possible.
    fn read(text: &str) -> Result<Self, &'static str>;
}

impl Knob for u32 {
    fn text(self) -> String {
        self.to_string()
    }

    fn read(text: &str) -> Result<Self, &'static str> {
        text.parse().map_err(|_| "a whole number is needed")
    }
}

impl Knob for bool {
    fn text(self) -> String {
        u32::from(self).to_string()
    }

    fn read(text: &str) -> Result<Self, &'static str> {
        u32::read(text).map(|number| number != 0)
    }
}

/// A knob that may be absent has a default of `None`, and is not printed then.
impl Knob for Option<u32> {
    fn text(self) -> String {
        self.map_or_else(String::new, u32::text)
    }

    fn read(text: &str) -> Result<Self, &'static str> {
        u32::read(text).map(Some)
    }
}

/// Declares the schedule of a family: a struct whose fields are the knobs, printed and read as `knob=value,knob=value`.
/// A knob with a default may be left out, and is printed only where its value differs.
macro_rules! schedule {
    (
        $(#[$meta:meta])*
        pub struct $name:ident { $($(#[$doc:meta])* pub $knob:ident: $ty:ty $(= $default:expr)?,)* }
    ) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $name { $($(#[$doc])* pub $knob: $ty,)* }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                let mut separator = "";
                $(
                    let default: Option<$ty> = None $(.or(Some($default)))?;
                    if default != Some(self.$knob) {
                        let value = $crate::family::Knob::text(self.$knob);
                        write!(f, concat!("{}", stringify!($knob), "={}"), separator, value)?;
                        separator = ",";
                    }
                )*
                let _ = separator;
                Ok(())
            }
        }

        impl $name {
            pub(crate) fn read(knobs: &mut $crate::family::Knobs<'_>) -> Result<Self, $crate::ScheduleError> {
                Ok(Self { $($knob: knobs.take(stringify!($knob), None $(.or(Some($default)))?)?,)* })
            }
        }
    };
}
pub(crate) use schedule;

/// The knobs of a text that have not been read yet.
pub(crate) struct Knobs<'a> {
    kernel: Kernel,
    pairs: Vec<(&'a str, &'a str)>,
}

impl<'a> Knobs<'a> {
    /// Splits `kernel:knob=value,knob=value`.
    pub fn split(text: &'a str) -> Result<(Kernel, Self), ScheduleError> {
        let (kernel, knobs) = text.split_once(':').ok_or_else(|| {
            let why = "is not a schedule: write kernel:knob=value,knob=value,…";
            ScheduleError::malformed(format!("'{text}' {why}"))
        })?;
        let kernel = Kernel::from_str(kernel)?;
        let pair = |pair: &'a str| {
            let found = pair.split_once('=');
            found.ok_or_else(|| ScheduleError::malformed(format!("'{pair}' is not of the form knob=value")))
        };
        let pairs = knobs.split(',').filter(|pair| !pair.is_empty()).map(pair).collect::<Result<_, _>>()?;
        Ok((kernel, Self { kernel, pairs }))
    }

    /// A knob's value, or its default.
    pub fn take<T: Knob>(&mut self, knob: &str, default: Option<T>) -> Result<T, ScheduleError> {
        let kernel = self.kernel;
        let Some(at) = self.pairs.iter().position(|&(name, _)| name == knob) else {
            let missing = || ScheduleError::malformed(format!("{kernel} needs the knob {knob}"));
            return default.ok_or_else(missing);
        };
        let (_, value) = self.pairs.remove(at);
        T::read(value).map_err(|why| ScheduleError::malformed(format!("{knob}={value}: {why}")))
    }

    /// Refuses knobs that nobody has read.
    pub fn end(self) -> Result<(), ScheduleError> {
        match self.pairs.first() {
            Some((knob, _)) => Err(ScheduleError::malformed(format!(
                "{} has no knob {knob}, or it is given twice",
                self.kernel
            ))),
            None => Ok(()),
        }
    }
}
