//! Workspace: what the launches of a plan hand on to each other, in memory that belongs to nobody else meanwhile.

use flashcore_kernels::{Args, Operand, ROW_PADDING, Schedule};

use super::bind::tensor_arg;
use crate::{DType, Layout, Pass, Problem};

/// Where tensors start in a workspace.
const ALIGNMENT: usize = 256;

/// Tensors of f32 and u32 that lie one behind the other.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Workspace {
    tensors: Vec<Region>,
    bytes: usize,
    /// Parts of the keys whose outputs it holds.
    parts: usize,
}

#[derive(Clone, Debug, PartialEq)]
struct Region {
    operand: Operand,
    offset: usize,
    layout: Layout,
}

impl Workspace {
    /// What a schedule needs for a problem as the kernels see it.
    pub fn of(folded: &Problem, schedule: &Schedule) -> Self {
        let mut workspace = Self { parts: 1, ..Self::default() };
        if folded.pass == Pass::Backward {
            let rows = folded.len_q.next_multiple_of(ROW_PADDING as usize);
            for operand in [Operand::RowLse, Operand::RowDelta] {
                workspace.push(operand, [folded.batch, folded.heads_q, rows, 1]);
            }
            if let Schedule::Sm90Bwd(schedule) = schedule {
                let tiles = schedule.query_tiles(folded.len_q as u32) as usize;
                let floats = schedule.dq_tile_bytes(folded.head_dim as u32) as usize / DType::F32.size();
                let shape = |words| [folded.batch, folded.heads_q, tiles, words];
                workspace.push(Operand::DqTiles, shape(floats));
                workspace.push(Operand::Turns, [folded.batch, folded.heads_q, rows / 64, 1]);
            }
            return workspace;
        }
        let Schedule::Sm90Fwd(schedule) = schedule else { return workspace };
        if schedule.parts == 1 {
            return workspace;
        }
        workspace.parts = schedule.parts as usize;
        let rows = [folded.batch, folded.heads_q, workspace.parts * folded.len_q];
        let [batch, heads, rows] = rows;
        // Two numbers per row: what it is relative to, and its sum.
        for (operand, columns) in [(Operand::PartialO, folded.head_dim_v), (Operand::PartialState, 2)] {
            workspace.push(operand, [batch, heads, rows, columns]);
        }
        workspace
    }

    /// Adds a tensor of this shape.
    fn push(&mut self, operand: Operand, shape: [usize; 4]) {
        let layout = Layout::bhsd(shape);
        self.tensors.push(Region { operand, offset: self.bytes, layout });
        let bytes = layout.elements().unwrap_or(0) * DType::F32.size();
        self.bytes += bytes.next_multiple_of(ALIGNMENT);
    }

    pub fn bytes(&self) -> usize {
        self.bytes
    }

    pub fn parts(&self) -> u32 {
        self.parts as u32
    }

    /// Tells a launch where its tensors are, in a workspace at this address.
    pub fn bind(&self, address: u64, args: &mut Args) {
        for Region { operand, offset, layout } in &self.tensors {
            args.set(*operand, tensor_arg(address + *offset as u64, layout, DType::F32.size()));
        }
    }
}
