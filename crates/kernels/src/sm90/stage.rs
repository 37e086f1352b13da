//! Results on their way from registers to global memory: through panels in shared memory, which TMA stores.

use flashcore_ptx::{Addr, B32, B64, F32, KernelBuilder, Reg};

use super::fwd::{PITCH, columns, panels};
use crate::{ElementType, parts::fragment::pack};

/// What a thread has of 64 rows of accumulators, rounded: two words for every eight columns, up to whole panels. TMA reads
/// whole boxes and clips them at the tensor's edge, so what lies beyond it must be written too.
pub(super) fn rounded(k: &mut KernelBuilder, dtype: ElementType, rows: &[Reg<F32>]) -> Vec<[Reg<B32>; 2]> {
    let mut packed: Vec<[Reg<B32>; 2]> = rows
        .chunks_exact(4)
        .map(|quad| [pack(k, dtype, quad[0], quad[1]), pack(k, dtype, quad[2], quad[3])])
        .collect();
    let eights = (panels(2 * rows.len() as u32, dtype) * columns(dtype) / 8) as usize;
    if packed.len() < eights {
        let zero = k.mov_b32(0u32);
        packed.resize(eights, [zero; 2]);
    }
    packed
}

/// Writes a warpgroup's 64 rows to panels in shared memory, given its thread and where its rows begin in the first panel.
pub(super) fn write(
    k: &mut KernelBuilder,
    packed: &[[Reg<B32>; 2]],
    thread: Reg<B32>,
    rows: Reg<B32>,
    panel_bytes: u32,
) {
    let start = lane(k, thread, rows);
    for (pair, chunks) in packed.chunks(2).enumerate() {
        let at = at(k, start, 2 * pair as u32, panel_bytes);
        if let [[a, b], [c, d]] = chunks {
            k.stmatrix(at, [*a, *b, *c, *d]);
        }
    }
}

/// Stores rows that [`write`] has written, so many of them, for those that TMA would store together with rows of others: to
/// this address, and so many bytes from one to the next.
pub(super) fn store_rows(
    k: &mut KernelBuilder,
    (rows, panel_bytes): (Reg<B32>, u32),
    thread: Reg<B32>,
    count: Reg<B32>,
    (to, to_row): (Reg<B64>, Reg<B64>),
    (head_dim, dtype): (u32, ElementType),
) {
    // A thread has a chunk of 16 bytes of every panel of every sixteenth row.
    let (chunk, row) = (k.and_b32(thread, 7u32), k.shr_u32(thread, 3u32));
    let xor = k.and_b32(row, 7u32);
    let swizzled = k.xor_b32(chunk, xor);
    let line = k.mad_lo_u32(row, PITCH, rows);
    let from = k.mad_lo_u32(swizzled, 16u32, line);
    let to = k.mad_wide_u32(chunk, 16u32, to);
    for first in (0..64).step_by(16) {
        let row = k.add_u32(row, first);
        let exists = k.setp_lt_s32(row, count);
        let row = k.cvt_u64_u32(row);
        let to = k.mad_lo_u64(row, to_row, to);
        for panel in 0..panels(head_dim, dtype) {
            let chunks = (head_dim - panel * columns(dtype)) / 8;
            let inside = (chunks < 8).then(|| k.setp_lt_u32(chunk, chunks));
            let wanted = inside.map_or(exists, |inside| k.and_pred(exists, inside));
            let from = from.at((panel * panel_bytes + first * PITCH) as i32);
            let values: [Reg<B32>; 4] = k.ld_shared_vec(from);
            k.when(wanted, |k| k.st_global_vec(to.at((panel * PITCH) as i32), values));
        }
    }
}

/// The rows of a warpgroup as A operands, of 32 bytes of each row, as [`write`] would have written them.
pub(super) fn read(
    k: &mut KernelBuilder,
    operands: u32,
    thread: Reg<B32>,
    rows: Reg<B32>,
    panel_bytes: u32,
) -> Vec<[Reg<B32>; 4]> {
    let start = lane(k, thread, rows);
    (0..operands)
        .map(|step| {
            let at = at(k, start, 2 * step, panel_bytes);
            k.ldmatrix(at)
        })
        .collect()
}

/// Where a lane's row starts: lane l gives row l % 8 of matrix l / 8, which are upper rows, lower rows, then the same eight
/// columns further.
fn lane(k: &mut KernelBuilder, thread: Reg<B32>, rows: Reg<B32>) -> Reg<B32> {
    let lane = k.and_b32(thread, 31u32);
    let warp = k.shr_u32(thread, 5u32);
    let row = k.and_b32(lane, 15u32);
    let row = k.mad_lo_u32(warp, 16u32, row);
    let line = k.mad_lo_u32(row, PITCH, rows);
    let xor = k.and_b32(row, 7u32);
    let right = k.shr_u32(lane, 4u32);
    let swizzled = k.xor_b32(right, xor);
    k.mad_lo_u32(swizzled, 16u32, line)
}

/// Where it has this chunk of 16 bytes.
fn at(k: &mut KernelBuilder, start: Reg<B32>, chunk: u32, panel_bytes: u32) -> Addr<B32> {
    let (panel, chunk) = (chunk / 8, chunk % 8);
    // Rows start at whole lines, so a step inside a line is an XOR.
    let at = if chunk == 0 { start } else { k.xor_b32(start, 16 * chunk) };
    at.at((panel * panel_bytes) as i32)
}
