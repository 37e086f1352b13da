//! Hopper's backward kernels on the simulator, against gradients in f64 of the same numbers.

use flashcore_kernels::{Args, ElementType, Map, Operand, Packed, Schedule, Spec, TensorArg};
use flashcore_ptx::{Module, Target};
use flashcore_sim::{AsyncMode, Config, LaunchDims, LaunchReport, Sim, Swizzle, TensorElement, TensorMap};
use half::{bf16, f16};

/// A problem.
#[derive(Clone, Debug)]
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
    dtype: ElementType,
}

impl Case {
    /// One batch entry and head without a mask.
    fn new(len_q: usize, len_k: usize, dim: usize) -> Self {
        Self {
            batch: 1,
            heads: 1,
            heads_kv: 1,
            len_q,
            len_k,
            dim,
            dim_v: dim,
            left: None,
            right: None,
            softcap: None,
            key_lengths: None,
            dtype: ElementType::F16,
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
            head_dim_v: self.dim_v as u32,
            left: self.left.is_some(),
            right: self.right.is_some(),
            softcap: self.softcap.is_some(),
            scaled_scores: Spec::needs_scaled_scores(self.dtype, self.scale(), self.softcap),
            key_lengths: self.key_lengths.is_some(),
            grouped: self.heads != self.heads_kv,
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

    /// q, k, v and dO.
    fn inputs(&self) -> [Vec<u16>; 4] {
        let Case { batch, heads, heads_kv, len_q, len_k, dim, dim_v, .. } = *self;
        let sizes =
            [heads * len_q * dim, heads_kv * len_k * dim, heads_kv * len_k * dim_v, heads * len_q * dim_v];
        let mut seed = 0;
        sizes.map(|len| {
            seed += 1;
            noise(batch * len, seed).into_iter().map(|x| self.bits(x)).collect()
        })
    }
}

/// Numbers from -2 to 2 that look random.
fn noise(len: usize, seed: usize) -> Vec<f64> {
    let word = |i: usize| (i + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(seed) >> 20;
    (0..len).map(|i| (word(word(i)) % 4001) as f64 / 1000.0 - 2.0).collect()
}

/// What the gradients are, and the two numbers per query that the kernel is given.
struct Truth {
    gradients: [Vec<f64>; 3],
    row_lse: Vec<f32>,
    row_delta: Vec<f32>,
}

/// Rows that a head's numbers are padded to.
fn padded(case: &Case) -> usize {
    case.len_q.next_multiple_of(128)
}

fn truth(case: &Case, [q, k, v, d_o]: &[Vec<u16>; 4]) -> Truth {
    let Case { batch, heads, heads_kv, len_q, len_k, dim, dim_v, .. } = *case;
    let mut truth = Truth {
        gradients: [q.len(), k.len(), v.len()].map(|len| vec![0.0; len]),
        row_lse: vec![f32::INFINITY; batch * heads * padded(case)],
        row_delta: vec![0.0; batch * heads * padded(case)],
    };
    let all = |x: &[u16]| x.iter().map(|&bits| case.value(bits)).collect::<Vec<f64>>();
    let (q, k, v, d_o) = (all(q), all(k), all(v), all(d_o));
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    let scale = f64::from(case.scale());
    for row in 0..batch * heads * len_q {
        let (entry, head, i) = (row / len_q / heads, row / len_q % heads, row % len_q);
        let first_key = (entry * heads_kv + head / (heads / heads_kv)) * len_k;
        let keys = case.key_lengths.as_ref().map_or(len_k, |lengths| lengths[entry] as usize);
        let place = i as i64 + keys as i64 - len_q as i64;
        let sees = |key: &usize| {
            case.right.is_none_or(|right| *key as i64 <= place + i64::from(right))
                && case.left.is_none_or(|left| *key as i64 >= place - i64::from(left))
        };
        let (own_q, own_do) = (&q[row * dim..][..dim], &d_o[row * dim_v..][..dim_v]);
        // The score, and its derivative by the scaled dot product.
        let score = |key: usize| {
            let x = scale * dot(own_q, &k[(first_key + key) * dim..][..dim]);
            case.softcap.map_or((x, 1.0), |cap| {
                let tanh = (x / f64::from(cap)).tanh();
                (f64::from(cap) * tanh, 1.0 - tanh * tanh)
            })
        };
        let seen: Vec<usize> = (0..keys).filter(sees).collect();
        let scores: Vec<(f64, f64)> = seen.iter().map(|&key| score(key)).collect();
        let max = scores.iter().fold(f64::NEG_INFINITY, |max, s| max.max(s.0));
        let sum: f64 = scores.iter().map(|s| (s.0 - max).exp()).sum();
        if seen.is_empty() {
            continue;
        }
        let dps: Vec<f64> =
            seen.iter().map(|&key| dot(own_do, &v[(first_key + key) * dim_v..][..dim_v])).collect();
        let ps: Vec<f64> = scores.iter().map(|s| (s.0 - max).exp() / sum).collect();
        let delta: f64 = ps.iter().zip(&dps).map(|(p, dp)| p * dp).sum();
        let at = (entry * heads + head) * padded(case) + i;
        truth.row_lse[at] = ((max + sum.ln()) * std::f64::consts::LOG2_E) as f32;
        truth.row_delta[at] = delta as f32;
        for (j, &key) in seen.iter().enumerate() {
            let ds = ps[j] * (dps[j] - delta) * scores[j].1 * scale;
            let at = first_key + key;
            for d in 0..dim {
                truth.gradients[0][row * dim + d] += ds * k[at * dim + d];
                truth.gradients[1][at * dim + d] += ds * own_q[d];
            }
            for (d, own_do) in own_do.iter().enumerate() {
                truth.gradients[2][at * dim_v + d] += ps[j] * own_do;
            }
        }
    }
    truth
}

fn encode(map: &Map) -> Result<flashcore_ptx::TensorMap, String> {
    let element = if map.dtype == ElementType::F16 { TensorElement::F16 } else { TensorElement::Bf16 };
    let map = TensorMap::new(element, map.address, &map.dims, &map.strides, &map.box_dims);
    map.swizzled(Swizzle::B128).encode().map(flashcore_ptx::TensorMap)
}

fn bytes_of<T, const N: usize>(values: &[T], bytes: impl Fn(&T) -> [u8; N]) -> Vec<u8> {
    values.iter().flat_map(bytes).collect()
}

/// A schedule of the backward kernel and the one that finishes its work.
fn schedules(block_m: u32, rotate: bool) -> Vec<Schedule> {
    let rotate = u32::from(rotate);
    let texts = [
        format!("sm90_bwd:block_m={block_m},stages=3,pingpong=1,rotate={rotate}"),
        format!("sm90_bwd_finish:block_m={block_m},rotate={rotate}"),
    ];
    texts.iter().map(|text| text.parse().unwrap()).collect()
}

/// Runs a case; returns dq, dk, dv as bits and what was found.
fn run(
    case: &Case,
    schedules: &[Schedule],
    modules: &[Module],
    inputs: &[Vec<u16>; 4],
    truth: &Truth,
    config: Config,
) -> ([Vec<u16>; 3], Vec<LaunchReport>) {
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
    let shapes = [
        [batch, heads, len_q, dim],
        [batch, heads_kv, len_k, dim],
        [batch, heads_kv, len_k, dim_v],
        [batch, heads, len_q, dim_v],
    ];
    for ((operand, input), shape) in
        [Operand::Q, Operand::K, Operand::V, Operand::Do].into_iter().zip(inputs).zip(shapes)
    {
        let bytes = bytes_of(input, |bits| bits.to_le_bytes());
        set(operand, sim.alloc_from(&format!("{operand:?}"), &bytes).address, shape, 2);
    }
    let rows = [batch, heads, padded(case), 1];
    for (operand, numbers) in [(Operand::RowLse, &truth.row_lse), (Operand::RowDelta, &truth.row_delta)] {
        let bytes = bytes_of(numbers, |x| x.to_le_bytes());
        set(operand, sim.alloc_from(&format!("{operand:?}"), &bytes).address, rows, 4);
    }
    if let Some(lengths) = &case.key_lengths {
        let address = sim.alloc_from("key lengths", &bytes_of(lengths, |n| n.to_le_bytes())).address;
        set(Operand::KeyLengths, address, [batch, 1, 1, 1], 4);
    }
    if let Schedule::Sm90Bwd(main) = schedules[0] {
        let tiles = batch * heads * (main.copies() * main.query_tiles(len_q as u32)) as usize;
        let dq_tiles = sim.alloc("dq tiles", tiles * main.dq_tile_bytes(spec.head_dim) as usize);
        let turns = sim.alloc_from("turns", &vec![0; tiles * 4]);
        set(Operand::DqTiles, dq_tiles.address, [1, 1, 1, 1], 4);
        set(Operand::Turns, turns.address, [1, 1, 1, 1], 4);
    }
    let gradients = [(Operand::Dq, shapes[0]), (Operand::Dk, shapes[1]), (Operand::Dv, shapes[2])];
    let gradients = gradients.map(|(operand, shape)| {
        let memory = sim.alloc(&format!("{operand:?}"), shape.iter().product::<usize>() * 2);
        set(operand, memory.address, shape, 2);
        memory
    });
    let mut packed = Packed::default();
    for schedule in schedules {
        schedule.bind(&spec, &args, &mut encode, &mut packed).unwrap();
    }
    let mut reports = Vec::new();
    for (i, (schedule, module)) in schedules.iter().zip(modules).enumerate() {
        let geometry = schedule.geometry(&spec);
        let (own_heads, len) = if geometry.is_of_keys() { (heads_kv, len_k) } else { (heads, len_q) };
        let blocks = geometry.tiles(batch as u32, own_heads as u32, len as u32)
            + geometry.query_blocks(batch as u32, heads as u32, len_q as u32);
        let dims = LaunchDims {
            grid: [blocks as u32, 1, 1],
            block: [geometry.threads, 1, 1],
            cluster: None,
            dynamic_shared: Some(geometry.shared_bytes),
        };
        reports.push(sim.launch(module, &module.kernels[0].name, dims, packed.launch(i).0).unwrap());
    }
    let found = gradients.map(|memory| {
        if reports.iter().all(LaunchReport::is_clean) {
            assert_eq!(sim.unwritten(memory), [], "a gradient");
        }
        sim.read(memory).as_chunks().0.iter().map(|bytes| u16::from_le_bytes(*bytes)).collect()
    });
    (found, reports)
}

/// Requires that a case comes to the right gradients, on several interleavings to the same bits.
#[track_caller]
fn check(case: &Case) {
    // Blocks begin their walks at different tiles only without a mask.
    let rotations: &[bool] = if case.spec().is_masked() { &[false] } else { &[false, true] };
    for &rotate in rotations {
        check_with(case, &schedules(64, rotate));
        if case.dim.max(case.dim_v) <= 64 {
            check_with(case, &schedules(128, rotate));
        }
    }
}

/// The same for the kernel for wide heads.
#[track_caller]
fn check_wide(case: &Case, stages: u32, pingpong: u32) {
    for piecewise in [0, 1] {
        let schedule = format!("sm90_bwd_wide:stages={stages},pingpong={pingpong},piecewise={piecewise}");
        check_with(case, &[schedule.parse().unwrap()]);
    }
}

#[track_caller]
fn check_with(case: &Case, schedules: &[Schedule]) {
    let module = |schedule: &Schedule| {
        schedule
            .emit(&case.spec(), Target::Sm90a)
            .unwrap_or_else(|error| panic!("{case:?} {schedule}: {error}"))
    };
    let modules: Vec<Module> = schedules.iter().map(module).collect();
    let inputs = case.inputs();
    let truth = truth(case, &inputs);
    let mut first = None;
    for (async_mode, seed) in [(AsyncMode::Late, 0), (AsyncMode::Early, 7)] {
        let config = Config { async_mode, seed, ..Config::default() };
        let (found, reports) = run(case, schedules, &modules, &inputs, &truth, config);
        for report in reports {
            assert_eq!(report.findings, [], "{case:?}");
        }
        for ((name, found), truth) in ["dq", "dk", "dv"].iter().zip(&found).zip(&truth.gradients) {
            let unit = if case.dtype == ElementType::F16 { 2f64.powi(-10) } else { 2f64.powi(-7) };
            let rms = |x: &mut dyn Iterator<Item = f64>| {
                (x.map(|x| x * x).sum::<f64>() / truth.len().max(1) as f64).sqrt()
            };
            let size = rms(&mut truth.iter().copied());
            let error = rms(&mut found.iter().zip(truth).map(|(&bits, truth)| case.value(bits) - truth));
            assert!(error <= unit * size, "{case:?} {name}: error {error} of {size}");
        }
        assert!(first.get_or_insert_with(|| found.clone()) == &found, "{case:?}: other bits");
    }
}

#[test]
fn gradients_without_a_mask() {
    check(&Case::new(128, 128, 128));
    check(&Case { heads: 2, heads_kv: 2, ..Case::new(200, 300, 64) });
    check(&Case { dtype: ElementType::Bf16, ..Case::new(150, 130, 64) });
}

#[test]
fn gradients_under_masks() {
    check(&Case::new(200, 300, 64).causal());
    check(&Case::new(300, 200, 64).causal());
    check(&Case { left: Some(40), right: Some(7), ..Case::new(310, 400, 128) });
}

#[test]
fn gradients_of_groups_lengths_and_softcaps() {
    check(&Case { heads: 4, heads_kv: 2, batch: 2, ..Case::new(70, 140, 64).causal() });
    check(&Case { batch: 2, key_lengths: Some(vec![100, 0]), ..Case::new(70, 140, 128) });
    check(&Case { softcap: Some(3.0), ..Case::new(70, 140, 64).causal() });
    check(&Case { softcap: Some(1000.0), ..Case::new(70, 140, 64) });
}

#[test]
fn head_dims_of_all_kinds() {
    for (dim, dim_v) in [(8, 8), (40, 64), (72, 128), (128, 40), (96, 96)] {
        check(&Case { dim_v, ..Case::new(70, 140, dim) });
    }
    check(&Case { dim_v: 128, ..Case::new(130, 140, 40) });
}

#[test]
fn wide_heads_without_a_mask() {
    check_wide(&Case::new(200, 150, 256), 2, 1);
    check_wide(&Case { heads: 2, heads_kv: 2, dtype: ElementType::Bf16, ..Case::new(70, 200, 192) }, 3, 0);
}

#[test]
fn wide_heads_under_masks() {
    check_wide(&Case { dim_v: 128, ..Case::new(200, 330, 192) }.causal(), 3, 1);
    check_wide(&Case::new(330, 200, 160).causal(), 2, 0);
    check_wide(&Case { left: Some(40), right: Some(7), ..Case::new(310, 400, 136) }, 3, 1);
}

#[test]
fn wide_heads_with_groups_lengths_and_softcaps() {
    check_wide(&Case { heads: 4, heads_kv: 2, batch: 2, ..Case::new(70, 140, 136) }.causal(), 3, 1);
    check_wide(&Case { batch: 2, key_lengths: Some(vec![100, 0]), ..Case::new(150, 140, 256) }, 2, 1);
    check_wide(&Case { softcap: Some(3.0), ..Case::new(70, 140, 136) }.causal(), 3, 0);
    check_wide(&Case { softcap: Some(1000.0), ..Case::new(70, 140, 144) }, 2, 1);
}

#[test]
fn wide_heads_of_all_kinds() {
    for (dim, dim_v) in [(8, 256), (256, 8), (40, 136), (200, 72)] {
        check_wide(&Case { dim_v, ..Case::new(130, 140, dim) }, 2, 1);
    }
}
