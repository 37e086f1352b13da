//! A step of decoding before attention: new keys and values go into the cache, and queries and new keys are turned by their
//! positions.
//!
//! One launch does all of it, for a dense, a packed or a paged cache: the first blocks turn queries, the next ones write keys
//! and values, and the last ones write down how many keys each sequence has then, which attention reads. A thread has 32 bytes
//! of a row: two pieces of 16 bytes that are turned together, or two that lie side by side. Lengths, starts, tables and
//! positions are read here, so that a captured launch runs on other ones.
//!
//! A product of two 16-bit floats is exact in f32, so a turned number is rounded once to f32, and once to its type.
//!
//! What goes into a cache of E4M3 stays f32 until it is divided by its descale, and is then rounded to the nearest code, or
//! to the largest. A division, and not a product with the reciprocal, is what all engines can do with the same bits.

use flashcore_ptx::{
    B32, B64, F32, GlobalPtr, GridDep, KernelBuilder, ParamHandle, Pred, Reg, Target, TensorMap,
    kernel_params,
};

use crate::{
    Args, Blocks, Family, Geometry, Map, Operand, Packed, ScheduleError, Spec, TensorArg,
    family::schedule,
    parts::{
        fragment::{pack, pack_e4m3, unpack},
        params::{BlockDescaleParams, DescaleParams, address},
    },
};

/// Bytes that are loaded and stored at once.
const PIECE: u32 = 16;

/// Elements of a piece.
const ELEMENTS: u32 = 8;

kernel_params! {
    /// What a launch is given. Strides are in bytes; what a schedule or a spec does not have is not read.
    pub struct AppendParams {
        /// How many keys each sequence has before.
        lengths: GlobalPtr,
        /// Where to write how many it has afterwards.
        lengths_after: GlobalPtr,
        /// Where the new keys of each sequence begin.
        new_starts: GlobalPtr,
        /// Where each sequence's keys begin.
        k_starts: GlobalPtr,
        /// The pages of each sequence.
        pages: GlobalPtr,
        /// Where each sequence's queries begin.
        q_starts: GlobalPtr,
        /// At which position each sequence begins, if that is not its length.
        positions: GlobalPtr,
        /// The cosines, a row for each position.
        cos: GlobalPtr,
        /// The sines.
        sin: GlobalPtr,
        /// The new keys.
        new_k: GlobalPtr,
        /// From one batch entry of the new keys to the next.
        new_k_batch: u64,
        /// From one head of the new keys to the next.
        new_k_head: u64,
        /// From one row of the new keys to the next.
        new_k_row: u64,
        /// The new values.
        new_v: GlobalPtr,
        /// From one batch entry of the new values to the next.
        new_v_batch: u64,
        /// From one head of the new values to the next.
        new_v_head: u64,
        /// From one row of the new values to the next.
        new_v_row: u64,
        /// The cache of keys.
        k: GlobalPtr,
        /// From one batch entry of the cache of keys to the next.
        k_batch: u64,
        /// From one head of the cache of keys to the next.
        k_head: u64,
        /// From one row of the cache of keys to the next.
        k_row: u64,
        /// The cache of values.
        v: GlobalPtr,
        /// From one batch entry of the cache of values to the next.
        v_batch: u64,
        /// From one head of the cache of values to the next.
        v_head: u64,
        /// From one row of the cache of values to the next.
        v_row: u64,
        /// The queries.
        q: GlobalPtr,
        /// From one batch entry of the queries to the next.
        q_batch: u64,
        /// From one head of the queries to the next.
        q_head: u64,
        /// From one row of the queries to the next.
        q_row: u64,
        /// Where they go once they are turned.
        turned: GlobalPtr,
        /// From one batch entry of the turned queries to the next.
        turned_batch: u64,
        /// From one head of the turned queries to the next.
        turned_head: u64,
        /// From one row of the turned queries to the next.
        turned_row: u64,
        /// From one row of cosines to the next.
        cos_row: u64,
        /// From one row of sines to the next.
        sin_row: u64,
        /// From the pages of one sequence to those of the next.
        pages_row: u64,
        /// Sequences.
        sequences: u32,
        /// Kv heads.
        heads_kv: u32,
        /// Query heads, as attention has them.
        heads_q: u32,
        /// Rows of new keys, over all sequences.
        new_rows: u32,
        /// Rows of queries, over all sequences.
        q_rows: u32,
        /// New keys of a sequence where all have as many.
        new_keys: u32,
        /// Queries of a sequence where all have as many.
        queries: u32,
        /// The most keys that a sequence has room for.
        room: u32,
        /// Rows of a tensor of packed keys, or pages of the pool.
        entries: u32,
        /// The last position of the tables.
        last: u32,
        /// Blocks that turn queries.
        q_blocks: u32,
        /// Blocks that turn queries or write keys and values.
        row_blocks: u32,
    }
}

/// A tensor's address and strides.
type Tensor = (ParamHandle<AppendParams, GlobalPtr>, [ParamHandle<AppendParams, u64>; 3]);

/// The address of an array with a number for each sequence.
type Array = ParamHandle<AppendParams, GlobalPtr>;

/// The tensors, as the kernel is given them.
macro_rules! tensors {
    ($($name:ident: $base:ident $batch:ident $head:ident $row:ident;)*) => {
        $(const $name: Tensor =
            (AppendParams::$base, [AppendParams::$batch, AppendParams::$head, AppendParams::$row]);)*
    };
}

tensors! {
    NEW_K: new_k new_k_batch new_k_head new_k_row;
    NEW_V: new_v new_v_batch new_v_head new_v_row;
    CACHE_K: k k_batch k_head k_row;
    CACHE_V: v v_batch v_head v_row;
    QUERIES: q q_batch q_head q_row;
    TURNED: turned turned_batch turned_head turned_row;
}

schedule! {
    /// The knobs: what is turned, and how the new keys lie.
    pub struct Schedule {
        /// The first elements of a row, which are turned: a multiple of 16. Without it queries are left alone.
        pub rotary: Option<u32> = None,
        /// Whether neighbours are a pair, rather than elements half of what is turned apart.
        pub interleaved: bool = false,
        /// Whether positions are given, rather than taken from the lengths.
        pub positions: bool = false,
        /// Whether the new keys of sequences lie one behind the other.
        pub packed: bool = false,
        /// Threads per block.
        pub threads: u32 = 128,
    }
}

/// How many threads a row has.
fn threads_of(width: u32, turned: u32) -> u32 {
    turned / (2 * ELEMENTS) + (width - turned).div_ceil(2 * ELEMENTS)
}

impl Schedule {
    fn turned(self) -> u32 {
        self.rotary.unwrap_or(0)
    }

    /// Threads of a key and a value.
    fn threads_of_pair(self, spec: &Spec) -> [u32; 2] {
        [threads_of(spec.head_dim, self.turned()), threads_of(spec.head_dim_v, 0)]
    }

    /// Blocks that turn queries, those and the ones that write keys and values, and all, for so many sequences and so many
    /// rows of queries and of new keys over all heads.
    fn blocks(self, spec: &Spec, sequences: u64, [queries, new_keys]: [u64; 2]) -> [u64; 3] {
        let blocks = |threads: u64| threads.div_ceil(u64::from(self.threads));
        let of_query = self.rotary.map_or(0, |turned| threads_of(spec.head_dim, turned));
        let of_new = self.threads_of_pair(spec).into_iter().sum::<u32>();
        let of_queries = blocks(queries * u64::from(of_query));
        let of_rows = of_queries + blocks(new_keys * u64::from(of_new));
        [of_queries, of_rows, of_rows + blocks(sequences)]
    }

    /// How many blocks a launch has, for so many sequences and so many rows of queries and of new keys over all heads, if a
    /// grid can have as many.
    pub fn grid(self, spec: &Spec, sequences: u64, rows: [u64; 2]) -> Result<u32, ScheduleError> {
        let blocks = if sequences == 0 { 0 } else { self.blocks(spec, sequences, rows)[2] };
        // Threads are counted in 32 bits.
        u32::try_from(blocks * u64::from(self.threads)).map_err(|_| ScheduleError::Malformed {
            reason: format!("{blocks} blocks to append and to turn: up to 2^32 threads are possible"),
        })?;
        Ok(blocks as u32)
    }
}

impl Family for Schedule {
    const PROGRAMMATIC: bool = true;

    fn check(self, spec: &Spec, target: Target) -> Result<(), ScheduleError> {
        let refuse = |reason: String| Err(ScheduleError::Malformed { reason });
        if let Some(turned) = self.rotary
            && (turned == 0 || !turned.is_multiple_of(16) || turned > spec.head_dim)
        {
            return refuse(format!("rotary={turned}: possible are multiples of 16 up to the head dim"));
        }
        if self.rotary.is_none() && (self.interleaved || self.positions) {
            return refuse(
                "interleaved pairs and positions are for what is turned: add rotary=64, say".into(),
            );
        }
        if !self.threads.is_multiple_of(32) || !(32..=1024).contains(&self.threads) {
            return refuse(format!("{} threads: possible are multiples of 32 up to 1024", self.threads));
        }
        if !spec.key_lengths {
            return refuse("an append needs key lengths, which say where new keys go".into());
        }
        if spec.kv.is_some() && target == Target::Sm80 {
            return refuse("e4m3 needs sm_89 or later".into());
        }
        Ok(())
    }

    /// How many blocks there are depends on queries and on new keys: see [`Schedule::grid`].
    fn geometry(self, _: &Spec) -> Geometry {
        Geometry { rows: 1, threads: self.threads, shared_bytes: 0, blocks: Blocks::KeyRow }
    }

    fn emit(self, spec: &Spec, target: Target) -> KernelBuilder {
        let mut k = KernelBuilder::new("flashcore_append", target).params::<AppendParams>();
        if spec.kv.is_some() {
            k = k.more_params::<DescaleParams>();
        }
        if spec.descale_keys.is_some() {
            k = k.more_params::<BlockDescaleParams>();
        }
        let mut k = k.threads(self.threads);
        self.body(&mut k, spec);
        k
    }

    fn bind<E>(
        self,
        spec: &Spec,
        args: &Args,
        _: &mut dyn FnMut(&Map) -> Result<TensorMap, E>,
        packed: &mut Packed,
    ) -> Result<(), E> {
        packed.push(&self.params(spec, args));
        if spec.kv.is_some() {
            packed.extend(&DescaleParams::bind(args));
        }
        if spec.descale_keys.is_some() {
            packed.extend(&BlockDescaleParams::bind(args));
        }
        Ok(())
    }
}

impl Schedule {
    fn params(self, spec: &Spec, args: &Args) -> AppendParams {
        let pointer = |operand| args.tensor(operand).pointer();
        let of = |operand| *args.tensor(operand);
        let [new_k, new_v, k, v] = [Operand::NewK, Operand::NewV, Operand::K, Operand::V].map(of);
        let (q, turned) = (of(Operand::Q), of(Operand::TurnedQ));
        let heads = |tensor: &TensorArg| tensor.shape[1] as u32;
        let rows = |tensor: &TensorArg| (tensor.shape[0] * tensor.shape[2]) as u32;
        let of_all = [&q, &new_k].map(|tensor| u64::from(heads(tensor)) * u64::from(rows(tensor)));
        let [q_blocks, row_blocks, _] =
            self.blocks(spec, u64::from(args.sequences), of_all).map(|blocks| blocks as u32);
        AppendParams {
            lengths: pointer(Operand::KeyLengths),
            lengths_after: pointer(Operand::LengthsAfter),
            new_starts: pointer(Operand::NewStarts),
            k_starts: pointer(Operand::KStarts),
            pages: pointer(Operand::Pages),
            q_starts: pointer(Operand::QStarts),
            positions: pointer(Operand::Positions),
            cos: pointer(Operand::Cos),
            sin: pointer(Operand::Sin),
            new_k: new_k.pointer(),
            new_k_batch: new_k.strides[0],
            new_k_head: new_k.strides[1],
            new_k_row: new_k.strides[2],
            new_v: new_v.pointer(),
            new_v_batch: new_v.strides[0],
            new_v_head: new_v.strides[1],
            new_v_row: new_v.strides[2],
            k: k.pointer(),
            k_batch: k.strides[0],
            k_head: k.strides[1],
            k_row: k.strides[2],
            v: v.pointer(),
            v_batch: v.strides[0],
            v_head: v.strides[1],
            v_row: v.strides[2],
            q: q.pointer(),
            q_batch: q.strides[0],
            q_head: q.strides[1],
            q_row: q.strides[2],
            turned: turned.pointer(),
            turned_batch: turned.strides[0],
            turned_head: turned.strides[1],
            turned_row: turned.strides[2],
            cos_row: of(Operand::Cos).strides[2],
            sin_row: of(Operand::Sin).strides[2],
            pages_row: of(Operand::Pages).strides[0],
            sequences: args.sequences,
            heads_kv: heads(&k),
            heads_q: heads(&q),
            new_rows: rows(&new_k),
            q_rows: rows(&q),
            new_keys: new_k.shape[2] as u32,
            queries: q.shape[2] as u32,
            room: args.longest[1],
            entries: if spec.page.is_some() { k.shape[0] } else { k.shape[2] } as u32,
            last: (of(Operand::Cos).shape[2] as u32).saturating_sub(1),
            q_blocks,
            row_blocks,
        }
    }

    fn body(self, k: &mut KernelBuilder, spec: &Spec) {
        if k.target() >= Target::Sm90 {
            k.comment(
                "the next launch may set itself up beside this one, as this one does beside the one before",
            );
            k.griddepcontrol(GridDep::LaunchDependents);
            k.griddepcontrol(GridDep::Wait);
        }
        let step = Step { spec: *spec, schedule: self };
        let (block, row_blocks) = (k.ctaid_x(), k.param(AppendParams::row_blocks));
        let of_rows = k.setp_lt_u32(block, row_blocks);
        let behind_rows = k.sub_u32(block, row_blocks);
        let rows = |k: &mut KernelBuilder| {
            if self.rotary.is_none() {
                return step.append(k, block);
            }
            let q_blocks = k.param(AppendParams::q_blocks);
            let of_queries = k.setp_lt_u32(block, q_blocks);
            let behind = k.sub_u32(block, q_blocks);
            k.if_else(of_queries, |k| step.turn_queries(k, block), |k| step.append(k, behind));
        };
        k.if_else(of_rows, rows, |k| step.lengths(k, behind_rows));
    }
}

/// What is to be done.
struct Step {
    spec: Spec,
    schedule: Schedule,
}

/// A row of a tensor: entry, head and row.
type Row = [Reg<B32>; 3];

/// A row of a sequence.
struct Own {
    sequence: Reg<B32>,
    /// Its number in the sequence.
    row: Reg<B32>,
    /// Where it is in the tensor.
    place: Row,
    /// Whether it is one of the sequence, where that is not known from the row's number.
    there: Option<Reg<Pred>>,
}

impl Step {
    /// A thread's part of the rows of all heads: which of the threads of a row it is, the head and the row.
    fn share(&self, k: &mut KernelBuilder, block: Reg<B32>, threads: u32, heads: Reg<B32>) -> [Reg<B32>; 3] {
        let tid = k.tid_x();
        let item = k.mad_lo_u32(block, self.schedule.threads, tid);
        let (rest, mine) = (k.div_u32(item, threads), k.rem_u32(item, threads));
        [mine, k.rem_u32(rest, heads), k.div_u32(rest, heads)]
    }

    /// The position of a sequence's first new key and query.
    fn first(&self, k: &mut KernelBuilder, sequence: Reg<B32>, length: Reg<B32>) -> Reg<B32> {
        if self.schedule.positions { number(k, AppendParams::positions, sequence) } else { length }
    }

    fn turn_queries(&self, k: &mut KernelBuilder, block: Reg<B32>) {
        k.section("queries");
        let (heads, rows) = (k.param(AppendParams::heads_q), k.param(AppendParams::q_rows));
        let threads = threads_of(self.spec.head_dim, self.schedule.turned());
        let [mine, head, row] = self.share(k, block, threads, heads);
        let exists = k.setp_lt_u32(row, rows);
        k.if_(exists, |k| {
            let starts = self.spec.packed_q.then_some(AppendParams::q_starts);
            // Rows of no sequence are copied too: tiles reach over them.
            let Own { sequence, row, place, .. } = own(k, [head, row], starts, AppendParams::queries);
            let length = length(k, sequence);
            let first = self.first(k, sequence, length);
            let position = if self.spec.is_masked() { k.add_u32(first, row) } else { first };
            let rows = [QUERIES, TURNED].map(|tensor| row_at(k, tensor, place));
            self.turn(k, rows, mine, position, None);
        });
    }

    fn lengths(&self, k: &mut KernelBuilder, block: Reg<B32>) {
        k.section("how many keys there are then");
        let (tid, sequences) = (k.tid_x(), k.param(AppendParams::sequences));
        let sequence = k.mad_lo_u32(block, self.schedule.threads, tid);
        let exists = k.setp_lt_u32(sequence, sequences);
        k.if_(exists, |k| {
            let new = if self.schedule.packed {
                let starts = k.param(AppendParams::new_starts);
                let at = k.mad_wide_u32(sequence, 4u32, starts);
                let (start, end): (Reg<B32>, Reg<B32>) = (k.ld_global(at), k.ld_global(at.at(4)));
                k.sub_u32(end, start)
            } else {
                k.param(AppendParams::new_keys)
            };
            let (length, room) = (length(k, sequence), k.param(AppendParams::room));
            let after = k.add_u32(length, new);
            let after = k.min_u32(after, room);
            let at = k.param(AppendParams::lengths_after);
            let at = k.mad_wide_u32(sequence, 4u32, at);
            k.st_global(at, after);
        });
    }

    fn append(&self, k: &mut KernelBuilder, block: Reg<B32>) {
        k.section("new keys and values");
        let [of_key, of_value] = self.schedule.threads_of_pair(&self.spec);
        let (heads, rows) = (k.param(AppendParams::heads_kv), k.param(AppendParams::new_rows));
        let [mine, head, row] = self.share(k, block, of_key + of_value, heads);
        let exists = k.setp_lt_u32(row, rows);
        k.if_(exists, |k| {
            let starts = self.schedule.packed.then_some(AppendParams::new_starts);
            let own = own(k, [head, row], starts, AppendParams::new_keys);
            let length = length(k, own.sequence);
            let key = k.add_u32(length, own.row);
            let room = k.param(AppendParams::room);
            let fits = k.setp_lt_u32(key, room);
            let fits = own.there.map_or(fits, |there| k.and_pred(there, fits));
            k.if_(fits, |k| {
                let (entry, row, there) = self.cache_place(k, own.sequence, key);
                let to = [entry, head, row];
                let write = |k: &mut KernelBuilder| {
                    let is_key = k.setp_lt_u32(mine, of_key);
                    let of_its_value = k.sub_u32(mine, of_key);
                    let keys = |k: &mut KernelBuilder| {
                        let rows = [row_at(k, NEW_K, own.place), row_at(k, CACHE_K, to)];
                        let first = self.first(k, own.sequence, length);
                        let position = k.add_u32(first, own.row);
                        let descale = self.descale(k, Operand::K, own.sequence, head, key);
                        self.turn(k, rows, mine, position, descale);
                    };
                    let values = |k: &mut KernelBuilder| {
                        let rows = [row_at(k, NEW_V, own.place), row_at(k, CACHE_V, to)];
                        let descale = self.descale(k, Operand::V, own.sequence, head, key);
                        self.copy(k, rows, of_its_value, [0, self.spec.head_dim_v], descale);
                    };
                    k.if_else(is_key, keys, values);
                };
                match there {
                    Some(there) => k.if_(there, write),
                    None => write(k),
                }
            });
        });
    }

    /// The entry and the row of the cache where a key of the sequence is, and whether the tensor has it, where that is not
    /// known from the key's number.
    fn cache_place(
        &self,
        k: &mut KernelBuilder,
        sequence: Reg<B32>,
        key: Reg<B32>,
    ) -> (Reg<B32>, Reg<B32>, Option<Reg<Pred>>) {
        let entries = k.param(AppendParams::entries);
        if let Some(page) = self.spec.page {
            let (index, row) = (k.div_u32(key, page), k.rem_u32(key, page));
            let (pages, to_next) = (k.param(AppendParams::pages), k.param(AppendParams::pages_row));
            let sequence = k.cvt_u64_u32(sequence);
            let pages = k.mad_lo_u64(sequence, to_next, pages);
            let at = k.mad_wide_u32(index, 4u32, pages);
            let page: Reg<B32> = k.ld_global(at);
            return (page, row, Some(k.setp_lt_u32(page, entries)));
        }
        if self.spec.packed_k {
            let start = number(k, AppendParams::k_starts, sequence);
            let row = k.add_u32(start, key);
            return (k.mov_b32(0u32), row, Some(k.setp_lt_u32(row, entries)));
        }
        (sequence, key, None)
    }

    /// The descale of a key's or a value's codes, if the cache has codes: 1 where none is given.
    fn descale(
        &self,
        k: &mut KernelBuilder,
        of: Operand,
        sequence: Reg<B32>,
        head: Reg<B32>,
        key: Reg<B32>,
    ) -> Option<Reg<F32>> {
        self.spec.kv?;
        Some(match self.spec.descale_keys {
            None => DescaleParams::read(k, of, sequence, head),
            Some(keys) => {
                let block = k.div_u32(key, keys);
                BlockDescaleParams::of(k, of, sequence, head).read_there(k, block)
            }
        })
    }

    /// Copies this thread's part of a row, turned for a position, and as codes where there is a descale.
    fn turn(
        &self,
        k: &mut KernelBuilder,
        [from, to]: [Reg<B64>; 2],
        mine: Reg<B32>,
        position: Reg<B32>,
        descale: Option<Reg<F32>>,
    ) {
        let (turned, width) = (self.schedule.turned(), self.spec.head_dim);
        let pairs = turned / (2 * ELEMENTS);
        let behind = |k: &mut KernelBuilder| {
            let mine = k.sub_u32(mine, pairs);
            self.copy(k, [from, to], mine, [turned, width], descale);
        };
        let turns = |k: &mut KernelBuilder| self.turn_pair(k, [from, to], mine, position, descale);
        match turned {
            0 => self.copy(k, [from, to], mine, [0, width], descale),
            _ if turned == width => turns(k),
            _ => {
                let is_turned = k.setp_lt_u32(mine, pairs);
                k.if_else(is_turned, turns, behind);
            }
        }
    }

    /// Turns two pieces: eight pairs, which eight cosines and sines are for.
    fn turn_pair(
        &self,
        k: &mut KernelBuilder,
        [from, to]: [Reg<B64>; 2],
        mine: Reg<B32>,
        position: Reg<B32>,
        descale: Option<Reg<F32>>,
    ) {
        let dtype = self.spec.dtype;
        let last = k.param(AppendParams::last);
        let position = k.min_u32(position, last);
        let position = k.cvt_u64_u32(position);
        let tables = [(AppendParams::cos, AppendParams::cos_row), (AppendParams::sin, AppendParams::sin_row)];
        let [cos, sin]: [[Reg<B32>; 4]; 2] = tables.map(|(table, row)| {
            let (table, row) = (k.param(table), k.param(row));
            let at = k.mad_lo_u64(position, row, table);
            let at = k.mad_wide_u32(mine, PIECE, at);
            k.ld_global_vec(at)
        });
        // The second piece lies beside the first one, or half of what is turned behind it.
        let (step, apart) =
            if self.schedule.interleaved { (2 * PIECE, PIECE) } else { (PIECE, self.schedule.turned()) };
        let from = k.mad_wide_u32(mine, step, from);
        let pieces: [[Reg<B32>; 4]; 2] = [k.ld_global_vec(from), k.ld_global_vec(from.at(apart as i32))];
        let words: [Reg<B32>; 8] = std::array::from_fn(|i| pieces[i / 4][i % 4]);
        let numbers = words.map(|word| unpack(k, dtype, word));
        let [cos, sin] = [cos, sin].map(|of| of.map(|word| unpack(k, dtype, word)));
        let mut turned = numbers;
        for pair in 0..8 {
            let ([a, b], [c, d]) = if self.schedule.interleaved {
                ([pair, 0], [pair, 1])
            } else {
                ([pair / 2, pair % 2], [4 + pair / 2, pair % 2])
            };
            let (x, y) = (numbers[a][b], numbers[c][d]);
            let [cos, sin] = [cos, sin].map(|of| of[pair / 2][pair % 2]);
            let ys = k.mul_f32(y, sin);
            let minus = k.neg_f32(ys);
            turned[a][b] = k.fma_f32(x, cos, minus);
            let xs = k.mul_f32(x, sin);
            turned[c][d] = k.fma_f32(y, cos, xs);
        }
        if let Some(descale) = descale {
            let to = k.mad_wide_u32(mine, step / 2, to);
            for (piece, at) in [0, apart / 2].into_iter().enumerate() {
                let pairs: [[Reg<F32>; 2]; 4] = std::array::from_fn(|i| turned[4 * piece + i]);
                store_codes(k, to, at, pairs, descale);
            }
            return;
        }
        let words = turned.map(|[low, high]| pack(k, dtype, low, high));
        let to = k.mad_wide_u32(mine, step, to);
        let piece = |first: usize| std::array::from_fn(|i| words[first + i]);
        k.st_global_vec::<B32, 4>(to, piece(0));
        k.st_global_vec::<B32, 4>(to.at(apart as i32), piece(4));
    }

    /// Copies a thread's two pieces of a row's elements from `first` up to `end`, of which the last may have one; as codes
    /// where there is a descale.
    fn copy(
        &self,
        k: &mut KernelBuilder,
        [from, to]: [Reg<B64>; 2],
        mine: Reg<B32>,
        [first, end]: [u32; 2],
        descale: Option<Reg<F32>>,
    ) {
        // A piece of codes is half as wide.
        let stored = if descale.is_some() { PIECE / 2 } else { PIECE };
        let [first, pieces] = [first, end - first].map(|elements| elements / ELEMENTS);
        let from = k.mad_wide_u32(mine, 2 * PIECE, from);
        let to = k.mad_wide_u32(mine, 2 * stored, to);
        let load = |k: &mut KernelBuilder, piece: u32| -> [Reg<B32>; 4] {
            k.ld_global_vec(from.at(((first + piece) * PIECE) as i32))
        };
        let store = |k: &mut KernelBuilder, piece: u32, words: [Reg<B32>; 4]| {
            let at = (first + piece) * stored;
            match descale {
                None => k.st_global_vec(to.at(at as i32), words),
                Some(descale) => {
                    let pairs = words.map(|word| unpack(k, self.spec.dtype, word));
                    store_codes(k, to, at, pairs, descale);
                }
            }
        };
        let one = load(k, 0);
        let second = |k: &mut KernelBuilder| {
            let other = load(k, 1);
            store(k, 1, other);
        };
        if pieces.is_multiple_of(2) {
            second(k);
        } else {
            let has_two = k.setp_lt_u32(mine, pieces / 2);
            k.if_(has_two, second);
        }
        store(k, 0, one);
    }
}

/// Stores a piece's numbers, divided by a descale, as e4m3.
fn store_codes(k: &mut KernelBuilder, to: Reg<B64>, at: u32, pairs: [[Reg<F32>; 2]; 4], descale: Reg<F32>) {
    let [a, b, c, d] = pairs.map(|pair| pair.map(|number| k.div_f32(number, descale)));
    let words = [[a, b], [c, d]].map(|[[a, b], [c, d]]| pack_e4m3(k, [a, b, c, d]));
    k.st_global_vec::<B32, 2>(to.at(at as i32), words);
}

/// Whose row that is: each sequence has as many, or starts say which rows are whose.
fn own(
    k: &mut KernelBuilder,
    [head, row]: [Reg<B32>; 2],
    starts: Option<Array>,
    each: ParamHandle<AppendParams, u32>,
) -> Own {
    let Some(starts) = starts else {
        let each = k.param(each);
        let (sequence, own) = (k.div_u32(row, each), k.rem_u32(row, each));
        return Own { sequence, row: own, place: [sequence, head, own], there: None };
    };
    k.comment("the last sequence that begins there or before");
    let sequences = k.param(AppendParams::sequences);
    let (sequence, past) = (k.mov_b32(0u32), k.mov_b32(sequences));
    k.loop_(|k, search| {
        let left = k.sub_u32(past, sequence);
        let found = k.setp_le_u32(left, 1u32);
        k.break_if(search, found);
        let half = k.shr_u32(left, 1u32);
        let middle = k.add_u32(sequence, half);
        let start = number(k, starts, middle);
        let before = k.setp_le_u32(start, row);
        k.when(before, |k| k.set(sequence, |k| k.mov_b32(middle)));
        k.when(!before, |k| k.set(past, |k| k.mov_b32(middle)));
    });
    let base = k.param(starts);
    let at = k.mad_wide_u32(sequence, 4u32, base);
    let (start, end): (Reg<B32>, Reg<B32>) = (k.ld_global(at), k.ld_global(at.at(4)));
    let (begun, ends) = (k.setp_le_u32(start, row), k.setp_lt_u32(row, end));
    let there = Some(k.and_pred(begun, ends));
    Own { sequence, row: k.sub_u32(row, start), place: [k.mov_b32(0u32), head, row], there }
}

/// How many keys a sequence has before.
fn length(k: &mut KernelBuilder, sequence: Reg<B32>) -> Reg<B32> {
    let (length, room) = (number(k, AppendParams::lengths, sequence), k.param(AppendParams::room));
    k.min_u32(length, room)
}

/// The address of a row of a tensor.
fn row_at(k: &mut KernelBuilder, (base, strides): Tensor, row: Row) -> Reg<B64> {
    address(k, base, &strides, &row)
}

/// A sequence's number of an array.
fn number(k: &mut KernelBuilder, array: Array, sequence: Reg<B32>) -> Reg<B32> {
    let array = k.param(array);
    let at = k.mad_wide_u32(sequence, 4u32, array);
    k.ld_global(at)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ElementType, Kernel, Schedule as Any};

    fn spec() -> Spec {
        Spec { key_lengths: true, head_dim_v: 40, ..Spec::new(ElementType::Bf16, 96) }
    }

    #[test]
    fn a_text_reads_back_and_what_cannot_be_turned_is_refused() {
        for (text, why) in [
            ("append:", None),
            ("append:rotary=64,interleaved=1,positions=1,packed=1,threads=256", None),
            ("append:rotary=96", None),
            ("append:rotary=8", Some("multiples of 16")),
            ("append:rotary=112", Some("up to the head dim")),
            ("append:interleaved=1", Some("rotary=64")),
            ("append:positions=1", Some("rotary=64")),
            ("append:threads=48", Some("multiples of 32")),
        ] {
            let schedule: Any = text.parse().unwrap();
            assert_eq!((schedule.to_string().as_str(), schedule.kernel()), (text, Kernel::Append));
            let checked = schedule.check(&spec(), Target::Sm80);
            match why {
                None => assert_eq!(checked, Ok(())),
                Some(why) => assert!(checked.unwrap_err().to_string().contains(why), "{text}"),
            }
        }
        let without = Spec { key_lengths: false, ..spec() };
        let schedule: Any = "append:".parse().unwrap();
        assert!(schedule.check(&without, Target::Sm80).is_err());
        let codes = Spec { kv: Some(ElementType::E4m3), ..spec() };
        let error = schedule.check(&codes, Target::Sm80).unwrap_err().to_string();
        assert!(error.contains("sm_89 or later"), "{error}");
        assert_eq!(schedule.check(&codes, Target::Sm89), Ok(()));
    }

    #[test]
    fn there_are_as_many_threads_as_pieces_need() {
        let schedule =
            |rotary| Schedule { rotary, interleaved: false, positions: false, packed: false, threads: 128 };
        // 96 elements are 12 pieces; of 40 values there are 5, which three threads have.
        assert_eq!(schedule(None).threads_of_pair(&spec()), [6, 3]);
        assert_eq!(schedule(Some(16)).threads_of_pair(&spec()), [1 + 5, 3]);
        assert_eq!(threads_of(24, 16), 2);
        // 5 sequences with 8 heads of 1 query and 2 heads of 1 key.
        assert_eq!(schedule(Some(96)).blocks(&spec(), 5, [40, 10]), [2, 3, 4]);
        assert_eq!(schedule(None).blocks(&spec(), 5, [40, 10]), [0, 1, 2]);
        assert_eq!(schedule(None).grid(&spec(), 129, [40, 0]), Ok(2));
        assert_eq!(schedule(None).grid(&spec(), 0, [40, 0]), Ok(0));
        assert!(schedule(Some(96)).grid(&spec(), 1, [1 << 30, 0]).is_err());
    }
}
