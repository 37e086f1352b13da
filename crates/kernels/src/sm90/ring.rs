//! A ring of slots in shared memory that one side fills and the other reads, with two barriers per slot: one says that
//! it is filled, the other that it is free.

use flashcore_ptx::{Addr, B32, KernelBuilder, Operand, Pred, Reg, Scope, Shared};

/// One side's position in a ring. A slot's barriers lie side by side: filled, then free.
pub(crate) struct Ring {
    slots: Reg<B32>,
    bytes: u32,
    stages: u32,
    bars: Reg<B32>,
    slot: Reg<B32>,
    parity: Reg<B32>,
    /// How many slots it advances at a time.
    stride: u32,
    /// Whether the parity is the other ring's, whose slots are filled where this one's are free.
    behind: bool,
}

/// Offset of the barrier that says that a slot is free.
const FREE: i32 = 8;

impl Ring {
    /// For the side that fills: every slot is free at first, and a fresh barrier reports the phase before its first as
    /// complete.
    pub fn producer(k: &mut KernelBuilder, slots: Shared, bytes: u32, bars: Shared, stages: u32) -> Self {
        Self::new(k, slots, bytes, bars, stages, 1)
    }

    /// For the side that reads.
    pub fn consumer(k: &mut KernelBuilder, slots: Shared, bytes: u32, bars: Shared, stages: u32) -> Self {
        Self::new(k, slots, bytes, bars, stages, 0)
    }

    /// Starts at a slot and advances by several at a time, for readers that divide the slots among themselves. The
    /// number of slots must be a multiple of the step, so that each reader always has the same slots.
    pub fn starting_at(self, k: &mut KernelBuilder, slot: Reg<B32>, stride: u32) -> Self {
        k.set(self.slot, |k| k.mov_b32(slot));
        Self { stride, ..self }
    }

    fn new(k: &mut KernelBuilder, slots: Shared, bytes: u32, bars: Shared, stages: u32, parity: u32) -> Self {
        let (slots, bars) = (k.shared_addr(slots), k.shared_addr(bars));
        let (slot, parity) = (k.mov_b32(0u32), k.mov_b32(parity));
        Self { slots, bytes, stages, bars, slot, parity, stride: 1, behind: false }
    }

    /// For the side that reads this ring's slots and fills those of another, always at the same position: both advance
    /// with this one.
    pub fn behind(&self, k: &mut KernelBuilder, slots: Shared, bytes: u32, bars: Shared) -> Self {
        let (slots, bars) = (k.shared_addr(slots), k.shared_addr(bars));
        Self { slots, bytes, bars, behind: true, ..*self }
    }

    /// The same with addresses that are so many bytes further.
    pub fn further(self, k: &mut KernelBuilder, bytes: Reg<B32>) -> Self {
        let slots = k.add_u32(self.slots, bytes);
        Self { slots, ..self }
    }

    /// The slot's word, of one word per slot.
    pub fn word(&self, k: &mut KernelBuilder, words: Shared) -> Reg<B32> {
        self.entry(k, words, 4)
    }

    /// The slot's entry, of one entry of so many bytes per slot.
    pub fn entry(&self, k: &mut KernelBuilder, entries: Shared, bytes: u32) -> Reg<B32> {
        let entries = k.shared_addr(entries);
        k.mad_lo_u32(self.slot, bytes, entries)
    }

    /// The slot's address.
    pub fn address(&self, k: &mut KernelBuilder) -> Reg<B32> {
        if self.stages == 1 { self.slots } else { k.mad_lo_u32(self.slot, self.bytes, self.slots) }
    }

    fn bar(&self, k: &mut KernelBuilder) -> Reg<B32> {
        if self.stages == 1 { self.bars } else { k.mad_lo_u32(self.slot, 16u32, self.bars) }
    }

    /// The barrier that says that the slot is filled.
    pub fn filled(&self, k: &mut KernelBuilder) -> Reg<B32> {
        self.bar(k)
    }

    /// The barrier that says that the slot is free.
    pub fn free(&self, k: &mut KernelBuilder) -> Addr<B32> {
        self.bar(k).at(FREE)
    }

    /// Waits until the slot is filled.
    pub fn wait_filled(&self, k: &mut KernelBuilder) {
        let bar = self.filled(k);
        k.mbarrier_wait_parity(bar, self.parity, Scope::Cta);
    }

    /// Waits until a piece of the slot is filled: the first by the slot's own barrier, others, from 1 on, by these, of which each
    /// slot has so many.
    pub fn wait_piece(&self, k: &mut KernelBuilder, others: Shared, count: u32, piece: u32) {
        if piece == 0 {
            return self.wait_filled(k);
        }
        let bar = self.piece(k, others, count, piece);
        k.mbarrier_wait_parity(bar, self.parity, Scope::Cta);
    }

    /// The barrier of a piece from 1 on.
    pub fn piece(&self, k: &mut KernelBuilder, others: Shared, count: u32, piece: u32) -> Addr<B32> {
        self.entry(k, others, 8 * count).at(8 * (piece as i32 - 1))
    }

    /// Waits until the slot is free.
    pub fn wait_free(&self, k: &mut KernelBuilder) {
        let bar = self.free(k);
        let parity = if self.behind { k.xor_b32(self.parity, 1u32) } else { self.parity };
        k.mbarrier_wait_parity(bar, parity, Scope::Cta);
    }

    /// Says that this warp is done with the slot, and goes on to the next.
    pub fn give_back(&self, k: &mut KernelBuilder, first_lane: Reg<Pred>) {
        let free = self.free(k);
        k.when(first_lane, |k| k.mbarrier_arrive(free));
        self.advance(k);
    }

    /// Advances to the next slot.
    pub fn advance(&self, k: &mut KernelBuilder) {
        if self.stages == 1 {
            k.set(self.parity, |k| k.xor_b32(self.parity, 1u32));
            return;
        }
        let next = k.add_u32(self.slot, self.stride);
        let (wraps, wrapped): (_, Operand<B32>) = if self.stride == 1 {
            (k.setp_eq_u32(next, self.stages), 0u32.into())
        } else {
            (k.setp_ge_u32(next, self.stages), k.sub_u32(next, self.stages).into())
        };
        let turned = k.xor_b32(self.parity, 1u32);
        k.set(self.slot, |k| k.selp_b32(wrapped, next, wraps));
        k.set(self.parity, |k| k.selp_b32(turned, self.parity, wraps));
    }
}
