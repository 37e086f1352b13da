//! The softmax of unfused attention: a row of scores becomes a row of probabilities, in place.
//!
//! One block takes one row and holds it in registers between its three passes: the maximum, the sum, the result.

use flashcore::plan::Target;
use flashcore::{DType, Mask, Problem};
use flashcore_ptx::{
    B16, B32, BuildErrors, F32, GlobalPtr, KernelBuilder, Module, Reg, Shared, SharedLayout, kernel_params,
};

kernel_params! {
    /// The scores of all rows, one after the other.
    pub struct Rows {
        /// Where they are, and where the probabilities go.
        scores: GlobalPtr,
    }
}

/// The kernel's name.
pub const ENTRY: &str = "flashcore_softmax";
/// The most scores per thread.
const HELD: usize = 32;
/// The most keys per row: a block has at most 1024 threads.
pub const MOST_KEYS: usize = 1024 * HELD;

/// Threads per block for a problem.
pub fn threads(problem: &Problem) -> u32 {
    problem.len_k.div_ceil(HELD).next_power_of_two().clamp(32, 1024) as u32
}

/// Scores that a thread reads at a time: 16 bytes where rows allow it.
fn vector(problem: &Problem) -> usize {
    if problem.len_k.is_multiple_of(8) { 8 } else { 1 }
}

/// The kernel for the rows of a problem. Its grid has one block per query and head.
pub fn module(problem: &Problem, target: Target) -> Result<Module, BuildErrors> {
    let (threads, vector) = (threads(problem), vector(problem));
    let warps = threads / 32;
    let mut shared = SharedLayout::new();
    let slots = shared.alloc("slots", 4 * warps, 16);
    let mut k = KernelBuilder::new(ENTRY, target).params::<Rows>().shared(shared).threads(threads);
    let (scores, tid, row) = (k.param(Rows::scores), k.tid_x(), k.ctaid_x());
    let start = k.mad_wide_u32(row, 2 * problem.len_k as u32, scores);
    let visible = visible(&mut k, problem, row);
    let chunks = problem.len_k.div_ceil(threads as usize * vector);
    let own = k.mul_lo_u32(tid, vector as u32);
    let own_start = k.mad_wide_u32(own, 2, start);
    // Every chunk lies at a fixed offset from the first, so that no chunk needs address registers of its own.
    let step = threads as usize * vector;
    let inside =
        |k: &mut KernelBuilder, chunk: usize| k.setp_lt_s32(own, (problem.len_k - chunk * step) as i32);
    let mut held = Vec::new();
    for chunk in 0..chunks {
        let at = own_start.at((2 * chunk * step) as i32);
        let within = inside(&mut k, chunk);
        let mut values = Vec::new();
        if vector == 8 {
            let words: [Reg<B32>; 4] = std::array::from_fn(|_| k.mov_b32(0u32));
            k.if_(within, |k| k.set(words, |k| k.ld_global_vec::<B32, 4>(at)));
            for word in words {
                values.extend(k.unpack_b32(word).map(|half| widen(&mut k, problem.dtype, half)));
            }
        } else {
            let half = k.mov_b16(0u16);
            k.if_(within, |k| k.set(half, |k| k.ld_global::<B16>(at)));
            values.push(widen(&mut k, problem.dtype, half));
        }
        for (i, value) in values.iter_mut().enumerate() {
            let key = k.add_u32(own, (chunk * step + i) as u32);
            let seen = k.setp_lt_u32(key, visible);
            let exponent = k.mul_f32(*value, std::f32::consts::LOG2_E);
            *value = k.selp_f32(exponent, f32::NEG_INFINITY, seen);
        }
        held.push(values);
    }
    // A row that sees no key has no maximum; against a finite one its probabilities are zeros.
    let mut most = k.mov_f32(f32::MIN);
    for &value in held.iter().flatten() {
        most = k.max_f32(most, value);
    }
    let most = over_block(&mut k, most, slots, tid, warps, KernelBuilder::max_f32);
    let mut sum = k.mov_f32(0.0);
    for value in held.iter_mut().flatten() {
        let below = k.sub_f32(*value, most);
        *value = k.ex2_approx_ftz_f32(below);
        sum = k.add_f32(sum, *value);
    }
    if warps > 1 {
        k.comment("everybody has read the maxima");
        k.bar_sync_all();
    }
    let sum = over_block(&mut k, sum, slots, tid, warps, KernelBuilder::add_f32);
    let any = k.setp_gt_f32(sum, 0.0);
    let inverse = k.rcp_approx_f32(sum);
    let inverse = k.selp_f32(inverse, 0.0, any);
    for (chunk, values) in held.into_iter().enumerate() {
        let at = own_start.at((2 * chunk * step) as i32);
        let within = inside(&mut k, chunk);
        let values: Vec<Reg<F32>> = values.into_iter().map(|value| k.mul_f32(value, inverse)).collect();
        if vector == 8 {
            let words: [Reg<B32>; 4] =
                std::array::from_fn(|i| pack(&mut k, problem.dtype, values[2 * i + 1], values[2 * i]));
            k.if_(within, |k| k.st_global_vec(at, words));
        } else {
            let half = match problem.dtype {
                DType::BF16 => k.cvt_rn_bf16_f32(values[0]),
                DType::F16 | DType::F32 | DType::F8E4M3 | DType::I32 => k.cvt_rn_f16_f32(values[0]),
            };
            k.if_(within, |k| k.st_global(at, half));
        }
    }
    Ok(Module::new(target).with(k.finish()?))
}

/// How many keys the query of a row sees.
fn visible(k: &mut KernelBuilder, problem: &Problem, row: Reg<B32>) -> Reg<B32> {
    let keys = problem.len_k as u32;
    if problem.mask != Mask::Causal {
        return k.mov_b32(keys);
    }
    let query = k.rem_u32(row, problem.len_q as u32);
    // The last query sees the last key.
    let seen = k.add_s32(query, problem.len_k as i32 - problem.len_q as i32 + 1);
    let seen = k.max_s32(seen, 0);
    k.min_s32(seen, problem.len_k as i32)
}

fn widen(k: &mut KernelBuilder, dtype: DType, half: Reg<B16>) -> Reg<F32> {
    match dtype {
        DType::BF16 => k.cvt_f32_bf16(half),
        DType::F16 | DType::F32 | DType::F8E4M3 | DType::I32 => k.cvt_f32_f16(half),
    }
}

fn pack(k: &mut KernelBuilder, dtype: DType, high: Reg<F32>, low: Reg<F32>) -> Reg<B32> {
    match dtype {
        DType::BF16 => k.cvt_rn_bf16x2_f32(high, low),
        DType::F16 | DType::F32 | DType::F8E4M3 | DType::I32 => k.cvt_rn_f16x2_f32(high, low),
    }
}

/// Reduces a value over all threads of the block; every thread gets the result.
fn over_block(
    k: &mut KernelBuilder,
    value: Reg<F32>,
    slots: Shared,
    tid: Reg<B32>,
    warps: u32,
    join: impl Fn(&mut KernelBuilder, Reg<F32>, Reg<F32>) -> Reg<F32>,
) -> Reg<F32> {
    let over = |k: &mut KernelBuilder, mut value: Reg<F32>, lanes: u32| {
        let mut mask = lanes / 2;
        while mask > 0 {
            let other = k.shfl_bfly(value, mask);
            value = join(k, value, other);
            mask /= 2;
        }
        value
    };
    let value = over(k, value, 32);
    if warps == 1 {
        return value;
    }
    let base = k.shared_addr(slots);
    let (warp, lane) = (k.shr_u32(tid, 5u32), k.and_b32(tid, 31u32));
    let first = k.setp_eq_u32(lane, 0u32);
    let own = k.mad_lo_u32(warp, 4u32, base);
    k.if_(first, |k| k.st_shared(own, value));
    k.bar_sync_all();
    // Lane i reads the slot of warp i modulo the number of warps.
    let slot = k.and_b32(lane, warps - 1);
    let place = k.mad_lo_u32(slot, 4u32, base);
    let value = k.ld_shared::<F32>(place);
    over(k, value, warps)
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashcore::sim::Config;
    use flashcore_ptx::KernelParams;
    use flashcore_ptx::ptxas::Ptxas;
    use flashcore_sim::{LaunchDims, Sim};
    use half::{bf16, f16};

    fn round(dtype: DType, x: f64) -> (u16, f64) {
        match dtype {
            DType::BF16 => (bf16::from_f64(x).to_bits(), bf16::from_f64(x).to_f64()),
            DType::F16 | DType::F32 | DType::F8E4M3 | DType::I32 => {
                (f16::from_f64(x).to_bits(), f16::from_f64(x).to_f64())
            }
        }
    }

    fn cases() -> Vec<Problem> {
        let of = |len_q: usize, len_k: usize, dtype| Problem::new(1, 2, len_q, 64, dtype).with_kv(2, len_k);
        vec![
            of(3, 64, DType::F16),
            of(5, 7, DType::F16).with_mask(Mask::Causal),
            of(9, 5, DType::BF16).with_mask(Mask::Causal),
            of(2, 1000, DType::BF16),
            of(2, 2000, DType::F16).with_mask(Mask::Causal),
            of(1, 4100, DType::F16),
        ]
    }

    #[test]
    fn rows_of_every_length_become_probabilities_and_a_row_that_sees_nothing_zeros() {
        for problem in cases() {
            let (rows, keys) = (2 * problem.len_q, problem.len_k);
            let mut rng = flashcore_judge::rng::Rng::new(3);
            let scores: Vec<(u16, f64)> =
                (0..rows * keys).map(|_| round(problem.dtype, 4.0 * rng.normal())).collect();
            let bytes: Vec<u8> = scores.iter().flat_map(|(bits, _)| bits.to_le_bytes()).collect();
            let mut sim = Sim::new(Config { threads: 1, ..Config::default() });
            let memory = sim.alloc("scores", bytes.len());
            sim.write(memory, &bytes);
            let dims = LaunchDims {
                grid: [rows as u32, 1, 1],
                block: [threads(&problem), 1, 1],
                cluster: None,
                dynamic_shared: None,
            };
            let module = module(&problem, Target::Sm80).unwrap();
            let params = Rows { scores: GlobalPtr(memory.address) };
            let report = sim.launch(&module, ENTRY, dims, &params.pack()).unwrap();
            assert!(report.findings.is_empty(), "{:?}", report.findings.first());
            let out = sim.read(memory);
            for row in 0..rows {
                let seen = problem.mask.keys(row % problem.len_q, problem.len_q, keys);
                let scores = &scores[row * keys..][..keys];
                let sum: f64 = seen.clone().map(|key| scores[key].1.exp()).sum();
                for (key, (_, score)) in scores.iter().enumerate() {
                    let place = 2 * (row * keys + key);
                    let bits = u16::from_le_bytes([out[place], out[place + 1]]);
                    let got = match problem.dtype {
                        DType::BF16 => bf16::from_bits(bits).to_f64(),
                        DType::F16 | DType::F32 | DType::F8E4M3 | DType::I32 => f16::from_bits(bits).to_f64(),
                    };
                    let expected = if seen.contains(&key) { score.exp() / sum } else { 0.0 };
                    let most = if problem.dtype == DType::BF16 { 0.005 } else { 0.001 };
                    assert!(
                        (got - expected).abs() <= most * expected + 1e-7,
                        "{problem:?} {row} {key}: {got} {expected}"
                    );
                }
            }
        }
    }

    #[test]
    fn it_assembles_without_spills_for_the_longest_rows_too() {
        let Some(ptxas) = Ptxas::find_or_skip().unwrap() else { return };
        let longest = Problem::new(1, 1, 1, 64, DType::F16).with_kv(1, MOST_KEYS);
        let odd = Problem::new(1, 1, 1, 64, DType::BF16).with_kv(1, MOST_KEYS - 1);
        for problem in cases().into_iter().chain([longest, odd]) {
            let made = ptxas.assemble(&module(&problem, Target::Sm80).unwrap(), Target::Sm80).unwrap();
            assert_eq!(made.kernels[0].spill_store_bytes, 0, "{problem:?}");
        }
    }
}
