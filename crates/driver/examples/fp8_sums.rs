//! Compares how this GPU adds up products of fp8 with how the simulator does, bit by bit.
//!
//! ```text
//! cargo run --release -p flashcore-driver --example fp8_sums
//! ```
//!
//! Prints, for `wgmma` and for `mma.sync`, how many sums are the same for each number of bits that the simulator can
//! keep. The exit status is 0 when every sum of `wgmma` is the simulator's default, 1 when one is not, 2 when there is no
//! Hopper GPU. The simulator has Ada's `mma.sync`; Hopper's keeps more bits, so its sums are printed only.

#![allow(unsafe_code)] // Launches are unsafe by nature; each kernel here is given buffers that outlive it.
#![allow(missing_docs)] // A program, not a library.

use std::error::Error;
use std::process::ExitCode;

use flashcore_driver::{ComputeCapability, Context, Driver, JitOptions, LaunchConfig, StreamOptions};
use flashcore_ptx::*;
use flashcore_sim::{Config, Fp8Sums, LaunchDims, Sim};

kernel_params! {
    /// What both kernels take.
    pub struct Io {
        /// For each block: B in shared memory, then a word of each fragment register of each thread, A's first.
        x: GlobalPtr,
        /// The accumulators of each thread.
        y: GlobalPtr,
    }
}

const BLOCKS: u32 = 256;
/// Of `wgmma`: B has 64 rows of 32 bytes; a thread has 4 registers of A and 32 accumulators.
const B_BYTES: u32 = 64 * 32;
const THREADS: u32 = 128;
const TYPES: [MatrixTy; 2] = [MatrixTy::E4m3, MatrixTy::E5m2];

/// The words of a block of x and of y, for `wgmma` and for `mma.sync`.
const WGMMA: (u32, u32) = (B_BYTES / 4 + (4 + 32) * THREADS, 32 * THREADS);
const MMA: (u32, u32) = ((6 + 4) * 32, 4 * 32);

/// This block's words of x and y.
fn own(k: &mut KernelBuilder, (x_words, y_words): (u32, u32)) -> (Reg<B64>, Reg<B64>) {
    let (block, x, y) = (k.ctaid_x(), k.param(Io::x), k.param(Io::y));
    (k.mad_wide_u32(block, 4 * x_words, x), k.mad_wide_u32(block, 4 * y_words, y))
}

fn wgmma_kernel(a_ty: MatrixTy, b_ty: MatrixTy) -> Result<Module, BuildErrors> {
    let mut shared = SharedLayout::new();
    let b = shared.alloc("b", B_BYTES, 1024);
    let k = KernelBuilder::new("sums", Target::Sm90a).params::<Io>().shared(shared);
    let mut k = k.threads(THREADS).min_blocks_per_sm(1);
    let (tid, (x, y)) = (k.tid_x(), own(&mut k, WGMMA));
    let base = k.shared_addr(b);
    k.for_s32(tid, B_BYTES / 4, THREADS, |k, i, _| {
        let (from, to) = (k.mad_wide_u32(i, 4, x), k.mad_lo_u32(i, 4, base));
        let word = k.ld_global::<B32>(from);
        k.st_shared(to, word);
    });
    k.fence_proxy_async(ProxySpace::Shared);
    k.bar_sync_all();
    let (px, py) = (k.mad_wide_u32(tid, 4, x), k.mad_wide_u32(tid, 4, y));
    let at = |register: u32| (B_BYTES + 4 * THREADS * register) as i32;
    let a: [Reg<B32>; 4] = std::array::from_fn(|r| k.ld_global(px.at(at(r as u32))));
    let sums: Vec<Reg<F32>> = (0..32).map(|r| k.ld_global(px.at(at(4 + r)))).collect();
    // Unswizzled matrices of eight rows of 16 bytes: the next 16 k are 128 bytes on, the next eight rows 256.
    let start = k.shr_u32(base, 4);
    let low = k.or_b32(start, (128 >> 4) << 16);
    let descriptor = k.pack_b64(low, 256u32 >> 4);
    k.wgmma_fence();
    k.wgmma_rs(Wgmma { b: b_ty, ..Wgmma::new(64, a_ty) }, &sums, a, descriptor, true);
    k.wgmma_commit();
    k.wgmma_wait(0);
    for (r, sum) in (0..).zip(sums) {
        k.st_global(py.at(4 * THREADS as i32 * r), sum);
    }
    Ok(Module::new(Target::Sm90a).with(k.finish()?))
}

fn mma_kernel(a_ty: MatrixTy, b_ty: MatrixTy) -> Result<Module, BuildErrors> {
    let mut k = KernelBuilder::new("sums", Target::Sm89).params::<Io>().threads(32);
    let (tid, (x, y)) = (k.tid_x(), own(&mut k, MMA));
    let (px, py) = (k.mad_wide_u32(tid, 4, x), k.mad_wide_u32(tid, 4, y));
    let r: [Reg<B32>; 6] = std::array::from_fn(|i| k.ld_global(px.at(128 * i as i32)));
    let c: [Reg<F32>; 4] = std::array::from_fn(|i| k.ld_global(px.at(128 * (6 + i as i32))));
    let sums = k.mma_m16n8k32(a_ty, b_ty, [r[0], r[1], r[2], r[3]], [r[4], r[5]], c);
    for (i, sum) in (0..).zip(sums) {
        k.st_global(py.at(128 * i), sum);
    }
    Ok(Module::new(Target::Sm89).with(k.finish()?))
}

/// Words of fp8 codes and, for the last `sums` of each block, of accumulators. Blocks take turns: all codes, numbers far
/// apart, numbers near each other, many zeros.
fn input(block_words: u32, sums: u32) -> Vec<u32> {
    let mut state = 1u64;
    let mut random = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 32) as u32
    };
    (0..BLOCKS * block_words)
        .map(|i| match (i % block_words >= block_words - sums, i / block_words % 4) {
            (true, 3) => 0,
            (true, _) => (random() & 0x807F_FFFF) | (107 + random() % 40) << 23,
            (false, 0) => random(),
            (false, 1) => random() & 0xBBBB_BBBB,
            (false, 2) => random() & 0x8F8F_8F8F | 0x3030_3030,
            (false, _) => random() & random() & 0xBBBB_BBBB,
        })
        .collect()
}

fn threads(module: &Module) -> u32 {
    module.kernels[0].threads.map_or(1, Threads::count)
}

fn simulated(
    module: &Module,
    x: &[u32],
    y_words: u32,
    fp8_sums: Fp8Sums,
) -> Result<Vec<u32>, Box<dyn Error>> {
    let mut sim = Sim::new(Config { fp8_sums, ..Config::default() });
    let bytes: Vec<u8> = x.iter().flat_map(|word| word.to_le_bytes()).collect();
    let (x, y) = (sim.alloc_from("x", &bytes), sim.alloc("y", (4 * BLOCKS * y_words) as usize));
    let params = Io { x: GlobalPtr(x.address), y: GlobalPtr(y.address) }.pack();
    let report = sim.launch(module, "sums", LaunchDims::linear(BLOCKS, threads(module)), &params)?;
    if let Some(finding) = report.findings.first() {
        return Err(finding.to_string().into());
    }
    Ok(sim.read(y).as_chunks().0.iter().map(|word| u32::from_le_bytes(*word)).collect())
}

fn measured(context: &Context, module: &Module, x: &[u32], y_words: u32) -> Result<Vec<u32>, Box<dyn Error>> {
    let text = module.to_string();
    let loaded = flashcore_driver::Module::from_ptx(context, "sums.ptx", &text, &JitOptions::default())?;
    let stream = context.stream(StreamOptions::default())?;
    let (x, y) = (stream.upload_new(x)?, stream.upload_new(&vec![0u32; (BLOCKS * y_words) as usize])?);
    let params = Io { x: GlobalPtr(x.address()), y: GlobalPtr(y.address()) }.pack();
    let shared_bytes = module.kernels[0].shared_bytes();
    let config = LaunchConfig { shared_bytes, ..LaunchConfig::new([BLOCKS, 1, 1], [threads(module), 1, 1]) };
    // SAFETY: the kernel reads `x` and writes `y`, which have these many words for each block.
    unsafe { loaded.function("sums")?.launch(&stream, &config, &params) }?;
    Ok(stream.download_all::<u32>(&y)?)
}

fn run() -> Result<ExitCode, Box<dyn Error>> {
    let context = Driver::load().and_then(|driver| driver.device(0)?.context());
    let context = match context {
        Ok(context) => Some(context),
        Err(error) => {
            println!("only the simulator runs: {error}");
            None
        }
    };
    let hopper = ComputeCapability { major: 9, minor: 0 };
    let context = context.filter(|context| context.properties().compute_capability == hopper);
    let mut all_same = true;
    type Emit = fn(MatrixTy, MatrixTy) -> Result<Module, BuildErrors>;
    let kernels: [(&str, Emit, (u32, u32)); 2] =
        [("wgmma", wgmma_kernel, WGMMA), ("mma.sync", mma_kernel, MMA)];
    for (name, emit, (x_words, y_words)) in kernels {
        let x = input(x_words, y_words);
        for (a, b) in TYPES.into_iter().flat_map(|a| TYPES.map(|b| (a, b))) {
            let module = emit(a, b)?;
            let have = context.as_ref().map(|context| measured(context, &module, &x, y_words)).transpose()?;
            for sums in [Fp8Sums::F32].into_iter().chain((12..=16).map(|bits| Fp8Sums::Short { bits })) {
                let want = simulated(&module, &x, y_words, sums)?;
                let Some(have) = &have else { continue };
                let same = have.iter().zip(&want).filter(|(have, want)| have == want).count();
                println!("{name:<8} {a:?} {b:?} {sums:?}: {same} of {} the same", want.len());
                if name == "wgmma" && sums == Fp8Sums::default() {
                    all_same &= same == want.len();
                    for (i, (have, want)) in
                        have.iter().zip(&want).enumerate().filter(|(_, (h, w))| h != w).take(3)
                    {
                        println!(
                            "    block {} word {}: {have:#x} on the GPU, {want:#x} here",
                            i as u32 / y_words,
                            i as u32 % y_words
                        );
                    }
                }
            }
        }
    }
    Ok(ExitCode::from(match (context.is_some(), all_same) {
        (false, _) => 2,
        (true, same) => u8::from(!same),
    }))
}

fn main() -> ExitCode {
    run().unwrap_or_else(|error| {
        eprintln!("{error}");
        ExitCode::FAILURE
    })
}
