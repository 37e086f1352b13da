//! Workspace: what the launches of a plan hand on to each other, in memory that belongs to nobody else meanwhile.

use flashcore_kernels::{
    Args, Operand, ROW_PADDING, Schedule, packed_tiles, quantize::Quantize, share_rows, share_tiles,
};

use super::{
    Folded, Launch,
    bind::{operand, tensor_arg},
    choose,
    fold::fold_layout,
};
use crate::{DType, Layout, Name, Pass, Problem, Queries};

/// Where tensors start in a workspace.
const ALIGNMENT: usize = 256;

/// Tensors that lie one behind the other.
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
    /// Bytes of an element.
    size: usize,
}

/// What of a call is quantised, and what becomes of it.
const QUANTISED: [(Operand, Operand); 3] =
    [(Operand::Q, Operand::Q8), (Operand::K, Operand::K8), (Operand::V, Operand::V8)];

/// What of a call is another once keys were appended, and where that lies.
const APPENDED: [(Operand, Operand); 2] =
    [(Operand::Q, Operand::TurnedQ), (Operand::KeyLengths, Operand::LengthsAfter)];

/// The shapes of q, k and v, for those who ask how many blocks or how much memory they take.
pub(super) fn shapes(folded: &Problem) -> Args {
    let mut args = Args::default();
    for parameter in folded.signature().inputs() {
        args.set(operand(parameter.name), tensor_arg(0, &Layout::bhsd(parameter.shape), 1));
    }
    args
}

impl Workspace {
    /// What a schedule needs for a problem as the kernels see it.
    pub fn of(folded: &Problem, schedule: &Schedule) -> Self {
        let mut workspace = Self { parts: 1, ..Self::default() };
        if folded.pass == Pass::Backward {
            let (entries, len_q) = match folded.queries {
                Queries::Dense => (folded.batch, folded.len_q as u32),
                Queries::Packed { total } => {
                    (1, ROW_PADDING * packed_tiles(ROW_PADDING, total as u32, folded.batch as u32))
                }
            };
            let rows = len_q.next_multiple_of(ROW_PADDING) as usize;
            let push = |workspace: &mut Self, operand, rows, words| {
                workspace.push(operand, [entries, folded.heads_q, rows, words]);
            };
            for operand in [Operand::RowLse, Operand::RowDelta] {
                push(&mut workspace, operand, rows, 1);
            }
            if let Schedule::Sm90Bwd(schedule) = schedule {
                let tiles = (schedule.copies() * schedule.query_tiles(len_q)) as usize;
                let floats = schedule.dq_tile_bytes(folded.head_dim as u32) as usize / DType::F32.size();
                push(&mut workspace, Operand::DqTiles, tiles, floats);
                push(&mut workspace, Operand::Turns, rows / 32, 1);
            }
            return workspace;
        }
        workspace.parts = choose::parts(schedule) as usize;
        if workspace.parts == 1 {
            return workspace;
        }
        let (batch, rows) = match folded.queries {
            Queries::Dense => (folded.batch, folded.len_q),
            Queries::Packed { total } => (1, total),
        };
        let (heads, rows) = (folded.heads_q, workspace.parts * rows);
        // Two numbers per row: what it is relative to, and its sum.
        for (operand, columns) in [(Operand::PartialO, folded.head_dim_v), (Operand::PartialState, 2)] {
            workspace.push(operand, [batch, heads, rows, columns]);
        }
        workspace
    }

    /// With what these launches make of a problem's tensors: q, k and v in f8, their descales, the mean of the keys, and what
    /// the launches have between themselves.
    pub fn quantise(&mut self, folded: &Problem, launches: &[Launch]) {
        let shapes = shapes(folded);
        let turn = launches.iter().any(|launch| matches!(launch.schedule, Schedule::Quantize(of) if of.turn));
        for (of, stored) in QUANTISED {
            let shape = shapes.tensor(of).shape;
            let shape = if turn && of == Operand::V { Quantize::turned(shape) } else { shape };
            self.push_of(DType::F8E4M3.size(), stored, shape);
        }
        for operand in [Operand::QDescale, Operand::KDescale, Operand::VDescale] {
            self.push(operand, shapes.tensor(operand).shape);
        }
        let space = launches.iter().map(|launch| match launch.schedule {
            Schedule::Quantize(of) => of.space(&launch.spec, &shapes) as usize,
            _ => 0,
        });
        self.push_of(1, Operand::Space, [1, 1, 1, space.max().unwrap_or(0)]);
        if launches.iter().any(|launch| matches!(launch.schedule, Schedule::Quantize(of) if of.smooth)) {
            self.push(Operand::KMean, [folded.batch, folded.heads_kv, 1, folded.head_dim]);
        }
    }

    /// With what an append leaves beside the cache: key lengths, and the queries if they are turned.
    pub fn append(&mut self, problem: &Problem, folded: &Folded) {
        self.push(Operand::LengthsAfter, [1, 1, 1, problem.batch]);
        if problem.append.is_some_and(|append| append.rotary.is_some()) {
            let signature = problem.signature();
            for q in signature.inputs().filter(|of| of.name == Name::Q) {
                let layout = fold_layout(&Layout::bhsd(q.shape), q, problem, folded);
                self.push_of(q.dtype.size(), Operand::TurnedQ, layout.shape);
            }
        }
    }

    /// With what the blocks of a launch put aside, if there are keys enough.
    pub fn put_aside(&mut self, folded: &Problem, launch: &Launch) {
        if let Schedule::Sm90Fwd(schedule) = &launch.schedule {
            let bytes = schedule.aside_bytes(&launch.spec) as usize;
            if bytes > 0 && folded.len_k > schedule.keys_before_aside() as usize {
                self.push(Operand::Aside, [1, 1, launch.grid[0] as usize, bytes / DType::F32.size()]);
            }
        }
    }

    /// With the partial results of a launch whose blocks share keys by length: every block may begin in a column, and every column
    /// in a block.
    pub fn share(&mut self, folded: &Problem, launch: &Launch) {
        if !choose::is_by_length(&launch.schedule) {
            return;
        }
        let (spec, len_q) = (&launch.spec, folded.len_q as u32);
        let columns = folded.batch * folded.heads_q * share_tiles(spec, len_q) as usize;
        let rows = (launch.grid[0] as usize + columns) * share_rows(spec, len_q) as usize;
        for (operand, rows, columns) in [
            (Operand::PartialO, rows, folded.head_dim_v),
            (Operand::PartialState, rows, 2),
            (Operand::PartialPlaces, columns, 2),
        ] {
            self.push(operand, [1, 1, rows, columns]);
        }
    }

    /// What attention is bound to: where q, k and v were quantised, or q was turned, to what they became.
    pub fn attended(&self, args: &Args) -> Args {
        let mut attended = *args;
        for (of, stored) in QUANTISED.into_iter().chain(APPENDED) {
            if self.tensors.iter().any(|region| region.operand == stored) {
                attended.set(of, *args.tensor(stored));
            }
        }
        attended
    }

    /// Adds a tensor of this shape, of f32 or u32.
    fn push(&mut self, operand: Operand, shape: [usize; 4]) {
        self.push_of(DType::F32.size(), operand, shape);
    }

    /// Adds a tensor of this shape, with elements of so many bytes.
    fn push_of(&mut self, size: usize, operand: Operand, shape: [usize; 4]) {
        let layout = Layout::bhsd(shape);
        self.tensors.push(Region { operand, offset: self.bytes, layout, size });
        let bytes = layout.elements().unwrap_or(0) * size;
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
        for Region { operand, offset, layout, size } in &self.tensors {
            args.set(*operand, tensor_arg(address + *offset as u64, layout, *size));
        }
    }
}
