//! The forward kernels for what an inference engine has: packed sequences and keys in pages. On the simulator, against
//! attention in f64 on the same numbers.

use flashcore_kernels::{
    Args, ElementType, Kernel, Map, Operand, Packed, Schedule, Section, Spec, TensorArg, packed_tiles,
};
use flashcore_ptx::{
    Module, Op, Target,
    ptxas::{Ptxas, PtxasError},
};
use flashcore_sim::{
    AsyncMode, Buffer, Config, LaunchDims, LaunchReport, Sim, Swizzle, TensorElement, TensorMap,
};
use half::{bf16, f16};

/// How queries lie.
#[derive(Clone, Copy, PartialEq)]
enum Queries {
    /// As many of each sequence.
    Dense,
    Packed,
}

/// How keys and values lie.
#[derive(Clone, Copy, PartialEq)]
enum Keys {
    Packed,
    /// In pages of so many keys; in the order of tokens, or of heads.
    Paged(usize, Order),
}

#[derive(Clone, Copy, PartialEq)]
enum Order {
    /// (pages, keys of a page, heads, head dim).
    Tokens,
    /// (pages, heads, keys of a page, head dim).
    Heads,
    /// (pages, keys and values, keys of a page, heads, head dim).
    Both,
}

/// A problem: sequences of so many queries and keys.
#[derive(Clone)]
struct Case {
    sequences: Vec<(usize, usize)>,
    queries: Queries,
    keys: Keys,
    heads: usize,
    heads_kv: usize,
    dim: usize,
    dim_v: usize,
    /// How many keys before and after its own position a query sees.
    left: Option<i32>,
    right: Option<i32>,
    softcap: Option<f32>,
    dtype: ElementType,
    /// Sequences that are full of NaN. What comes of them does not matter.
    nan: Vec<usize>,
}

impl Case {
    fn packed(sequences: &[(usize, usize)], heads: usize, dim: usize) -> Self {
        Self {
            sequences: sequences.to_vec(),
            queries: Queries::Packed,
            keys: Keys::Packed,
            heads,
            heads_kv: heads,
            dim,
            dim_v: dim,
            left: None,
            right: None,
            softcap: None,
            dtype: ElementType::F16,
            nan: Vec::new(),
        }
    }

    /// Two query heads per key head, with so many queries each, and sequences of so many keys.
    fn paged(page: usize, len_q: usize, keys: &[usize], dim: usize) -> Self {
        let sequences: Vec<_> = keys.iter().map(|&keys| (len_q, keys)).collect();
        Self {
            queries: Queries::Dense,
            keys: Keys::Paged(page, Order::Tokens),
            heads_kv: 2,
            ..Self::packed(&sequences, 4, dim)
        }
    }

    fn causal(self) -> Self {
        Self { right: Some(0), ..self }
    }

    fn scale(&self) -> f32 {
        1.0 / (self.dim as f32).sqrt()
    }

    fn spec(&self) -> Spec {
        let page = match self.keys {
            Keys::Packed => None,
            Keys::Paged(page, _) => Some(page as u32),
        };
        Spec {
            head_dim_v: self.dim_v as u32,
            left: self.left.is_some(),
            right: self.right.is_some(),
            softcap: self.softcap.is_some(),
            scaled_scores: Spec::needs_scaled_scores(self.dtype, self.scale(), self.softcap),
            key_lengths: page.is_some(),
            packed_q: self.queries == Queries::Packed,
            packed_k: self.keys == Keys::Packed,
            page,
            grouped: self.heads != self.heads_kv,
            lse: true,
            ..Spec::new(self.dtype, self.dim as u32)
        }
    }

    fn bits(&self, x: f64) -> u16 {
        match self.dtype {
            ElementType::F16 => f16::from_f64(x).to_bits(),
            _ => bf16::from_f64(x).to_bits(),
        }
    }

    fn value(&self, bits: u16) -> f64 {
        match self.dtype {
            ElementType::F16 => f16::from_bits(bits).to_f64(),
            _ => bf16::from_bits(bits).to_f64(),
        }
    }

    /// The error of a rounding.
    fn unit(&self) -> f64 {
        if self.dtype == ElementType::F16 { 2f64.powi(-11) } else { 2f64.powi(-8) }
    }

    /// An element of q, k or v, given the sequence, the head, the row and the column.
    fn element(&self, of: usize, [sequence, head, row, column]: [usize; 4]) -> u16 {
        if self.nan.contains(&sequence) {
            return self.bits(f64::NAN);
        }
        let word = |i: usize| (i + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 20;
        let place = (((of * 64 + sequence) * 64 + head) * 8192 + row) * 512 + column;
        self.bits((word(word(place)) % 4001) as f64 / 1000.0 - 2.0)
    }

    /// The first row of each sequence of queries, or of keys, and the end of the last.
    fn starts(&self, len: impl Fn(&(usize, usize)) -> usize) -> Vec<usize> {
        let lens = self.sequences.iter().map(len);
        std::iter::once(0).chain(lens.scan(0, |at, len| (*at += len, Some(*at)).1)).collect()
    }
}

/// What attention is, row by row of a head of a sequence: outputs, the sums of p |v| beside which their errors count, and
/// lse.
type Row = (Vec<(f64, f64)>, f64);

fn truth(case: &Case, sequence: usize, head: usize, i: usize) -> Row {
    let Case { heads, heads_kv, dim, dim_v, .. } = *case;
    let (len_q, len_k) = case.sequences[sequence];
    let kv_head = head / (heads / heads_kv);
    let place = i as i64 + len_k as i64 - len_q as i64;
    let sees = |key: &usize| {
        case.right.is_none_or(|right| *key as i64 <= place + i64::from(right))
            && case.left.is_none_or(|left| *key as i64 >= place - i64::from(left))
    };
    let q: Vec<f64> = (0..dim).map(|d| case.value(case.element(0, [sequence, head, i, d]))).collect();
    let score = |key: usize| {
        let dot: f64 =
            (0..dim).map(|d| q[d] * case.value(case.element(1, [sequence, kv_head, key, d]))).sum();
        let score = f64::from(case.scale()) * dot;
        case.softcap.map_or(score, |cap| f64::from(cap) * (score / f64::from(cap)).tanh())
    };
    let seen: Vec<(usize, f64)> = (0..len_k).filter(sees).map(|key| (key, score(key))).collect();
    let max = seen.iter().fold(f64::NEG_INFINITY, |max, &(_, score)| max.max(score));
    let sum: f64 = seen.iter().map(|&(_, score)| (score - max).exp()).sum();
    let mut o = vec![(0.0, 0.0); dim_v];
    for &(key, score) in &seen {
        let p = (score - max).exp() / sum;
        for (d, (o, size)) in o.iter_mut().enumerate() {
            let v = case.value(case.element(2, [sequence, kv_head, key, d]));
            (*o, *size) = (*o + p * v, *size + p * v.abs());
        }
    }
    (o, if seen.is_empty() { f64::NEG_INFINITY } else { max + sum.ln() })
}

fn encode(map: &Map) -> Result<flashcore_ptx::TensorMap, String> {
    let element = if map.dtype == ElementType::F16 { TensorElement::F16 } else { TensorElement::Bf16 };
    let map = TensorMap::new(element, map.address, &map.dims, &map.strides, &map.box_dims);
    map.swizzled(Swizzle::B128).encode().map(flashcore_ptx::TensorMap)
}

fn bytes_of<T, const N: usize>(values: &[T], bytes: impl Fn(&T) -> [u8; N]) -> Vec<u8> {
    values.iter().flat_map(bytes).collect()
}

/// A tensor of 16-bit elements in a buffer, given the shape and the strides in elements.
fn tensor(address: u64, shape: [usize; 4], [batch, head, row]: [usize; 3], size: usize) -> TensorArg {
    TensorArg { address, shape, strides: [batch, head, row].map(|stride| (stride * size) as u64) }
}

/// Where the keys of a case are: for each sequence the pages of the pool, and the pages that there are.
fn pages(case: &Case, page: usize) -> (Vec<Vec<usize>>, usize) {
    let all: usize = case.sequences.iter().map(|&(_, keys)| keys.div_ceil(page)).sum();
    // Some pages are nobody's, and a sequence's lie anywhere: 7 has no divisor in common with the number.
    let pool = (all + 3).next_multiple_of(8);
    let mut next = 0;
    let mut take = || {
        next += 1;
        next * 7 % pool
    };
    let tables = case.sequences.iter().map(|&(_, keys)| (0..keys.div_ceil(page)).map(|_| take()).collect());
    (tables.collect(), pool)
}

/// What a run left.
struct Found {
    /// Of each sequence, head and query.
    o: Vec<Vec<f64>>,
    lse: Vec<f64>,
    report: LaunchReport,
}

/// A case in the memory of a simulator.
struct Memory {
    sim: Sim,
    args: Args,
    o: Buffer,
    lse: Buffer,
    /// Rows of o.
    rows: usize,
}

/// Rows of o and lse behind the last sequence, which nobody may write.
const SPARE: usize = 70;

/// What stands behind the entries of a page table that are read.
const GARBAGE: [i32; 3] = [i32::MAX, -5, 1];

fn upload(case: &Case, config: Config) -> Memory {
    let Case { heads, heads_kv, dim, dim_v, .. } = *case;
    let mut sim = Sim::new(config);
    let mut args = Args::default();
    (args.scale, args.softcap) = (case.scale(), case.softcap);
    (args.left, args.right) = (case.left.unwrap_or(0), case.right.unwrap_or(0));
    args.section = Section { heads: (heads / heads_kv) as u32, places: 0 };
    let mut put = |name: &str, bytes: &[u8]| sim.alloc_from(name, bytes).address;
    let words = |values: &[usize]| bytes_of(values, |&value| (value as i32).to_le_bytes());
    let list = |address: u64, len: usize| TensorArg { address, shape: [1, 1, 1, len], strides: [4; 3] };
    let batch = case.sequences.len();
    let longest =
        |len: fn(&(usize, usize)) -> usize| case.sequences.iter().map(len).max().unwrap_or(0) as u32;
    (args.sequences, args.longest) = (batch as u32, [longest(|it| it.0), longest(|it| it.1)]);
    let q_starts = case.starts(|&(queries, _)| queries);
    let rows = q_starts[batch];
    // Queries and outputs are (rows, heads, head dim); queries of dense sequences are rows of their own entry.
    let len_q = case.sequences[0].0;
    let of_queries = |address, rows: usize, columns: usize, size| match case.queries {
        Queries::Packed => tensor(address, [1, heads, rows, columns], [0, columns, heads * columns], size),
        Queries::Dense => {
            let strides = [len_q * heads * columns, columns, heads * columns];
            tensor(address, [batch, heads, len_q, columns], strides, size)
        }
    };
    let mut q = Vec::new();
    for (sequence, &(queries, _)) in case.sequences.iter().enumerate() {
        for (i, head) in (0..queries).flat_map(|i| (0..heads).map(move |head| (i, head))) {
            q.extend((0..dim).map(|d| case.element(0, [sequence, head, i, d])));
        }
    }
    // Nobody's queries.
    let spare = if case.queries == Queries::Packed { SPARE } else { 0 };
    q.extend(std::iter::repeat_n(case.bits(f64::NAN), spare * heads * dim));
    let bits = |bits: &u16| bits.to_le_bytes();
    args.set(Operand::Q, of_queries(put("q", &bytes_of(&q, bits)), rows + spare, dim, 2));
    if case.queries == Queries::Packed {
        args.set(Operand::QStarts, list(put("q starts", &words(&q_starts)), batch + 1));
    }
    match case.keys {
        Keys::Packed => {
            let k_starts = case.starts(|&(_, keys)| keys);
            args.set(Operand::KStarts, list(put("k starts", &words(&k_starts)), batch + 1));
            for (of, operand, columns) in [(1, Operand::K, dim), (2, Operand::V, dim_v)] {
                let mut all = Vec::new();
                for (sequence, &(_, keys)) in case.sequences.iter().enumerate() {
                    for (j, head) in (0..keys).flat_map(|j| (0..heads_kv).map(move |head| (j, head))) {
                        all.extend((0..columns).map(|d| case.element(of, [sequence, head, j, d])));
                    }
                }
                all.extend(std::iter::repeat_n(case.bits(f64::NAN), 5 * heads_kv * columns));
                let shape = [1, heads_kv, k_starts[batch] + 5, columns];
                let address = put("keys or values", &bytes_of(&all, bits));
                args.set(operand, tensor(address, shape, [0, columns, heads_kv * columns], 2));
            }
        }
        Keys::Paged(page, order) => {
            let (tables, pool) = pages(case, page);
            let most = tables.iter().map(Vec::len).max().unwrap_or(0) + 2;
            let mut entries = Vec::new();
            for table in &tables {
                entries.extend(table.iter().map(|&page| page as i32));
                entries.extend(GARBAGE.iter().cycle().take(most - table.len()));
            }
            let address = put("pages", &bytes_of(&entries, |entry| entry.to_le_bytes()));
            let table = TensorArg { address, shape: [batch, 1, 1, most], strides: [4 * most as u64, 4, 4] };
            args.set(Operand::Pages, table);
            let lengths: Vec<usize> = case.sequences.iter().map(|&(_, keys)| keys).collect();
            args.set(Operand::KeyLengths, list(put("key lengths", &words(&lengths)), batch));
            let mut shared = None;
            for (of, operand, columns) in [(1, Operand::K, dim), (2, Operand::V, dim_v)] {
                let per_page = heads_kv * page * columns;
                let (first, strides) = match order {
                    Order::Tokens => (0, [per_page, columns, heads_kv * columns]),
                    Order::Heads => (0, [per_page, page * columns, columns]),
                    Order::Both => ((of - 1) * per_page, [2 * per_page, columns, heads_kv * columns]),
                };
                let both = order == Order::Both;
                let len = pool * per_page * if both { 2 } else { 1 };
                let mut all: Vec<u16> = shared.take().unwrap_or(vec![case.bits(f64::NAN); len]);
                for (sequence, &(_, keys)) in case.sequences.iter().enumerate() {
                    for (j, head) in (0..keys).flat_map(|j| (0..heads_kv).map(move |head| (j, head))) {
                        let row = [tables[sequence][j / page], head, j % page];
                        let at = row.iter().zip(strides).map(|(at, stride)| at * stride).sum::<usize>();
                        for d in 0..columns {
                            all[first + at + d] = case.element(of, [sequence, head, j, d]);
                        }
                    }
                }
                if both && of == 1 {
                    shared = Some(all);
                    // It is put with the values.
                    args.set(operand, tensor(0, [pool, heads_kv, page, columns], strides, 2));
                    continue;
                }
                let address = put("keys or values", &bytes_of(&all, bits));
                if both {
                    let keys = *args.tensor(Operand::K);
                    args.set(Operand::K, TensorArg { address, ..keys });
                }
                let address = address + 2 * first as u64;
                args.set(operand, tensor(address, [pool, heads_kv, page, columns], strides, 2));
            }
        }
    }
    let o = sim.alloc("o", (rows + spare) * heads * dim_v * 2);
    let lse = sim.alloc("lse", heads * (rows + spare) * 4);
    args.set(Operand::O, of_queries(o.address, rows + spare, dim_v, 2));
    args.set(
        Operand::Lse,
        match case.queries {
            Queries::Packed => tensor(lse.address, [1, heads, rows + spare, 1], [0, rows + spare, 1], 4),
            Queries::Dense => tensor(lse.address, [batch, heads, len_q, 1], [heads * len_q, len_q, 1], 4),
        },
    );
    Memory { sim, args, o, lse, rows }
}

/// Runs a case on four multiprocessors.
fn run(case: &Case, schedule: &Schedule, module: &Module, config: Config) -> Found {
    launch(case, schedule, module, upload(case, config))
}

fn launch(case: &Case, schedule: &Schedule, module: &Module, memory: Memory) -> Found {
    let Memory { mut sim, mut args, o, lse, rows } = memory;
    let Case { heads, dim_v, .. } = *case;
    let spec = case.spec();
    let batch = case.sequences.len();
    let geometry = schedule.geometry(&spec);
    // What is launched does not depend on where packed sequences begin and end.
    let len = if case.queries == Queries::Packed { rows + SPARE } else { case.sequences[0].0 };
    args.section.places = args.section.heads * (len as u32).div_ceil(geometry.rows);
    let mut packed = Packed::default();
    schedule.bind(&spec, &args, &mut encode, &mut packed).unwrap();
    let (batch, len) = match schedule.kernel() {
        Kernel::Sm80Decode if spec.packed_q => {
            (1, geometry.rows * packed_tiles(geometry.rows, len as u32, batch as u32))
        }
        _ => (batch as u32, len as u32),
    };
    let dims = LaunchDims {
        grid: geometry.grid(batch, heads as u32, len, 4),
        block: [geometry.threads, 1, 1],
        cluster: None,
        dynamic_shared: Some(geometry.shared_bytes),
    };
    let report = sim.launch(module, &module.kernels[0].name, dims, packed.launch(0).0).unwrap();
    let (o_bytes, lse_bytes) = (sim.read(o), sim.read(lse));
    if report.is_clean() {
        // Packed sequences have rows behind them that are nobody's.
        let unwritten = |buffer| sim.unwritten(buffer).into_iter().map(|range| range.len()).sum::<usize>();
        let spare = if case.queries == Queries::Packed { SPARE } else { 0 };
        assert_eq!(unwritten(o), spare * heads * dim_v * 2, "o");
        assert_eq!(unwritten(lse), spare * heads * 4, "lse");
        let past = rows * heads * dim_v * 2;
        assert!(sim.unwritten(o).iter().all(|range| range.start == past), "o behind the last sequence");
    }
    let (o_of, lse_of) = (*args.tensor(Operand::O), *args.tensor(Operand::Lse));
    let starts = case.starts(|&(queries, _)| queries);
    let mut found = Found { o: Vec::new(), lse: Vec::new(), report };
    for (sequence, &(queries, _)) in case.sequences.iter().enumerate() {
        for (head, i) in (0..heads).flat_map(|head| (0..queries).map(move |i| (head, i))) {
            let at = |of: &TensorArg| {
                let (entry, row) =
                    if case.queries == Queries::Packed { (0, starts[sequence] + i) } else { (sequence, i) };
                [entry, head, row].iter().zip(of.strides).map(|(&at, stride)| at * stride as usize).sum()
            };
            let (o, lse): (usize, usize) = (at(&o_of), at(&lse_of));
            let bits = |d: usize| u16::from_le_bytes([o_bytes[o + 2 * d], o_bytes[o + 2 * d + 1]]);
            found.o.push((0..dim_v).map(|d| case.value(bits(d))).collect());
            let bytes = lse_bytes[lse..lse + 4].try_into().unwrap();
            found.lse.push(f64::from(f32::from_le_bytes(bytes)));
        }
    }
    found
}

fn schedule(warpgroups: u32, block_n: u32, rest: &str) -> Schedule {
    let rest = ["stages=2", "q_stages=1", "ctas=1", "split=1", "poly=0", "lazy=0", "pairs=0", "pingpong=0"]
        .into_iter()
        .filter(|knob| rest.split(',').all(|given| given.split('=').next() != knob.split('=').next()))
        .chain([rest])
        .collect::<Vec<_>>()
        .join(",");
    format!("sm90_fwd:warpgroups={warpgroups},block_n={block_n},{rest}").parse().unwrap()
}

/// A schedule of the kernel that Ampere and Ada have.
fn ampere(block_m: u32, block_n: u32, warps: u32, stages: u32, rest: &str) -> Schedule {
    format!("sm80_fwd:block_m={block_m},block_n={block_n},warps={warps},stages={stages},{rest}")
        .parse()
        .unwrap()
}

fn module(case: &Case, schedule: &Schedule) -> Module {
    let target = if schedule.kernel() == Kernel::Sm90Fwd { Target::Sm90a } else { Target::Sm80 };
    schedule.emit(&case.spec(), target).unwrap_or_else(|error| panic!("{schedule}: {error}"))
}

/// Requires that a case comes to what attention is, without races and the like.
#[track_caller]
fn check(case: &Case, schedule: Schedule) {
    let module = module(case, &schedule);
    for async_mode in [AsyncMode::Late, AsyncMode::Early] {
        let found = run(case, &schedule, &module, Config { async_mode, ..Config::default() });
        assert_eq!(found.report.findings, [], "{schedule}");
        if let Some(wrong) = difference(case, &found) {
            panic!("{schedule} {async_mode:?}: {wrong}");
        }
    }
}

/// Where what was found is not attention.
fn difference(case: &Case, found: &Found) -> Option<String> {
    let mut rows = found.o.iter().zip(&found.lse);
    for (sequence, &(queries, _)) in case.sequences.iter().enumerate() {
        for (head, i) in (0..case.heads).flat_map(|head| (0..queries).map(move |i| (head, i))) {
            let (o, &lse) = rows.next()?;
            if case.nan.contains(&sequence) {
                continue;
            }
            let (truth, truth_lse) = truth(case, sequence, head, i);
            let what = format!("sequence {sequence}, head {head}, query {i}");
            let close = (lse - truth_lse).abs() < 1e-4 * truth_lse.abs().max(1.0);
            if lse != truth_lse && !close {
                return Some(format!("{what}: lse {lse} is not {truth_lse}"));
            }
            for (d, (&o, (truth, size))) in o.iter().zip(truth).enumerate() {
                let close = (o - truth).abs() <= 4.0 * case.unit() * size;
                if !close {
                    return Some(format!("{what}, column {d}: {o} is not {truth}"));
                }
            }
        }
    }
    None
}

/// Few queries and few keys at a time; and the other ways of copying ahead.
const SMALL: &str = "q_in_regs=0,order=longest";
const IN_REGISTERS: &str = "q_in_regs=1,order=head";

const PERSISTENT: &str = "persistent=1";
const TURNS: &str = "persistent=1,pingpong=1,q_stages=2";

/// Very uneven ones, with empty ones at the ends and between.
const UNEVEN: [(usize, usize); 9] =
    [(0, 0), (1, 1), (200, 200), (0, 0), (3, 3), (64, 64), (129, 129), (2, 2), (0, 0)];

#[test]
fn packed_sequences_of_any_lengths_are_attention() {
    check(&Case::packed(&UNEVEN, 2, 64), schedule(2, 64, TURNS));
    check(&Case::packed(&UNEVEN, 2, 64).causal(), schedule(2, 64, TURNS));
    check(&Case::packed(&UNEVEN, 3, 64).causal(), schedule(1, 64, "persistent=1,ctas=2"));
    check(&Case::packed(&[(70, 70), (130, 130)], 1, 128).causal(), schedule(2, 128, TURNS));
    check(&Case::packed(&[(0, 0), (0, 0)], 2, 64), schedule(1, 64, PERSISTENT));
}

#[test]
fn packed_sequences_have_their_own_masks_groups_and_head_dims() {
    let more_keys = [(5, 90), (100, 40), (33, 0), (64, 128), (1, 250)];
    check(&Case::packed(&more_keys, 2, 64).causal(), schedule(2, 64, TURNS));
    let window = Case { left: Some(30), right: Some(7), ..Case::packed(&more_keys, 2, 64) };
    check(&window, schedule(2, 32, TURNS));
    let grouped = Case { heads_kv: 2, dtype: ElementType::Bf16, ..Case::packed(&UNEVEN, 6, 64).causal() };
    check(&grouped, schedule(3, 64, TURNS));
    let capped = Case { softcap: Some(5.0), dim_v: 40, ..Case::packed(&more_keys, 1, 72).causal() };
    check(&capped, schedule(1, 64, PERSISTENT));
    check(&Case::packed(&[(30, 61), (70, 100)], 1, 256).causal(), schedule(2, 64, "persistent=1,pingpong=1"));
}

#[test]
fn packed_sequences_are_attention_on_ampere() {
    for (block_m, warps, stages, rest) in
        [(64, 4, 1, SMALL), (64, 4, 2, IN_REGISTERS), (128, 4, 2, SMALL), (128, 8, 3, SMALL)]
    {
        check(&Case::packed(&UNEVEN, 2, 64), ampere(block_m, 32, warps, stages, rest));
        check(&Case::packed(&UNEVEN, 2, 64).causal(), ampere(block_m, 64, warps, stages, rest));
    }
    let more_keys = [(5, 90), (100, 40), (33, 0), (64, 128), (1, 250)];
    let window = Case { left: Some(30), right: Some(7), ..Case::packed(&more_keys, 2, 64) };
    check(&window, ampere(64, 32, 4, 2, SMALL));
    let grouped = Case { heads_kv: 2, dtype: ElementType::Bf16, ..Case::packed(&UNEVEN, 6, 64).causal() };
    check(&grouped, ampere(64, 48, 4, 3, SMALL));
    let capped = Case { softcap: Some(5.0), dim_v: 40, ..Case::packed(&more_keys, 1, 72).causal() };
    check(&capped, ampere(64, 64, 4, 1, IN_REGISTERS));
    check(&Case::packed(&[(30, 61), (70, 100)], 1, 256).causal(), ampere(64, 32, 4, 1, SMALL));
    check(&Case::packed(&[(0, 0), (0, 0)], 2, 64), ampere(64, 64, 4, 2, SMALL));
}

#[test]
fn packed_sequences_are_found_and_kept_apart_on_ampere() {
    let many: Vec<_> = (0..75).map(|i| (i * 7 % 11, i * 5 % 23)).collect();
    check(&Case::packed(&many, 2, 16), ampere(64, 32, 4, 2, SMALL));
    let longest_last: Vec<_> = (0..70).map(|i| (i, i)).collect();
    check(&Case::packed(&longest_last, 1, 16).causal(), ampere(64, 32, 4, 1, SMALL));
    // What neighbours hold does not matter.
    for (stages, causal) in [(1, true), (2, false), (3, true)] {
        let case = Case::packed(&[(70, 70), (30, 30), (64, 64), (100, 101), (9, 9)], 2, 64);
        let case = Case { nan: vec![0, 2, 4], ..case };
        check(&if causal { case.causal() } else { case }, ampere(64, 64, 4, stages, SMALL));
    }
    let dense = Case { queries: Queries::Dense, ..Case::packed(&[(40, 100), (40, 0), (40, 33)], 2, 64) };
    check(&dense, ampere(64, 64, 4, 2, SMALL));
    check(&Case { nan: vec![1, 2], ..dense.causal() }, ampere(128, 48, 8, 2, SMALL));
}

#[test]
fn keys_in_pages_of_any_size_are_attention_on_ampere() {
    let lens = [100, 1, 64, 0, 193];
    for page in [1, 7, 16, 48, 64, 100, 256] {
        for (block_m, block_n, warps, stages) in [(64, 32, 4, 1), (64, 64, 4, 2), (128, 48, 8, 3)] {
            let schedule = ampere(block_m, block_n, warps, stages, SMALL);
            check(&Case::paged(page, 3, &lens, 64), schedule);
            check(&Case::paged(page, 3, &lens, 64).causal(), schedule);
        }
    }
    for order in [Order::Tokens, Order::Heads, Order::Both] {
        let case = Case { keys: Keys::Paged(16, order), dim_v: 64, ..Case::paged(16, 70, &[90, 33], 64) };
        check(&case.causal(), ampere(64, 64, 4, 2, IN_REGISTERS));
    }
    // Keys and values whose rows are shared by different threads.
    for (dim, dim_v, page) in [(128, 64, 16), (40, 128, 64), (48, 40, 24), (256, 16, 16)] {
        let case = Case { dim_v, dtype: ElementType::Bf16, ..Case::paged(page, 1, &[130, 77, 0], dim) };
        check(&case, ampere(64, 32, 4, 1, SMALL));
    }
    let window = Case { left: Some(40), right: Some(0), ..Case::paged(24, 40, &[200, 50], 64) };
    check(&window, ampere(64, 32, 4, 2, SMALL));
}

#[test]
fn packed_queries_see_keys_in_pages_on_ampere() {
    for page in [16, 20, 64] {
        let sequences = [(1, 100), (40, 40), (0, 30), (130, 200), (5, 0)];
        let case = Case::packed(&sequences, 4, 64).causal();
        let case = Case { keys: Keys::Paged(page, Order::Tokens), heads_kv: 2, ..case };
        check(&case, ampere(64, 64, 4, 2, SMALL));
        check(&Case { nan: vec![0, 4], ..case }, ampere(128, 32, 8, 1, SMALL));
    }
}

/// A schedule of the kernel for few queries.
fn decoding(warps: u32, keys: u32, stages: u32) -> Schedule {
    format!("sm80_decode:warps={warps},keys={keys},stages={stages},parts=1").parse().unwrap()
}

#[test]
fn packed_sequences_are_attention_where_queries_are_few() {
    check(&Case::packed(&UNEVEN, 2, 64), decoding(4, 32, 2));
    check(&Case::packed(&UNEVEN, 2, 64).causal(), decoding(2, 16, 3));
    let more_keys = [(5, 90), (100, 40), (33, 0), (64, 128), (1, 250)];
    let window = Case { left: Some(30), right: Some(7), ..Case::packed(&more_keys, 2, 64) };
    check(&window, decoding(3, 16, 2));
    let grouped = Case { heads_kv: 2, dtype: ElementType::Bf16, ..Case::packed(&UNEVEN, 6, 128).causal() };
    check(&grouped, decoding(4, 16, 2));
    let capped = Case { softcap: Some(5.0), dim_v: 48, ..Case::packed(&more_keys, 1, 80).causal() };
    check(&capped, decoding(1, 32, 4));
    check(&Case { dim_v: 16, ..Case::packed(&[(30, 61), (70, 100)], 1, 256) }.causal(), decoding(2, 16, 2));
    check(&Case::packed(&[(0, 0), (0, 0)], 2, 64), decoding(4, 16, 2));
    let many: Vec<_> = (0..75).map(|i| (i * 7 % 11, i * 5 % 23)).collect();
    check(&Case::packed(&many, 2, 16), decoding(2, 32, 2));
    let case = Case::packed(&[(70, 70), (30, 30), (64, 64), (100, 101), (9, 9)], 2, 64);
    check(&Case { nan: vec![0, 2, 4], ..case.causal() }, decoding(4, 32, 2));
    let dense = Case { queries: Queries::Dense, ..Case::packed(&[(40, 100), (40, 0), (40, 33)], 2, 64) };
    check(&Case { nan: vec![1, 2], ..dense.causal() }, decoding(2, 16, 2));
}

#[test]
fn keys_in_pages_are_attention_where_queries_are_few() {
    for (page, keys) in [(16, 16), (32, 32), (48, 16), (64, 32), (256, 32)] {
        check(&Case::paged(page, 3, &[100, 1, 64, 0, 193], 64), decoding(2, keys, 3));
        check(&Case::paged(page, 20, &[100, 1, 64, 0, 193], 64).causal(), decoding(4, keys, 2));
    }
    for order in [Order::Tokens, Order::Heads, Order::Both] {
        let case = Case { keys: Keys::Paged(16, order), dim_v: 64, ..Case::paged(16, 7, &[90, 33], 64) };
        check(&case.causal(), decoding(2, 16, 2));
    }
    for (dim, dim_v) in [(128, 64), (48, 128), (80, 48), (256, 16), (192, 256)] {
        let case = Case { dim_v, dtype: ElementType::Bf16, ..Case::paged(16, 1, &[130, 77, 0], dim) };
        check(&case, decoding(2, 16, 2));
    }
    let sequences = [(1, 100), (40, 40), (0, 30), (13, 200), (5, 0)];
    let case = Case::packed(&sequences, 4, 64).causal();
    let case = Case { keys: Keys::Paged(16, Order::Tokens), heads_kv: 2, ..case };
    check(&Case { nan: vec![0, 4], ..case }, decoding(2, 16, 3));
}

#[test]
fn packed_keys_are_seen_by_queries_that_are_not_packed() {
    let case = Case { queries: Queries::Dense, ..Case::packed(&[(40, 100), (40, 0), (40, 33)], 2, 64) };
    check(&case, schedule(1, 64, "persistent=0,split=2"));
    check(&Case { nan: vec![1, 2], ..case.causal() }, schedule(1, 48, PERSISTENT));
}

#[test]
fn more_sequences_than_a_warp_has_lanes_are_all_found() {
    let many: Vec<_> = (0..75).map(|i| (i * 7 % 11, i * 5 % 23)).collect();
    check(&Case::packed(&many, 2, 16), schedule(1, 32, PERSISTENT));
    let longest_last: Vec<_> = (0..70).map(|i| (i, i)).collect();
    check(&Case::packed(&longest_last, 1, 16).causal(), schedule(1, 32, "persistent=1,q_stages=2"));
}

#[test]
fn what_the_neighbours_of_a_packed_sequence_hold_does_not_matter() {
    for (schedule, causal) in [
        (schedule(2, 64, TURNS), true),
        (schedule(1, 48, PERSISTENT), false),
        (schedule(2, 64, TURNS), false),
    ] {
        let case = Case::packed(&[(70, 70), (30, 30), (64, 64), (100, 101), (9, 9)], 2, 64);
        let case = Case { nan: vec![0, 2, 4], ..case };
        check(&if causal { case.causal() } else { case }, schedule);
    }
}

#[test]
fn keys_in_pages_of_every_size_are_attention() {
    let lens = [100, 1, 64, 0, 193];
    for page in [16, 32, 48, 64, 128, 256] {
        check(&Case::paged(page, 3, &lens, 64), schedule(1, 64, "persistent=0"));
        check(&Case::paged(page, 3, &lens, 64).causal(), schedule(1, 80, PERSISTENT));
    }
}

#[test]
fn keys_in_pages_are_read_by_every_kind_of_block() {
    let lens = [300, 77, 0, 128];
    for dim in [64, 128] {
        let case = |page| Case { dtype: ElementType::Bf16, ..Case::paged(page, 1, &lens, dim) };
        for page in [16, 64] {
            check(&case(page), schedule(1, 64, "persistent=0,stages=3"));
            check(&case(page), schedule(1, 32, "persistent=0,split=4"));
            check(&case(page), schedule(2, 32, "persistent=0,together=1,split=2"));
            check(&case(page), schedule(2, 32, "persistent=1,pingpong=1,q_stages=2"));
            check(&case(page), schedule(1, 64, "persistent=1,ctas=2"));
        }
    }
}

#[test]
fn pools_of_pages_lie_as_engines_have_them() {
    for order in [Order::Tokens, Order::Heads, Order::Both] {
        let case = Case { keys: Keys::Paged(16, order), dim_v: 64, ..Case::paged(16, 70, &[90, 33], 64) };
        check(&case.causal(), schedule(2, 64, TURNS));
    }
}

#[test]
fn packed_queries_see_keys_in_pages() {
    for page in [16, 64] {
        let sequences = [(1, 100), (40, 40), (0, 30), (130, 200), (5, 0)];
        let case = Case::packed(&sequences, 4, 64).causal();
        let case = Case { keys: Keys::Paged(page, Order::Tokens), heads_kv: 2, ..case };
        check(&case, schedule(2, 64, TURNS));
        check(&Case { nan: vec![0, 4], ..case }, schedule(1, 48, PERSISTENT));
    }
}

#[test]
fn a_page_that_does_not_exist_is_zeros_and_no_memory_is_read_for_it() {
    for schedule in
        [schedule(1, 64, "persistent=0"), ampere(64, 64, 4, 2, SMALL), ampere(64, 32, 4, 1, SMALL)]
    {
        no_memory_is_read_for_a_page_that_does_not_exist(16, &schedule);
    }
    no_memory_is_read_for_a_page_that_does_not_exist(64, &ampere(64, 64, 4, 2, SMALL));
}

fn no_memory_is_read_for_a_page_that_does_not_exist(page: usize, schedule: &Schedule) {
    let case = Case::paged(page, 1, &[64], 64);
    let module = module(&case, schedule);
    for wrong in [i32::MAX, i32::MIN, -1, 1 << 20, 8] {
        let mut memory = upload(&case, Config::default());
        let (table, count) = (memory.args.tensor(Operand::Pages).address, pages(&case, page).1);
        assert!(wrong < 0 || wrong as usize >= count);
        let entries: Vec<i32> = vec![wrong; 4];
        let buffer = memory.sim.alloc_from("wrong pages", &bytes_of(&entries, |entry| entry.to_le_bytes()));
        assert_ne!(buffer.address, table);
        let pages = *memory.args.tensor(Operand::Pages);
        memory.args.set(Operand::Pages, TensorArg { address: buffer.address, ..pages });
        let found = launch(&case, schedule, &module, memory);
        assert_eq!(found.report.findings, [], "{schedule}");
        assert!(found.o.iter().flatten().all(|&o| o == 0.0), "values of {wrong} are zeros");
        assert!(found.lse.iter().all(|lse| (lse - 64f64.ln()).abs() < 1e-5), "scores of {wrong} are zeros");
    }
}

#[test]
fn swapped_pages_and_a_length_off_by_one_are_found() {
    for schedule in [schedule(1, 64, "persistent=0"), ampere(64, 64, 4, 2, SMALL)] {
        wrong_tables_are_found(&schedule);
    }
}

fn wrong_tables_are_found(schedule: &Schedule) {
    let case = Case::paged(16, 1, &[100, 40], 64);
    let module = module(&case, schedule);
    let with = |tamper: &dyn Fn(&mut Case)| {
        let mut other = case.clone();
        tamper(&mut other);
        difference(&case, &run(&other, schedule, &module, Config::default()))
    };
    assert_eq!(with(&|_| ()), None);
    assert!(with(&|other| other.sequences.swap(0, 1)).is_some(), "sequences swapped");
    assert!(with(&|other| other.sequences[0].1 = 99).is_some(), "a key less");
    assert!(with(&|other| other.sequences[1].1 = 41).is_some(), "a key more");
}

#[test]
fn what_tells_of_tiles_and_clears_values_is_missed_where_it_is_dropped() {
    let case = Case { nan: vec![0, 2], ..Case::packed(&[(70, 70), (100, 100), (64, 64)], 1, 64) };
    let schedule = schedule(2, 64, TURNS);
    let module = schedule.emit(&case.spec(), Target::Sm90a).unwrap();
    let without = |dropped: &dyn Fn(&Op) -> bool| {
        let mut module = module.clone();
        module.kernels[0].body.retain(|inst| !dropped(&inst.op));
        module
    };
    let wrong = |module: &Module, async_mode| {
        let found = run(&case, &schedule, module, Config { async_mode, ..Config::default() });
        !found.report.is_clean() || difference(&case, &found).is_some()
    };
    let fences = without(&|op| matches!(op, Op::FenceProxyAsync(_)));
    assert!(!wrong(&module, AsyncMode::Late));
    for async_mode in [AsyncMode::Late, AsyncMode::Early] {
        assert!(wrong(&fences, async_mode));
    }
}

#[test]
fn packed_and_paged_kernels_assemble_without_spills() {
    let Some(ptxas) = Ptxas::find_or_skip().unwrap_or_else(|error| panic!("{error}")) else {
        eprintln!("not assembled: {}", PtxasError::NotFound);
        return;
    };
    let full = |dim: u32| Spec { grouped: true, ..Spec::new(ElementType::Bf16, dim).causal().with_lse() };
    let packed = |dim| Spec { packed_q: true, packed_k: true, ..full(dim) };
    let paged = |dim, page| Spec { page: Some(page), key_lengths: true, right: false, ..full(dim) };
    let many = "persistent=1,pingpong=1,q_stages=2";
    let one = "persistent=1,pingpong=1,q_stages=1";
    let fullest = [
        (packed(64), schedule(3, 128, many)),
        (packed(64), schedule(4, 64, "persistent=1,pingpong=1,q_stages=2,stages=4")),
        (packed(128), schedule(2, 128, many)),
        (
            Spec { left: true, packed_k: false, page: Some(16), key_lengths: true, ..packed(128) },
            schedule(2, 128, many),
        ),
        (Spec { softcap: true, ..packed(128) }, schedule(2, 112, many)),
        (packed(192), schedule(2, 96, one)),
        (packed(256), schedule(2, 64, one)),
        (packed(128), schedule(1, 64, "persistent=1,ctas=2")),
        (paged(128, 16), schedule(2, 128, many)),
        (paged(128, 16), schedule(1, 128, "persistent=0,stages=3")),
        (paged(128, 64), schedule(2, 64, "persistent=0,together=1,split=2")),
        (paged(128, 16), schedule(2, 32, "persistent=0,together=1,stages=4")),
        (paged(128, 16), schedule(1, 64, "persistent=0,stages=6,parts=8")),
        (paged(256, 16), schedule(1, 32, "persistent=0,stages=2,split=8")),
        (paged(64, 48), schedule(1, 80, "persistent=1,ctas=2")),
        (paged(64, 16), schedule(2, 48, "persistent=1,ctas=2")),
    ];
    for (spec, schedule) in fullest {
        assembles(&ptxas, &spec, schedule, Target::Sm90a);
    }
    let odd = |dim| Spec { left: true, softcap: true, right: true, head_dim_v: dim - 8, ..paged(dim, 24) };
    let fullest = [
        (packed(64), ampere(128, 64, 4, 2, IN_REGISTERS)),
        (paged(64, 64), ampere(128, 64, 4, 2, SMALL)),
        (Spec { packed_q: true, ..odd(64) }, ampere(128, 64, 4, 2, SMALL)),
        (Spec { packed_q: true, ..paged(128, 16) }, ampere(128, 64, 8, 2, IN_REGISTERS)),
        (odd(128), ampere(128, 64, 8, 3, IN_REGISTERS)),
        (Spec { packed_q: true, ..odd(192) }, ampere(64, 64, 4, 1, SMALL)),
        (Spec { packed_q: true, ..odd(256) }, ampere(64, 32, 4, 1, SMALL)),
    ];
    for (spec, schedule) in fullest {
        assembles(&ptxas, &spec, schedule, Target::Sm80);
    }
}

fn assembles(ptxas: &Ptxas, spec: &Spec, schedule: Schedule, target: Target) {
    let module = schedule.emit(spec, target).unwrap_or_else(|error| panic!("{schedule}: {error}"));
    let assembled = ptxas.assemble(&module, target).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(assembled.remarks, [], "{schedule} for {spec:?}");
    for kernel in &assembled.kernels {
        let spills = (kernel.spill_store_bytes, kernel.spill_load_bytes);
        assert_eq!(spills, (0, 0), "{schedule} for {spec:?}");
    }
}
