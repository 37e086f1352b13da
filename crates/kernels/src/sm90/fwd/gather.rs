//! Merges warpgroups of a block that shared the keys of the same queries: all but the first hand over their results
//! through shared memory, and the first continues with the total.

use flashcore_ptx::{F32, KernelBuilder, Reg};

use super::{
    Schedule,
    consumer::{ALL, Consumer},
    merge::{weigh, weighted},
};
use crate::Spec;

/// 16 bytes for each thread of a warpgroup.
const CHUNK: u32 = 16 * 128;

/// Bytes of shared memory that a block reserves for handing over.
pub(super) fn bytes(schedule: Schedule, spec: &Spec) -> u32 {
    if schedule.together { (schedule.warpgroups - 1) * part_bytes(spec) } else { 0 }
}

/// Bytes from one warpgroup: the state of two rows and all columns, 16 bytes per thread at a time.
fn part_bytes(spec: &Spec) -> u32 {
    (1 + spec.head_dim_v / 8) * CHUNK
}

/// Hands over the results of a warpgroup other than the first.
pub(super) fn send(k: &mut KernelBuilder, of: &Consumer<'_>) {
    k.section("gather: hand over");
    let part = k.sub_u32(of.group, 1u32);
    let base = k.shared_addr(of.memory.gathered);
    let base = k.mad_lo_u32(part, part_bytes(of.spec), base);
    let mine = k.mad_lo_u32(of.thread, 16u32, base);
    let [upper, lower] = of.softmax.rows;
    k.st_shared_vec(mine, [upper.reference, upper.sum, lower.reference, lower.sum]);
    for (i, quad) in (1..).zip(of.o.chunks_exact(4)) {
        k.st_shared_vec(mine.at((i * CHUNK) as i32), [quad[0], quad[1], quad[2], quad[3]]);
    }
    k.bar_arrive(ALL, of.schedule.consumer_threads());
}

/// Adds the others' results to those of the first warpgroup.
pub(super) fn receive(k: &mut KernelBuilder, of: &Consumer<'_>) {
    k.section("gather: receive");
    k.bar_sync(ALL, of.schedule.consumer_threads());
    let base = k.shared_addr(of.memory.gathered);
    let mine = k.mad_lo_u32(of.thread, 16u32, base);
    let place = |sender: u32, chunk: u32| (sender * part_bytes(of.spec) + chunk * CHUNK) as i32;
    let senders = of.schedule.warpgroups - 1;
    let states: Vec<[Reg<F32>; 4]> =
        (0..senders).map(|sender| k.ld_shared_vec(mine.at(place(sender, 0)))).collect();
    let weights = weigh(k, of, &states);
    for (i, quad) in (1..).zip(of.o.chunks_exact(4)) {
        let received: Vec<[Reg<F32>; 4]> =
            (0..senders).map(|sender| k.ld_shared_vec(mine.at(place(sender, i)))).collect();
        for (element, &o) in quad.iter().enumerate() {
            let theirs = received.iter().map(|received| received[element]);
            let value = weighted(k, o, theirs, &weights[element / 2]);
            k.set(o, |k| k.mov_f32(value));
        }
    }
}
