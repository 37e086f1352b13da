//! A block that took a part of the keys writes its partial result to global memory: the undivided sums over its keys,
//! and each row's reference. Part p of a head with `len_q` queries has the rows from p · len_q on. Where blocks share keys by
//! length, part p of all has the rows from p times those of a tile on.

use flashcore_ptx::KernelBuilder;

use super::{consumer::Consumer, tiles::Tile};
use crate::{parts::shares::ShareParams, sm90::Sm90Params};

/// Stores the output and the state of this part's rows.
pub(super) fn store(k: &mut KernelBuilder, of: &Consumer<'_>, tile: &Tile) {
    k.section("partial: what this part of the keys came to");
    let (o, state) = (k.param(Sm90Params::o), k.param(Sm90Params::lse));
    let (o, state, o_row, state_row, first) = if let Some(part) = &tile.part {
        let (o_row, state_row) = (k.param(Sm90Params::o_row), k.param(Sm90Params::lse_row));
        let rows = k.param(ShareParams::part_rows);
        let first = k.mul_lo_u32(part.number, rows);
        (o, state, o_row, state_row, k.sub_u32(first, tile.rows.first_row))
    } else {
        let o = Consumer::head_address(k, tile, o, [Sm90Params::o_batch, Sm90Params::o_head]);
        let state = Consumer::head_address(k, tile, state, [Sm90Params::lse_batch, Sm90Params::lse_head]);
        let (o_row, state_row) = (k.param(Sm90Params::o_row), k.param(Sm90Params::lse_row));
        let part = k.ctaid_y();
        (o, state, o_row, state_row, k.mul_lo_u32(part, tile.rows.len_q))
    };
    let leads = k.setp_eq_u32(of.column, 0u32);
    for half in 0..2 {
        let row = of.problem_row(k, tile, half as u32);
        let exists = tile.has_row(k, of.schedule, row);
        let row = k.add_u32(row, first);
        let row = k.cvt_u64_u32(row);
        let states = k.mad_lo_u64(row, state_row, state);
        let mine = k.and_pred(leads, exists);
        let of_row = of.softmax.rows[half];
        k.when(mine, |k| k.st_global_vec(states, [of_row.reference, of_row.sum]));
        let columns = k.mad_lo_u64(row, o_row, o);
        let columns = k.mad_wide_u32(of.column, 4u32, columns);
        for (eight, quad) in of.o.chunks_exact(4).enumerate() {
            let both = [quad[2 * half], quad[2 * half + 1]];
            k.when(exists, |k| k.st_global_vec(columns.at(32 * eight as i32), both));
        }
    }
}
