//! What a GPU can do at most, measured: the rates of products, copies and exponentials when nothing else is in the way.
//!
//! The operands of the products are drawn, not zeros: multiplying zeros takes less power, and a GPU that needs less power
//! runs at a higher clock than any real work lets it.

use flashcore::cuda::Cuda;
use flashcore::cuda::driver::{self, Event, EventKind, JitOptions, LaunchConfig};
use flashcore::plan::Target;
use flashcore_ptx::{
    B32, BuildErrors, F32, GlobalPtr, KernelBuilder, KernelParams, MatrixTy, Module, Reg, Shared,
    SharedLayout, Wgmma, kernel_params,
};
use serde_json::{Value, json};

kernel_params! {
    /// Where each thread writes something that depends on everything it computed.
    pub struct Sunk {
        /// Four bytes per thread.
        sink: GlobalPtr,
    }
}

const ENTRY: &str = "flashcore_ceiling";
/// One tile of A with 64 rows and one of B with 256, of 64 numbers each, in 16 bits.
const TILE_BYTES: u32 = (64 + 256) * 64 * 2;
/// The upper half of a descriptor: a swizzle of 128 bytes, and 1024 bytes from eight rows to the next eight.
const DESCRIPTOR_HIGH: u32 = 0x4000_0040;
/// Threads of a block.
const THREADS: u32 = 256;
/// Launches before the clock.
const WARM: usize = 3;
/// Launches on the clock; the best of them is the ceiling.
const TIMED: usize = 10;
/// Bytes of a copy, where the GPU has eight times as many.
const COPIED: usize = 1 << 28;

/// What is measured by a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ceiling {
    /// Products of 16-bit numbers with 32-bit sums, in the tensor cores.
    Matmul,
    /// Exponentials.
    Exp,
}

impl Ceiling {
    /// Blocks of a multiprocessor.
    fn blocks(self, target: Target) -> u32 {
        match (self, target) {
            (Ceiling::Matmul, Target::Sm90a) => 1,
            (Ceiling::Matmul, _) => 2,
            (Ceiling::Exp, _) => 6,
        }
    }

    /// Turns of a launch, so that it takes milliseconds.
    fn turns(self, target: Target) -> u32 {
        match (self, target) {
            (Ceiling::Matmul, Target::Sm90a) => 2_000,
            (Ceiling::Matmul, _) => 12_000,
            (Ceiling::Exp, _) => 6_000,
        }
    }

    /// Operations that a block does in one turn: floating-point operations, or exponentials.
    fn per_turn(self, target: Target) -> f64 {
        match (self, target) {
            // Two warpgroups, sixteen products of 64x256x16 each.
            (Ceiling::Matmul, Target::Sm90a) => 2.0 * 16.0 * 2.0 * 64.0 * 256.0 * 16.0,
            // Eight warps, sixteen products of 16x8x16 each.
            (Ceiling::Matmul, _) => 8.0 * 16.0 * 2.0 * 16.0 * 8.0 * 16.0,
            (Ceiling::Exp, _) => 256.0 * 8.0,
        }
    }

    /// The kernel that does so many turns.
    pub fn module(self, target: Target, turns: u32) -> Result<Module, BuildErrors> {
        let mut shared = SharedLayout::new();
        let tile = shared.alloc("tile", TILE_BYTES, 1024);
        let mut k = KernelBuilder::new(ENTRY, target).params::<Sunk>().threads(THREADS).min_blocks_per_sm(1);
        let uses_tile = self == Ceiling::Matmul && target == Target::Sm90a;
        if uses_tile {
            k = k.shared(shared);
        }
        let (out, tid, block) = (k.param(Sunk::sink), k.tid_x(), k.ctaid_x());
        let all = match self {
            Ceiling::Matmul if uses_tile => {
                fill(&mut k, tile, tid, THREADS);
                k.fence_proxy_async(flashcore_ptx::ProxySpace::Shared);
                k.bar_sync_all();
                wgmma(&mut k, tile, turns)
            }
            Ceiling::Matmul => mma(&mut k, tid, turns),
            Ceiling::Exp => exp(&mut k, tid, turns),
        };
        let mut total = k.mov_f32(0.0);
        for x in all {
            total = k.add_f32(total, x);
        }
        let sink = k.f32_to_bits(total);
        let index = k.mad_lo_u32(block, THREADS, tid);
        let at = k.mad_wide_u32(index, 4, out);
        k.st_global(at, sink);
        Ok(Module::new(target).with(k.finish()?))
    }
}

/// Bits that look random, as two 16-bit floats between 1 and 2 with either sign.
fn drawn(k: &mut KernelBuilder, index: Reg<B32>) -> Reg<B32> {
    let spread = k.mul_lo_u32(index, 0x9e37_79b1u32);
    let high = k.shr_u32(spread, 15u32);
    let mixed = k.xor_b32(spread, high);
    let mixed = k.mul_lo_u32(mixed, 0x2c1b_3c6du32);
    let fraction = k.and_b32(mixed, 0x83ff_83ffu32);
    k.or_b32(fraction, 0x3c00_3c00u32)
}

/// Fills the tile with drawn numbers.
fn fill(k: &mut KernelBuilder, tile: Shared, tid: Reg<B32>, threads: u32) {
    let base = k.shared_addr(tile);
    k.for_s32(0u32, TILE_BYTES / 4, threads, |k, at, _| {
        let index = k.add_u32(at, tid);
        let value = drawn(k, index);
        let place = k.mad_lo_u32(index, 4u32, base);
        k.st_shared(place, value);
    });
}

/// Sixteen products of a warpgroup in flight at a time.
fn wgmma(k: &mut KernelBuilder, tile: Shared, turns: u32) -> Vec<Reg<F32>> {
    let sums: Vec<Reg<F32>> = (0..128).map(|_| k.mov_f32(0.0)).collect();
    let base = k.shared_addr(tile);
    let start = k.bfe_u32(base, 4u32, 14u32);
    let steps: Vec<_> = (0..4u32)
        .map(|step| {
            let low = k.add_u32(start, 2 * step);
            let a = k.pack_b64(low, DESCRIPTOR_HIGH);
            // Behind the 64 rows of A.
            let low = k.add_u32(low, 8192u32 >> 4);
            (a, k.pack_b64(low, DESCRIPTOR_HIGH))
        })
        .collect();
    k.for_s32(0u32, turns, 1u32, |k, _, _| {
        k.wgmma_fence();
        for _ in 0..4 {
            for &(a, b) in &steps {
                k.wgmma_ss(Wgmma::new(256, MatrixTy::F16), &sums, a, b, true);
            }
        }
        k.wgmma_commit();
        k.wgmma_wait(0);
    });
    sums
}

/// Sixteen products of a warp, on eight sums.
fn mma(k: &mut KernelBuilder, tid: Reg<B32>, turns: u32) -> Vec<Reg<F32>> {
    let sums: Vec<[Reg<F32>; 4]> = (0..8).map(|_| std::array::from_fn(|_| k.mov_f32(0.0))).collect();
    let mut word = |salt: u32| {
        let index = k.mad_lo_u32(tid, 8u32, salt);
        drawn(k, index)
    };
    let (a, b) = ([word(0), word(1), word(2), word(3)], [word(4), word(5)]);
    k.for_s32(0u32, turns, 1u32, |k, _, _| {
        for _ in 0..2 {
            for &c in &sums {
                k.set(c, |k| k.mma_m16n8k16(MatrixTy::F16, a, b, c));
            }
        }
    });
    sums.into_iter().flatten().collect()
}

/// Eight exponentials of a thread.
fn exp(k: &mut KernelBuilder, tid: Reg<B32>, turns: u32) -> Vec<Reg<F32>> {
    let seed = k.cvt_rn_f32_u32(tid);
    let values: Vec<Reg<F32>> = (0..8).map(|i| k.mul_f32(seed, -1e-3 * (i + 1) as f32)).collect();
    k.for_s32(0u32, turns, 1u32, |k, _, _| {
        for &x in &values {
            k.set(x, |k| k.ex2_approx_ftz_f32(x));
        }
    });
    values
}

fn say(error: impl std::fmt::Display) -> String {
    error.to_string()
}

/// All that is measured, as a worker's reply.
pub fn measure(cuda: &Cuda) -> Result<Value, String> {
    Ok(json!({
        "matmul_tflops": rate(Ceiling::Matmul, cuda)? / 1e12,
        "exp_gops": rate(Ceiling::Exp, cuda)? / 1e9,
        "memory_gbytes": copied(cuda)? / 1e9,
    }))
}

/// The shortest of some runs in seconds, each between two events.
fn best(cuda: &Cuda, mut run: impl FnMut() -> Result<(), String>) -> Result<f64, String> {
    let event = || Event::new(cuda.context(), EventKind::Timing).map_err(say);
    let (start, end) = (event()?, event()?);
    for _ in 0..WARM {
        run()?;
    }
    let mut best = f64::INFINITY;
    for _ in 0..TIMED {
        start.record(cuda.stream()).map_err(say)?;
        run()?;
        end.record(cuda.stream()).map_err(say)?;
        end.synchronize().map_err(say)?;
        best = best.min(f64::from(end.ms_since(&start).map_err(say)?) / 1e3);
    }
    if best > 0.0 { Ok(best) } else { Err("the GPU's clock stands still".into()) }
}

/// Operations per second.
#[allow(unsafe_code)] // A launch reaches memory through an address.
fn rate(ceiling: Ceiling, cuda: &Cuda) -> Result<f64, String> {
    let hardware = cuda.hardware();
    let (target, turns) = (hardware.target, ceiling.turns(hardware.target));
    let text = ceiling.module(target, turns).map_err(say)?.to_string();
    let module =
        driver::Module::from_ptx(cuda.context(), ENTRY, &text, &JitOptions::default()).map_err(say)?;
    let function = module.function(ENTRY).map_err(say)?;
    let blocks = hardware.sms * ceiling.blocks(target);
    let sink = cuda.context().alloc((blocks * THREADS) as usize * 4).map_err(say)?;
    let params = Sunk { sink: GlobalPtr(sink.address()) }.pack();
    let mut config = LaunchConfig::new([blocks, 1, 1], [THREADS, 1, 1]);
    if ceiling == Ceiling::Matmul && target == Target::Sm90a {
        function.set_max_dynamic_shared(TILE_BYTES).map_err(say)?;
        config.shared_bytes = TILE_BYTES;
    }
    let seconds = best(cuda, || {
        // SAFETY: each thread writes four bytes of a buffer that has as many for each, and outlives the launches.
        unsafe { function.launch(cuda.stream(), &config, &params) }.map_err(say)
    })?;
    Ok(ceiling.per_turn(target) * f64::from(turns) * f64::from(blocks) / seconds)
}

/// Bytes that a copy reads and writes in a second.
fn copied(cuda: &Cuda) -> Result<f64, String> {
    let bytes = COPIED.min(cuda.context().properties().memory_bytes as usize / 8);
    let from = cuda.context().alloc(bytes).map_err(say)?;
    let mut to = cuda.context().alloc(bytes).map_err(say)?;
    let seconds = best(cuda, || cuda.stream().copy(&mut to, 0, &from, 0, bytes).map_err(say))?;
    Ok(2.0 * bytes as f64 / seconds)
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashcore::sim::Config;
    use flashcore_ptx::ptxas::Ptxas;
    use flashcore_sim::{LaunchDims, Sim};

    const ALL: [Ceiling; 2] = [Ceiling::Matmul, Ceiling::Exp];

    #[test]
    fn every_ceiling_runs_clean_in_the_simulator_and_does_as_many_products_as_it_counts() {
        for target in [Target::Sm80, Target::Sm90a] {
            for ceiling in ALL {
                let module = ceiling.module(target, 2).unwrap();
                let mut sim = Sim::new(Config { threads: 1, ..Config::default() });
                let sink = sim.alloc("sink", 4 * u64::from(THREADS) as usize);
                let params = Sunk { sink: GlobalPtr(sink.address) };
                let dims = LaunchDims {
                    grid: [1, 1, 1],
                    block: [THREADS, 1, 1],
                    cluster: None,
                    dynamic_shared: (ceiling == Ceiling::Matmul && target == Target::Sm90a)
                        .then_some(TILE_BYTES),
                };
                let report = sim.launch(&module, ENTRY, dims, &params.pack()).unwrap();
                assert!(report.findings.is_empty(), "{ceiling:?} {target:?}: {:?}", report.findings.first());
            }
        }
    }

    #[test]
    fn every_ceiling_assembles_without_spills_and_with_products_in_flight() {
        let Some(ptxas) = Ptxas::find_or_skip().unwrap() else { return };
        for target in [Target::Sm80, Target::Sm90a] {
            for ceiling in ALL {
                let made = ptxas.assemble(&ceiling.module(target, 64).unwrap(), target).unwrap();
                assert_eq!(made.kernels[0].spill_store_bytes, 0, "{ceiling:?} {target:?}");
                assert_eq!(made.serialised_wgmma().count(), 0, "{ceiling:?} {target:?}");
            }
        }
    }
}
