//! The modifiers of instructions: what follows the dots of a PTX mnemonic, as enums.
//!
//! Each variant knows its text, so that the printer has no second list of them.

/// Declares an enum whose variants stand for a piece of PTX text.
macro_rules! ptx_enum {
    ($(#[$doc:meta])* $name:ident { $($(#[$vdoc:meta])* $variant:ident = $text:literal,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum $name { $($(#[$vdoc])* $variant,)* }
        impl $name {
            /// All variants.
            pub const ALL: &'static [$name] = &[$($name::$variant),*];
            /// The text in PTX, with its leading dot where it is a modifier.
            pub const fn text(self) -> &'static str {
                match self { $($name::$variant => $text),* }
            }
        }
    };
}

ptx_enum! {
    /// A comparison. The `u` forms hold also when an operand is NaN.
    Cmp {
        /// Equal.
        Eq = ".eq",
        /// Not equal.
        Ne = ".ne",
        /// Less.
        Lt = ".lt",
        /// Less or equal.
        Le = ".le",
        /// Greater.
        Gt = ".gt",
        /// Greater or equal.
        Ge = ".ge",
        /// Equal or unordered.
        Equ = ".equ",
        /// Not equal or unordered.
        Neu = ".neu",
        /// Less or unordered.
        Ltu = ".ltu",
        /// Less, equal or unordered.
        Leu = ".leu",
        /// Greater or unordered.
        Gtu = ".gtu",
        /// Greater, equal or unordered.
        Geu = ".geu",
        /// Neither is NaN.
        Num = ".num",
        /// At least one is NaN.
        Nan = ".nan",
    }
}

ptx_enum! {
    /// How the operands of a comparison or an atomic are read.
    NumType {
        /// Signed 16 bits.
        S16 = ".s16",
        /// Unsigned 16 bits.
        U16 = ".u16",
        /// Signed 32 bits.
        S32 = ".s32",
        /// Unsigned 32 bits.
        U32 = ".u32",
        /// Signed 64 bits.
        S64 = ".s64",
        /// Unsigned 64 bits.
        U64 = ".u64",
        /// Single precision.
        F32 = ".f32",
    }
}

ptx_enum! {
    /// A special register that is read with `mov`.
    Special {
        /// Thread index in the block, x.
        TidX = "%tid.x",
        /// Thread index in the block, y.
        TidY = "%tid.y",
        /// Thread index in the block, z.
        TidZ = "%tid.z",
        /// Block size, x.
        NtidX = "%ntid.x",
        /// Block size, y.
        NtidY = "%ntid.y",
        /// Block size, z.
        NtidZ = "%ntid.z",
        /// Block index in the grid, x.
        CtaidX = "%ctaid.x",
        /// Block index in the grid, y.
        CtaidY = "%ctaid.y",
        /// Block index in the grid, z.
        CtaidZ = "%ctaid.z",
        /// Grid size in blocks, x.
        NctaidX = "%nctaid.x",
        /// Grid size in blocks, y.
        NctaidY = "%nctaid.y",
        /// Grid size in blocks, z.
        NctaidZ = "%nctaid.z",
        /// Lane in the warp.
        LaneId = "%laneid",
        /// Warp slot. Not stable: derive the warp's index from `tid` instead.
        WarpId = "%warpid",
        /// Mask with the bits below this lane's set.
        LaneMaskLt = "%lanemask_lt",
        /// The multiprocessor's number.
        SmId = "%smid",
        /// How many multiprocessor numbers there are.
        NsmId = "%nsmid",
        /// Cluster index in the grid, x.
        ClusterIdX = "%clusterid.x",
        /// Cluster index in the grid, y.
        ClusterIdY = "%clusterid.y",
        /// Cluster index in the grid, z.
        ClusterIdZ = "%clusterid.z",
        /// Grid size in clusters, x.
        NclusterIdX = "%nclusterid.x",
        /// Grid size in clusters, y.
        NclusterIdY = "%nclusterid.y",
        /// Grid size in clusters, z.
        NclusterIdZ = "%nclusterid.z",
        /// Block index in the cluster, x.
        ClusterCtaIdX = "%cluster_ctaid.x",
        /// Block index in the cluster, y.
        ClusterCtaIdY = "%cluster_ctaid.y",
        /// Block index in the cluster, z.
        ClusterCtaIdZ = "%cluster_ctaid.z",
        /// Cluster size in blocks, x.
        ClusterNctaIdX = "%cluster_nctaid.x",
        /// Cluster size in blocks, y.
        ClusterNctaIdY = "%cluster_nctaid.y",
        /// Cluster size in blocks, z.
        ClusterNctaIdZ = "%cluster_nctaid.z",
        /// Block index in the cluster, flat.
        ClusterCtaRank = "%cluster_ctarank",
        /// Cluster size in blocks, flat.
        ClusterNctaRank = "%cluster_nctarank",
        /// Bytes of dynamic shared memory of the launch.
        DynamicSmemSize = "%dynamic_smem_size",
        /// Cycle counter, low 32 bits.
        Clock = "%clock",
        /// Cycle counter.
        Clock64 = "%clock64",
        /// Nanosecond clock.
        GlobalTimer = "%globaltimer",
    }
}

impl Special {
    /// Whether the value has 64 bits; else it has 32.
    pub const fn is_64_bit(self) -> bool {
        matches!(self, Special::Clock64 | Special::GlobalTimer)
    }

    /// Whether it exists only where clusters do.
    pub const fn needs_cluster(self) -> bool {
        matches!(
            self,
            Special::ClusterIdX
                | Special::ClusterIdY
                | Special::ClusterIdZ
                | Special::NclusterIdX
                | Special::NclusterIdY
                | Special::NclusterIdZ
                | Special::ClusterCtaIdX
                | Special::ClusterCtaIdY
                | Special::ClusterCtaIdZ
                | Special::ClusterNctaIdX
                | Special::ClusterNctaIdY
                | Special::ClusterNctaIdZ
                | Special::ClusterCtaRank
                | Special::ClusterNctaRank
        )
    }
}

ptx_enum! {
    /// The address space of a load, a store, an atomic or an address conversion.
    Space {
        /// Device memory.
        Global = ".global",
        /// This block's shared memory.
        Shared = ".shared",
        /// Shared memory of any block of the cluster, by an address that `mapa` made.
        SharedCluster = ".shared::cluster",
        /// Kernel parameters.
        Param = ".param",
    }
}

ptx_enum! {
    /// The type of one element that a load or store moves.
    MemTy {
        /// A byte, zero-extended into a 32-bit register.
        U8 = ".u8",
        /// A byte, sign-extended into a 32-bit register.
        S8 = ".s8",
        /// 16 bits.
        B16 = ".b16",
        /// 32 bits.
        B32 = ".b32",
        /// 64 bits.
        B64 = ".b64",
        /// Single precision.
        F32 = ".f32",
    }
}

impl AtomTy {
    /// Bytes in memory.
    pub const fn bytes(self) -> u32 {
        match self {
            AtomTy::F16 | AtomTy::Bf16 => 2,
            AtomTy::B32 | AtomTy::U32 | AtomTy::S32 | AtomTy::F32 | AtomTy::F16x2 | AtomTy::Bf16x2 => 4,
            AtomTy::B64 | AtomTy::U64 | AtomTy::S64 => 8,
        }
    }
}

impl MemTy {
    /// Bytes in memory.
    pub const fn bytes(self) -> u32 {
        match self {
            MemTy::U8 | MemTy::S8 => 1,
            MemTy::B16 => 2,
            MemTy::B32 | MemTy::F32 => 4,
            MemTy::B64 => 8,
        }
    }
}

ptx_enum! {
    /// How many elements a load or store moves per lane.
    Width {
        /// One.
        V1 = "",
        /// Two.
        V2 = ".v2",
        /// Four.
        V4 = ".v4",
    }
}

impl Width {
    /// The number.
    pub const fn count(self) -> u32 {
        match self {
            Width::V1 => 1,
            Width::V2 => 2,
            Width::V4 => 4,
        }
    }

    /// The width for a number of elements, if there is one.
    pub const fn from_count(count: usize) -> Option<Width> {
        match count {
            1 => Some(Width::V1),
            2 => Some(Width::V2),
            4 => Some(Width::V4),
            _ => None,
        }
    }
}

ptx_enum! {
    /// The set of threads that a memory order reaches.
    Scope {
        /// The block.
        Cta = ".cta",
        /// The cluster.
        Cluster = ".cluster",
        /// The device.
        Gpu = ".gpu",
        /// The whole system.
        Sys = ".sys",
    }
}

/// The memory order of a load or a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Order {
    /// No order: the default.
    #[default]
    Weak,
    /// `.volatile`.
    Volatile,
    /// `.relaxed`.
    Relaxed(Scope),
    /// `.acquire`, loads only.
    Acquire(Scope),
    /// `.release`, stores only.
    Release(Scope),
}

ptx_enum! {
    /// Which caches a load or store uses.
    CacheOp {
        /// All levels.
        Ca = ".ca",
        /// L2 only (loads and stores).
        Cg = ".cg",
        /// Streaming: likely used once.
        Cs = ".cs",
        /// Last use (loads only).
        Lu = ".lu",
        /// Write back (stores only).
        Wb = ".wb",
        /// Write through (stores only).
        Wt = ".wt",
    }
}

ptx_enum! {
    /// How long a line should stay in L1.
    L1Evict {
        /// Ordinary.
        Normal = ".L1::evict_normal",
        /// Do not change the line's priority.
        Unchanged = ".L1::evict_unchanged",
        /// First to go.
        First = ".L1::evict_first",
        /// Last to go.
        Last = ".L1::evict_last",
        /// Do not allocate.
        NoAllocate = ".L1::no_allocate",
    }
}

ptx_enum! {
    /// How much a load asks L2 to fetch.
    L2Prefetch {
        /// 64 bytes.
        B64 = ".L2::64B",
        /// 128 bytes.
        B128 = ".L2::128B",
        /// 256 bytes.
        B256 = ".L2::256B",
    }
}

/// How a load or store treats the caches. [`CacheHint::default`] asks for nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct CacheHint {
    /// A cache operator. Not together with [`CacheHint::l1`].
    pub op: Option<CacheOp>,
    /// `.nc`: the data is read-only for the whole kernel (global loads only).
    pub non_coherent: bool,
    /// An L1 eviction priority.
    pub l1: Option<L1Evict>,
    /// An L2 prefetch size (global loads only).
    pub l2_prefetch: Option<L2Prefetch>,
    /// Whether an L2 cache policy operand follows: the last source, a 64-bit register.
    pub policy: bool,
}

ptx_enum! {
    /// The operation of `atom`, `red`, `redux` or a bulk reduction.
    AtomOp {
        /// Sum.
        Add = ".add",
        /// Minimum.
        Min = ".min",
        /// Maximum.
        Max = ".max",
        /// Bitwise and.
        And = ".and",
        /// Bitwise or.
        Or = ".or",
        /// Bitwise exclusive or.
        Xor = ".xor",
        /// Exchange.
        Exch = ".exch",
        /// Compare and swap.
        Cas = ".cas",
        /// Increment up to a bound, then wrap to 0.
        Inc = ".inc",
        /// Decrement, wrapping from 0 to a bound.
        Dec = ".dec",
    }
}

ptx_enum! {
    /// The element type of an atomic or a bulk reduction.
    AtomTy {
        /// Untyped 32 bits (`exch`, `cas`, `and`, `or`, `xor`).
        B32 = ".b32",
        /// Untyped 64 bits (`exch`, `cas`, `and`, `or`, `xor`).
        B64 = ".b64",
        /// Unsigned 32 bits.
        U32 = ".u32",
        /// Signed 32 bits.
        S32 = ".s32",
        /// Unsigned 64 bits.
        U64 = ".u64",
        /// Signed 64 bits.
        S64 = ".s64",
        /// Single precision.
        F32 = ".f32",
        /// Half precision.
        F16 = ".f16",
        /// Brain float.
        Bf16 = ".bf16",
        /// A pair of halves.
        F16x2 = ".f16x2",
        /// A pair of brain floats.
        Bf16x2 = ".bf16x2",
    }
}

ptx_enum! {
    /// The memory order of an atomic.
    AtomSem {
        /// `.relaxed`.
        Relaxed = ".relaxed",
        /// `.acquire`.
        Acquire = ".acquire",
        /// `.release`.
        Release = ".release",
        /// `.acq_rel`.
        AcqRel = ".acq_rel",
    }
}

ptx_enum! {
    /// From which lane a shuffle reads.
    ShflMode {
        /// Lane xor operand.
        Bfly = ".bfly",
        /// The operand itself.
        Idx = ".idx",
        /// Lane minus operand.
        Up = ".up",
        /// Lane plus operand.
        Down = ".down",
    }
}

ptx_enum! {
    /// What a vote answers.
    VoteMode {
        /// Does it hold for all lanes?
        All = ".all",
        /// Does it hold for any lane?
        Any = ".any",
        /// Is it the same in all lanes?
        Uni = ".uni",
    }
}

ptx_enum! {
    /// The number of 8x8 matrices that `ldmatrix` or `stmatrix` moves.
    MatrixCount {
        /// One.
        X1 = ".x1",
        /// Two.
        X2 = ".x2",
        /// Four.
        X4 = ".x4",
    }
}

impl MatrixCount {
    /// The number.
    pub const fn count(self) -> u32 {
        match self {
            MatrixCount::X1 => 1,
            MatrixCount::X2 => 2,
            MatrixCount::X4 => 4,
        }
    }
}

ptx_enum! {
    /// The element type of a matrix operand.
    MatrixTy {
        /// Half precision.
        F16 = ".f16",
        /// Brain float.
        Bf16 = ".bf16",
        /// fp8, 4 exponent bits.
        E4m3 = ".e4m3",
        /// fp8, 5 exponent bits.
        E5m2 = ".e5m2",
    }
}

impl MatrixTy {
    /// Bits of an element.
    pub const fn bits(self) -> u32 {
        match self {
            MatrixTy::F16 | MatrixTy::Bf16 => 16,
            MatrixTy::E4m3 | MatrixTy::E5m2 => 8,
        }
    }
}

ptx_enum! {
    /// The element type of an accumulator.
    AccTy {
        /// Single precision, one per register.
        F32 = ".f32",
        /// Half precision, two per 32-bit register.
        F16 = ".f16",
    }
}

ptx_enum! {
    /// The shape of `mma.sync`.
    MmaShape {
        /// 16x8, k = 8: f16, bf16.
        M16n8k8 = ".m16n8k8",
        /// 16x8, k = 16: f16, bf16.
        M16n8k16 = ".m16n8k16",
        /// 16x8, k = 32: fp8.
        M16n8k32 = ".m16n8k32",
    }
}

ptx_enum! {
    /// The caches that the non-bulk `cp.async` goes through.
    CpAsyncCache {
        /// L1 and L2: 4, 8 or 16 bytes.
        Ca = ".ca",
        /// L2 only: 16 bytes.
        Cg = ".cg",
    }
}

ptx_enum! {
    /// The bytes that one lane's `cp.async` copies.
    CpAsyncBytes {
        /// 4 bytes.
        B4 = "4",
        /// 8 bytes.
        B8 = "8",
        /// 16 bytes.
        B16 = "16",
    }
}

impl CpAsyncBytes {
    /// The number.
    pub const fn count(self) -> u32 {
        match self {
            CpAsyncBytes::B4 => 4,
            CpAsyncBytes::B8 => 8,
            CpAsyncBytes::B16 => 16,
        }
    }
}

ptx_enum! {
    /// The number of dimensions of a tensor map.
    Dims {
        /// 1.
        D1 = ".1d",
        /// 2.
        D2 = ".2d",
        /// 3.
        D3 = ".3d",
        /// 4.
        D4 = ".4d",
        /// 5.
        D5 = ".5d",
    }
}

impl Dims {
    /// The number.
    pub const fn count(self) -> usize {
        match self {
            Dims::D1 => 1,
            Dims::D2 => 2,
            Dims::D3 => 3,
            Dims::D4 => 4,
            Dims::D5 => 5,
        }
    }

    /// The rank for a number of coordinates, if there is one.
    pub const fn from_count(count: usize) -> Option<Dims> {
        match count {
            1 => Some(Dims::D1),
            2 => Some(Dims::D2),
            3 => Some(Dims::D3),
            4 => Some(Dims::D4),
            5 => Some(Dims::D5),
            _ => None,
        }
    }
}

ptx_enum! {
    /// The memory that `fence.proxy.async` covers.
    ProxySpace {
        /// All.
        All = "",
        /// Global.
        Global = ".global",
        /// This block's shared memory.
        Shared = ".shared::cta",
    }
}

ptx_enum! {
    /// The order that a fence makes.
    FenceSem {
        /// Acquire and release.
        AcqRel = ".acq_rel",
        /// Sequentially consistent.
        Sc = ".sc",
    }
}

ptx_enum! {
    /// The reach of `membar`.
    MembarLevel {
        /// The block.
        Cta = ".cta",
        /// The device.
        Gl = ".gl",
        /// The system.
        Sys = ".sys",
    }
}

ptx_enum! {
    /// What arriving at the cluster barrier publishes.
    ClusterArrive {
        /// Writes before it are visible after the wait.
        Release = ".release",
        /// Nothing.
        Relaxed = ".relaxed",
    }
}

ptx_enum! {
    /// How long a cache line covered by a policy should stay in L2.
    L2Evict {
        /// Last to go.
        Last = ".L2::evict_last",
        /// Ordinary.
        Normal = ".L2::evict_normal",
        /// First to go.
        First = ".L2::evict_first",
        /// Leave as it is.
        Unchanged = ".L2::evict_unchanged",
    }
}

ptx_enum! {
    /// The cache that a prefetch fills.
    PrefetchLevel {
        /// L1.
        L1 = ".L1",
        /// L2.
        L2 = ".L2",
    }
}

ptx_enum! {
    /// Dependence between grids that overlap (programmatic dependent launch).
    GridDep {
        /// Let the dependent grid start.
        LaunchDependents = ".launch_dependents",
        /// Wait for the grids this one depends on.
        Wait = ".wait",
    }
}

ptx_enum! {
    /// What `match.sync` answers.
    MatchMode {
        /// The lanes that hold the same value as this one.
        Any = ".any",
        /// All lanes if all hold the same value, else none.
        All = ".all",
    }
}

/// The modifiers of `wgmma.mma_async`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Wgmma {
    /// Columns of the accumulator: 8 to 256, a multiple of 8.
    pub n: u16,
    /// A's element.
    pub a: MatrixTy,
    /// B's element.
    pub b: MatrixTy,
    /// The accumulator.
    pub acc: AccTy,
    /// Whether A comes from registers; else from shared memory by a descriptor.
    pub a_in_regs: bool,
    /// Whether A is negated.
    pub negate_a: bool,
    /// Whether B is negated.
    pub negate_b: bool,
    /// Whether A is M-major in shared memory (16-bit elements only).
    pub trans_a: bool,
    /// Whether B is N-major in shared memory (16-bit elements only).
    pub trans_b: bool,
}

impl Wgmma {
    /// Both operands K-major from shared memory, nothing negated, accumulating in f32.
    pub const fn new(n: u16, ty: MatrixTy) -> Wgmma {
        Wgmma {
            n,
            a: ty,
            b: ty,
            acc: AccTy::F32,
            a_in_regs: false,
            negate_a: false,
            negate_b: false,
            trans_a: false,
            trans_b: false,
        }
    }

    /// The same with A from registers.
    pub const fn a_in_regs(self) -> Wgmma {
        Wgmma { a_in_regs: true, ..self }
    }

    /// The same with A M-major.
    pub const fn trans_a(self) -> Wgmma {
        Wgmma { trans_a: true, ..self }
    }

    /// The same with B N-major.
    pub const fn trans_b(self) -> Wgmma {
        Wgmma { trans_b: true, ..self }
    }

    /// The depth of one instruction: 16 for 16-bit elements, 32 for fp8.
    pub const fn k(&self) -> u16 {
        (256 / self.a.bits()) as u16
    }

    /// Accumulator registers per thread.
    pub const fn acc_regs(&self) -> usize {
        match self.acc {
            AccTy::F32 => self.n as usize / 2,
            AccTy::F16 => self.n as usize / 4,
        }
    }
}
