//! Makes E4M3 of 16-bit queries, keys and values, with the descales that attention takes: the largest magnitude of a kv
//! head over 448, and for queries that of all heads of a group.
//!
//! The first pass finds the largest magnitude of each chunk of rows; the last one reduces those of its head, and writes
//! codes. It takes the chunks in the opposite order, as the last ones read are still in the L2 cache. No result depends on
//! the order in which blocks run.
//!
//! Keys can be smoothed: the mean over all keys is subtracted from each, channel by channel. That adds the same number to
//! all scores of a query, so that the output does not change, and lse lacks scale · q · mean. The first pass then finds the
//! sum, the smallest and the largest number of each channel, and a small pass between makes of them the mean and the
//! largest magnitude that will be left.
//!
//! Queries and keys can be rotated: signs that look random, then a Walsh-Hadamard transform, divided by √head_dim. It
//! leaves dot products as they are, and spreads outliers over all channels.

mod params;

use flashcore_ptx::{
    B32, B64, F32, GridDep, KernelBuilder, Module, ParamHandle, Pred, Reg, Shared, SharedLayout, Target,
};

use self::params::{Common, OfK, OfQ, OfV, TensorParams};
use crate::{Args, ElementType, Operand, ScheduleError, parts::softmax::NEG_INF};

/// The largest number of e4m3.
pub const MOST: f32 = 448.0;

/// Threads of a block, but for the pass between.
const THREADS: u32 = 256;
/// Threads of a block of the pass between.
const MEAN_THREADS: u32 = 1024;
/// Elements that a thread has of a row.
const WIDTH: u32 = 8;
/// Rows that a thread has in flight.
const AT_ONCE: u32 = 8;
/// Chunks that a thread of the pass between has in flight.
const CHUNKS_AT_ONCE: u32 = 4;

/// What is to be quantised, and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Quantize {
    /// Of the elements: f16 or bf16.
    pub dtype: ElementType,
    /// Elements of a query and of a key: a multiple of 16 up to 256.
    pub head_dim: u32,
    /// Elements of a value, likewise.
    pub head_dim_v: u32,
    /// Whether there are queries. How many heads share a descale follows from the shape of k, which is then needed even
    /// where there are no keys to quantise.
    pub q: bool,
    /// Whether there are keys.
    pub k: bool,
    /// Whether there are values.
    pub v: bool,
    /// Whether the mean over the keys is subtracted from them.
    pub smooth: bool,
    /// Whether queries and keys are rotated, and the seed of the [`signs`]. The head dim must be a power of two.
    pub rotate: Option<u32>,
    /// Whether batch entries have key lengths of their own: rows of k and v behind them are neither read nor written.
    pub key_lengths: bool,
    /// Whether every row of the elements starts at a multiple of 16 bytes, and every row of the codes at a multiple of 8.
    pub aligned: bool,
    /// Rows per block.
    pub rows: u32,
}

/// One of the launches, in their order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Pass {
    /// Finds the largest magnitudes; of smoothed keys the sums and bounds of each channel.
    Scan,
    /// Makes the mean and the largest magnitude of smoothed keys.
    Mean,
    /// Writes codes and descales.
    Cast,
}

impl Pass {
    /// The name of its kernel.
    pub const fn name(self) -> &'static str {
        match self {
            Pass::Scan => "flashcore_quantize_scan",
            Pass::Mean => "flashcore_quantize_mean",
            Pass::Cast => "flashcore_quantize_cast",
        }
    }
}

/// One of the tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Which {
    Q,
    K,
    V,
}

impl Which {
    /// Its elements, its codes, and its descales.
    fn operands(self) -> (Operand, Operand, Operand) {
        match self {
            Which::Q => (Operand::Q, Operand::Q8, Operand::QDescale),
            Which::K => (Operand::K, Operand::K8, Operand::KDescale),
            Which::V => (Operand::V, Operand::V8, Operand::VDescale),
        }
    }
}

/// Which channels change their sign before the transform, given the seed.
pub fn signs(seed: u32, head_dim: u32) -> Vec<bool> {
    (0..head_dim)
        .map(|channel| {
            // The finaliser of MurmurHash3: every bit depends on all bits of the input.
            let mut word = seed.wrapping_mul(0x9e37_79b9).wrapping_add(channel);
            for (shift, factor) in [(16, 0x85eb_ca6b), (13, 0xc2b2_ae35)] {
                word = (word ^ (word >> shift)).wrapping_mul(factor);
            }
            (word ^ (word >> 16)) & 1 == 1
        })
        .collect()
}

impl Quantize {
    /// Queries, keys and values of one head dim, as they are.
    pub fn new(dtype: ElementType, head_dim: u32) -> Self {
        Self {
            dtype,
            head_dim,
            head_dim_v: head_dim,
            q: true,
            k: true,
            v: true,
            smooth: false,
            rotate: None,
            key_lengths: false,
            aligned: true,
            rows: 256,
        }
    }

    /// Its launches, in this order.
    pub fn passes(self) -> &'static [Pass] {
        if self.smooth { &[Pass::Scan, Pass::Mean, Pass::Cast] } else { &[Pass::Scan, Pass::Cast] }
    }

    /// Threads per block.
    pub fn threads(self, pass: Pass) -> u32 {
        if pass == Pass::Mean { MEAN_THREADS } else { THREADS }
    }

    /// The grid of a pass.
    pub fn grid(self, pass: Pass, args: &Args) -> [u32; 3] {
        let [batch, heads, ..] = args.tensor(Operand::K).shape;
        match pass {
            Pass::Mean => [(batch * heads) as u32, 1, 1],
            Pass::Scan | Pass::Cast => [self.blocks(args)[2], 1, 1],
        }
    }

    /// Whether kernels can be made of it.
    pub fn check(self, target: Target) -> Result<(), ScheduleError> {
        let refuse = |reason: String| Err(ScheduleError::Malformed { reason });
        let possible = |dim: u32| (16..=256).contains(&dim) && dim.is_multiple_of(16);
        if !possible(self.head_dim) || !possible(self.head_dim_v) {
            return Err(ScheduleError::HeadDim {
                head_dim: self.head_dim,
                head_dim_v: self.head_dim_v,
                possible: "multiples of 16 from 16 to 256",
            });
        }
        if !matches!(self.dtype, ElementType::F16 | ElementType::Bf16) {
            return refuse(format!("{:?} cannot be quantised: f16 and bf16 can", self.dtype));
        }
        if target == Target::Sm80 {
            return refuse("e4m3 needs sm_89 or later".into());
        }
        if self.tensors().next().is_none() || (self.smooth && !self.k) {
            return refuse("nothing to quantise: take q, k or v, and k if it is to be smoothed".into());
        }
        if self.rotate.is_some() && !self.head_dim.is_power_of_two() {
            return refuse(format!("head_dim {}: rotations need a power of two", self.head_dim));
        }
        if self.rows == 0 {
            return refuse("0 rows per block: take some, such as 256".into());
        }
        Ok(())
    }

    /// The kernel of a pass, as a module with one entry.
    pub fn emit(self, pass: Pass, target: Target) -> Result<Module, ScheduleError> {
        self.check(target)?;
        let memory = self.memory(pass);
        let mut k = KernelBuilder::new(pass.name(), target)
            .params::<Common>()
            .more_params::<OfQ>()
            .more_params::<OfK>()
            .more_params::<OfV>()
            .shared(memory.layout.clone())
            .threads(self.threads(pass));
        self.body(&mut k, pass, &memory);
        Ok(Module::new(target).with(k.finish()?))
    }

    /// Bytes of shared memory of a block.
    pub fn shared_bytes(self, pass: Pass) -> u32 {
        self.memory(pass).layout.bytes()
    }

    fn memory(self, pass: Pass) -> Memory {
        let mut layout = SharedLayout::new();
        // Three numbers for each channel that a thread has.
        let floats = match pass {
            Pass::Mean => 3 * MEAN_THREADS,
            Pass::Scan if self.smooth => 3 * WIDTH * THREADS,
            Pass::Scan | Pass::Cast => 0,
        };
        let channels = layout.alloc("channels", 4 * floats, 16);
        let reduced = layout.alloc("reduced", 4 * self.threads(pass) / 32, 4);
        Memory { layout, channels, reduced }
    }

    fn tensors(self) -> impl Iterator<Item = Which> {
        [(self.q, Which::Q), (self.k, Which::K), (self.v, Which::V)]
            .into_iter()
            .filter_map(|(there, which)| there.then_some(which))
    }

    fn smooths(self, which: Which) -> bool {
        self.smooth && which == Which::K
    }

    /// The seed of a tensor's rotation.
    fn rotates(self, which: Which) -> Option<u32> {
        self.rotate.filter(|_| which != Which::V)
    }

    fn columns(self, which: Which) -> u32 {
        if which == Which::V { self.head_dim_v } else { self.head_dim }
    }

    fn body(self, k: &mut KernelBuilder, pass: Pass, memory: &Memory) {
        if k.target() >= Target::Sm90 {
            k.comment(
                "the next launch may set itself up beside this one, as this one does beside the one before",
            );
            k.griddepcontrol(GridDep::LaunchDependents);
            k.griddepcontrol(GridDep::Wait);
        }
        if pass == Pass::Mean {
            return self.mean(k, memory);
        }
        let mut item = k.ctaid_x();
        if pass == Pass::Cast {
            // Blocks run in about the order of their numbers, and this pass goes the other way.
            let blocks = k.param(Common::blocks);
            let last = k.sub_u32(blocks, 1u32);
            item = k.sub_u32(last, item);
        }
        let (k_first, v_first) = (k.param(Common::k_first), k.param(Common::v_first));
        let (after_q, after_k) = (k.setp_ge_u32(item, k_first), k.setp_ge_u32(item, v_first));
        for which in self.tensors() {
            match which {
                Which::Q => k.if_(!after_q, |k| self.tensor::<OfQ>(k, pass, memory, which, item)),
                Which::K => {
                    let inside = k.sub_u32(item, k_first);
                    let mine = k.xor_pred(after_q, after_k);
                    k.if_(mine, |k| self.tensor::<OfK>(k, pass, memory, which, inside));
                }
                Which::V => {
                    let inside = k.sub_u32(item, v_first);
                    k.if_(after_k, |k| self.tensor::<OfV>(k, pass, memory, which, inside));
                }
            }
        }
    }

    /// One chunk of a tensor, given its number.
    fn tensor<P: TensorParams>(
        self,
        k: &mut KernelBuilder,
        pass: Pass,
        memory: &Memory,
        which: Which,
        item: Reg<B32>,
    ) {
        k.section(match which {
            Which::Q => "queries",
            Which::K => "keys",
            Which::V => "values",
        });
        let [rows, heads, _] = P::counts();
        let (rows, heads) = (k.param(rows), k.param(heads));
        let chunks = self.chunks_of(k, rows);
        let (all_heads, chunk) = (k.div_u32(item, chunks), k.rem_u32(item, chunks));
        let (batch, head) = (k.div_u32(all_heads, heads), k.rem_u32(all_heads, heads));
        let first = k.mul_lo_u32(chunk, self.rows);
        let mut end = rows;
        if self.key_lengths && which != Which::Q {
            let lengths = k.param(Common::key_lengths);
            let own = k.mad_wide_u32(batch, 4u32, lengths);
            let length = k.ld_global::<B32>(own);
            end = k.min_u32(rows, length);
        }
        let past = k.add_u32(first, self.rows);
        let end = k.min_u32(end, past);
        let chunk = Chunk { batch, head, heads, chunk, first, end };
        match pass {
            Pass::Cast => self.cast::<P>(k, memory, which, &chunk),
            _ => self.scan::<P>(k, memory, which, &chunk),
        }
    }

    /// Chunks per head.
    fn chunks_of(self, k: &mut KernelBuilder, rows: Reg<B32>) -> Reg<B32> {
        let up = k.add_u32(rows, self.rows - 1);
        k.div_u32(up, self.rows)
    }

    /// The first pass over a chunk.
    fn scan<P: TensorParams>(self, k: &mut KernelBuilder, memory: &Memory, which: Which, chunk: &Chunk) {
        let [_, _, parts] = P::counts();
        let reader = Reader::new::<P>(k, self, which, chunk);
        let rotation = self.rotates(which).map(|seed| Rotation::new(k, seed, self.head_dim));
        if self.smooths(which) {
            let channels = Channels::new(k);
            reader.each(k, self, |k, words, exists| {
                let x = self.unpack(k, words);
                channels.add(k, &x, exists);
                let y = rotation.as_ref().map_or(x, |rotation| rotation.turn(k, x));
                channels.bound(k, &y);
            });
            return channels.store(k, self, memory, &reader, chunk);
        }
        k.section("scan: the largest magnitude");
        let most = if let Some(rotation) = rotation {
            let most: [Reg<F32>; 4] = std::array::from_fn(|_| k.mov_f32(0.0));
            reader.each(k, self, |k, words, _| {
                let x = self.unpack(k, words);
                let y = rotation.turn(k, x);
                for (i, y) in y.into_iter().enumerate() {
                    let size = k.abs_f32(y);
                    k.set(most[i % 4], |k| k.max_f32(most[i % 4], size));
                }
            });
            most.into_iter().reduce(|a, b| k.max_f32(a, b)).expect("four")
        } else {
            // Pairs of magnitudes are compared at once.
            let most: [Reg<B32>; 4] = std::array::from_fn(|_| k.mov_b32(0u32));
            reader.each(k, self, |k, words, _| {
                for (word, most) in words.into_iter().zip(most) {
                    let size = k.and_b32(word, 0x7fff_7fff_u32);
                    k.set(most, |k| match self.dtype {
                        ElementType::F16 => k.max_f16x2(most, size),
                        _ => k.max_bf16x2(most, size),
                    });
                }
            });
            let all = self.unpack(k, most);
            all.into_iter().reduce(|a, b| k.max_f32(a, b)).expect("eight")
        };
        let most = reduce(k, memory, most, THREADS);
        k.section("scan: what this chunk came to");
        let parts = k.param(parts);
        let head = k.mad_lo_u32(chunk.batch, chunk.heads, chunk.head);
        let place = k.mad_lo_u32(head, parts, chunk.chunk);
        let amax = k.param(P::amax());
        let at = k.mad_wide_u32(place, 4u32, amax);
        let first = first_thread(k);
        k.when(first, |k| k.st_global(at, most));
    }

    /// The last pass over a chunk.
    fn cast<P: TensorParams>(self, k: &mut KernelBuilder, memory: &Memory, which: Which, chunk: &Chunk) {
        let [_, _, parts] = P::counts();
        k.section("cast: the largest magnitude of the head, or of its group");
        let parts = k.param(parts);
        let (group, kv_head) = if which == Which::Q {
            let group = k.param(Common::group);
            (group, k.div_u32(chunk.head, group))
        } else {
            (k.mov_b32(1u32), chunk.head)
        };
        let first_head = k.mul_lo_u32(kv_head, group);
        let of_batch = k.mad_lo_u32(chunk.batch, chunk.heads, first_head);
        let start = k.mul_lo_u32(of_batch, parts);
        let count = k.mul_lo_u32(group, parts);
        let amax = k.param(P::amax());
        let base = k.mad_wide_u32(start, 4u32, amax);
        let most = k.mov_f32(0.0);
        let tid = k.tid_x();
        k.for_s32(tid, count, THREADS as i32, |k, i, _| {
            let at = k.mad_wide_u32(i, 4u32, base);
            let part: Reg<F32> = k.ld_global(at);
            k.set(most, |k| k.max_f32(most, part));
        });
        let most = reduce(k, memory, most, THREADS);
        let none = k.setp_eq_f32(most, 0.0);
        let descale = k.mul_f32(most, 1.0 / f64::from(MOST));
        // Its inverse must be finite.
        let descale = k.max_f32(descale, f32::MIN_POSITIVE);
        let descale = k.selp_f32(1.0, descale, none);
        let inverse = k.rcp_f32(descale);

        k.section("cast: the descale, written by the first chunk of the head or group");
        let (base, strides) = P::descale();
        let at = address(k, base, &strides, &[chunk.batch, kv_head]);
        let leads = k.setp_eq_u32(chunk.head, first_head);
        let first_chunk = k.setp_eq_u32(chunk.chunk, 0u32);
        let writes = k.and_pred(leads, first_chunk);
        let first = first_thread(k);
        let writes = k.and_pred(writes, first);
        k.when(writes, |k| k.st_global(at, descale));

        let reader = Reader::new::<P>(k, self, which, chunk);
        let rotation = self.rotates(which).map(|seed| Rotation::new(k, seed, self.head_dim));
        let mean: Option<[Reg<F32>; 8]> = self.smooths(which).then(|| {
            let at = mean_address(k, chunk.batch, chunk.head);
            let at = k.mad_wide_u32(reader.column, 4u32, at);
            let ([a, b, c, d], [e, f, g, h]) = (k.ld_global_vec(at), k.ld_global_vec(at.at(16)));
            [a, b, c, d, e, f, g, h]
        });
        let (base, [to_batch, to_head, to_row]) = P::out();
        let out = address(k, base, &[to_batch, to_head], &[chunk.batch, chunk.head]);
        let to_row = k.param(to_row);
        k.section("cast: codes");
        reader.each_row(k, self, |k, words, row, exists| {
            let mut x = self.unpack(k, words);
            if let Some(mean) = mean {
                x = std::array::from_fn(|i| k.sub_f32(x[i], mean[i]));
            }
            if let Some(rotation) = &rotation {
                x = rotation.turn(k, x);
            }
            let x = x.map(|x| k.mul_f32(x, inverse));
            let pairs: [_; 4] =
                std::array::from_fn(|i| k.cvt_rn_satfinite_e4m3x2_f32(x[2 * i + 1], x[2 * i]));
            let codes = [k.pack_b32(pairs[0], pairs[1]), k.pack_b32(pairs[2], pairs[3])];
            let row = k.cvt_u64_u32(row);
            let at = k.mad_lo_u64(row, to_row, out);
            let column = k.cvt_u64_u32(reader.column);
            let at = k.add_u64(at, column);
            if self.aligned {
                k.when(exists, |k| k.st_global_vec(at, codes));
                return;
            }
            for byte in 0..8 {
                let code = k.shr_u32(codes[byte / 4], (8 * (byte % 4)) as u32);
                k.when(exists, |k| k.st_global_u8(at.at(byte as i32), code));
            }
        });
    }

    /// The pass between: one block per kv head. A thread has a channel of every so many chunks.
    fn mean(self, k: &mut KernelBuilder, memory: &Memory) {
        let columns = self.head_dim;
        let strands = MEAN_THREADS / columns;
        k.section("mean: a channel of some chunks");
        let [rows, heads, _] = OfK::counts();
        let (rows, heads) = (k.param(rows), k.param(heads));
        let item = k.ctaid_x();
        let (batch, head) = (k.div_u32(item, heads), k.rem_u32(item, heads));
        let keys = if self.key_lengths {
            let lengths = k.param(Common::key_lengths);
            let own = k.mad_wide_u32(batch, 4u32, lengths);
            let length = k.ld_global::<B32>(own);
            k.min_u32(rows, length)
        } else {
            rows
        };
        let chunks = self.chunks_of(k, rows);
        let tid = k.tid_x();
        let (strand, channel) = (k.div_u32(tid, columns), k.rem_u32(tid, columns));
        let works = k.setp_lt_u32(strand, strands);
        let partials = partial_address(k, columns, chunks, item);
        let partials = k.mad_wide_u32(channel, 4u32, partials);
        let totals = [k.mov_f32(0.0), k.mov_f32(f32::INFINITY), k.mov_f32(NEG_INF)];
        let first = k.selp_b32(strand, chunks, works);
        k.for_s32(first, chunks, (CHUNKS_AT_ONCE * strands) as i32, |k, chunk, _| {
            let read: Vec<[Reg<F32>; 3]> = (0..CHUNKS_AT_ONCE)
                .map(|i| {
                    let chunk = if i == 0 { chunk } else { k.add_u32(chunk, i * strands) };
                    let exists = k.setp_lt_u32(chunk, chunks);
                    let at = k.mad_wide_u32(chunk, 12 * columns, partials);
                    let read = [k.mov_f32(0.0), k.mov_f32(f32::INFINITY), k.mov_f32(NEG_INF)];
                    for (i, &read) in read.iter().enumerate() {
                        let at = at.at((4 * columns) as i32 * i as i32);
                        k.when(exists, |k| k.set(read, |k| k.ld_global(at)));
                    }
                    read
                })
                .collect();
            for read in read {
                merge(k, totals, read);
            }
        });
        k.section("mean: all strands, in their order");
        let base = k.shared_addr(memory.channels);
        let mine = k.mad_lo_u32(tid, 12u32, base);
        for (i, &total) in totals.iter().enumerate() {
            k.st_shared(mine.at(4 * i as i32), total);
        }
        k.bar_sync_all();
        let of_channel = k.mad_lo_u32(channel, 12u32, base);
        let all = [k.mov_f32(0.0), k.mov_f32(f32::INFINITY), k.mov_f32(NEG_INF)];
        for strand in 0..strands {
            let theirs: [Reg<F32>; 3] = std::array::from_fn(|i| {
                k.ld_shared(of_channel.at((12 * columns * strand) as i32 + 4 * i as i32))
            });
            merge(k, all, theirs);
        }
        let [sum, least, most] = all;
        let count = k.cvt_rn_f32_u32(keys);
        let mean = k.div_f32(sum, count);
        let none = k.setp_eq_u32(keys, 0u32);
        let mean = k.selp_f32(0.0, mean, none);
        let at = mean_address(k, batch, head);
        let at = k.mad_wide_u32(channel, 4u32, at);
        let writes = k.setp_lt_u32(tid, columns);
        k.when(writes, |k| k.st_global(at, mean));
        let turned = match self.rotate {
            None => mean,
            Some(seed) => self.turn_mean(k, seed, mean, channel, base),
        };
        let (above, below) = (k.sub_f32(most, turned), k.sub_f32(turned, least));
        let size = k.max_f32(above, below);
        // Without keys it is below 0.
        let size = k.max_f32(size, 0.0);
        let size = reduce(k, memory, size, MEAN_THREADS);
        let amax = k.param(OfK::amax());
        let at = k.mad_wide_u32(item, 4u32, amax);
        let first = first_thread(k);
        k.when(first, |k| k.st_global(at, size));
    }

    /// The mean, rotated: a channel per thread, as often as there are strands.
    fn turn_mean(
        self,
        k: &mut KernelBuilder,
        seed: u32,
        mean: Reg<F32>,
        channel: Reg<B32>,
        base: Reg<B32>,
    ) -> Reg<F32> {
        let factor = sign_factors(k, seed, self.head_dim, channel, 1)[0];
        let mut value = k.mul_f32(mean, factor);
        for distance in (0..self.head_dim.trailing_zeros()).map(|bit| 1 << bit) {
            let other = if distance < 32 {
                k.shfl_bfly(value, distance)
            } else {
                let tid = k.tid_x();
                let other = k.xor_b32(tid, distance);
                let (mine, theirs) = (k.mad_lo_u32(tid, 4u32, base), k.mad_lo_u32(other, 4u32, base));
                k.bar_sync_all();
                k.st_shared(mine, value);
                k.bar_sync_all();
                k.ld_shared(theirs)
            };
            let sign = butterfly_sign(k, channel, distance);
            value = k.fma_f32(value, sign, other);
        }
        value
    }

    /// Eight numbers of four words.
    fn unpack(self, k: &mut KernelBuilder, words: [Reg<B32>; 4]) -> [Reg<F32>; 8] {
        let pairs = words.map(|word| {
            if self.dtype == ElementType::F16 {
                return k.unpack_b32(word).map(|half| k.cvt_f32_f16(half));
            }
            let (low, high) = (k.shl_b32(word, 16u32), k.and_b32(word, 0xffff_0000_u32));
            [k.f32_from_bits(low), k.f32_from_bits(high)]
        });
        std::array::from_fn(|i| pairs[i / 2][i % 2])
    }
}

/// The largest number of all threads of a block, which all get.
fn reduce(k: &mut KernelBuilder, memory: &Memory, value: Reg<F32>, threads: u32) -> Reg<F32> {
    let most = [16u32, 8, 4, 2, 1].into_iter().fold(value, |most, distance| {
        let other = k.shfl_bfly(most, distance);
        k.max_f32(most, other)
    });
    let tid = k.tid_x();
    let (warp, lane) = (k.shr_u32(tid, 5u32), k.and_b32(tid, 31u32));
    let base = k.shared_addr(memory.reduced);
    let mine = k.mad_lo_u32(warp, 4u32, base);
    let first = k.setp_eq_u32(lane, 0u32);
    k.when(first, |k| k.st_shared(mine, most));
    k.bar_sync_all();
    let each = (0..threads / 32).map(|warp| k.ld_shared::<F32>(base.at(4 * warp as i32)));
    let each: Vec<Reg<F32>> = each.collect();
    each.into_iter().reduce(|a, b| k.max_f32(a, b)).expect("at least one warp")
}

/// A block's shared memory.
struct Memory {
    layout: SharedLayout,
    channels: Shared,
    /// One f32 per warp.
    reduced: Shared,
}

/// A block's rows.
struct Chunk {
    batch: Reg<B32>,
    head: Reg<B32>,
    /// Of the tensor.
    heads: Reg<B32>,
    chunk: Reg<B32>,
    first: Reg<B32>,
    /// One past the last of its rows that exists; below the first where none does.
    end: Reg<B32>,
}

/// What a thread reads of a chunk: eight columns of every so many rows.
struct Reader {
    /// Its first column.
    column: Reg<B32>,
    /// Its first row in the chunk; behind the last one for threads that have none.
    row: Reg<B32>,
    /// Rows that all threads together read at once.
    at_once: u32,
    columns: u32,
    first: Reg<B32>,
    end: Reg<B32>,
    /// Where its columns are, in row 0.
    base: Reg<B64>,
    to_row: Reg<B64>,
}

impl Reader {
    fn new<P: TensorParams>(k: &mut KernelBuilder, of: Quantize, which: Which, chunk: &Chunk) -> Self {
        let columns = of.columns(which);
        let threads = columns / WIDTH;
        let tid = k.tid_x();
        let (row, column) = (k.div_u32(tid, threads), k.rem_u32(tid, threads));
        let at_once = THREADS / threads;
        let works = k.setp_lt_u32(row, at_once);
        let row = k.selp_b32(row, of.rows, works);
        let column = k.mul_lo_u32(column, WIDTH);
        let (base, [to_batch, to_head, to_row]) = P::x();
        let base = address(k, base, &[to_batch, to_head], &[chunk.batch, chunk.head]);
        let base = k.mad_wide_u32(column, 2u32, base);
        let to_row = k.param(to_row);
        Self { column, row, at_once, columns, first: chunk.first, end: chunk.end, base, to_row }
    }

    /// Does something with the words of each of this thread's rows. All lanes come by equally often, some with the last row
    /// once more; the predicate says which have a row of their own.
    fn each(
        &self,
        k: &mut KernelBuilder,
        of: Quantize,
        mut does: impl FnMut(&mut KernelBuilder, [Reg<B32>; 4], Reg<Pred>),
    ) {
        self.each_row(k, of, |k, words, _, exists| does(k, words, exists));
    }

    /// The same with the row.
    fn each_row(
        &self,
        k: &mut KernelBuilder,
        of: Quantize,
        mut does: impl FnMut(&mut KernelBuilder, [Reg<B32>; 4], Reg<B32>, Reg<Pred>),
    ) {
        let last = k.sub_u32(self.end, 1u32);
        k.for_s32(self.first, self.end, (AT_ONCE * self.at_once) as i32, |k, start, _| {
            let mine = k.add_u32(start, self.row);
            let rows: Vec<_> = (0..AT_ONCE)
                .map(|i| {
                    let row = if i == 0 { mine } else { k.add_u32(mine, i * self.at_once) };
                    let exists = k.setp_lt_u32(row, self.end);
                    let row = k.min_u32(row, last);
                    (self.read(k, of, row), row, exists)
                })
                .collect();
            for (words, row, exists) in rows {
                does(k, words, row, exists);
            }
        });
    }

    fn read(&self, k: &mut KernelBuilder, of: Quantize, row: Reg<B32>) -> [Reg<B32>; 4] {
        let row = k.cvt_u64_u32(row);
        let at = k.mad_lo_u64(row, self.to_row, self.base);
        if of.aligned {
            return k.ld_global_vec(at);
        }
        let halves: [_; 8] = std::array::from_fn(|i| k.ld_global(at.at(2 * i as i32)));
        std::array::from_fn(|i| k.pack_b32(halves[2 * i], halves[2 * i + 1]))
    }
}

/// The sums and bounds of a thread's eight channels.
struct Channels {
    sum: [Reg<F32>; 8],
    least: [Reg<F32>; 8],
    most: [Reg<F32>; 8],
}

impl Channels {
    fn new(k: &mut KernelBuilder) -> Self {
        let mut eight = |value: f32| std::array::from_fn(|_| k.mov_f32(value));
        Self { sum: eight(0.0), least: eight(f32::INFINITY), most: eight(NEG_INF) }
    }

    /// Adds a row.
    fn add(&self, k: &mut KernelBuilder, x: &[Reg<F32>; 8], exists: Reg<Pred>) {
        for (&sum, &x) in self.sum.iter().zip(x) {
            k.when(exists, |k| k.set(sum, |k| k.add_f32(sum, x)));
        }
    }

    /// Widens the bounds to a row, which may have been seen before.
    fn bound(&self, k: &mut KernelBuilder, y: &[Reg<F32>; 8]) {
        for (i, &y) in y.iter().enumerate() {
            k.set(self.least[i], |k| k.min_f32(self.least[i], y));
            k.set(self.most[i], |k| k.max_f32(self.most[i], y));
        }
    }

    /// Adds up what the block's threads have of each channel, in the order of their rows, and stores it.
    fn store(&self, k: &mut KernelBuilder, of: Quantize, memory: &Memory, reader: &Reader, chunk: &Chunk) {
        k.section("scan: sums and bounds of the channels");
        let columns = reader.columns;
        let base = k.shared_addr(memory.channels);
        let row = k.mul_lo_u32(reader.row, columns);
        let place = k.add_u32(row, reader.column);
        let mine = k.mad_lo_u32(place, 4u32, base);
        let part = (4 * reader.at_once * columns) as i32;
        let works = k.setp_lt_u32(reader.row, reader.at_once);
        for (i, of) in [&self.sum, &self.least, &self.most].into_iter().enumerate() {
            for half in 0..2 {
                let values = std::array::from_fn::<_, 4, _>(|j| of[4 * half + j]);
                let at = mine.at(part * i as i32 + 16 * half as i32);
                k.when(works, |k| k.st_shared_vec(at, values));
            }
        }
        k.bar_sync_all();
        let tid = k.tid_x();
        let [rows, ..] = OfK::counts();
        let rows = k.param(rows);
        let chunks = of.chunks_of(k, rows);
        let item = k.mad_lo_u32(chunk.batch, chunk.heads, chunk.head);
        let out = partial_address(k, columns, chunks, item);
        let out = k.mad_wide_u32(chunk.chunk, 12 * columns, out);
        let channel = k.setp_lt_u32(tid, columns);
        k.if_(channel, |k| {
            let totals = [k.mov_f32(0.0), k.mov_f32(f32::INFINITY), k.mov_f32(NEG_INF)];
            let mine = k.mad_lo_u32(tid, 4u32, base);
            for row in 0..reader.at_once {
                let theirs: [Reg<F32>; 3] = std::array::from_fn(|i| {
                    k.ld_shared(mine.at(part * i as i32 + (4 * columns * row) as i32))
                });
                merge(k, totals, theirs);
            }
            let out = k.mad_wide_u32(tid, 4u32, out);
            for (i, total) in totals.into_iter().enumerate() {
                k.st_global(out.at((4 * columns) as i32 * i as i32), total);
            }
        });
    }
}

/// Adds sums and widens bounds.
fn merge(k: &mut KernelBuilder, into: [Reg<F32>; 3], from: [Reg<F32>; 3]) {
    k.set(into[0], |k| k.add_f32(into[0], from[0]));
    k.set(into[1], |k| k.min_f32(into[1], from[1]));
    k.set(into[2], |k| k.max_f32(into[2], from[2]));
}

/// Where the partial sums and bounds of a kv head are: for each chunk the sums, the least and the largest.
fn partial_address(k: &mut KernelBuilder, columns: u32, chunks: Reg<B32>, item: Reg<B32>) -> Reg<B64> {
    let base = k.param(Common::partials);
    let chunk = k.mul_lo_u32(item, chunks);
    k.mad_wide_u32(chunk, 12 * columns, base)
}

/// Where the mean of a kv head is.
fn mean_address(k: &mut KernelBuilder, batch: Reg<B32>, head: Reg<B32>) -> Reg<B64> {
    address(k, Common::mean, &[Common::mean_batch, Common::mean_head], &[batch, head])
}

fn first_thread(k: &mut KernelBuilder) -> Reg<Pred> {
    let tid = k.tid_x();
    k.setp_eq_u32(tid, 0u32)
}

/// An address in a tensor.
fn address<P: flashcore_ptx::KernelParams>(
    k: &mut KernelBuilder,
    base: ParamHandle<P, flashcore_ptx::GlobalPtr>,
    strides: &[ParamHandle<P, u64>],
    indices: &[Reg<B32>],
) -> Reg<B64> {
    let base = k.param(base);
    strides.iter().zip(indices).fold(base, |at, (&stride, &index)| {
        let (index, stride) = (k.cvt_u64_u32(index), k.param(stride));
        k.mad_lo_u64(index, stride, at)
    })
}

/// Turns rows around: a thread has eight channels, and its neighbours have the others.
struct Rotation {
    /// The signs of this thread's channels, over √head_dim.
    factors: Vec<Reg<F32>>,
    /// For each distance between lanes: 1 for the lower lane of a pair, −1 for the upper.
    signs: Vec<(u32, Reg<F32>)>,
}

impl Rotation {
    fn new(k: &mut KernelBuilder, seed: u32, head_dim: u32) -> Self {
        let threads = head_dim / WIDTH;
        let tid = k.tid_x();
        let lane = k.and_b32(tid, threads - 1);
        let column = k.mul_lo_u32(lane, WIDTH);
        let factors = sign_factors(k, seed, head_dim, column, WIDTH);
        let distances = (0..threads.trailing_zeros()).map(|bit| 1 << bit);
        let signs = distances.map(|distance| (distance, butterfly_sign(k, lane, distance))).collect();
        Self { factors, signs }
    }

    fn turn(&self, k: &mut KernelBuilder, x: [Reg<F32>; 8]) -> [Reg<F32>; 8] {
        let mut x: [Reg<F32>; 8] = std::array::from_fn(|i| k.mul_f32(x[i], self.factors[i]));
        for distance in [1, 2, 4] {
            x = std::array::from_fn(|i| {
                let other = x[i ^ distance];
                if i & distance == 0 { k.add_f32(x[i], other) } else { k.sub_f32(other, x[i]) }
            });
        }
        for &(distance, sign) in &self.signs {
            x = x.map(|x| {
                let other = k.shfl_bfly(x, distance);
                k.fma_f32(x, sign, other)
            });
        }
        x
    }
}

/// 1 for the lower of two that are `distance` apart, −1 for the upper.
fn butterfly_sign(k: &mut KernelBuilder, index: Reg<B32>, distance: u32) -> Reg<F32> {
    let bit = k.and_b32(index, distance);
    let lower = k.setp_eq_u32(bit, 0u32);
    k.selp_f32(1.0, -1.0, lower)
}

/// The signs of so many channels from one on, over √head_dim. That one is a multiple of their number.
fn sign_factors(
    k: &mut KernelBuilder,
    seed: u32,
    head_dim: u32,
    first: Reg<B32>,
    count: u32,
) -> Vec<Reg<F32>> {
    let words = signs(seed, head_dim)
        .chunks(32)
        .map(|signs| (0..).zip(signs).fold(0, |word, (bit, &sign)| word | u32::from(sign) << bit))
        .collect::<Vec<u32>>();
    let index = k.shr_u32(first, 5u32);
    let mut word = k.mov_b32(words[0]);
    for (i, &other) in (1..).zip(&words[1..]) {
        let this = k.setp_eq_u32(index, i as u32);
        word = k.selp_b32(other, word, this);
    }
    let inside = k.and_b32(first, 31u32);
    let bits = k.shr_u32(word, inside);
    let size = 1.0 / f64::from(head_dim).sqrt();
    (0..count)
        .map(|i| {
            let bit = k.bfe_u32(bits, i, 1u32);
            let turns = k.setp_ne_u32(bit, 0u32);
            k.selp_f32(-size, size, turns)
        })
        .collect()
}
