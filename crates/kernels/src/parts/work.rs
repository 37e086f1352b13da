//! What one block works on: its batch entry, head and rows, and the keys that those rows see.

use flashcore_ptx::{B32, B64, GlobalPtr, KernelBuilder, KernelParams, ParamHandle, Reg};

use crate::{FwdParams, Spec, family::Knob};

impl Knob for Order {
    fn text(self) -> String {
        match self {
            Order::HeadByHead => "head",
            Order::LongestFirst => "longest",
        }
        .into()
    }

    fn read(text: &str) -> Result<Self, &'static str> {
        match text {
            "head" => Ok(Order::HeadByHead),
            "longest" => Ok(Order::LongestFirst),
            _ => Err("possible are head and longest"),
        }
    }
}

/// The order in which blocks take their work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Order {
    /// All rows of a head, then the next head: neighbours share keys and values in the cache.
    HeadByHead,
    /// The last rows of every head first: under a causal mask these have the most keys, so the long blocks do
    /// not start last.
    LongestFirst,
}

impl Order {
    /// The grid for this many row blocks, heads and batch entries.
    pub fn grid(self, row_blocks: u32, heads: u32, batch: u32) -> [u32; 3] {
        match self {
            Order::HeadByHead => [row_blocks, heads, batch],
            Order::LongestFirst => [heads, batch, row_blocks],
        }
    }
}

/// The rows of a head that one block works on.
#[derive(Clone, Copy)]
pub(crate) struct Rows {
    /// The batch entry.
    pub batch: Reg<B32>,
    /// The query head.
    pub head: Reg<B32>,
    /// Queries per head.
    pub len_q: Reg<B32>,
    /// The first row of this block.
    pub first_row: Reg<B32>,
}

impl Rows {
    /// Finds this block's rows, given the rows per block. The epilogue computes them again, so that the main loop keeps
    /// no registers for values that only the epilogue needs.
    pub fn find(k: &mut KernelBuilder, rows: u32, order: Order) -> Self {
        let (x, y, z) = (k.ctaid_x(), k.ctaid_y(), k.ctaid_z());
        let (block, head, batch) = match order {
            Order::HeadByHead => (x, y, z),
            Order::LongestFirst => {
                let blocks = k.nctaid_z();
                let last = k.sub_u32(blocks, 1u32);
                (k.sub_u32(last, z), x, y)
            }
        };
        Self { batch, head, len_q: k.param(FwdParams::len_q), first_row: k.mul_lo_u32(block, rows) }
    }

    /// The same for a one-dimensional grid, where only the number of blocks limits batch entries and heads.
    pub fn find_in_row(k: &mut KernelBuilder, rows: u32) -> Self {
        let len_q = k.param(FwdParams::len_q);
        let heads = k.param(FwdParams::heads);
        let tile = k.ctaid_x();
        let past = k.add_u32(len_q, rows - 1);
        let head_tiles = k.div_u32(past, rows);
        let all_heads = k.div_u32(tile, head_tiles);
        let batch = k.div_u32(all_heads, heads);
        let remainder = |k: &mut KernelBuilder, n: Reg<B32>, quotient: Reg<B32>, by: Reg<B32>| {
            let whole = k.mul_lo_u32(quotient, by);
            k.sub_u32(n, whole)
        };
        let block = remainder(k, tile, all_heads, head_tiles);
        let head = remainder(k, all_heads, batch, heads);
        Self { batch, head, len_q, first_row: k.mul_lo_u32(block, rows) }
    }

    /// The kv head of this head.
    pub fn kv_head(&self, k: &mut KernelBuilder, spec: &Spec) -> Reg<B32> {
        if !spec.grouped {
            return self.head;
        }
        let group = k.param(FwdParams::group);
        k.div_u32(self.head, group)
    }

    /// The output of this head.
    pub fn o(&self, k: &mut KernelBuilder) -> Reg<B64> {
        head_address(k, FwdParams::o, FwdParams::o_batch, FwdParams::o_head, self.batch, self.head)
    }

    /// The lse of this head.
    pub fn lse(&self, k: &mut KernelBuilder) -> Reg<B64> {
        head_address(k, FwdParams::lse, FwdParams::lse_batch, FwdParams::lse_head, self.batch, self.head)
    }
}

/// How the rows of a tensor of queries are found, from where its first one of a head is.
pub(crate) struct QueryRows {
    /// Bytes from one query to the next.
    query: Reg<B64>,
    /// Where a query has several rows: how many, and the bytes from one to the next.
    heads: Option<(u32, Reg<B64>)>,
}

impl QueryRows {
    /// Reads the strides from one query and from one head to the next.
    pub fn read<P: KernelParams>(
        k: &mut KernelBuilder,
        spec: &Spec,
        [query, head]: [ParamHandle<P, u64>; 2],
    ) -> Self {
        let several = spec.rows_per_query > 1;
        Self { query: k.param(query), heads: several.then(|| (spec.rows_per_query, k.param(head))) }
    }

    /// The address of a row.
    pub fn address(&self, k: &mut KernelBuilder, base: Reg<B64>, row: Reg<B32>) -> Reg<B64> {
        let Some((rows, to_head)) = self.heads else {
            return Work::row_address(k, base, row, self.query);
        };
        let (query, head) = (k.div_u32(row, rows), k.rem_u32(row, rows));
        let base = Work::row_address(k, base, query, self.query);
        Work::row_address(k, base, head, to_head)
    }
}

/// The query head that a head's first row is of.
pub(crate) fn first_query_head(k: &mut KernelBuilder, spec: &Spec, head: Reg<B32>) -> Reg<B32> {
    if spec.rows_per_query == 1 { head } else { k.mul_lo_u32(head, spec.rows_per_query) }
}

/// What one block works on.
pub(crate) struct Work {
    /// Its rows.
    pub rows: Rows,
    /// The queries of this head.
    pub q: Reg<B64>,
    /// The keys of this head.
    pub k: Reg<B64>,
    /// The values of this head.
    pub v: Reg<B64>,
    /// Which keys its rows see.
    pub band: Band,
}

/// Which keys a query sees: those that exist, between the mask's bounds.
#[derive(Clone, Copy)]
pub(crate) struct Band {
    /// Keys of this batch entry.
    pub keys: Reg<B32>,
    /// A query's own position is its number plus this; present where a bound is relative to it.
    shift: Option<Reg<B32>>,
    left: Option<Reg<B32>>,
    right: Option<Reg<B32>>,
    rows_per_query: u32,
}

/// The keys that a block's rows see: from `begin` to `end` by any of them, from `full_begin` to `full_end` by all.
/// The end is not included. Nothing is seen where `end <= begin`.
#[derive(Clone, Copy)]
pub(crate) struct KeyRange {
    pub begin: Reg<B32>,
    pub end: Reg<B32>,
    pub full_begin: Reg<B32>,
    pub full_end: Reg<B32>,
}

/// The address of one head of a tensor.
fn head_address(
    k: &mut KernelBuilder,
    base: ParamHandle<FwdParams, GlobalPtr>,
    batch_stride: ParamHandle<FwdParams, u64>,
    head_stride: ParamHandle<FwdParams, u64>,
    batch: Reg<B32>,
    head: Reg<B32>,
) -> Reg<B64> {
    let (base, batch_stride, head_stride) = (k.param(base), k.param(batch_stride), k.param(head_stride));
    let (batch, head) = (k.cvt_u64_u32(batch), k.cvt_u64_u32(head));
    let entry = k.mad_lo_u64(batch, batch_stride, base);
    k.mad_lo_u64(head, head_stride, entry)
}

impl Work {
    /// Reads the parameters and finds this block's part.
    pub fn begin(k: &mut KernelBuilder, spec: &Spec, find: impl FnOnce(&mut KernelBuilder) -> Rows) -> Self {
        k.section("work: which rows of which head");
        let rows = find(k);
        let Rows { batch, head, len_q, .. } = rows;
        let kv_head = rows.kv_head(k, spec);
        let keys = if spec.key_lengths {
            let lengths = k.param(FwdParams::key_lengths);
            let own = k.mad_wide_u32(batch, 4u32, lengths);
            k.ld_global::<B32>(own)
        } else {
            k.param(FwdParams::len_k)
        };
        let first = first_query_head(k, spec, head);
        let q = head_address(k, FwdParams::q, FwdParams::q_batch, FwdParams::q_head, batch, first);
        // A page lies in the place of a batch entry, so a pool's head begins with that of its first page.
        let entry = if spec.page.is_some() { k.mov_b32(0u32) } else { batch };
        let key = head_address(k, FwdParams::k, FwdParams::k_batch, FwdParams::k_head, entry, kv_head);
        let value = head_address(k, FwdParams::v, FwdParams::v_batch, FwdParams::v_head, entry, kv_head);
        let band = Band::new(k, spec, keys, len_q, [FwdParams::left, FwdParams::right]);
        Self { rows, q, k: key, v: value, band }
    }

    /// The address of a row of a tensor, given the bytes between rows.
    pub fn row_address(k: &mut KernelBuilder, base: Reg<B64>, row: Reg<B32>, stride: Reg<B64>) -> Reg<B64> {
        let row = k.cvt_u64_u32(row);
        k.mad_lo_u64(row, stride, base)
    }

    /// The keys that this block's rows see, given the rows per block.
    pub fn key_range(&self, k: &mut KernelBuilder, rows: u32) -> KeyRange {
        self.band.key_range(k, &self.rows, rows)
    }
}

impl Band {
    /// For a batch entry with this many keys and rows per head; `bounds` are the parameters of the left and the right
    /// bound.
    pub fn new<P: KernelParams>(
        k: &mut KernelBuilder,
        spec: &Spec,
        keys: Reg<B32>,
        len_q: Reg<B32>,
        bounds: [ParamHandle<P, i32>; 2],
    ) -> Self {
        let rows_per_query = spec.rows_per_query;
        let shift = spec.is_masked().then(|| {
            if spec.top_left {
                return k.mov_b32(0u32);
            }
            let queries = if rows_per_query == 1 { len_q } else { k.div_u32(len_q, rows_per_query) };
            k.sub_s32(keys, queries)
        });
        let [left, right] = bounds;
        let left = spec.left.then(|| k.param(left));
        let right = spec.right.then(|| k.param(right));
        Self { keys, shift, left, right, rows_per_query }
    }

    /// The query of a row.
    fn query(&self, k: &mut KernelBuilder, row: Reg<B32>) -> Reg<B32> {
        if self.rows_per_query == 1 { row } else { k.div_u32(row, self.rows_per_query) }
    }

    /// One past the last key that a row sees, as a signed number that may be negative.
    pub fn row_end(&self, k: &mut KernelBuilder, row: Reg<B32>) -> Reg<B32> {
        let (Some(shift), Some(right)) = (self.shift, self.right) else { return self.keys };
        let query = self.query(k, row);
        let place = k.add_s32(query, shift);
        let last = k.add_s32(place, right);
        let end = k.add_s32(last, 1);
        k.min_s32(end, self.keys)
    }

    /// The first key that a row sees, at least 0; `None` where that is always key 0.
    pub fn row_begin(&self, k: &mut KernelBuilder, row: Reg<B32>) -> Option<Reg<B32>> {
        let (Some(shift), Some(left)) = (self.shift, self.left) else { return None };
        let query = self.query(k, row);
        let place = k.add_s32(query, shift);
        let first = k.sub_s32(place, left);
        Some(k.max_s32(first, 0))
    }

    /// The first query that sees a key, which may be negative; `None` where that is always query 0.
    pub fn key_begin(&self, k: &mut KernelBuilder, key: Reg<B32>) -> Option<Reg<B32>> {
        let (Some(shift), Some(right)) = (self.shift, self.right) else { return None };
        let place = k.sub_s32(key, shift);
        Some(k.sub_s32(place, right))
    }

    /// One past the last query that sees a key, whether there are so many or not; `None` where that is always the last.
    pub fn key_end(&self, k: &mut KernelBuilder, key: Reg<B32>) -> Option<Reg<B32>> {
        let (Some(shift), Some(left)) = (self.shift, self.left) else { return None };
        let place = k.sub_s32(key, shift);
        let last = k.add_s32(place, left);
        Some(k.add_s32(last, 1))
    }

    /// The keys that a block's rows see, given the rows per block.
    pub fn key_range(&self, k: &mut KernelBuilder, block: &Rows, rows: u32) -> KeyRange {
        k.section("work: which keys these rows see");
        let past = k.add_s32(block.first_row, rows as i32);
        let past = k.min_s32(past, block.len_q);
        let last_row = k.sub_s32(past, 1);
        let end = self.row_end(k, last_row);
        let full_end = self.row_end(k, block.first_row);
        let begin = self.row_begin(k, block.first_row).unwrap_or_else(|| k.mov_b32(0));
        let full_begin = self.row_begin(k, last_row).unwrap_or(begin);
        KeyRange { begin, end, full_begin, full_end: k.max_s32(full_end, 0) }
    }
}
