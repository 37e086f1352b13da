//! Sums that are put aside: after so many key tiles, a thread adds its part of the output to what it has in global memory, in
//! f32, and begins anew. Only the thread itself reads that again, at the end.
//!
//! What is put aside stays relative to the references of the first time, so that it is added to without being read. Only where a
//! reference has grown so far that a sum might overflow, all of it is taken back and put aside anew.

use flashcore_ptx::{AtomSem, B32, B64, F32, KernelBuilder, MemHint, Order, Pred, Reg, Scope};

use super::{Schedule, softmax::Softmax};
use crate::{Spec, parts::softmax::NEG_INF, sm90::Sm90Params};

/// Bytes of the four numbers that a thread moves at once, of all threads of a warpgroup.
const STEP: usize = 128 * 16;

/// How much larger than at first exponentials may be that are added to what was put aside.
const MOST_GROWTH: f32 = (1_u64 << 40) as f32;

/// What a thread has put aside of its two rows.
pub(super) struct Aside {
    group: Reg<B32>,
    thread: Reg<B32>,
    /// Bytes per block and per warpgroup.
    bytes: [u32; 2],
    /// Whether there is anything.
    some: Reg<Pred>,
    /// What it is relative to.
    references: [Reg<F32>; 2],
}

impl Aside {
    pub fn new(
        k: &mut KernelBuilder,
        schedule: Schedule,
        spec: &Spec,
        group: Reg<B32>,
        thread: Reg<B32>,
    ) -> Self {
        let bytes = schedule.aside_bytes(spec);
        let bytes = [bytes, bytes / schedule.warpgroups];
        let references = [0, 1].map(|_| k.mov_f32(NEG_INF));
        Self { group, thread, bytes, some: k.mov_pred(false), references }
    }

    /// Where it lies: not kept in registers, which are short.
    fn address(&self, k: &mut KernelBuilder) -> Reg<B64> {
        let base = k.param(Sm90Params::o);
        let block = k.ctaid_x();
        let [of_block, of_group] = self.bytes;
        let at = k.mad_wide_u32(block, of_block, base);
        let at = k.mad_wide_u32(self.group, of_group, at);
        k.mad_wide_u32(self.thread, 16u32, at)
    }

    /// Nothing is put aside.
    pub fn reset(&self, k: &mut KernelBuilder) {
        k.set(self.some, |k| k.mov_pred(false));
    }

    /// Puts the output aside. The rows' references are finite: some tile has been seen whole.
    pub fn put(&self, k: &mut KernelBuilder, softmax: &Softmax, o: &[Reg<F32>]) {
        k.section("the output so far is put aside");
        let now = softmax.rows.map(|row| row.reference);
        let growth = [0, 1].map(|half| softmax.params.exp(k, now[half], self.references[half]));
        let much = growth.map(|growth| k.setp_gt_f32(growth, MOST_GROWTH));
        let much = k.or_pred(much[0], much[1]);
        let none = k.not_pred(self.some);
        let anew = k.or_pred(much, none);
        let anew = k.vote_any(anew);
        k.if_else(
            anew,
            |k| {
                self.take_back(k, softmax, o);
                let at = self.address(k);
                for (i, quad) in o.as_chunks::<4>().0.iter().enumerate() {
                    k.st_global_vec(at.at((i * STEP) as i32), *quad);
                }
                for (kept, now) in self.references.iter().zip(now) {
                    k.set(*kept, |k| k.mov_f32(now));
                }
                k.set(self.some, |k| k.mov_pred(true));
            },
            |k| {
                let at = self.address(k);
                for (i, quad) in o.as_chunks::<4>().0.iter().enumerate() {
                    let grown: [Reg<F32>; 4] = std::array::from_fn(|j| k.mul_f32(quad[j], growth[j / 2]));
                    k.red_add_vec_f32(AtomSem::Relaxed, Scope::Gpu, at.at((i * STEP) as i32), grown);
                }
            },
        );
    }

    /// Adds to the output what was put aside, relative to the rows' references as they are now.
    pub fn take_back(&self, k: &mut KernelBuilder, softmax: &Softmax, o: &[Reg<F32>]) {
        k.if_(self.some, |k| {
            let at = self.address(k);
            let now = softmax.rows.map(|row| row.reference);
            let factors = [0, 1].map(|half| softmax.params.exp(k, self.references[half], now[half]));
            for (i, quad) in o.as_chunks::<4>().0.iter().enumerate() {
                // Not from the first level of the cache, which sums in memory pass by.
                let relaxed = MemHint::new().order(Order::Relaxed(Scope::Gpu));
                let before: [Reg<F32>; 4] = k.ld_global_vec_hint(at.at((i * STEP) as i32), relaxed);
                for (j, (&o, before)) in quad.iter().zip(before).enumerate() {
                    k.set(o, |k| k.fma_f32(before, factors[j / 2], o));
                }
            }
        });
    }
}
