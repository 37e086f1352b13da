//! What an instruction counts as in the statistics.

use flashcore_ptx::{Alu, Op, Space};

/// What an instruction counts as in the statistics.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Class {
    /// Integer arithmetic, bits, addresses.
    Integer,
    /// Floating-point arithmetic.
    Float,
    /// Functions: `ex2`, `lg2`, `rcp`, `sqrt`, `tanh`, division.
    Function,
    /// Conversions.
    Convert,
    /// Moves and selections.
    Move,
    /// Comparisons and predicates.
    Compare,
    /// Branches and exits.
    Control,
    /// Parameter loads.
    Param,
    /// Global loads.
    GlobalLoad,
    /// Global stores.
    GlobalStore,
    /// Shared loads.
    SharedLoad,
    /// Shared stores.
    SharedStore,
    /// `ldmatrix` and `stmatrix`.
    Matrix,
    /// Tensor-core instructions.
    Tensor,
    /// Atomics.
    Atomic,
    /// Asynchronous copies.
    AsyncCopy,
    /// Shuffles, votes and the like.
    Warp,
    /// Barriers, waits and fences.
    Sync,
    /// The rest.
    Other,
}

pub(super) fn classify(op: &Op) -> Class {
    match op {
        Op::Alu(alu) => classify_alu(*alu),
        Op::Setp { .. } => Class::Compare,
        Op::MovSpecial(_)
        | Op::PackB64
        | Op::UnpackB64
        | Op::PackB32
        | Op::UnpackB32
        | Op::AddrOf
        | Op::Cvta { .. }
        | Op::CreatePolicy(_)
        | Op::Mapa
        | Op::GetCtaRank => Class::Move,
        Op::Label(_) | Op::Bra { .. } | Op::Exit | Op::Ret | Op::Trap => Class::Control,
        Op::Ld { space: Space::Param, .. } => Class::Param,
        Op::Ld { space: Space::Global, .. } => Class::GlobalLoad,
        Op::Ld { .. } => Class::SharedLoad,
        Op::St { space: Space::Global, .. } => Class::GlobalStore,
        Op::St { .. } | Op::StAsync { .. } => Class::SharedStore,
        Op::Atom { .. } | Op::Red { .. } => Class::Atomic,
        Op::Shfl(_)
        | Op::Vote(_)
        | Op::Ballot
        | Op::Match(_)
        | Op::Redux { .. }
        | Op::Elect
        | Op::ActiveMask => Class::Warp,
        Op::BarWarpSync
        | Op::BarSync { .. }
        | Op::BarArrive { .. }
        | Op::Membar(_)
        | Op::Fence { .. }
        | Op::FenceProxyAsync(_)
        | Op::FenceMbarrierInit
        | Op::MbarrierInit
        | Op::MbarrierInval
        | Op::MbarrierArrive { .. }
        | Op::MbarrierArriveExpectTx { .. }
        | Op::MbarrierExpectTx { .. }
        | Op::MbarrierTestWait { .. }
        | Op::MbarrierTryWait { .. }
        | Op::CpAsyncCommit
        | Op::CpAsyncWait(_)
        | Op::CpAsyncWaitAll
        | Op::CpAsyncMbarrierArrive { .. }
        | Op::BulkCommit
        | Op::BulkWait { .. }
        | Op::WgmmaFence
        | Op::WgmmaCommit
        | Op::WgmmaWait(_)
        | Op::ClusterArrive { .. }
        | Op::ClusterWait { .. } => Class::Sync,
        Op::CpAsync { .. }
        | Op::BulkLoad { .. }
        | Op::BulkStore { .. }
        | Op::BulkToCluster
        | Op::BulkReduce { .. }
        | Op::BulkReduceCluster { .. }
        | Op::TensorLoad { .. }
        | Op::TensorStore { .. }
        | Op::TensorReduce { .. } => Class::AsyncCopy,
        Op::Ldmatrix { .. } | Op::Stmatrix { .. } => Class::Matrix,
        Op::Mma { .. } | Op::Wgmma(_) => Class::Tensor,
        _ => Class::Other,
    }
}

fn classify_alu(alu: Alu) -> Class {
    let text = alu.line().text;
    let (head, rest) = text.split_once('.').unwrap_or((text, ""));
    match head {
        "mov" | "selp" | "slct" => Class::Move,
        "cvt" => Class::Convert,
        "ex2" | "lg2" | "rcp" | "sqrt" | "rsqrt" | "sin" | "cos" | "tanh" => Class::Function,
        "div" if rest.contains('f') => Class::Function,
        _ if rest.ends_with("pred") => Class::Compare,
        _ if rest.contains("f32") || rest.contains("f16") => Class::Float,
        _ => Class::Integer,
    }
}
