//! Blocks of a cluster that shared the keys of a tile merge their results: each takes a part of the columns, and gets
//! the other blocks' sums and partial outputs for those columns through distributed shared memory.

use flashcore_ptx::{B32, ClusterAddr, F32, KernelBuilder, Reg, Scope};

use super::{Schedule, consumer::Consumer, tiles::Tile};
use crate::{
    Phase, Spec,
    parts::{fragment::pack, softmax::SoftmaxParams},
};

/// Bytes of shared memory that a block reserves for what the others send.
pub(super) fn exchange_bytes(schedule: Schedule, spec: &Spec) -> u32 {
    (schedule.split - 1) * sender_bytes(schedule, spec)
}

/// Bytes from one block: the state of two rows and a part of the columns, 16 bytes per thread at a time.
fn sender_bytes(schedule: Schedule, spec: &Spec) -> u32 {
    (1 + spec.head_dim_v / 8 / schedule.split) * chunk_bytes(schedule)
}

/// 16 bytes for each thread that merges.
fn chunk_bytes(schedule: Schedule) -> u32 {
    16 * 128 * schedule.readers()
}

/// Sends, waits, merges, and stores this block's columns.
pub(super) fn run(k: &mut KernelBuilder, of: &Consumer<'_>, tile: &Tile) {
    let Consumer { schedule, spec, memory, .. } = *of;
    let Schedule { split, .. } = schedule;
    k.section("merge: send");
    k.comment("the other blocks run, so their shared memory is there");
    k.cluster_wait(true);
    let rank = k.cluster_ctarank();
    let tid = k.tid_x();
    let exchange = k.shared_addr(memory.exchange);
    let merged = k.shared_addr(memory.merged);
    let mine = k.mad_lo_u32(tid, 16u32, exchange);
    let chunk = chunk_bytes(schedule);
    let part = (spec.head_dim_v / 8 / split) as usize;
    let [upper, lower] = of.softmax.rows;
    for step in 1..split {
        // The block `step` further gets what it will call its sender `step`; its own columns are those of its rank.
        let to = k.add_u32(rank, step);
        let to = k.and_b32(to, split - 1);
        let place = k.add_u32(mine, (step - 1) * sender_bytes(schedule, spec));
        let (there, arrived) = (k.mapa(place, to), k.mapa(merged, to));
        // Each store is counted where it arrives: no order among the lanes of a warp has to be relied on.
        k.st_async(there, [upper.reference, upper.sum, lower.reference, lower.sum], arrived);
        for other in 0..split {
            let theirs = k.setp_eq_u32(to, other);
            k.if_(theirs, |k| {
                for (i, quad) in of.o.chunks_exact(4).skip(other as usize * part).take(part).enumerate() {
                    let at = k.add_u32(there.0, (i as u32 + 1) * chunk);
                    k.st_async(ClusterAddr(at), [quad[0], quad[1], quad[2], quad[3]], arrived);
                }
            });
        }
    }

    k.section("merge: receive");
    // What arrives lies in this block's own shared memory; the cluster's scope would also invalidate the L1 cache.
    k.mbarrier_wait_parity(memory.merged, 0u32, Scope::Cta);
    let states: Vec<[Reg<F32>; 4]> = (1..split)
        .map(|step| k.ld_shared_vec(mine.at(((step - 1) * sender_bytes(schedule, spec)) as i32)))
        .collect();
    let weights = weigh(k, of, &states);

    k.section("merge: this block's columns");
    Phase::Store.begin(k);
    let inverse = [0, 1].map(|half| of.inverse(k, half));
    let rows = of.output_rows(k, tile);
    for owner in 0..split {
        let this = k.setp_eq_u32(rank, owner);
        k.if_(this, |k| {
            let first = owner as usize * part;
            for (i, quad) in of.o.chunks_exact(4).skip(first).take(part).enumerate() {
                let received: Vec<[Reg<F32>; 4]> = (0..states.len())
                    .map(|sender| {
                        let at = sender as u32 * sender_bytes(schedule, spec) + (i as u32 + 1) * chunk;
                        k.ld_shared_vec(mine.at(at as i32))
                    })
                    .collect();
                for (half, (address, exists)) in rows.into_iter().enumerate() {
                    let value = |k: &mut KernelBuilder, element: usize| {
                        let theirs = received.iter().map(|received| received[element]);
                        let value = weighted(k, quad[element], theirs, &weights[half]);
                        k.mul_f32(value, inverse[half])
                    };
                    let (a, b) = (value(k, 2 * half), value(k, 2 * half + 1));
                    let both: Reg<B32> = pack(k, spec.dtype, a, b);
                    k.when(exists, |k| k.st_global(address.at(16 * (first + i) as i32), both));
                }
            }
        });
    }
}

/// For this thread's two rows, the weights that each block's sums are to be multiplied by: this block's first, then the
/// others'. The rows' state becomes the merged one.
pub(super) fn weigh(
    k: &mut KernelBuilder,
    of: &Consumer<'_>,
    states: &[[Reg<F32>; 4]],
) -> [Vec<Reg<F32>>; 2] {
    [0, 1].map(|half| {
        let row = of.softmax.rows[half];
        // A row's common reference is the largest.
        let most = states.iter().fold(row.reference, |most, state| k.max_f32(most, state[2 * half]));
        let reference = SoftmaxParams::reference(k, most, false);
        let mut weights = vec![of.softmax.params.exp(k, row.reference, reference)];
        let mut sum = k.mul_f32(row.sum, weights[0]);
        for state in states {
            let theirs = of.softmax.params.exp(k, state[2 * half], reference);
            sum = k.fma_f32(state[2 * half + 1], theirs, sum);
            weights.push(theirs);
        }
        k.set(row.sum, |k| k.mov_f32(sum));
        k.set(row.reference, |k| k.mov_f32(most));
        weights
    })
}

/// An element of the merged output.
pub(super) fn weighted(
    k: &mut KernelBuilder,
    own: Reg<F32>,
    theirs: impl Iterator<Item = Reg<F32>>,
    weights: &[Reg<F32>],
) -> Reg<F32> {
    let first = k.mul_f32(own, weights[0]);
    theirs.zip(&weights[1..]).fold(first, |sum, (theirs, &weight)| k.fma_f32(theirs, weight, sum))
}
