//! Few queries of 16 bits against keys and values of 8: on the simulator, against attention in f64 on the same numbers.

use flashcore_kernels::{
    Args, ElementType, Family, Operand, Packed, Schedule, ScheduleError, Spec, TensorArg,
    sm80::decode::{self, ROWS},
};
use flashcore_ptx::{
    Module, Op, Space, Target,
    ptxas::{Ptxas, PtxasError},
};
use flashcore_sim::{Config, Finding, LaunchDims, Launching, Sim};
use float8::F8E4M3;

/// A problem: queries of 16 bits, keys and values of e4m3.
#[derive(Clone)]
struct Case {
    dtype: ElementType,
    batch: usize,
    heads: usize,
    heads_kv: usize,
    len_q: usize,
    len_k: usize,
    dim: usize,
    dim_v: usize,
    left: Option<i32>,
    right: Option<i32>,
    softcap: Option<f32>,
    key_lengths: Option<Vec<u32>>,
    /// Keys of a page, where keys and values lie in a pool.
    page: Option<usize>,
    /// What becomes of the table of pages.
    edit: fn(&mut Vec<u32>),
    /// Of k and v, by batch entry and kv head.
    descales: [Option<Vec<f32>>; 2],
    /// What the queries are multiplied by.
    size: f32,
}

impl Case {
    /// The heads of a group as the rows of one head, as decoding has them.
    fn new(dtype: ElementType, group: usize, len_k: usize, dim: usize) -> Self {
        Self {
            dtype,
            batch: 1,
            heads: 1,
            heads_kv: 1,
            len_q: group,
            len_k,
            dim,
            dim_v: dim,
            left: None,
            right: None,
            softcap: None,
            key_lengths: None,
            page: None,
            edit: |_| (),
            descales: [None, None],
            size: 1.0,
        }
    }

    fn scale(&self) -> f32 {
        1.0 / (self.dim as f32).sqrt() / self.size
    }

    fn spec(&self) -> Spec {
        Spec {
            kv: Some(ElementType::E4m3),
            head_dim_v: self.dim_v as u32,
            left: self.left.is_some(),
            right: self.right.is_some(),
            softcap: self.softcap.is_some(),
            // The descales are part of the scale, and known to the GPU alone.
            scaled_scores: Spec::needs_scaled_scores(ElementType::E4m3, self.scale(), self.softcap),
            key_lengths: self.key_lengths.is_some(),
            page: self.page.map(|page| page as u32),
            grouped: self.heads != self.heads_kv,
            lse: true,
            ..Spec::new(self.dtype, self.dim as u32)
        }
    }

    /// The queries as 16-bit words.
    fn queries(&self) -> Vec<[u8; 2]> {
        let len = self.batch * self.heads * self.len_q * self.dim;
        let word = |x: f32| match self.dtype {
            ElementType::F16 => half::f16::from_f32(x).to_le_bytes(),
            _ => half::bf16::from_f32(x).to_le_bytes(),
        };
        noise(len, 1).into_iter().map(|x| word(x * self.size)).collect()
    }

    fn float(&self, word: [u8; 2]) -> f64 {
        match self.dtype {
            ElementType::F16 => half::f16::from_le_bytes(word).to_f64(),
            _ => half::bf16::from_le_bytes(word).to_f64(),
        }
    }

    fn codes(&self) -> [Vec<u8>; 2] {
        let rows = self.batch * self.heads_kv * self.len_k;
        let code = |x: f32| F8E4M3::from_f32(x).to_bits();
        [(self.dim, 2), (self.dim_v, 3)]
            .map(|(dim, seed)| noise(rows * dim, seed).into_iter().map(code).collect())
    }

    fn descale(&self, of: usize, batch: usize, kv_head: usize) -> f64 {
        self.descales[of].as_ref().map_or(1.0, |all| f64::from(all[batch * self.heads_kv + kv_head]))
    }
}

/// The same codes in pages of a pool, in the order of tokens, and which page each of a batch entry's is: those of the last
/// entry come first, every other page is nobody's, and what is nobody's is NaN.
fn in_pages(case: &Case, page: usize, codes: &[u8], dim: usize) -> (Vec<u8>, Vec<u32>) {
    let Case { batch, heads_kv, len_k, .. } = *case;
    let each = len_k.div_ceil(page);
    let table: Vec<u32> = (0..batch * each).rev().map(|place| 2 * place as u32 + 1).collect();
    let mut pool = vec![0x7f; (2 * batch * each + 1) * page * heads_kv * dim];
    for (row, codes) in codes.chunks_exact(dim).enumerate() {
        let (entry, head, key) = (row / len_k / heads_kv, row / len_k % heads_kv, row % len_k);
        if case.key_lengths.as_ref().is_some_and(|lengths| key >= lengths[entry] as usize) {
            continue;
        }
        let token = table[entry * each + key / page] as usize * page + key % page;
        pool[(token * heads_kv + head) * dim..][..dim].copy_from_slice(codes);
    }
    (pool, table)
}

/// Numbers from -2 to 2 that look random.
fn noise(len: usize, seed: usize) -> Vec<f32> {
    let word = |i: usize| (i + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(seed) >> 20;
    (0..len).map(|i| (word(word(i)) % 4001) as f32 / 1000.0 - 2.0).collect()
}

/// Outputs, the sums of p |v| beside which their errors count, and lse.
fn truth(case: &Case) -> [Vec<f64>; 3] {
    let Case { heads, heads_kv, len_q, len_k, dim, dim_v, .. } = *case;
    let (q, [k, v]) = (case.queries(), case.codes());
    let value = |code: u8| F8E4M3::from_bits(code).to_f64();
    let mut truth = [Vec::new(), Vec::new(), Vec::new()];
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
        let score = |key: usize| {
            let of_key = &k[(first_key + key) * dim..][..dim];
            let dot: f64 =
                q[row * dim..][..dim].iter().zip(of_key).map(|(&q, &k)| case.float(q) * value(k)).sum();
            let score = f64::from(case.scale()) * case.descale(0, batch, kv_head) * dot;
            case.softcap.map_or(score, |cap| f64::from(cap) * (score / f64::from(cap)).tanh())
        };
        let seen: Vec<(usize, f64)> =
            (0..keys).filter(|&key| sees(key)).map(|key| (key, score(key))).collect();
        let max = seen.iter().fold(f64::NEG_INFINITY, |max, &(_, score)| max.max(score));
        let sum: f64 = seen.iter().map(|&(_, score)| (score - max).exp()).sum();
        truth[2].push(if seen.is_empty() { f64::NEG_INFINITY } else { max + sum.ln() });
        for d in 0..dim_v {
            let (mut o, mut size) = (0.0, 0.0);
            for &(key, score) in &seen {
                let p = (score - max).exp() / sum;
                let v = value(v[(first_key + key) * dim_v + d]) * case.descale(1, batch, kv_head);
                (o, size) = (o + p * v, size + p * v.abs());
            }
            truth[0].push(o);
            truth[1].push(size);
        }
    }
    truth
}

/// Runs a case, with what merges its parts; outputs and lse.
fn run(case: &Case, schedule: decode::Schedule, codes: &[Vec<u8>; 2], target: Target) -> [Vec<f64>; 2] {
    let module = schedule.module(&case.spec(), target).unwrap();
    run_module(case, schedule, codes, target, &module).unwrap_or_else(|findings| panic!("{findings:?}"))
}

/// The same with this module; what was found in its launch, if anything.
fn run_module(
    case: &Case,
    schedule: decode::Schedule,
    codes: &[Vec<u8>; 2],
    target: Target,
    module: &Module,
) -> Result<[Vec<f64>; 2], Vec<Finding>> {
    let spec = case.spec();
    let Case { batch, heads, heads_kv, len_q, len_k, dim, dim_v, .. } = *case;
    let mut sim = Sim::new(Config::default());
    let mut args = Args::default();
    (args.scale, args.softcap) = (case.scale(), case.softcap);
    (args.left, args.right) = (case.left.unwrap_or(0), case.right.unwrap_or(0));
    args.parts = schedule.parts;
    let mut set = |operand, address: u64, shape: [usize; 4], size: usize| {
        let row = (shape[3] * size) as u64;
        let strides = [row * (shape[1] * shape[2]) as u64, row * shape[2] as u64, row];
        args.set(operand, TensorArg { address, shape, strides });
    };
    set(
        Operand::Q,
        sim.alloc_from("q", case.queries().as_flattened()).address,
        [batch, heads, len_q, dim],
        2,
    );
    if case.page.is_none() {
        set(Operand::K, sim.alloc_from("k", &codes[0]).address, [batch, heads_kv, len_k, dim], 1);
        set(Operand::V, sim.alloc_from("v", &codes[1]).address, [batch, heads_kv, len_k, dim_v], 1);
    }
    if let Some(lengths) = &case.key_lengths {
        let bytes: Vec<u8> = lengths.iter().flat_map(|length| length.to_le_bytes()).collect();
        set(Operand::KeyLengths, sim.alloc_from("key lengths", &bytes).address, [batch, 1, 1, 1], 4);
    }
    for (operand, descales) in [Operand::KDescale, Operand::VDescale].into_iter().zip(&case.descales) {
        let Some(descales) = descales else { continue };
        let bytes: Vec<u8> = descales.iter().flat_map(|descale| descale.to_le_bytes()).collect();
        set(operand, sim.alloc_from("descale", &bytes).address, [batch, heads_kv, 1, 1], 4);
    }
    let o = sim.alloc("o", batch * heads * len_q * dim_v * 2);
    let lse = sim.alloc("lse", batch * heads * len_q * 4);
    let rows = schedule.parts as usize * len_q;
    let partial = sim.alloc("partial o", batch * heads * rows * dim_v * 4);
    let state = sim.alloc("partial state", batch * heads * rows * 8);
    set(Operand::O, o.address, [batch, heads, len_q, dim_v], 2);
    set(Operand::Lse, lse.address, [batch, heads, len_q, 1], 4);
    set(Operand::PartialO, partial.address, [batch, heads, rows, dim_v], 4);
    set(Operand::PartialState, state.address, [batch, heads, rows, 2], 4);

    if let Some(page) = case.page {
        for (operand, codes, dim) in [(Operand::K, &codes[0], dim), (Operand::V, &codes[1], dim_v)] {
            let (pool, mut table) = in_pages(case, page, codes, dim);
            (case.edit)(&mut table);
            let shape = [pool.len() / (page * heads_kv * dim), heads_kv, page, dim];
            let token = (heads_kv * dim) as u64;
            let strides = [page as u64 * token, dim as u64, token];
            args.set(operand, TensorArg { address: sim.alloc_from("pool", &pool).address, shape, strides });
            let bytes: Vec<u8> = table.iter().flat_map(|page| page.to_le_bytes()).collect();
            let (address, each) = (sim.alloc_from("pages", &bytes).address, table.len() / batch);
            let strides = [4 * each as u64; 3];
            args.set(Operand::Pages, TensorArg { address, shape: [batch, 1, 1, each], strides });
        }
        args.longest = [len_q as u32, len_k as u32];
    }
    let mut packed = Packed::default();
    let mut none = |_: &flashcore_kernels::Map| Err::<flashcore_ptx::TensorMap, ()>(());
    schedule.bind(&spec, &args, &mut none, &mut packed).unwrap();
    let dims = |geometry: flashcore_kernels::Geometry| LaunchDims {
        grid: geometry.grid(batch as u32, heads as u32, len_q as u32, 4),
        block: [geometry.threads, 1, 1],
        cluster: None,
        dynamic_shared: Some(geometry.shared_bytes),
    };
    let how = if target == Target::Sm90a { Launching::Programmatic } else { Launching::StreamOrder };
    let own = dims(schedule.geometry(&spec));
    let report = sim.launch_as(module, "flashcore_sm80_decode", own, packed.launch(0).0, how).unwrap();
    if !report.is_clean() {
        return Err(report.findings);
    }
    assert_eq!(report.stats.bank_conflicts(), 0, "{schedule}");
    if schedule.parts > 1 {
        assert_eq!(sim.unwritten(partial), [], "partial o");
        assert_eq!(sim.unwritten(state), [], "partial state");
        let combine: Schedule = "combine:warps=4".parse().unwrap();
        combine.bind(&spec, &args, &mut none, &mut packed).unwrap();
        let module = combine.emit(&spec, target).unwrap();
        let own = dims(combine.geometry(&spec));
        let report = sim.launch_as(&module, "flashcore_combine", own, packed.launch(1).0, how).unwrap();
        assert_eq!(report.findings, [], "combine after {schedule}");
    }
    assert_eq!(sim.unwritten(o), [], "o");
    assert_eq!(sim.unwritten(lse), [], "lse");
    Ok([
        sim.read(o).as_chunks().0.iter().map(|word| case.float(*word)).collect(),
        sim.read(lse).as_chunks().0.iter().map(|bytes| f64::from(f32::from_le_bytes(*bytes))).collect(),
    ])
}

fn schedule(warps: u32, keys: u32, stages: u32, parts: u32) -> decode::Schedule {
    decode::Schedule { warps, keys, stages, parts }
}

#[track_caller]
fn check_on(case: &Case, schedule: decode::Schedule, target: Target) {
    let what =
        || format!("{:?} {}x{}/{}x{} {schedule}", case.dtype, case.heads, case.len_q, case.len_k, case.dim);
    let [o, lse] = run(case, schedule, &case.codes(), target);
    let [want, sizes, want_lse] = truth(case);
    // Outputs of bf16 are rounded by up to 2^-9, and probabilities to f16, which has few bits for very small ones.
    let most = if case.dtype == ElementType::F16 { 1.5e-3 } else { 5e-3 };
    for ((o, want), size) in o.iter().zip(&want).zip(&sizes) {
        assert!((o - want).abs() <= most * size + 1e-6, "{}: {o} is not {want}", what());
    }
    for (lse, want) in lse.iter().zip(&want_lse) {
        let right = lse == want || (lse - want).abs() < 1e-5 * want.abs().max(1.0);
        assert!(right, "{}: lse {lse} is not {want}", what());
    }
}

#[track_caller]
fn check(case: &Case, schedule: decode::Schedule) {
    check_on(case, schedule, Target::Sm90a);
}

use ElementType::{Bf16, F16};

#[test]
fn every_head_dim_and_group_is_right() {
    check(&Case::new(F16, 4, 333, 128), schedule(4, 32, 3, 1));
    check(&Case::new(Bf16, 8, 1000, 64), schedule(8, 32, 3, 1));
    check(&Case::new(F16, 1, 100, 256), schedule(4, 16, 2, 1));
    check(&Case { dim_v: 128, ..Case::new(Bf16, 16, 77, 192) }, schedule(2, 16, 4, 1));
    check(&Case { dim_v: 80, ..Case::new(F16, 5, 130, 96) }, schedule(3, 32, 2, 1));
    check(&Case { dim_v: 16, ..Case::new(Bf16, 3, 45, 80) }, schedule(1, 16, 3, 1));
    check(&Case { dim_v: 48, ..Case::new(F16, 2, 5, 16) }, schedule(8, 32, 3, 1));
    // More rows than a block has.
    check(&Case::new(F16, ROWS as usize + 5, 200, 64), schedule(4, 32, 2, 1));
    check_on(&Case::new(Bf16, 4, 200, 128), schedule(4, 32, 2, 1), Target::Sm89);
}

#[test]
fn parts_are_merged_as_those_of_16_bits() {
    check(&Case { batch: 2, heads: 2, heads_kv: 2, ..Case::new(F16, 4, 500, 128) }, schedule(4, 32, 3, 3));
    // More parts than there are steps of keys.
    check(&Case::new(Bf16, 8, 40, 64), schedule(2, 16, 2, 7));
    let descales = || Some(vec![0.25, 3.0]);
    let case = Case { heads: 2, heads_kv: 2, ..Case::new(F16, 4, 300, 64) };
    check(&Case { descales: [descales(), descales()], ..case.clone() }, schedule(4, 32, 2, 4));
    let capped = Case { softcap: Some(2.0), descales: [descales(), None], ..case };
    check(&capped, schedule(4, 32, 2, 4));
    // Without what lets one launch begin beside another, too.
    check_on(&capped, schedule(4, 32, 2, 4), Target::Sm89);
}

#[test]
fn masks_groups_lengths_softcaps_and_descales_are_right() {
    // Several queries per head, as a draft of tokens has them.
    let draft = Case { heads: 4, heads_kv: 2, batch: 2, ..Case::new(Bf16, 5, 200, 64) };
    check(&draft, schedule(4, 32, 3, 1));
    check(&Case { right: Some(0), ..draft.clone() }, schedule(4, 32, 3, 1));
    check(&Case { right: Some(0), left: Some(70), ..draft.clone() }, schedule(2, 16, 3, 1));
    check(&Case { right: Some(0), left: Some(70), ..draft.clone() }, schedule(2, 16, 3, 3));
    // More queries than keys: the first see none.
    check(&Case { right: Some(0), ..Case::new(F16, 30, 11, 64) }, schedule(2, 16, 2, 1));
    let ragged = Case { batch: 4, key_lengths: Some(vec![0, 150, 31, 97]), ..Case::new(F16, 4, 150, 64) };
    check(&ragged, schedule(4, 32, 2, 1));
    check(&ragged, schedule(2, 16, 2, 3));
    check(&Case { right: Some(0), ..ragged }, schedule(4, 16, 2, 1));
    let each = |first: f32| Some((0..4).map(|i| first * (1.0 + i as f32)).collect());
    let scaled = Case { descales: [each(0.25), each(2.0)], ..draft };
    check(&scaled, schedule(4, 32, 3, 1));
    check(&Case { softcap: Some(3.0), ..scaled }, schedule(4, 32, 3, 1));
}

#[test]
fn queries_of_bf16_keep_their_bits_however_small_or_large_they_are() {
    for size in [1e-30, 1e-6, 1e6, 1e30] {
        check(&Case { size, ..Case::new(Bf16, 4, 100, 64) }, schedule(4, 32, 2, 1));
    }
}

#[test]
fn codes_behind_the_last_key_do_not_matter() {
    let case = Case { batch: 2, key_lengths: Some(vec![50, 101]), ..Case::new(F16, 4, 150, 64) };
    let [mut k, mut v] = case.codes();
    for schedule in [schedule(2, 32, 2, 1), schedule(2, 16, 3, 2)] {
        let before = run(&case, schedule, &[k.clone(), v.clone()], Target::Sm90a);
        for (batch, keys) in [50, 101].into_iter().enumerate() {
            for byte in (batch * 150 + keys) * 64..(batch + 1) * 150 * 64 {
                // NaN, of either sign.
                (k[byte], v[byte]) = (0x7f, 0xff);
            }
        }
        assert_eq!(run(&case, schedule, &[k.clone(), v.clone()], Target::Sm90a), before);
        [k, v] = case.codes();
    }
}

#[test]
fn a_wait_for_copies_is_missed_where_it_is_dropped() {
    let case = Case::new(F16, 4, 300, 64);
    let schedule = schedule(2, 32, 3, 1);
    let module = schedule.module(&case.spec(), Target::Sm90a).unwrap();
    let mut without = module.clone();
    let waits = |inst: &flashcore_ptx::Inst| matches!(inst.op, Op::CpAsyncWait(_));
    assert!(module.kernels[0].body.iter().any(waits));
    without.kernels[0].body.retain(|inst| !waits(inst));
    assert!(run_module(&case, schedule, &case.codes(), Target::Sm90a, &module).is_ok());
    assert!(run_module(&case, schedule, &case.codes(), Target::Sm90a, &without).is_err());
}

#[test]
fn keys_in_pages_are_read_where_the_table_says() {
    let lengths = |lengths: &[u32]| Some(lengths.to_vec());
    // Lengths end within a page, at its end, one key later, and before the first key.
    let case = Case { batch: 5, key_lengths: lengths(&[64, 150, 0, 65, 1]), ..Case::new(F16, 4, 150, 64) };
    for (page, own) in [
        (16, schedule(4, 16, 3, 1)),
        (16, schedule(2, 16, 2, 3)),
        (32, schedule(2, 32, 4, 1)),
        (48, schedule(3, 16, 2, 2)),
        (64, schedule(2, 32, 3, 1)),
        (256, schedule(8, 32, 2, 1)),
    ] {
        check(&Case { page: Some(page), ..case.clone() }, own);
    }
    let each = |first: f32| Some((0..4).map(|i| first * (1.0 + i as f32)).collect());
    let draft = Case {
        heads: 4,
        heads_kv: 2,
        batch: 2,
        right: Some(0),
        page: Some(32),
        descales: [each(0.25), each(2.0)],
        ..Case::new(Bf16, 5, 200, 64)
    };
    check(&draft, schedule(4, 32, 3, 1));
    check(&Case { left: Some(70), ..draft.clone() }, schedule(2, 16, 3, 3));
    check_on(&Case { key_lengths: lengths(&[200, 31]), ..draft }, schedule(4, 32, 2, 1), Target::Sm89);
    let wide = Case { dim_v: 80, page: Some(16), ..Case::new(F16, 16, 70, 256) };
    check(&wide, schedule(4, 16, 2, 1));
}

#[test]
fn other_pages_than_the_tables_are_found_and_nothing_is_read_of_one_that_the_pool_has_not() {
    let case = Case { batch: 2, page: Some(32), ..Case::new(F16, 4, 300, 64) };
    let own = schedule(2, 32, 3, 1);
    let codes = case.codes();
    let right = run(&case, own, &codes, Target::Sm90a);
    let swapped = Case { edit: |table| table.swap(2, 7), ..case.clone() };
    assert!(run(&swapped, own, &codes, Target::Sm90a) != right);
    // Keys and values of such pages are zeros.
    let missing = Case { edit: |table| [table[1], table[12]] = [u32::MAX, 41], ..case.clone() };
    let mut zeroed = codes.clone();
    for codes in &mut zeroed {
        codes[32 * 64..64 * 64].fill(0);
        codes[(300 + 64) * 64..(300 + 96) * 64].fill(0);
    }
    assert!(run(&missing, own, &codes, Target::Sm90a) == run(&case, own, &zeroed, Target::Sm90a));
    // Numbers of pages that are not read ahead.
    let mut module = own.module(&case.spec(), Target::Sm90a).unwrap();
    let kernel = &mut module.kernels[0];
    let walk = kernel.sections.iter().position(|name| &**name == "walk: one step of keys").unwrap();
    let reads = |inst: &flashcore_ptx::Inst| {
        inst.section == Some(walk as u32) && matches!(inst.op, Op::Ld { space: Space::Global, .. })
    };
    let all = kernel.body.len();
    kernel.body.retain(|inst| !reads(inst));
    assert_eq!(kernel.body.len(), all - 1);
    assert!(run_module(&case, own, &codes, Target::Sm90a, &module) != Ok(right));
}

#[test]
fn what_cannot_be_is_refused() {
    let refused = |schedule: decode::Schedule, spec: Spec, target| schedule.check(&spec, target).unwrap_err();
    let of = |dtype, dim| Spec { kv: Some(ElementType::E4m3), ..Spec::new(dtype, dim) };
    let spec = of(F16, 128);
    let good = decode::Schedule::new(&spec, 1);
    assert_eq!(good.check(&spec, Target::Sm89), Err(ScheduleError::Shared(shared(good, &spec))));
    assert_eq!(good.check(&spec, Target::Sm90a), Ok(()));
    assert!(refused(good, spec, Target::Sm80).to_string().contains("sm_89"));
    assert!(refused(good, of(ElementType::E4m3, 128), Target::Sm90a).to_string().contains("bf16"));
    let odd = decode::Schedule { keys: 24, ..good };
    assert!(refused(odd, spec, Target::Sm90a).to_string().contains("16 or 32 keys"));
    assert!(matches!(refused(good, of(F16, 72), Target::Sm90a), ScheduleError::HeadDim { .. }));
    let capped = Spec { softcap: true, ..spec };
    assert!(refused(good, capped, Target::Sm90a).to_string().contains("scaled scores"));
    let in_blocks = Spec { descale_keys: Some(48), ..spec };
    assert!(refused(good, in_blocks, Target::Sm90a).to_string().contains("multiples of 32"));
    assert_eq!(decode::Schedule::new(&in_blocks, 1).check(&in_blocks, Target::Sm90a), Ok(()));
    let paged = Spec { page: Some(48), ..spec };
    assert!(refused(good, paged, Target::Sm90a).to_string().contains("pages of 48 keys"));
    assert_eq!(decode::Schedule::new(&paged, 1).check(&paged, Target::Sm90a), Ok(()));
    let many = decode::Schedule { warps: 16, stages: 2, keys: 16, parts: 1 };
    assert!(matches!(refused(many, spec, Target::Sm90a), ScheduleError::Registers { .. }));
}

/// Why a schedule's shared memory does not fit on Ada.
fn shared(schedule: decode::Schedule, spec: &Spec) -> flashcore_ptx::SharedError {
    match schedule.check(spec, Target::Sm89) {
        Err(ScheduleError::Shared(error)) => error,
        other => panic!("{other:?}"),
    }
}

#[test]
fn default_schedules_assemble_without_spills() {
    let Some(ptxas) = Ptxas::find_or_skip().unwrap_or_else(|error| panic!("{error}")) else {
        eprintln!("not assembled: {}", PtxasError::NotFound);
        return;
    };
    for head_dim in [64, 128, 192, 256] {
        let plain = Spec { kv: Some(ElementType::E4m3), ..Spec::new(Bf16, head_dim) };
        let capped = Spec {
            grouped: true,
            key_lengths: true,
            softcap: true,
            scaled_scores: true,
            left: true,
            ..plain.causal().with_lse()
        };
        let in_blocks = Spec { descale_keys: Some(128), ..capped };
        let paged = Spec { page: Some(16), ..capped };
        let small = decode::Schedule { warps: 4, stages: 2, ..decode::Schedule::new(&plain, 1) };
        for (spec, schedule, target) in [
            (plain, decode::Schedule::new(&plain, 2), Target::Sm90a),
            (capped, decode::Schedule::new(&capped, 1), Target::Sm90a),
            (capped, small, Target::Sm89),
            (in_blocks, decode::Schedule::new(&in_blocks, 2), Target::Sm90a),
            (paged, decode::Schedule::new(&paged, 2), Target::Sm90a),
        ] {
            let module = schedule.module(&spec, target).unwrap();
            let assembled = ptxas.assemble(&module, target).unwrap_or_else(|error| panic!("{error}"));
            assert_eq!(assembled.remarks, []);
            for kernel in &assembled.kernels {
                let spilled = (kernel.spill_store_bytes, kernel.spill_load_bytes);
                assert_eq!(spilled, (0, 0), "{schedule} for {spec:?}");
            }
        }
    }
}
