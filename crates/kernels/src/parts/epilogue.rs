//! The end of a block: divide by the sums, round, and write o and lse.

use flashcore_ptx::{B32, B64, F32, KernelBuilder, KernelParams, ParamHandle, Reg, Shared};

use super::{
    fragment::{Acc, HALVES, Place, pack},
    softmax::{OnlineSoftmax, SoftmaxParams},
    swizzle::{CHUNK, Tile},
    work::{Rows, Work},
};
use crate::{ElementType, FwdParams, Spec};

/// Divides each row of the output by its sum, and multiplies it by the descale of the values.
pub(crate) fn normalise(
    k: &mut KernelBuilder,
    softmax: &OnlineSoftmax,
    o: &[Vec<Acc>],
    descale: Option<Reg<F32>>,
) {
    for (state, o) in softmax.rows.iter().zip(o) {
        for (row, half) in state.iter().zip(HALVES) {
            let inverse = SoftmaxParams::inverse(k, row.sum);
            let inverse = descale.map_or(inverse, |descale| k.mul_f32(inverse, descale));
            for o in o {
                for &i in &half {
                    k.set(o[i], |k| k.mul_f32(o[i], inverse));
                }
            }
        }
    }
}

/// Writes lse, if it is wanted: by one of the four threads that share a row.
pub(crate) fn store_lse(
    k: &mut KernelBuilder,
    spec: &Spec,
    rows: &Rows,
    place: &Place,
    softmax: &OnlineSoftmax,
) {
    if !spec.lse {
        return;
    }
    k.section("epilogue: lse");
    let lse = rows.lse(k);
    let stride = k.param(FwdParams::lse_row);
    let first = k.setp_eq_u32(place.column, 0u32);
    for (tile, state) in softmax.rows.iter().enumerate() {
        for (half, row) in state.iter().enumerate() {
            let value = softmax.lse(k, *row);
            let index = place.row(k, rows, tile, half);
            let exists = k.setp_lt_s32(index, rows.len_q);
            let mine = k.and_pred(first, exists);
            let address = Work::row_address(k, lse, index, stride);
            k.when(mine, |k| k.st_global(address, value));
        }
    }
}

/// Writes a warp's rows of o.
pub(crate) fn store_output(
    k: &mut KernelBuilder,
    spec: &Spec,
    rows: &Rows,
    place: &Place,
    staging: Shared,
    tile: Tile,
    o: &[Vec<Acc>],
) {
    let out = Out {
        name: "o",
        first_row: rows.first_row,
        len: rows.len_q,
        row: FwdParams::o_row,
        dtype: spec.out(),
        head_dim: spec.head_dim_v,
        interleaved: spec.dtype.is_fp8(),
    };
    store(k, &out, place, staging, tile, o, |k| rows.o(k));
}

/// A result that a block writes some rows of.
pub(crate) struct Out<P> {
    /// Its name.
    pub name: &'static str,
    /// The block's first row.
    pub first_row: Reg<B32>,
    /// Rows of a head.
    pub len: Reg<B32>,
    /// Bytes from one row to the next.
    pub row: ParamHandle<P, u64>,
    /// The type of its elements.
    pub dtype: ElementType,
    /// Elements of a row.
    pub head_dim: u32,
    /// Whether accumulators come in pairs: one has the even columns of sixteen, the other the odd ones.
    pub interleaved: bool,
}

/// Writes a warp's rows of a result: through its own rows of a swizzled tile in shared memory, so that a warp stores
/// whole lines. `head` finds where the head starts.
pub(crate) fn store<P: KernelParams>(
    k: &mut KernelBuilder,
    out: &Out<P>,
    place: &Place,
    staging: Shared,
    tile: Tile,
    o: &[Vec<Acc>],
    head: impl FnOnce(&mut KernelBuilder) -> Reg<B64>,
) {
    k.section(&format!("epilogue: {} to shared memory", out.name));
    let base = k.shared_addr(staging);
    let (shift, mask) = tile.swizzle();
    let warp_base = k.mad_lo_u32(place.warp_row, tile.pitch(), base);
    let line = k.shr_u32(place.g, shift);
    let xor = k.and_b32(line, mask);
    let xor = k.shl_b32(xor, CHUNK.trailing_zeros());
    let column_bytes = k.shl_b32(place.column, 1u32);
    let row_start = k.mad_lo_u32(place.g, tile.pitch(), warp_base);
    if out.interleaved {
        stage_interleaved(k, out.dtype, place, tile, o, row_start, xor);
    }
    let start = k.add_u32(row_start, column_bytes);
    for (m, o) in o.iter().enumerate().filter(|_| !out.interleaved) {
        for (n, acc) in o.iter().enumerate() {
            let (panel, chunk) = (n as u32 / tile.chunks(), n as u32 % tile.chunks());
            let swizzled = if chunk == 0 { xor } else { k.xor_b32(xor, chunk * CHUNK) };
            let at = k.add_u32(start, swizzled);
            for (half, elements) in HALVES.iter().enumerate() {
                let offset = panel * tile.panel_bytes() + (16 * m + 8 * half) as u32 * tile.pitch();
                let value = pack(k, out.dtype, acc[elements[0]], acc[elements[1]]);
                k.st_shared::<B32>(at.at(offset as i32), value);
            }
        }
    }
    k.bar_warp_sync();

    k.section(&format!("epilogue: {} to global memory", out.name));
    let rows_at_once = 32 / tile.chunks();
    let row = k.shr_u32(place.lane, tile.chunks().trailing_zeros());
    let chunk = k.and_b32(place.lane, tile.chunks() - 1);
    let stride = k.param(out.row);
    let first_row = k.add_u32(out.first_row, place.warp_row);
    let head = head(k);
    for first in (0..16 * o.len() as u32).step_by(rows_at_once as usize) {
        let row = k.add_u32(row, first);
        let line = k.shr_u32(row, shift);
        let xor = k.and_b32(line, mask);
        let swizzled = k.xor_b32(chunk, xor);
        let swizzled = k.shl_b32(swizzled, CHUNK.trailing_zeros());
        let at = k.mad_lo_u32(row, tile.pitch(), swizzled);
        let at = k.add_u32(warp_base, at);
        let index = k.add_u32(first_row, row);
        let exists = k.setp_lt_s32(index, out.len);
        let row = Work::row_address(k, head, index, stride);
        let row = k.mad_wide_u32(chunk, CHUNK, row);
        for panel in 0..tile.panels() {
            let first_chunk = panel * tile.chunks();
            let holds = out.head_dim / 8 - first_chunk;
            let mut wanted = exists;
            if holds < tile.chunks() {
                let inside = k.setp_lt_u32(chunk, holds);
                wanted = k.and_pred(exists, inside);
            }
            let values: [Reg<F32>; 4] = k.ld_shared_vec(at.at((panel * tile.panel_bytes()) as i32));
            k.when(wanted, |k| k.st_global_vec(row.at((first_chunk * CHUNK) as i32), values));
        }
    }
}

/// Writes a warp's rows of o to its rows of a swizzled tile, where accumulators come in pairs: one has the even columns of
/// sixteen, the other the odd ones. A thread then has four columns side by side.
fn stage_interleaved(
    k: &mut KernelBuilder,
    dtype: ElementType,
    place: &Place,
    tile: Tile,
    o: &[Vec<Acc>],
    row_start: Reg<B32>,
    xor: Reg<B32>,
) {
    // Four columns are 8 bytes: in which of two chunks, and where in it.
    let bytes = k.shl_b32(place.column, 2u32);
    let (half, inside) = (k.and_b32(bytes, CHUNK), k.and_b32(bytes, CHUNK / 2));
    let xor = k.xor_b32(xor, half);
    let start = k.add_u32(row_start, inside);
    for (m, o) in o.iter().enumerate() {
        for (pair, both) in o.chunks_exact(2).enumerate() {
            let (panel, chunk) = (2 * pair as u32 / tile.chunks(), 2 * pair as u32 % tile.chunks());
            let swizzled = if chunk == 0 { xor } else { k.xor_b32(xor, chunk * CHUNK) };
            let at = k.add_u32(start, swizzled);
            for (half, elements) in HALVES.iter().enumerate() {
                let offset = panel * tile.panel_bytes() + (16 * m + 8 * half) as u32 * tile.pitch();
                let values = elements.map(|i| pack(k, dtype, both[0][i], both[1][i]));
                k.st_shared_vec::<B32, 2>(at.at(offset as i32), values);
            }
        }
    }
}
