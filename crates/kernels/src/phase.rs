//! Phase: what a kernel does at a time, as its [stamps](flashcore_ptx::trace) name it.

use flashcore_ptx::{B32, GridDep, KernelBuilder, Reg};

/// Declares the phases with their names.
macro_rules! phases {
    ($($(#[$doc:meta])* $phase:ident = $name:literal,)*) => {
        /// What a role of a block does, until it does something else. Emits nothing unless the kernel is traced.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum Phase { $($(#[$doc])* $phase,)* }

        impl Phase {
            /// All of them, in the order of their numbers.
            pub const ALL: &'static [Phase] = &[$(Phase::$phase,)*];

            /// Its name in a timeline.
            pub const fn name(self) -> &'static str {
                match self { $(Phase::$phase => $name,)* }
            }
        }
    };
}

phases! {
    /// From the block's start: barriers, registers, addresses.
    Setup = "setup",
    /// Waits until the launch before has ended.
    LaunchWait = "launch wait",
    /// Finds out which queries and keys are next.
    Tile = "tile",
    /// Waits for the queries. Its number is the tile's first row.
    QWait = "Q wait",
    /// Waits for a K tile.
    KWait = "K wait",
    /// Waits for a V tile.
    VWait = "V wait",
    /// Waits for its turn at the tensor cores.
    Turn = "turn",
    /// Issues S = QKᵀ; where products are not asynchronous, computes it.
    Qk = "QK",
    /// Waits for S = QKᵀ.
    QkWait = "QK wait",
    /// Issues O += PV; where products are not asynchronous, computes it.
    Pv = "PV",
    /// Waits for O += PV.
    PvWait = "PV wait",
    /// Scores become probabilities: softcap, mask, maximum, exponentials, sums.
    Softmax = "softmax",
    /// Packs the probabilities, and rescales the output where a maximum has moved.
    Rescale = "rescale",
    /// Skips key tiles that only other warpgroups see.
    Skip = "skip",
    /// Merges with other warpgroups or blocks.
    Merge = "merge",
    /// Divides by the sums, and writes the output and lse.
    Store = "store",
    /// Waits until a slot of shared memory is free.
    SlotWait = "slot wait",
    /// Issues the copy of the queries.
    CopyQ = "copy Q",
    /// Issues the copy of a K tile.
    CopyK = "copy K",
    /// Issues the copy of a V tile.
    CopyV = "copy V",
}

/// Waits until the launch before has ended; only then are stamps written.
#[track_caller]
pub(crate) fn wait_for_launch(k: &mut KernelBuilder) {
    let since = k.trace_clock();
    k.griddepcontrol(GridDep::Wait);
    k.open_trace();
    if let Some(since) = since {
        k.stamp_at(since, Phase::LaunchWait as u32, None);
    }
}

impl Phase {
    /// The phase of a number.
    pub fn of(number: u8) -> Option<Phase> {
        Self::ALL.get(usize::from(number)).copied()
    }

    /// Whether it only waits.
    pub const fn is_wait(self) -> bool {
        use Phase::*;
        matches!(self, LaunchWait | QWait | KWait | VWait | Turn | QkWait | PvWait | Skip | SlotWait)
    }

    /// It begins here.
    #[track_caller]
    pub(crate) fn begin(self, k: &mut KernelBuilder) {
        k.stamp(self as u32, None);
    }

    /// It begins here, for the key tile of this number.
    #[track_caller]
    pub(crate) fn begin_tile(self, k: &mut KernelBuilder, tile: Reg<B32>) {
        k.stamp(self as u32, Some((tile, 0)));
    }

    /// It begins here, for the key tile that is so many after this one.
    #[track_caller]
    pub(crate) fn begin_after(self, k: &mut KernelBuilder, tile: Reg<B32>, after: u32) {
        k.stamp(self as u32, Some((tile, after)));
    }
}
