//! The forward kernels with 8-bit floats: on the simulator, which adds their products with 14 bits as the hardware does,
//! against attention in f64 on the same numbers.

use flashcore_kernels::{
    Args, ElementType, Kernel, Map, Operand, Packed, Schedule, ScheduleError, Section, Spec, TensorArg,
};
use flashcore_ptx::{
    Arg, Inst, Module, Op, Space, Target,
    ptxas::{Ptxas, PtxasError},
};
use flashcore_sim::{
    AsyncMode, Config, Fp8Sums, LaunchDims, LaunchReport, Sim, Swizzle, TensorElement, TensorMap,
};
use float8::F8E4M3;

/// A problem. Its queries, keys and values are e4m3.
#[derive(Clone)]
struct Case {
    batch: usize,
    heads: usize,
    heads_kv: usize,
    len_q: usize,
    len_k: usize,
    dim: usize,
    dim_v: usize,
    /// How many keys before and after its own position a query sees.
    left: Option<i32>,
    right: Option<i32>,
    softcap: Option<f32>,
    key_lengths: Option<Vec<u32>>,
    /// Of q, k and v, by batch entry and kv head; one number is for all of them.
    descales: [Option<Vec<f32>>; 3],
    /// The keys of a block, where blocks have descales of k and v of their own: those of a kv head's blocks come one after the
    /// other.
    descale_keys: Option<usize>,
    out: ElementType,
}

impl Case {
    /// One batch entry without a mask.
    fn new(heads: usize, len_q: usize, len_k: usize, dim: usize) -> Self {
        Self {
            batch: 1,
            heads,
            heads_kv: heads,
            len_q,
            len_k,
            dim,
            dim_v: dim,
            left: None,
            right: None,
            softcap: None,
            key_lengths: None,
            descales: [None, None, None],
            descale_keys: None,
            out: ElementType::Bf16,
        }
    }

    fn causal(self) -> Self {
        Self { right: Some(0), ..self }
    }

    fn scale(&self) -> f32 {
        1.0 / (self.dim as f32).sqrt()
    }

    fn spec(&self) -> Spec {
        Spec {
            out: Some(self.out),
            head_dim_v: self.dim_v as u32,
            left: self.left.is_some(),
            right: self.right.is_some(),
            softcap: self.softcap.is_some(),
            scaled_scores: self.descale_keys.is_some()
                || Spec::needs_scaled_scores(ElementType::E4m3, self.scale(), self.softcap),
            descale_keys: self.descale_keys.map(|keys| keys as u32),
            key_lengths: self.key_lengths.is_some(),
            grouped: self.heads != self.heads_kv,
            lse: true,
            ..Spec::new(ElementType::E4m3, self.dim as u32)
        }
    }

    /// Codes of q, k and v: numbers of both signs.
    fn inputs(&self) -> [Vec<u8>; 3] {
        let shapes = [
            self.heads * self.len_q * self.dim,
            self.heads_kv * self.len_k * self.dim,
            self.heads_kv * self.len_k * self.dim_v,
        ];
        let mut seed = 0;
        shapes.map(|len| {
            seed += 1;
            noise(self.batch * len, seed).into_iter().map(code).collect()
        })
    }

    /// Blocks of a kv head with descales of their own, of q or of k and v.
    fn blocks(&self, of: usize) -> usize {
        self.descale_keys.filter(|_| of > 0).map_or(1, |keys| self.len_k.div_ceil(keys))
    }

    /// The descale of a key, or of all queries.
    fn descale(&self, of: usize, batch: usize, kv_head: usize, key: usize) -> f64 {
        let block = self.descale_keys.filter(|_| of > 0).map_or(0, |keys| key / keys);
        let at = (batch * self.heads_kv + kv_head) * self.blocks(of) + block;
        let descales = self.descales[of].as_ref();
        descales.map_or(1.0, |all| f64::from(all[if all.len() == 1 { 0 } else { at }]))
    }
}

fn code(x: f32) -> u8 {
    F8E4M3::from_f32(x).to_bits()
}

fn value(code: u8) -> f64 {
    F8E4M3::from_bits(code).to_f64()
}

/// Numbers from -2 to 2 that look random.
fn noise(len: usize, seed: usize) -> Vec<f32> {
    let word = |i: usize| (i + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(seed) >> 20;
    (0..len).map(|i| (word(word(i)) % 4001) as f32 / 1000.0 - 2.0).collect()
}

/// What attention is: outputs, the sums of p |v| beside which their errors count, and lse.
struct Truth {
    o: Vec<f64>,
    size: Vec<f64>,
    lse: Vec<f64>,
}

fn truth(case: &Case, [q, k, v]: &[Vec<u8>; 3]) -> Truth {
    let Case { heads, heads_kv, len_q, len_k, dim, dim_v, .. } = *case;
    let mut truth = Truth { o: Vec::new(), size: Vec::new(), lse: Vec::new() };
    for row in 0..case.batch * heads * len_q {
        let (batch, head, i) = (row / len_q / heads, row / len_q % heads, row % len_q);
        let kv_head = head / (heads / heads_kv);
        let first_key = (batch * heads_kv + kv_head) * len_k;
        let keys = case.key_lengths.as_ref().map_or(len_k, |lengths| lengths[batch] as usize);
        let place = i as i64 + keys as i64 - len_q as i64;
        let sees = |key: usize| {
            case.right.is_none_or(|right| key as i64 <= place + i64::from(right))
                && case.left.is_none_or(|left| key as i64 >= place - i64::from(left))
        };
        let of_q = f64::from(case.scale()) * case.descale(0, batch, kv_head, 0);
        let score = |key: usize| {
            let scale = of_q * case.descale(1, batch, kv_head, key);
            let dot: f64 =
                (0..dim).map(|d| value(q[row * dim + d]) * value(k[(first_key + key) * dim + d])).sum();
            let score = scale * dot;
            case.softcap.map_or(score, |cap| f64::from(cap) * (score / f64::from(cap)).tanh())
        };
        let seen: Vec<(usize, f64)> =
            (0..keys).filter(|&key| sees(key)).map(|key| (key, score(key))).collect();
        let max = seen.iter().fold(f64::NEG_INFINITY, |max, &(_, score)| max.max(score));
        let sum: f64 = seen.iter().map(|&(_, score)| (score - max).exp()).sum();
        truth.lse.push(if seen.is_empty() { f64::NEG_INFINITY } else { max + sum.ln() });
        for d in 0..dim_v {
            let (mut o, mut size) = (0.0, 0.0);
            for &(key, score) in &seen {
                let p = (score - max).exp() / sum;
                let v = value(v[(first_key + key) * dim_v + d]) * case.descale(2, batch, kv_head, key);
                (o, size) = (o + p * v, size + p * v.abs());
            }
            truth.o.push(o);
            truth.size.push(size);
        }
    }
    truth
}

fn encode(map: &Map) -> Result<flashcore_ptx::TensorMap, String> {
    let element = match map.dtype {
        ElementType::F16 => TensorElement::F16,
        ElementType::Bf16 => TensorElement::Bf16,
        ElementType::F32 => TensorElement::F32,
        ElementType::E4m3 => TensorElement::U8,
    };
    let map = TensorMap::new(element, map.address, &map.dims, &map.strides, &map.box_dims);
    map.swizzled(Swizzle::B128).encode().map(flashcore_ptx::TensorMap)
}

/// What a run left.
struct Found {
    o: Vec<f64>,
    lse: Vec<f64>,
    report: LaunchReport,
}

fn bytes_of<T, const N: usize>(values: &[T], bytes: impl Fn(&T) -> [u8; N]) -> Vec<u8> {
    values.iter().flat_map(bytes).collect()
}

/// V turned around, as the quantiser writes it, and how many keys it has with those that are padding.
fn turned(case: &Case, v: &[u8]) -> (Vec<u8>, usize) {
    const ORDER: [usize; 16] = [0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15];
    let Case { heads_kv, len_k, dim_v, .. } = *case;
    let padded = len_k.next_multiple_of(16);
    let mut turned = vec![0; case.batch * heads_kv * dim_v * padded];
    for (i, code) in turned.iter_mut().enumerate() {
        let (line, place) = (i / padded, i % padded);
        let (head, column, key) = (line / dim_v, line % dim_v, place / 16 * 16 + ORDER[place % 16]);
        let keys = case.key_lengths.as_ref().map_or(len_k, |lengths| lengths[head / heads_kv] as usize);
        if key < keys {
            *code = v[(head * len_k + key) * dim_v + column];
        }
    }
    (turned, padded)
}

/// Runs a case on four multiprocessors.
fn run(case: &Case, schedule: &Schedule, inputs: &[Vec<u8>; 3], module: &Module, config: Config) -> Found {
    let spec = case.spec();
    let Case { batch, heads, heads_kv, len_q, len_k, dim, dim_v, .. } = *case;
    let mut sim = Sim::new(config);
    let mut args = Args::default();
    (args.scale, args.softcap) = (case.scale(), case.softcap);
    (args.left, args.right) = (case.left.unwrap_or(0), case.right.unwrap_or(0));
    let mut set = |operand, address: u64, shape: [usize; 4], size: usize| {
        let row = (shape[3] * size) as u64;
        let strides = [row * (shape[1] * shape[2]) as u64, row * shape[2] as u64, row];
        args.set(operand, TensorArg { address, shape, strides });
    };
    let mut upload = |name: &str, bytes: &[u8]| sim.alloc_from(name, bytes).address;
    set(Operand::Q, upload("q", &inputs[0]), [batch, heads, len_q, dim], 1);
    set(Operand::K, upload("k", &inputs[1]), [batch, heads_kv, len_k, dim], 1);
    if schedule.to_string().contains("turned=1") {
        let (turned, padded) = turned(case, &inputs[2]);
        set(Operand::V, upload("turned v", &turned), [batch, heads_kv, dim_v, padded], 1);
    } else {
        set(Operand::V, upload("v", &inputs[2]), [batch, heads_kv, len_k, dim_v], 1);
    }
    if let Some(lengths) = &case.key_lengths {
        let address = upload("key lengths", &bytes_of(lengths, |length| length.to_le_bytes()));
        set(Operand::KeyLengths, address, [batch, 1, 1, 1], 4);
    }
    let o = sim.alloc("o", batch * heads * len_q * dim_v * 2);
    let lse = sim.alloc("lse", batch * heads * len_q * 4);
    set(Operand::O, o.address, [batch, heads, len_q, dim_v], 2);
    set(Operand::Lse, lse.address, [batch, heads, len_q, 1], 4);
    for (of, operand) in [Operand::QDescale, Operand::KDescale, Operand::VDescale].into_iter().enumerate() {
        let Some(descales) = &case.descales[of] else { continue };
        // Between two others.
        let padded = [&[7.0], &descales[..], &[7.0]].concat();
        let buffer = sim.alloc_from("descale", &bytes_of(&padded, |descale| descale.to_le_bytes()));
        let blocks = case.blocks(of);
        let strides = [(heads_kv * blocks) as u64, blocks as u64, 1].map(|stride| 4 * stride);
        let strides = if descales.len() == 1 { [0; 3] } else { strides };
        let shape = [batch, heads_kv, blocks, 1];
        args.set(operand, TensorArg { address: buffer.address + 4, shape, strides });
    }
    let geometry = schedule.geometry(&spec);
    args.section = Section { heads: 1, places: (len_q as u32).div_ceil(geometry.rows) };
    let grid = geometry.grid(batch as u32, heads as u32, len_q as u32, 4);
    if let Schedule::Sm90Fwd(schedule) = schedule {
        let aside = sim.alloc("aside", (grid[0] * schedule.aside_bytes(&spec)) as usize);
        args.set(Operand::Aside, TensorArg { address: aside.address, ..TensorArg::default() });
    }
    let mut packed = Packed::default();
    schedule.bind(&spec, &args, &mut encode, &mut packed).unwrap();
    let dims = LaunchDims {
        grid,
        block: [geometry.threads, 1, 1],
        cluster: None,
        dynamic_shared: Some(geometry.shared_bytes),
    };
    let name = format!("flashcore_{}", schedule.kernel());
    let report = sim.launch(module, &name, dims, packed.launch(0).0).unwrap();
    if report.is_clean() {
        assert_eq!(sim.unwritten(o), [], "o");
        assert_eq!(sim.unwritten(lse), [], "lse");
    }
    let half = |bytes: &[u8; 2]| match case.out {
        ElementType::F16 => half::f16::from_le_bytes(*bytes).to_f64(),
        _ => half::bf16::from_le_bytes(*bytes).to_f64(),
    };
    Found {
        o: sim.read(o).as_chunks().0.iter().map(half).collect(),
        lse: sim.read(lse).as_chunks().0.iter().map(|bytes| f64::from(f32::from_le_bytes(*bytes))).collect(),
        report,
    }
}

/// A schedule, given what differs.
fn schedule(warpgroups: u32, block_n: u32, rest: &str) -> Schedule {
    let common = "stages=2,q_stages=1,ctas=1,split=1,poly=0";
    format!("sm90_fwd:warpgroups={warpgroups},block_n={block_n},{common},{rest}").parse().unwrap()
}

/// A schedule of the kernel for Ada.
fn ada(block_m: u32, block_n: u32, warps: u32, stages: u32, q_in_regs: u32) -> Schedule {
    let knobs = format!("block_m={block_m},block_n={block_n},warps={warps},stages={stages}");
    format!("sm80_fwd:{knobs},q_in_regs={q_in_regs},order=head").parse().unwrap()
}

/// The oldest target that a schedule is for.
fn target(schedule: &Schedule) -> Target {
    if schedule.kernel() == Kernel::Sm90Fwd { Target::Sm90a } else { Target::Sm89 }
}

const PERSISTENT: &str = "pingpong=1,lazy=0,persistent=1,pairs=0";
const PAIRS: &str = "pingpong=1,lazy=0,persistent=1,pairs=1";
const SHORT: &str = "pingpong=0,lazy=0,persistent=0,pairs=0";

/// Requires that a case comes to what attention is.
#[track_caller]
fn check(case: &Case, schedule: Schedule) {
    let what =
        || format!("{}x{}x{}/{}x{} {schedule}", case.batch, case.heads, case.len_q, case.len_k, case.dim);
    let module =
        schedule.emit(&case.spec(), target(&schedule)).unwrap_or_else(|error| panic!("{}: {error}", what()));
    let inputs = case.inputs();
    let truth = truth(case, &inputs);
    // Sums of 14 bits are cut off, so scores come out smaller than they are.
    let [short, exact] =
        [(Fp8Sums::default(), AsyncMode::Late, 4e-3), (Fp8Sums::F32, AsyncMode::Early, 1e-5)];
    for (fp8_sums, async_mode, most_lse) in [short, exact] {
        let config = Config { fp8_sums, async_mode, ..Config::default() };
        let found = run(case, &schedule, &inputs, &module, config);
        assert_eq!(found.report.findings, [], "{}", what());
        let (mut errors, mut sizes) = (0.0, 0.0);
        for ((found, truth), size) in found.o.iter().zip(&truth.o).zip(&truth.size) {
            let error = (found - truth).abs();
            // A probability is rounded by up to a sixteenth of it.
            assert!(error <= 0.07 * size, "{} {fp8_sums:?}: {found} is not {truth}", what());
            (errors, sizes) = (errors + error * error, sizes + size * size);
        }
        let error = (errors / sizes).sqrt();
        assert!(error < 0.01, "{} {fp8_sums:?}: off by {error:.1e}", what());
        for (found, truth) in found.lse.iter().zip(&truth.lse) {
            let right = found == truth || (found - truth).abs() < most_lse * truth.abs().max(1.0);
            assert!(right, "{} {fp8_sums:?}: lse {found} is not {truth}", what());
        }
    }
}

#[test]
fn attention_of_every_head_dim_is_right() {
    check(&Case::new(2, 200, 300, 64), schedule(3, 128, PERSISTENT));
    check(&Case::new(1, 130, 333, 128), schedule(2, 128, PERSISTENT));
    check(&Case::new(1, 70, 200, 256), schedule(2, 64, PERSISTENT));
    check(&Case::new(1, 70, 200, 256), schedule(2, 96, PERSISTENT));
    check(&Case::new(2, 64, 100, 96), schedule(1, 64, SHORT));
    check(&Case { dim_v: 128, ..Case::new(1, 64, 100, 192) }, schedule(2, 96, SHORT));
    check(&Case { dim_v: 32, out: ElementType::F16, ..Case::new(1, 64, 100, 16) }, schedule(1, 32, SHORT));
    check(&Case { dim_v: 80, ..Case::new(1, 64, 400, 80) }, schedule(2, 160, SHORT));
}

#[test]
fn masks_groups_and_key_lengths_are_right() {
    check(&Case::new(2, 300, 300, 128).causal(), schedule(2, 128, PERSISTENT));
    check(&Case::new(3, 520, 520, 64).causal(), schedule(2, 96, PAIRS));
    check(&Case::new(1, 260, 40, 64).causal(), schedule(2, 64, SHORT));
    let window = Case { left: Some(40), right: Some(20), ..Case::new(1, 300, 300, 64) };
    check(&window, schedule(2, 32, PERSISTENT));
    let grouped = Case { heads_kv: 2, batch: 2, ..Case::new(4, 90, 150, 64).causal() };
    check(&grouped, schedule(2, 64, PERSISTENT));
    let ragged = Case { batch: 4, key_lengths: Some(vec![0, 150, 31, 97]), ..Case::new(2, 100, 150, 64) };
    check(&ragged, schedule(2, 64, PERSISTENT));
    check(&ragged.clone().causal(), schedule(1, 96, SHORT));
    check(&Case { dim: 128, dim_v: 128, ..ragged }, schedule(2, 160, PERSISTENT));
}

#[test]
fn sums_that_are_put_aside_are_right() {
    for (flush, rest) in [(2, SHORT), (2, PERSISTENT), (3, PAIRS), (100, PERSISTENT)] {
        let knobs = format!("{rest},flush={flush}");
        check(&Case::new(2, 200, 500, 64), schedule(2, 32, &knobs));
        check(&Case::new(3, 520, 520, 64).causal(), schedule(2, 32, &knobs));
    }
    let knobs = format!("{PERSISTENT},flush=2");
    let window = Case { left: Some(240), right: Some(20), ..Case::new(1, 600, 600, 64) };
    check(&window, schedule(2, 32, &knobs));
    let ragged = Case { batch: 4, key_lengths: Some(vec![0, 450, 31, 197]), ..Case::new(2, 100, 450, 64) };
    check(&ragged, schedule(2, 64, &knobs));
    check(&Case { dim: 256, dim_v: 256, ..Case::new(1, 128, 700, 256) }, schedule(2, 96, &knobs));
    check(&Case { softcap: Some(5.0), ..Case::new(1, 100, 400, 64) }, schedule(2, 32, &knobs));
}

#[test]
fn queries_in_registers_are_right() {
    for (dim, rest) in [(64, SHORT), (128, PERSISTENT)] {
        let knobs = format!("{rest},flush=2,q_regs=1");
        check(&Case::new(3, 300, 300, dim).causal(), schedule(2, 64, &knobs));
    }
}

#[test]
fn values_that_lie_turned_around_are_right() {
    let with = |rest: &str| format!("{rest},turned=1");
    check(&Case::new(2, 200, 300, 64), schedule(3, 128, &with(PERSISTENT)));
    check(&Case::new(1, 130, 333, 128).causal(), schedule(2, 192, &with(PERSISTENT)));
    check(&Case::new(1, 70, 200, 256), schedule(2, 96, &with(&format!("{PERSISTENT},flush=2"))));
    check(&Case { dim_v: 48, ..Case::new(1, 64, 100, 80) }, schedule(1, 64, &with(SHORT)));
    let ragged = Case { batch: 4, key_lengths: Some(vec![0, 150, 31, 97]), ..Case::new(2, 100, 150, 64) };
    check(&ragged, schedule(2, 64, &with(PERSISTENT)));
    check(&in_blocks(64, Case::new(4, 70, 200, 64)), schedule(2, 32, &with(PERSISTENT)));
    // The same bits as of values that a block turns around itself.
    let case = Case { heads_kv: 2, ..Case::new(4, 100, 250, 64).causal() };
    let inputs = case.inputs();
    let both = [PERSISTENT.to_owned(), with(PERSISTENT)].map(|rest| {
        let schedule = schedule(2, 96, &rest);
        let module = schedule.emit(&case.spec(), Target::Sm90a).unwrap();
        let found = run(&case, &schedule, &inputs, &module, Config::default());
        assert_eq!(found.report.findings, []);
        found.o
    });
    assert!(both[0] == both[1]);
    // Without those who turn, consumers have more registers.
    let spec = Spec { grouped: true, ..Spec::new(ElementType::E4m3, 128).causal().with_lse() };
    assemble(schedule(2, 192, &with(&format!("{PERSISTENT},flush=10"))), spec, Target::Sm90a);
    assemble(schedule(2, 128, &with(PERSISTENT)), spec, Target::Sm90a);
}

#[test]
fn what_was_put_aside_keeps_up_with_scores_that_grow() {
    // The walk goes from the last key to the first; each tile's scores are above all before by far more than f32 holds.
    for most in [0.5_f32, 4.0, 30.0] {
        let case = Case::new(1, 64, 512, 64);
        let [_, _, v] = case.inputs();
        let keys = (0..512 * 64).map(|i| code(most * (1.0 - (i / 64) as f32 / 512.0))).collect();
        let inputs = [vec![code(2.0); 64 * 64], keys, v];
        let (truth, schedule) = (truth(&case, &inputs), schedule(1, 32, &format!("{SHORT},flush=2")));
        let module = schedule.emit(&case.spec(), Target::Sm90a).unwrap();
        let found = run(&case, &schedule, &inputs, &module, Config::default());
        assert_eq!(found.report.findings, []);
        for (found, (truth, size)) in found.o.iter().zip(truth.o.iter().zip(&truth.size)) {
            assert!((found - truth).abs() < 0.04 * size, "up to {most}: {found} for {truth}");
        }
    }
}

#[test]
fn softcaps_and_descales_are_right() {
    let capped = Case { softcap: Some(5.0), ..Case::new(1, 100, 200, 64).causal() };
    check(&capped, schedule(2, 64, PERSISTENT));
    let three = || Some(vec![3.0]);
    let case = Case { descales: [three(), None, None], ..Case::new(1, 70, 200, 64) };
    check(&case, schedule(2, 64, SHORT));
    check(&Case { descales: [None, three(), three()], ..case.clone() }, schedule(2, 64, SHORT));
    // Different for each kv head, in two batch entries, under a softcap and with a lazy rescale.
    let each = |first: f32| Some((0..4).map(|i| first * (1.0 + i as f32)).collect());
    let case = Case { batch: 2, heads_kv: 2, ..Case::new(4, 70, 100, 64) };
    let case = Case { descales: [each(0.5), each(0.25), each(2.0)], ..case };
    check(&case, schedule(2, 64, "pingpong=0,lazy=2,persistent=1,pairs=0"));
    check(&Case { softcap: Some(2.0), ..case }, schedule(2, 64, PERSISTENT));
}

/// Two batch entries of two kv heads whose blocks of so many keys have descales of their own.
fn in_blocks(keys: usize, case: Case) -> Case {
    let case = Case { batch: 2, heads_kv: 2, descale_keys: Some(keys), ..case };
    let powers = |most: f32, seed| {
        let each = noise(4 * case.blocks(1), seed).into_iter().map(|x| (x / 2.0 * most).exp2());
        Some(each.collect::<Vec<f32>>())
    };
    // Of the keys smaller ones, for the tensor cores' sums cut off large scores.
    let descales = [Some(vec![0.5, 0.25, 0.125, 0.375]), powers(1.5, 5), powers(3.0, 6)];
    Case { descales, ..case }
}

#[test]
fn blocks_of_keys_have_descales_of_their_own() {
    for (keys, own, on_ada) in [
        (32, schedule(2, 32, PERSISTENT), ada(64, 32, 4, 2, 1)),
        (64, schedule(2, 64, PERSISTENT), ada(64, 64, 4, 1, 0)),
        (128, schedule(2, 64, SHORT), ada(128, 64, 8, 2, 1)),
        (96, schedule(1, 96, SHORT), ada(64, 32, 4, 3, 0)),
        (1 << 28, schedule(2, 64, PERSISTENT), ada(64, 64, 4, 2, 1)),
    ] {
        for own in [own, on_ada] {
            check(&in_blocks(keys, Case::new(2, 70, 300, 64).causal()), own);
        }
    }
    for own in [schedule(2, 32, PERSISTENT), ada(64, 32, 4, 2, 1)] {
        let case = in_blocks(64, Case::new(4, 70, 200, 32));
        let [q, k, v] = case.descales.clone();
        check(&Case { softcap: Some(5.0), left: Some(90), right: Some(20), ..case.clone() }, own);
        check(&Case { descales: [None, k, None], ..case.clone() }, own);
        check(&Case { descales: [q, None, v], key_lengths: Some(vec![130, 0]), ..case }, own);
    }
    check(&in_blocks(128, Case::new(2, 70, 300, 128)), schedule(2, 128, PERSISTENT));
    check(&in_blocks(64, Case::new(2, 70, 150, 256)), schedule(2, 64, PERSISTENT));
}

#[test]
fn the_descale_of_another_block_is_found() {
    let case = in_blocks(64, Case::new(2, 70, 300, 64));
    let inputs = case.inputs();
    let truth = truth(&case, &inputs);
    for schedule in [schedule(2, 64, PERSISTENT), ada(64, 64, 4, 2, 1)] {
        let module = schedule.emit(&case.spec(), target(&schedule)).unwrap();
        let off = |module: &Module| {
            let found = run(&case, &schedule, &inputs, module, Config::default());
            assert_eq!(found.report.findings, []);
            let errors = found.o.iter().zip(&truth.o).map(|(found, truth)| (found - truth).powi(2));
            (errors.sum::<f64>() / truth.size.iter().map(|size| size * size).sum::<f64>()).sqrt()
        };
        assert!(off(&module) < 0.01, "{schedule}");
        let kernel = &module.kernels[0];
        let in_walk = |inst: &Inst| {
            let section = &kernel.sections[inst.section.unwrap() as usize];
            section.starts_with("walk") || section.starts_with("main loop") && !section.contains("threads")
        };
        let is_read = |inst: &Inst| matches!(inst.op, Op::Ld { space: Space::Global, .. }) && in_walk(inst);
        let body = kernel.body.iter().enumerate();
        let reads: Vec<usize> = body.filter(|(_, inst)| is_read(inst)).map(|(at, _)| at).collect();
        assert!(reads.len() >= 4, "{reads:?}");
        // Of the keys and of the values, that of the block before, and of the one behind.
        for (of, bytes) in [(0, -4), (0, 4), (1, -4), (1, 4)] {
            let mut wrong = module.clone();
            for &at in reads.iter().skip(of).step_by(2) {
                let Arg::Mem { offset, .. } = &mut wrong.kernels[0].body[at].src[0] else { panic!() };
                *offset += bytes;
            }
            let off = off(&wrong);
            assert!(off > 0.1, "{schedule}, {of}, {bytes}: off by {off}");
        }
    }
}

#[test]
fn rows_of_v_behind_the_last_key_do_not_matter() {
    let case = Case { batch: 2, key_lengths: Some(vec![50, 100]), ..Case::new(1, 64, 150, 64) };
    for schedule in [schedule(1, 64, SHORT), ada(64, 64, 4, 2, 1), ada(128, 32, 8, 1, 0)] {
        rows_behind_do_not_matter(&case, &schedule);
    }
}

fn rows_behind_do_not_matter(case: &Case, schedule: &Schedule) {
    let module = schedule.emit(&case.spec(), target(schedule)).unwrap();
    let [q, mut k, mut v] = case.inputs();
    let run = |q: &[u8], k: &[u8], v: &[u8]| {
        let found = run(case, schedule, &[q.into(), k.into(), v.into()], &module, Config::default());
        assert_eq!(found.report.findings, []);
        found.o
    };
    let before = run(&q, &k, &v);
    for (batch, keys) in [50, 100].into_iter().enumerate() {
        for byte in (batch * 150 + keys) * 64..(batch + 1) * 150 * 64 {
            // NaN, of either sign.
            (k[byte], v[byte]) = (0x7f, 0xff);
        }
    }
    assert_eq!(run(&q, &k, &v), before);
}

#[test]
fn a_needle_is_found_after_many_keys_where_sums_are_flushed_and_lost_where_not() {
    // All keys but the first are alike, and the first is last in the walk: half of the weight is its own. What it adds is
    // added to a large sum.
    let case = Case { dim: 16, dim_v: 32, ..Case::new(1, 64, 4096, 16) };
    let q = vec![code(1.0); 64 * 16];
    let mut k = vec![code(0.0); 4096 * 16];
    let mut v = vec![code(1.125); 4096 * 32];
    // e^(score) = 4095.
    k[..16].fill(code(2.0));
    v[..32].fill(code(-1.125));
    let inputs = [q, k, v];
    let truth = truth(&case, &inputs);
    let off = |schedule: Schedule| {
        let module = schedule.emit(&case.spec(), target(&schedule)).unwrap();
        let found = run(&case, &schedule, &inputs, &module, Config::default());
        assert_eq!(found.report.findings, []);
        found.o.iter().zip(&truth.o).fold(0.0_f64, |most, (found, truth)| most.max((found - truth).abs()))
    };
    let [long, flushed] = [0, 1].map(|flush| off(schedule(1, 128, &format!("{SHORT},flush={flush}"))));
    let aside = off(schedule(1, 128, &format!("{SHORT},flush=8")));
    let on_ada = off(ada(64, 128, 4, 2, 1));
    assert!(flushed < 0.01, "flushed: off by {flushed}");
    assert!(aside < 0.01, "put aside: off by {aside}");
    assert!(on_ada < 0.01, "on Ada: off by {on_ada}");
    assert!(long > 0.03, "one long chain: off by {long}");
}

#[test]
fn what_passes_tiles_on_is_missed_where_it_is_dropped() {
    let case = Case::new(1, 64, 200, 64);
    let schedule = schedule(1, 64, SHORT);
    let inputs = case.inputs();
    let module = schedule.emit(&case.spec(), Target::Sm90a).unwrap();
    let fences = module.kernels[0].body.iter().filter(|inst| matches!(inst.op, Op::FenceProxyAsync(_)));
    assert_eq!(fences.count(), 2, "one for turned values, one for the output");
    let mut without = module.clone();
    without.kernels[0].body.retain(|inst| !matches!(inst.op, Op::FenceProxyAsync(_)));
    for async_mode in [AsyncMode::Late, AsyncMode::Early] {
        let config = || Config { async_mode, ..Config::default() };
        assert_eq!(run(&case, &schedule, &inputs, &module, config()).report.findings, []);
        assert!(!run(&case, &schedule, &inputs, &without, config()).report.is_clean());
    }
}

#[test]
fn turning_tiles_around_meets_in_no_bank() {
    let case = Case::new(1, 64, 128, 128);
    let schedule = schedule(2, 128, SHORT);
    let module = schedule.emit(&case.spec(), Target::Sm90a).unwrap();
    let found = run(&case, &schedule, &case.inputs(), &module, Config::default());
    assert_eq!(found.report.stats.bank_conflicts(), 0);
}

#[test]
fn what_cannot_be_is_refused() {
    let fp8 = |dim| Spec::new(ElementType::E4m3, dim);
    let good = schedule(2, 128, PERSISTENT);
    let refused = |schedule: Schedule, spec: Spec| schedule.check(&spec, Target::Sm90a).unwrap_err();
    assert_eq!(good.check(&fp8(128), Target::Sm90a), Ok(()));
    for dim in [8, 72, 264] {
        assert!(matches!(refused(good, fp8(dim)), ScheduleError::HeadDim { .. }), "{dim}");
    }
    for rest in ["split=2,warpgroups=1", "parts=2", "together=1", "multicast=2"] {
        let text =
            good.to_string().replace("persistent=1", "persistent=0").replace("pingpong=1", "pingpong=0");
        let knobs: Vec<&str> = rest.split(',').collect();
        let kept = text.split([':', ',']).skip(1).filter(|knob| {
            let name = |knob: &str| knob.split('=').next().unwrap_or_default().to_owned();
            !knobs.iter().any(|it| name(it) == name(knob))
        });
        let text = format!("sm90_fwd:{},{rest}", kept.collect::<Vec<_>>().join(","));
        let error = refused(text.parse().unwrap(), fp8(128)).to_string();
        assert!(error.contains("for itself"), "{rest}: {error}");
    }
    assert!(refused(schedule(2, 80, PERSISTENT), fp8(128)).to_string().contains("a multiple of 32"));
    let capped = Spec { softcap: true, ..fp8(128) };
    assert!(refused(good, capped).to_string().contains("scaled scores"));
    assert!(matches!(refused(schedule(2, 128, PERSISTENT), fp8(256)), ScheduleError::Shared(_)));
    assert!(matches!(refused(schedule(3, 192, PERSISTENT), fp8(64)), ScheduleError::Registers { .. }));
    let in_blocks = Spec { descale_keys: Some(192), scaled_scores: true, ..fp8(64) };
    for own in [schedule(2, 128, PERSISTENT), ada(64, 128, 4, 1, 0)] {
        assert!(
            refused(own, in_blocks).to_string().contains("blocks of 192 keys: possible are multiples of 128")
        );
    }
    for own in [schedule(2, 64, PERSISTENT), ada(64, 64, 4, 1, 0)] {
        assert_eq!(own.check(&in_blocks, Target::Sm90a), Ok(()));
        let fused = Spec { scaled_scores: false, ..in_blocks };
        assert!(refused(own, fused).to_string().contains("scaled scores"));
    }
    let aside = schedule(2, 64, &format!("{PERSISTENT},flush=4"));
    assert!(refused(aside, in_blocks).to_string().contains("take flush=1"));
    let turned = schedule(2, 64, &format!("{PERSISTENT},turned=1"));
    for spec in [Spec::new(ElementType::F16, 64), Spec { page: Some(64), ..fp8(64) }] {
        assert!(refused(turned, spec).to_string().contains("take turned=0"));
    }
    for out in [None, Some(ElementType::F32), Some(ElementType::E4m3)] {
        assert!(matches!(refused(good, Spec { out, ..fp8(128) }), ScheduleError::Out { .. }));
    }
    let odd = Spec { out: Some(ElementType::F16), ..Spec::new(ElementType::Bf16, 128) };
    assert!(matches!(refused(good, odd), ScheduleError::Out { .. }));
    assert_eq!(ada(64, 64, 4, 2, 1).check(&fp8(128), Target::Sm89), Ok(()));
    assert!(ada(64, 64, 4, 2, 1).check(&fp8(128), Target::Sm80).unwrap_err().to_string().contains("sm_89"));
    assert!(refused(ada(64, 48, 4, 2, 1), fp8(128)).to_string().contains("a multiple of 32"));
    assert!(refused(ada(64, 64, 4, 2, 1), capped).to_string().contains("scaled scores"));
    for text in ["scalar:warps=4", "sm80_mma:block_n=64", "combine:warps=4"] {
        let other: Schedule = text.parse().unwrap();
        assert_eq!(refused(other, fp8(128)), ScheduleError::Fp8 { kernel: other.kernel() });
        assert_ne!(other.kernel(), Kernel::Sm90Fwd);
    }
}

/// Requires that ptxas takes a kernel, without spills or serialised products.
#[track_caller]
fn assemble(schedule: Schedule, spec: Spec, target: Target) {
    let Some(ptxas) = Ptxas::find_or_skip().unwrap_or_else(|error| panic!("{error}")) else {
        eprintln!("not assembled: {}", PtxasError::NotFound);
        return;
    };
    let module = schedule.emit(&spec, target).unwrap_or_else(|error| panic!("{schedule}: {error}"));
    let assembled = ptxas.assemble(&module, target).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(assembled.remarks, [], "{schedule} for {spec:?}");
    for kernel in &assembled.kernels {
        assert_eq!((kernel.spill_store_bytes, kernel.spill_load_bytes), (0, 0), "{schedule} for {spec:?}");
    }
}

#[test]
fn ada_s_fullest_schedules_assemble_without_spills() {
    let fullest = [
        (64, ada(128, 96, 4, 1, 0), Target::Sm89),
        (128, ada(64, 128, 4, 1, 1), Target::Sm89),
        (256, ada(64, 64, 4, 2, 0), Target::Sm89),
        (96, ada(64, 96, 4, 2, 0), Target::Sm90a),
    ];
    for (head_dim, schedule, target) in fullest {
        let plain = Spec::new(ElementType::E4m3, head_dim);
        let causal = Spec { grouped: true, key_lengths: true, ..plain.causal().with_lse() };
        let capped = Spec { softcap: true, scaled_scores: true, left: true, ..causal };
        for spec in [plain, capped] {
            assemble(schedule, spec, target);
        }
    }
    let in_blocks = Spec { descale_keys: Some(96), scaled_scores: true, ..Spec::new(ElementType::E4m3, 64) };
    assemble(ada(64, 96, 4, 2, 0), in_blocks.causal().with_lse(), Target::Sm89);
}

#[test]
fn ada_s_kernel_is_right_for_every_head_dim() {
    check(&Case::new(2, 200, 300, 64), ada(128, 64, 4, 2, 1));
    check(&Case::new(1, 130, 333, 128), ada(128, 64, 8, 2, 1));
    check(&Case::new(1, 130, 333, 96), ada(128, 32, 4, 3, 0));
    check(&Case::new(1, 70, 200, 256), ada(64, 32, 4, 1, 0));
    check(&Case { dim_v: 128, ..Case::new(1, 64, 100, 192) }, ada(64, 64, 4, 2, 0));
    check(&Case { dim_v: 32, out: ElementType::F16, ..Case::new(1, 65, 100, 16) }, ada(64, 128, 4, 1, 1));
    check(&Case { dim_v: 16, ..Case::new(1, 64, 100, 48) }, ada(64, 32, 4, 2, 1));
    check(&Case { dim_v: 80, ..Case::new(1, 64, 300, 80) }, ada(64, 96, 4, 2, 0));
    check(&Case { dim_v: 112, ..Case::new(1, 3, 61, 96) }, ada(128, 64, 8, 1, 1));
}

#[test]
fn ada_s_kernel_is_right_for_masks_groups_softcaps_and_descales() {
    check(&Case::new(2, 300, 300, 128).causal(), ada(128, 64, 8, 2, 1));
    check(&Case::new(1, 260, 40, 64).causal(), ada(64, 64, 4, 1, 0));
    let window = Case { left: Some(40), right: Some(20), ..Case::new(1, 300, 300, 64) };
    check(&window, ada(64, 32, 4, 2, 0));
    let grouped = Case { heads_kv: 2, batch: 2, ..Case::new(4, 90, 150, 64).causal() };
    check(&grouped, ada(64, 64, 4, 3, 1));
    let ragged = Case { batch: 4, key_lengths: Some(vec![0, 150, 31, 97]), ..Case::new(2, 100, 150, 64) };
    check(&ragged, ada(128, 64, 4, 2, 1));
    check(&ragged.clone().causal(), ada(64, 96, 4, 1, 0));
    let capped = Case { softcap: Some(5.0), ..Case::new(1, 100, 200, 64).causal() };
    check(&capped, ada(64, 64, 4, 2, 1));
    // Different for each kv head, in two batch entries, and under a softcap.
    let each = |first: f32| Some((0..4).map(|i| first * (1.0 + i as f32)).collect());
    let case = Case { batch: 2, heads_kv: 2, ..Case::new(4, 70, 100, 64) };
    let case = Case { descales: [each(0.5), each(0.25), each(2.0)], ..case };
    check(&case, ada(64, 64, 4, 2, 1));
    check(&Case { softcap: Some(2.0), ..case.clone() }, ada(64, 64, 4, 2, 1));
    check(&Case { descales: [None, Some(vec![3.0]), None], ..case }, ada(64, 32, 4, 2, 0));
}

#[test]
fn ada_s_walk_over_keys_meets_in_no_bank() {
    let schedule = ada(128, 64, 8, 2, 1);
    let [shorter, longer] = [128, 384].map(|keys| {
        let case = Case::new(1, 128, keys, 128);
        let module = schedule.emit(&case.spec(), Target::Sm89).unwrap();
        let found = run(&case, &schedule, &case.inputs(), &module, Config::default());
        found.report.stats.bank_conflicts()
    });
    assert_eq!(shorter, longer);
}
