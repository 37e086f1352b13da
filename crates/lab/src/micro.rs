//! Microbenchmarks of the pieces that kernels are made of, and a simple model built from them.
//!
//! A piece is a generated kernel that does one thing again and again. On a GPU it reads the clock around that; in the
//! simulator its instructions are counted, which says what a piece is made of but not what it costs.
//!
//! The model adds up what a kernel's instructions cost, class by class, as the simulator counts them on a small problem.
//! It knows nothing of what overlaps. It leaves the tensor cores out: the products of a problem are the same whatever the
//! schedule. So it can order schedules, and how well it does is measured by its rank correlation with kernel times.

use std::collections::BTreeMap;

use flashcore::cuda::Cuda;
use flashcore::cuda::driver::{self, JitOptions, LaunchConfig};
use flashcore::plan::Target;
use flashcore::sim::{Config, Stats};
use flashcore_ptx::{
    B32, BuildErrors, F32, GlobalPtr, KernelBuilder, KernelParams, MatrixTy, Module, Reg, Scope, Shared,
    SharedLayout, Wgmma, kernel_params,
};
use flashcore_sim::{LaunchDims, Sim};
use serde::{Deserialize, Serialize};

kernel_params! {
    /// Where each block writes the cycles that it took.
    pub struct Timed {
        /// Eight bytes per block.
        cycles: GlobalPtr,
    }
}

/// Bytes of shared memory that every piece finds filled with zeros.
const TILE_BYTES: u32 = 48 << 10;

/// The upper half of a descriptor: a swizzle of 128 bytes, and 1024 bytes from eight rows to the next eight.
const DESCRIPTOR_HIGH: u32 = 0x4000_0040;

/// Schedulers per multiprocessor, each with its share of the warps.
const SCHEDULERS: f64 = 4.0;

/// One of the things that kernels are made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Piece {
    /// Multiply-adds in f32.
    Fma,
    /// Exponentials.
    Exponential,
    /// Exchanges between lanes.
    Shuffle,
    /// Products of a warp: 16x8x16.
    Mma,
    /// Four 8x8 matrices from shared memory, rows of 128 bytes, permuted so that there are no bank conflicts.
    LoadSwizzled,
    /// The same without the permutation.
    LoadPlain,
    /// One step of the online softmax on eight scores per lane.
    Softmax,
    /// A barrier of the whole block.
    Barrier,
    /// A slot of a pipeline handed over and back between two warps by mbarriers.
    HandOver,
    /// Products of a warpgroup: 64 x N x 64, from shared memory.
    Wgmma(u16),
}

impl Piece {
    /// Those that a target has.
    pub fn all(target: Target) -> Vec<Piece> {
        use Piece::*;
        let every = [Fma, Exponential, Shuffle, Mma, LoadSwizzled, LoadPlain, Softmax, Barrier];
        let hopper = [HandOver, Wgmma(64), Wgmma(128), Wgmma(192), Wgmma(256)];
        let has = target == Target::Sm90a;
        every.into_iter().chain(hopper.into_iter().filter(|_| has)).collect()
    }

    /// The name in tables and in JSON.
    pub fn name(self) -> String {
        match self {
            Piece::Fma => "fma".into(),
            Piece::Exponential => "ex2".into(),
            Piece::Shuffle => "shuffle".into(),
            Piece::Mma => "mma 16x8x16".into(),
            Piece::LoadSwizzled => "ldmatrix swizzled".into(),
            Piece::LoadPlain => "ldmatrix plain".into(),
            Piece::Softmax => "softmax step".into(),
            Piece::Barrier => "barrier".into(),
            Piece::HandOver => "pipeline hand-over".into(),
            Piece::Wgmma(n) => format!("wgmma 64x{n}x64"),
        }
    }

    /// Threads per block.
    fn threads(self) -> u32 {
        match self {
            Piece::HandOver => 64,
            Piece::Wgmma(_) => 128,
            _ => 256,
        }
    }

    /// How often the piece is done in one turn by one warp, or by the block where all of it takes part.
    fn per_turn(self) -> f64 {
        match self {
            Piece::Fma | Piece::Exponential | Piece::Shuffle => 8.0,
            Piece::Mma | Piece::LoadSwizzled | Piece::LoadPlain => 4.0,
            Piece::Softmax | Piece::Barrier | Piece::HandOver | Piece::Wgmma(_) => 1.0,
        }
    }

    /// Warps per scheduler, for what each warp does on its own.
    fn warps_beside(self) -> f64 {
        match self {
            Piece::Barrier | Piece::HandOver | Piece::Wgmma(_) => 1.0,
            _ => f64::from(self.threads()) / 32.0 / SCHEDULERS,
        }
    }

    /// The kernel that does it this many times.
    pub fn module(self, target: Target, turns: u32) -> Result<Module, BuildErrors> {
        let mut shared = SharedLayout::new();
        let tile = shared.alloc("tile", TILE_BYTES, 1024);
        let bars = shared.alloc("barriers", 16, 8);
        let mut k = KernelBuilder::new("flashcore_micro", target)
            .params::<Timed>()
            .shared(shared)
            .threads(self.threads())
            .min_blocks_per_sm(1);
        let (out, tid) = (k.param(Timed::cycles), k.tid_x());
        fill(&mut k, tile, tid, self.threads());
        if self == Piece::HandOver {
            let first = k.setp_eq_u32(tid, 0u32);
            k.if_(first, |k| {
                k.mbarrier_init(bars.at(0), 1u32);
                k.mbarrier_init(bars.at(8), 1u32);
                k.fence_mbarrier_init();
            });
        }
        if matches!(self, Piece::Wgmma(_)) {
            k.fence_proxy_async(flashcore_ptx::ProxySpace::Shared);
        }
        k.bar_sync_all();
        let sink = self.turns(&mut k, tile, bars, tid, turns);
        let first = k.setp_eq_u32(tid, 0u32);
        let block = k.ctaid_x();
        let at = k.mad_wide_u32(block, 8, out);
        k.if_(first, |k| {
            k.st_global(at, sink.0);
            k.comment("the results, so that they are computed");
            k.st_global(at.at(4), sink.1);
        });
        Ok(Module::new(target).with(k.finish()?))
    }

    /// The loop between two readings of the clock: the cycles, and something that depends on every result.
    fn turns(
        self,
        k: &mut KernelBuilder,
        tile: Shared,
        bars: Shared,
        tid: Reg<B32>,
        turns: u32,
    ) -> (Reg<B32>, Reg<B32>) {
        let lane = k.and_b32(tid, 31u32);
        let seed = k.cvt_rn_f32_u32(lane);
        let values: Vec<Reg<F32>> = (0..8).map(|i| k.mul_f32(seed, 1e-3 * (i + 1) as f32)).collect();
        let base = k.shared_addr(tile);
        let row = k.mad_lo_u32(lane, 128u32, base);
        let low = k.and_b32(lane, 7u32);
        let xor = k.shl_b32(low, 4u32);
        let place = if self == Piece::LoadSwizzled { k.add_u32(row, xor) } else { row };
        let loads: Vec<Reg<B32>> = (0..4).map(|i| k.add_u32(place, 4096u32 * i)).collect();
        let accumulators: Vec<[Reg<F32>; 4]> =
            (0..4).map(|_| std::array::from_fn(|_| k.mov_f32(0.0))).collect();
        let words: [Reg<B32>; 4] = std::array::from_fn(|_| k.mov_b32(0u32));
        let wide: Vec<Reg<F32>> = match self {
            Piece::Wgmma(n) => (0..n / 2).map(|_| k.mov_f32(0.0)).collect(),
            _ => Vec::new(),
        };
        let start_of_tile = k.bfe_u32(base, 4u32, 14u32);
        let (max, sum) = (k.mov_f32(f32::MIN), k.mov_f32(0.0));
        let warp = k.shr_u32(tid, 5u32);
        let is_first_warp = k.setp_eq_u32(warp, 0u32);
        let is_first_lane = k.setp_eq_u32(lane, 0u32);
        let before = k.clock();
        k.for_s32(0u32, turns, 1u32, |k, turn, _| match self {
            Piece::Fma => values.iter().for_each(|&x| k.set(x, |k| k.fma_f32(x, 0.5, 0.25))),
            Piece::Exponential => values.iter().for_each(|&x| k.set(x, |k| k.ex2_approx_ftz_f32(x))),
            Piece::Shuffle => values.iter().for_each(|&x| k.set(x, |k| k.shfl_bfly(x, 1u32))),
            Piece::Mma => accumulators.iter().for_each(|&c| {
                k.set(c, |k| k.mma_m16n8k16(MatrixTy::F16, words, [words[0], words[1]], c));
            }),
            Piece::LoadSwizzled | Piece::LoadPlain => loads.iter().for_each(|&at| {
                let [a, b, c, d] = k.ldmatrix::<4>(at);
                let (ab, cd) = (k.or_b32(a, b), k.or_b32(c, d));
                let zero = k.or_b32(ab, cd);
                // The tile holds zeros, but the assembler does not know that.
                k.set(at, |k| k.add_u32(at, zero));
            }),
            Piece::Softmax => {
                let mut top = max;
                for &x in &values {
                    top = k.max_f32(top, x);
                }
                for mask in [1u32, 2] {
                    let other = k.shfl_bfly(top, mask);
                    top = k.max_f32(top, other);
                }
                let moved = k.sub_f32(max, top);
                let rescale = k.ex2_approx_ftz_f32(moved);
                k.set(sum, |k| k.mul_f32(sum, rescale));
                for &x in &values {
                    let below = k.sub_f32(x, top);
                    let p = k.ex2_approx_ftz_f32(below);
                    k.set(sum, |k| k.add_f32(sum, p));
                    k.set(x, |k| k.fma_f32(p, 0.5, x));
                }
                k.set(max, |k| k.mov_f32(top));
            }
            Piece::Barrier => k.bar_sync_all(),
            Piece::HandOver => {
                let parity = k.and_b32(turn, 1u32);
                k.if_else(
                    is_first_warp,
                    |k| {
                        k.if_(is_first_lane, |k| k.mbarrier_arrive(bars.at(0)));
                        k.mbarrier_wait_parity(bars.at(8), parity, Scope::Cta);
                    },
                    |k| {
                        k.mbarrier_wait_parity(bars.at(0), parity, Scope::Cta);
                        k.if_(is_first_lane, |k| k.mbarrier_arrive(bars.at(8)));
                    },
                );
            }
            Piece::Wgmma(n) => {
                k.wgmma_fence();
                for step in 0..4u32 {
                    let low = k.add_u32(start_of_tile, 2 * step);
                    let a = k.pack_b64(low, DESCRIPTOR_HIGH);
                    // After the 64 rows of A.
                    let low = k.add_u32(low, 8192u32 >> 4);
                    let b = k.pack_b64(low, DESCRIPTOR_HIGH);
                    k.wgmma_ss(Wgmma::new(n, MatrixTy::F16), &wide, a, b, true);
                }
                k.wgmma_commit();
                k.wgmma_wait(0);
            }
        });
        let after = k.clock();
        let cycles = k.sub_u32(after, before);
        let floats = values.iter().chain(accumulators.iter().flatten()).chain(&wide).chain([&max, &sum]);
        let mut all = k.mov_f32(0.0);
        for &x in floats {
            all = k.add_f32(all, x);
        }
        let mut sink = k.cvt_rzi_u32_f32(all);
        for &at in &loads {
            sink = k.xor_b32(sink, at);
        }
        (cycles, sink)
    }
}

/// Fills the tile with zeros.
fn fill(k: &mut KernelBuilder, tile: Shared, tid: Reg<B32>, threads: u32) {
    let base = k.shared_addr(tile);
    let own = k.mad_lo_u32(tid, 4u32, base);
    let zero = k.mov_b32(0u32);
    k.for_s32(0u32, TILE_BYTES, 4 * threads, |k, at, _| {
        let place = k.add_u32(own, at);
        k.st_shared(place, zero);
    });
}

/// What is known about a piece.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Measured {
    /// Its name.
    pub piece: String,
    /// Scheduler cycles per execution of the piece, measured on the device; absent without one.
    pub cycles: Option<f64>,
    /// Warp instructions per turn, counted by the simulator.
    pub instructions_per_turn: f64,
    /// Passes through the banks of shared memory per turn.
    pub passes_per_turn: f64,
    /// Passes lost to conflicts.
    pub conflicts_per_turn: f64,
}

/// Counts a piece in the simulator: the difference between many turns and few, so that what surrounds them is left out.
pub fn count(piece: Piece, target: Target) -> Result<Measured, String> {
    const FEW: u32 = 2;
    const MANY: u32 = 10;
    let run = |turns: u32| -> Result<Stats, String> {
        let module = piece.module(target, turns).map_err(|error| error.to_string())?;
        let mut sim = Sim::new(Config { threads: 1, ..Config::default() });
        let out = sim.alloc("cycles", 8);
        let params = Timed { cycles: GlobalPtr(out.address) };
        let dims = LaunchDims {
            grid: [1, 1, 1],
            block: [piece.threads(), 1, 1],
            cluster: None,
            dynamic_shared: Some(shared_bytes()),
        };
        let report = sim
            .launch(&module, "flashcore_micro", dims, &params.pack())
            .map_err(|error| error.to_string())?;
        match report.findings.first() {
            Some(finding) => Err(format!("{}: {finding}", piece.name())),
            None => Ok(report.stats),
        }
    };
    let (few, many) = (run(FEW)?, run(MANY)?);
    let passes = |stats: &Stats| stats.banks.iter().map(|bank| bank.wavefronts).sum::<u64>();
    let each = |few: u64, many: u64| (many - few) as f64 / f64::from(MANY - FEW);
    Ok(Measured {
        piece: piece.name(),
        cycles: None,
        instructions_per_turn: each(few.warp_instructions, many.warp_instructions),
        passes_per_turn: each(passes(&few), passes(&many)),
        conflicts_per_turn: each(few.bank_conflicts(), many.bank_conflicts()),
    })
}

/// Shared memory of every piece.
fn shared_bytes() -> u32 {
    TILE_BYTES + 16
}

/// The cycles per execution of a piece on the GPU: the median over its multiprocessors. Comparing many turns with few
/// removes the cost of the surrounding code.
#[allow(unsafe_code)] // A launch reaches memory through an address.
pub fn time(piece: Piece, cuda: &Cuda) -> Result<f64, String> {
    const FEW: u32 = 512;
    const MANY: u32 = 2048;
    let say = |error: driver::DriverError| error.to_string();
    let blocks = cuda.hardware().sms;
    let run = |turns: u32| -> Result<f64, String> {
        let module = piece.module(cuda.hardware().target, turns).map_err(|error| error.to_string())?;
        let text = module.to_string();
        let loaded =
            driver::Module::from_ptx(cuda.context(), "flashcore_micro", &text, &JitOptions::default());
        let function = loaded.and_then(|module| module.function("flashcore_micro")).map_err(say)?;
        function.set_max_dynamic_shared(shared_bytes()).map_err(say)?;
        let out = cuda.stream().upload_new(&vec![0_u32; 2 * blocks as usize]).map_err(say)?;
        let params = Timed { cycles: GlobalPtr(out.address()) };
        let mut config = LaunchConfig::new([blocks, 1, 1], [piece.threads(), 1, 1]);
        config.shared_bytes = shared_bytes();
        for _ in 0..2 {
            // SAFETY: each block writes eight bytes of a buffer that has as many for each, and outlives the launch.
            unsafe { function.launch(cuda.stream(), &config, &params.pack()) }.map_err(say)?;
        }
        cuda.synchronize().map_err(|error| error.to_string())?;
        let words = cuda.stream().download_all::<u32>(&out).map_err(say)?;
        let cycles: Vec<f64> = words.iter().step_by(2).map(|&word| f64::from(word)).collect();
        crate::stats::median(&cycles).ok_or_else(|| "no block wrote its cycles".into())
    };
    let turn = (run(MANY)? - run(FEW)?) / f64::from(MANY - FEW);
    Ok(turn / piece.per_turn() / piece.warps_beside())
}

/// What a warp instruction of each class costs a scheduler, in cycles.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Costs {
    /// By the simulator's class names; a class that is not named costs one.
    pub cycles: BTreeMap<String, f64>,
    /// Whether they were measured, rather than taken from the ratios that data sheets give.
    pub measured: bool,
}

impl Costs {
    /// By the widths of the units, as NVIDIA documents them.
    pub fn nominal() -> Self {
        let cycles = [("function", 8.0), ("warp", 2.0), ("matrix", 4.0), ("convert", 2.0), ("sync", 8.0)];
        let cycles = cycles.map(|(class, cycles)| (class.to_string(), cycles));
        // The tensor cores' work is the same for every schedule.
        Self { cycles: cycles.into_iter().chain([("tensor".into(), 0.0)]).collect(), measured: false }
    }

    /// By what was measured, and nominal where nothing was.
    pub fn of(pieces: &[Measured]) -> Self {
        let mut costs = Self::nominal();
        let of = [
            ("fma", "float"),
            ("ex2", "function"),
            ("shuffle", "warp"),
            ("ldmatrix swizzled", "matrix"),
            ("barrier", "sync"),
        ];
        for (piece, class) in of {
            let found = pieces.iter().find(|it| it.piece == piece).and_then(|it| it.cycles);
            if let Some(cycles) = found.filter(|&cycles| cycles > 0.0) {
                costs.cycles.insert(class.into(), cycles);
                costs.measured = true;
            }
        }
        costs
    }

    /// The cost of a launch by the simulator's counts, per pair of a query and a key.
    pub fn predict(&self, stats: &Stats, pairs: f64) -> f64 {
        let cost = |class: &str| self.cycles.get(class).copied().unwrap_or(1.0);
        let total: f64 = stats.mix.iter().map(|(class, &count)| count as f64 * cost(class)).sum();
        (total + stats.bank_conflicts() as f64) / pairs.max(1.0)
    }
}

/// Spearman's rank correlation; absent with fewer than three pairs or where all of one side are equal.
pub fn rank_correlation(pairs: &[(f64, f64)]) -> Option<f64> {
    if pairs.len() < 3 {
        return None;
    }
    let ranks = |values: Vec<f64>| -> Vec<f64> {
        let rank = |x: f64| {
            let below = values.iter().filter(|&&y| y < x).count() as f64;
            let equal = values.iter().filter(|&&y| y == x).count() as f64;
            below + (equal - 1.0) / 2.0
        };
        values.iter().map(|&x| rank(x)).collect()
    };
    let (a, b) = (ranks(pairs.iter().map(|it| it.0).collect()), ranks(pairs.iter().map(|it| it.1).collect()));
    let mean = (pairs.len() - 1) as f64 / 2.0;
    let product = |x: &[f64], y: &[f64]| x.iter().zip(y).map(|(x, y)| (x - mean) * (y - mean)).sum::<f64>();
    let spread = (product(&a, &a) * product(&b, &b)).sqrt();
    (spread > 0.0).then(|| product(&a, &b) / spread)
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashcore_ptx::ptxas::Ptxas;

    #[test]
    fn every_piece_runs_clean_in_the_simulator_and_only_the_plain_load_conflicts() {
        for piece in Piece::all(Target::Sm90a) {
            let measured = count(piece, Target::Sm90a).unwrap();
            assert!(measured.instructions_per_turn > 0.0, "{measured:?}");
            let conflicts = measured.conflicts_per_turn > 0.0;
            assert_eq!(conflicts, piece == Piece::LoadPlain, "{measured:?}");
        }
    }

    #[test]
    fn every_piece_assembles_for_every_target_that_has_it() {
        let Some(ptxas) = Ptxas::find_or_skip().unwrap() else { return };
        for target in [Target::Sm80, Target::Sm90a] {
            for piece in Piece::all(target) {
                let made = ptxas.assemble(&piece.module(target, 64).unwrap(), target).unwrap();
                assert_eq!(made.kernels[0].spill_store_bytes, 0, "{}", piece.name());
                assert_eq!(made.serialised_wgmma().count(), 0, "{}", piece.name());
            }
        }
    }

    #[test]
    fn what_was_measured_replaces_what_is_nominal() {
        let ex2 = Measured {
            piece: "ex2".into(),
            cycles: Some(9.5),
            instructions_per_turn: 8.0,
            passes_per_turn: 0.0,
            conflicts_per_turn: 0.0,
        };
        let costs = Costs::of(&[ex2]);
        assert!(costs.measured);
        assert_eq!((costs.cycles["function"], costs.cycles["warp"]), (9.5, 2.0));
        assert!(!Costs::of(&[]).measured);
    }

    #[test]
    fn rank_correlation_is_one_for_the_same_order_and_minus_one_for_the_reverse() {
        let of = |pairs: &[(f64, f64)]| rank_correlation(pairs).unwrap();
        assert!((of(&[(1.0, 10.0), (2.0, 11.0), (3.0, 500.0)]) - 1.0).abs() < 1e-12);
        assert!((of(&[(1.0, 3.0), (2.0, 2.0), (3.0, 1.0)]) + 1.0).abs() < 1e-12);
        assert_eq!(rank_correlation(&[(1.0, 1.0), (2.0, 1.0), (3.0, 1.0)]), None);
        assert_eq!(rank_correlation(&[(1.0, 1.0), (2.0, 2.0)]), None);
    }
}
