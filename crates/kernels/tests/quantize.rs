//! The kernels that make E4M3 of 16-bit floats: on the simulator, against the same in f64.

use flashcore_kernels::{
    Args, ElementType, Operand, Packed, ScheduleError, TensorArg,
    quantize::{MOST, Pass, Quantize, signs},
};
use flashcore_ptx::{
    Target,
    ptxas::{Ptxas, PtxasError},
};
use flashcore_sim::{AsyncMode, Config, LaunchDims, Launching, Sim};
use float8::F8E4M3;

/// What is quantised: shapes of q and of k and v, and how their rows lie in memory.
#[derive(Clone)]
struct Case {
    quantize: Quantize,
    batch: usize,
    heads: usize,
    heads_kv: usize,
    len_q: usize,
    len_k: usize,
    lengths: Option<Vec<u32>>,
    /// Whether the heads of a row lie side by side, rather than the rows of a head.
    heads_inside: bool,
    /// Elements between the end of a row and the start of the next.
    gap: usize,
}

impl Case {
    fn new(quantize: Quantize, len: usize) -> Self {
        Self {
            quantize,
            batch: 2,
            heads: 4,
            heads_kv: 2,
            len_q: len,
            len_k: len,
            lengths: None,
            heads_inside: false,
            gap: 0,
        }
    }

    /// Whether a tensor is quantised.
    fn has(&self, tensor: usize) -> bool {
        let Quantize { q, k, v, .. } = self.quantize;
        [q, k, v][tensor]
    }

    /// Heads, rows and columns of q, k and v.
    fn sizes(&self) -> [[usize; 3]; 3] {
        let Quantize { head_dim, head_dim_v, .. } = self.quantize;
        let (dim, dim_v) = (head_dim as usize, head_dim_v as usize);
        [[self.heads, self.len_q, dim], [self.heads_kv, self.len_k, dim], [self.heads_kv, self.len_k, dim_v]]
    }

    /// Elements from one batch entry, head and row to the next, and of all.
    fn strides(&self, [heads, rows, columns]: [usize; 3]) -> [usize; 4] {
        let row = columns + self.gap;
        if self.heads_inside {
            [heads * rows * row, row, heads * row, self.batch * heads * rows * row]
        } else {
            [heads * rows * row, rows * row, row, self.batch * heads * rows * row]
        }
    }

    /// How many descales a head of a tensor has, and of how many rows each is.
    fn blocks(&self, tensor: usize) -> (usize, usize) {
        let rows = self.sizes()[tensor][1];
        if !self.quantize.by_chunk || tensor == 0 {
            return (1, rows);
        }
        (rows.div_ceil(self.quantize.rows as usize), self.quantize.rows as usize)
    }

    /// Rows of a batch entry that count.
    fn rows(&self, tensor: usize, batch: usize) -> usize {
        let all = self.sizes()[tensor][1];
        match &self.lengths {
            Some(lengths) if tensor > 0 => all.min(lengths[batch] as usize),
            _ => all,
        }
    }

    /// The numbers of a tensor as they lie in memory: channels of different size and mean, NaN where nothing counts.
    fn inputs(&self, tensor: usize) -> Vec<f32> {
        let [heads, rows, columns] = self.sizes()[tensor];
        let [to_batch, to_head, to_row, all] = self.strides([heads, rows, columns]);
        let mut numbers = vec![f32::NAN; all];
        for (batch, head) in (0..self.batch).flat_map(|batch| (0..heads).map(move |head| (batch, head))) {
            for row in 0..self.rows(tensor, batch) {
                for column in 0..columns {
                    let at = batch * to_batch + head * to_head + row * to_row + column;
                    let place = ((batch * heads + head) * rows + row) * columns + column;
                    let size = [1.0, 0.25, 3.0, 40.0][(column + head) % 4];
                    // The last head of the values is zero.
                    let zero = tensor == 2 && batch == 1 && head + 1 == heads;
                    let number = noise(place, tensor) * size + if column % 5 == 0 { 6.0 } else { 0.5 };
                    numbers[at] = if zero { 0.0 } else { self.round(number) };
                }
            }
        }
        numbers
    }

    fn round(&self, number: f32) -> f32 {
        match self.quantize.dtype {
            ElementType::F16 => half::f16::from_f32(number).to_f32(),
            _ => half::bf16::from_f32(number).to_f32(),
        }
    }

    fn bytes(&self, numbers: &[f32]) -> Vec<u8> {
        numbers
            .iter()
            .flat_map(|&number| match self.quantize.dtype {
                ElementType::F16 => half::f16::from_f32(number).to_le_bytes(),
                _ => half::bf16::from_f32(number).to_le_bytes(),
            })
            .collect()
    }
}

/// A number from -1 to 1 that looks random.
fn noise(place: usize, seed: usize) -> f32 {
    let word = |i: usize| (i + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(seed) >> 20;
    (word(word(place)) % 2001) as f32 / 1000.0 - 1.0
}

/// What a run left of each tensor: codes as they lie in memory and descales; and the mean.
#[derive(PartialEq, Debug)]
struct Found {
    codes: Vec<Vec<u8>>,
    descales: Vec<Vec<f32>>,
    mean: Vec<f32>,
}

fn run(case: &Case, config: Config) -> Found {
    let Quantize { head_dim, smooth, .. } = case.quantize;
    let floats = |bytes: Vec<u8>| bytes.as_chunks().0.iter().map(|it| f32::from_le_bytes(*it)).collect();
    let mut sim = Sim::new(config);
    let mut args = Args::default();
    let operands = [
        (Operand::Q, Operand::Q8, Operand::QDescale),
        (Operand::K, Operand::K8, Operand::KDescale),
        (Operand::V, Operand::V8, Operand::VDescale),
    ];
    let (mut codes, mut descales) = (Vec::new(), Vec::new());
    for (tensor, (from, to, descale)) in operands.into_iter().enumerate() {
        let [heads, rows, columns] = case.sizes()[tensor];
        let [to_batch, to_head, to_row, all] = case.strides([heads, rows, columns]);
        let shape = [case.batch, heads, rows, columns];
        let mut set = |operand, address, size: usize| {
            let strides = [to_batch, to_head, to_row].map(|stride| (size * stride) as u64);
            args.set(operand, TensorArg { address, shape, strides });
        };
        set(from, sim.alloc_from("x", &case.bytes(&case.inputs(tensor))).address, 2);
        if case.quantize.turn && tensor == 2 {
            let shape = Quantize::turned(shape);
            let bytes = |from: usize| shape[from..].iter().product::<usize>();
            codes.push(sim.alloc("turned codes", bytes(0)));
            let strides = [1, 2, 3].map(|from| bytes(from) as u64);
            args.set(to, TensorArg { address: codes[tensor].address, shape, strides });
        } else {
            codes.push(sim.alloc("codes", all));
            set(to, codes[tensor].address, 1);
        }
        let (blocks, _) = case.blocks(tensor);
        descales.push(sim.alloc("descales", 4 * case.batch * case.heads_kv * blocks));
        let address = descales[tensor].address;
        let strides = [4 * case.heads_kv * blocks, 4 * blocks, 4].map(|stride| stride as u64);
        args.set(descale, TensorArg { address, shape: [case.batch, case.heads_kv, blocks, 1], strides });
    }
    if let Some(lengths) = &case.lengths {
        let bytes: Vec<u8> = lengths.iter().flat_map(|length| length.to_le_bytes()).collect();
        let address = sim.alloc_from("lengths", &bytes).address;
        args.set(Operand::KeyLengths, TensorArg { address, ..TensorArg::default() });
    }
    let mean = sim.alloc("mean", 4 * case.batch * case.heads_kv * head_dim as usize);
    let row = 4 * u64::from(head_dim);
    let strides = [row * case.heads_kv as u64, row, row];
    let shape = [case.batch, case.heads_kv, 1, head_dim as usize];
    args.set(Operand::KMean, TensorArg { address: mean.address, shape, strides });
    let space = sim.alloc("space", case.quantize.space(&args) as usize);
    args.set(Operand::Space, TensorArg { address: space.address, ..TensorArg::default() });
    for &pass in case.quantize.passes() {
        let module = case.quantize.emit(pass, Target::Sm90a).unwrap();
        let mut packed = Packed::default();
        case.quantize.bind(pass, &args, &mut packed);
        let grid = case.quantize.grid(pass, &args);
        let block = [case.quantize.threads(pass), 1, 1];
        let dims = LaunchDims { grid, block, cluster: None, dynamic_shared: None };
        let (params, how) = (packed.launch(0).0, Launching::Programmatic);
        let report = sim.launch_as(&module, pass.name(), dims, params, how).unwrap();
        assert_eq!(report.findings, [], "{pass:?} of {:?}", case.quantize);
    }
    assert_eq!(sim.unwritten(space), [], "space");
    if smooth {
        assert_eq!(sim.unwritten(mean), [], "mean");
    }
    if case.gap == 0 {
        for (tensor, &codes) in codes.iter().enumerate() {
            assert_eq!(sim.unwritten(codes).is_empty(), case.has(tensor), "codes");
        }
    }
    Found {
        codes: codes.iter().map(|&codes| sim.read(codes)).collect(),
        descales: descales.iter().map(|&descales| floats(sim.read(descales))).collect(),
        mean: if smooth { floats(sim.read(mean)) } else { Vec::new() },
    }
}

/// Signs, then the transform, over √head_dim.
fn rotated(seed: u32, x: &[f64]) -> Vec<f64> {
    let signs = signs(seed, x.len() as u32);
    let entry = |i: usize, j: usize| if (i & j).count_ones().is_multiple_of(2) { 1.0 } else { -1.0 };
    let signed = |j: usize| if signs[j] { -x[j] } else { x[j] };
    let root = (x.len() as f64).sqrt();
    (0..x.len()).map(|i| (0..x.len()).map(|j| entry(i, j) * signed(j)).sum::<f64>() / root).collect()
}

/// Requires that a case comes to what it is.
#[track_caller]
fn check(case: &Case) {
    let found = run(case, Config::default());
    let Quantize { smooth, rotate, .. } = case.quantize;
    for tensor in (0..3).filter(|&tensor| case.has(tensor)) {
        let [heads, rows, columns] = case.sizes()[tensor];
        let [to_batch, to_head, to_row, _] = case.strides([heads, rows, columns]);
        let x = case.inputs(tensor);
        let group = heads / case.heads_kv;
        for (batch, kv_head) in
            (0..case.batch).flat_map(|batch| (0..case.heads_kv).map(move |kv_head| (batch, kv_head)))
        {
            let what = || format!("{:?}: tensor {tensor}, entry {batch}, kv head {kv_head}", case.quantize);
            let count = case.rows(tensor, batch);
            let at = |head: usize, row: usize| batch * to_batch + head * to_head + row * to_row;
            let places: Vec<usize> = (kv_head * group..(kv_head + 1) * group)
                .flat_map(|head| (0..count).map(move |row| (head, row)))
                .map(|(head, row)| at(head, row))
                .collect();
            let mut all: Vec<Vec<f64>> = places
                .iter()
                .map(|&at| x[at..at + columns].iter().map(|&x| f64::from(x)).collect())
                .collect();
            if smooth && tensor == 1 {
                let first = (batch * case.heads_kv + kv_head) * columns;
                for (d, &mean) in found.mean[first..first + columns].iter().enumerate() {
                    let sum: f64 = all.iter().map(|row| row[d]).sum();
                    let want = if count == 0 { 0.0 } else { sum / count as f64 };
                    assert!((f64::from(mean) - want).abs() < 1e-5, "{}: mean {mean} is not {want}", what());
                    for row in &mut all {
                        row[d] -= want;
                    }
                }
            }
            if let Some(seed) = rotate.filter(|_| tensor < 2) {
                all = all.iter().map(|row| rotated(seed, row)).collect();
            }
            let (blocks, of_rows) = case.blocks(tensor);
            let block = |i: usize| i % count / of_rows;
            let descale_of = |block: usize| {
                let place = (batch * case.heads_kv + kv_head) * blocks + block;
                f64::from(found.descales[tensor][place])
            };
            for of in 0..blocks {
                let own = (0..all.len()).filter(|&i| block(i) == of).flat_map(|i| &all[i]);
                let amax = own.fold(0.0_f64, |most, x| most.max(x.abs()));
                let want = if amax == 0.0 { 1.0 } else { amax / f64::from(MOST) };
                let descale = descale_of(of);
                assert!((descale / want - 1.0).abs() < 1e-5, "{}: descale {descale} is not {want}", what());
            }
            for (i, (&at, row)) in places.iter().zip(&all).enumerate() {
                let descale = descale_of(block(i));
                for (d, x) in row.iter().enumerate() {
                    let code = F8E4M3::from_bits(found.codes[tensor][at + d]).to_f64();
                    let y = x / descale;
                    // Half of the distance between neighbours, and what f32 rounds.
                    let step = y.abs().max(1.0 / 64.0).log2().floor().exp2() / 8.0;
                    let off = (code - y).abs();
                    assert!(off <= 0.5 * step + 2e-3 * step + 2e-4, "{}: {code} is not {y}", what());
                }
            }
        }
    }
}

#[test]
fn chunks_of_keys_and_values_have_descales_of_their_own_by_one_pass() {
    let chunks = |rows, quantize: Quantize| Quantize { by_chunk: true, rows, ..quantize };
    let cache = Quantize { q: false, ..bf16(64) };
    assert_eq!(chunks(32, cache).passes(), [Pass::Cast]);
    check(&Case { len_q: 1, ..Case::new(chunks(32, cache), 150) });
    check(&Case {
        len_q: 5,
        ..Case::new(chunks(48, Quantize { head_dim_v: 96, rotate: Some(3), ..f16(32) }), 100)
    });
    let lengths = Some(vec![70, 0]);
    let smoothed = Quantize { smooth: true, key_lengths: true, ..bf16(128) };
    check(&Case { lengths, ..Case::new(chunks(64, smoothed), 150) });
}

/// Which key of each sixteen stands where.
const ORDER: [usize; 16] = [0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15];

#[test]
fn values_are_written_turned_around_with_zeros_behind_the_last_key() {
    let lengths = |lengths: [u32; 2]| Some(lengths.to_vec());
    let ragged = Quantize { key_lengths: true, ..f16(64) };
    for case in [
        Case::new(bf16(64), 130),
        Case { len_q: 3, ..Case::new(Quantize { head_dim_v: 48, rows: 16, ..f16(32) }, 37) },
        Case { len_q: 3, ..Case::new(Quantize { smooth: true, ..bf16(256) }, 300) },
        Case { lengths: lengths([70, 0]), heads_inside: true, ..Case::new(ragged, 250) },
        Case { gap: 8, ..Case::new(Quantize { by_chunk: true, rows: 32, ..bf16(128) }, 90) },
    ] {
        let plain = run(&case, Config::default());
        let turned = Case { quantize: Quantize { turn: true, ..case.quantize }, ..case.clone() };
        let turned = run(&turned, Config::default());
        assert_eq!((&plain.descales, &plain.codes[..2]), (&turned.descales, &turned.codes[..2]));
        let [heads, rows, columns] = case.sizes()[2];
        let [to_batch, to_head, to_row, _] = case.strides([heads, rows, columns]);
        let padded = rows.next_multiple_of(16);
        for (i, &code) in turned.codes[2].iter().enumerate() {
            let (line, place) = (i / padded, i % padded);
            let (batch, head, column) = (line / columns / heads, line / columns % heads, line % columns);
            let key = place / 16 * 16 + ORDER[place % 16];
            let at = batch * to_batch + head * to_head + key * to_row + column;
            let want = if key < case.rows(2, batch) { plain.codes[2][at] } else { 0 };
            assert_eq!(
                code, want,
                "{:?}: entry {batch}, head {head}, key {key}, column {column}",
                case.quantize
            );
        }
    }
    let odd = Quantize { turn: true, rows: 24, ..bf16(64) };
    assert!(odd.check(Target::Sm90a).unwrap_err().to_string().contains("multiples of 16"));
}

fn f16(head_dim: u32) -> Quantize {
    Quantize::new(ElementType::F16, head_dim)
}

fn bf16(head_dim: u32) -> Quantize {
    Quantize::new(ElementType::Bf16, head_dim)
}

#[test]
fn codes_and_descales_of_every_head_dim_are_right() {
    check(&Case::new(f16(64), 130));
    check(&Case { len_q: 5, ..Case::new(bf16(128), 301) });
    check(&Case::new(bf16(256), 33));
    check(&Case { batch: 2, len_q: 1, ..Case::new(Quantize { head_dim_v: 96, ..f16(80) }, 70) });
    check(&Case::new(Quantize { rows: 16, ..bf16(16) }, 257));
}

#[test]
fn each_tensor_can_be_quantised_alone() {
    let none = Quantize { q: false, k: false, v: false, ..bf16(64) };
    check(&Case::new(Quantize { q: true, ..none }, 70));
    check(&Case::new(Quantize { v: true, ..none }, 70));
    check(&Case { len_q: 1, ..Case::new(Quantize { k: true, v: true, smooth: true, ..none }, 70) });
}

#[test]
fn any_strides_are_taken() {
    check(&Case { heads_inside: true, ..Case::new(f16(64), 65) });
    check(&Case { gap: 8, ..Case::new(bf16(64), 65) });
    let odd = Quantize { aligned: false, ..f16(48) };
    check(&Case { gap: 3, heads_inside: true, ..Case::new(odd, 37) });
    check(&Case {
        gap: 1,
        ..Case::new(Quantize { smooth: true, rotate: Some(5), ..Quantize { aligned: false, ..bf16(32) } }, 37)
    });
}

#[test]
fn smoothed_and_rotated_keys_are_right() {
    let smooth = |quantize: Quantize| Quantize { smooth: true, ..quantize };
    let rotate = |quantize: Quantize| Quantize { rotate: Some(7), ..quantize };
    check(&Case::new(smooth(bf16(64)), 300));
    check(&Case::new(smooth(Quantize { rows: 32, ..f16(80) }), 530));
    for head_dim in [16, 32, 64, 256] {
        check(&Case::new(rotate(f16(head_dim)), 70));
    }
    check(&Case::new(smooth(rotate(Quantize { rows: 64, ..bf16(128) })), 333));
    check(&Case::new(smooth(rotate(bf16(256))), 60));
}

#[test]
fn rows_behind_the_key_lengths_do_not_matter_and_become_zeros() {
    for smooth in [false, true] {
        let quantize = Quantize { smooth, key_lengths: true, rows: 64, ..bf16(64) };
        let lengths = vec![0, 150, 31, 64];
        let case = Case { batch: 4, lengths: Some(lengths.clone()), ..Case::new(quantize, 150) };
        check(&case);
        let found = run(&case, Config::default());
        for (i, row) in found.codes[1..].iter().flat_map(|codes| codes.chunks(64).enumerate()) {
            let (entry, key) = (i / (2 * 150), i % 150);
            let zeros = row.iter().all(|&code| code == 0);
            assert!(zeros || key < lengths[entry] as usize, "entry {entry}, key {key}");
        }
    }
}

#[test]
fn dot_products_of_rotated_rows_are_what_they_were() {
    let rows: Vec<Vec<f64>> = (0..2).map(|i| (0..64).map(|d| f64::from(noise(d, i))).collect()).collect();
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    let turned: Vec<Vec<f64>> = rows.iter().map(|row| rotated(9, row)).collect();
    assert!((dot(&turned[0], &turned[1]) - dot(&rows[0], &rows[1])).abs() < 1e-12);
    let of = signs(9, 256).into_iter().filter(|&sign| sign).count();
    assert!((96..160).contains(&of), "{of} of 256");
    assert_ne!(signs(9, 256), signs(10, 256));
}

#[test]
fn scores_of_codes_lack_the_queries_product_with_the_mean() {
    let quantize = Quantize { smooth: true, rotate: Some(11), ..bf16(64) };
    let case = Case { batch: 1, heads: 1, heads_kv: 1, len_q: 8, ..Case::new(quantize, 50) };
    let found = run(&case, Config::default());
    let numbers = [0, 1].map(|tensor| case.inputs(tensor));
    let codes = |tensor: usize, at: usize| {
        F8E4M3::from_bits(found.codes[tensor][at]).to_f64() * f64::from(found.descales[tensor][0])
    };
    let (mut errors, mut sizes) = (0.0, 0.0);
    for (i, j) in (0..8).flat_map(|i| (0..50).map(move |j| (i, j))) {
        let sum = |of: &dyn Fn(usize) -> f64| (0..64).map(of).sum::<f64>();
        let query = |d: usize| f64::from(numbers[0][64 * i + d]);
        let want = sum(&|d| query(d) * f64::from(numbers[1][64 * j + d]));
        let have = sum(&|d| codes(0, 64 * i + d) * codes(1, 64 * j + d))
            + sum(&|d| query(d) * f64::from(found.mean[d]));
        (errors, sizes) = (errors + (have - want).powi(2), sizes + want.powi(2));
    }
    let error = (errors / sizes).sqrt();
    assert!(error < 0.02, "off by {error}");
}

#[test]
fn bits_do_not_depend_on_the_order_of_blocks() {
    let case = Case::new(Quantize { smooth: true, rotate: Some(3), rows: 32, ..f16(64) }, 200);
    let first = run(&case, Config { threads: 1, ..Config::default() });
    let again = run(&case, Config { seed: 99, async_mode: AsyncMode::Early, ..Config::default() });
    assert_eq!(first, again);
}

#[test]
fn what_cannot_be_is_refused() {
    let refused = |quantize: Quantize, target| quantize.emit(Pass::Scan, target).unwrap_err().to_string();
    assert!(refused(f16(64), Target::Sm80).contains("sm_89"));
    assert!(refused(Quantize::new(ElementType::F32, 64), Target::Sm89).contains("f16 and bf16"));
    assert!(refused(Quantize { rotate: Some(1), ..f16(96) }, Target::Sm89).contains("power of two"));
    assert!(refused(Quantize { smooth: true, k: false, ..f16(96) }, Target::Sm89).contains("smoothed"));
    let odd = f16(72).emit(Pass::Scan, Target::Sm89).unwrap_err();
    assert!(matches!(odd, ScheduleError::HeadDim { .. }));
}

#[test]
fn kernels_assemble_without_spills() {
    let Some(ptxas) = Ptxas::find_or_skip().unwrap_or_else(|error| panic!("{error}")) else {
        eprintln!("not assembled: {}", PtxasError::NotFound);
        return;
    };
    for head_dim in [64, 128, 256] {
        let plain = Quantize { key_lengths: true, ..bf16(head_dim) };
        let all = Quantize { smooth: true, rotate: Some(1), ..plain };
        let turned = Quantize { turn: true, ..plain };
        for (quantize, target) in
            [(plain, Target::Sm89), (plain, Target::Sm90a), (all, Target::Sm90a), (turned, Target::Sm90a)]
        {
            for &pass in quantize.passes() {
                let module = quantize.emit(pass, target).unwrap();
                let assembled = ptxas.assemble(&module, target).unwrap_or_else(|error| panic!("{error}"));
                assert_eq!(assembled.remarks, []);
                for kernel in &assembled.kernels {
                    let spilled = (kernel.spill_store_bytes, kernel.spill_load_bytes);
                    assert_eq!(spilled, (0, 0), "{pass:?} of {quantize:?}");
                    eprintln!("{pass:?} {head_dim} {target}: {} registers", kernel.registers);
                }
            }
        }
    }
}
