//! What is counted: instructions by class, bank conflicts and sectors by instruction, and the errors for what is
//! not implemented.

mod common;

use common::*;
use flashcore_ptx::*;
use flashcore_sim::*;

/// Two warps store a tile and read it down its columns, with rows of so many bytes.
fn columns(pitch: u32) -> Module {
    let mut shared = SharedLayout::new();
    let tile = shared.alloc("tile", 32 * 132, 16);
    kernel(32, shared, Target::Sm80, move |k| {
        let (y, lane) = (k.param(Io::y), k.tid_x());
        let base = k.shared_addr(tile);
        let row = k.mad_lo_u32(lane, 4, base);
        for r in 0..32 {
            k.comment("along a row");
            k.st_shared(row.at((r * pitch) as i32), lane);
        }
        k.bar_warp_sync();
        let column = k.mad_lo_u32(lane, pitch, base);
        k.comment("down a column");
        let v = k.ld_shared::<B32>(column);
        let py = k.mad_wide_u32(lane, 4, y);
        k.comment("coalesced");
        k.st_global(py, v);
        let far = k.mad_wide_u32(lane, 64, y);
        k.comment("scattered");
        k.st_global(far.at(2048), v);
    })
}

fn banks<'a>(outcome: &'a Outcome, comment: &str) -> &'a BankStats {
    let mut of = outcome.report.stats.banks.iter();
    of.find(|b| b.site.comment.as_deref() == Some(comment)).expect("it was executed")
}

#[test]
fn a_column_of_an_unpadded_tile_meets_32_times_in_a_bank_and_a_padded_one_never() {
    let unpadded = run(&columns(128), 1, &[0; 4], 8192, 0, Config::default());
    assert_clean(&unpadded, &Config::default());
    assert_eq!(banks(&unpadded, "along a row").conflicts(), 0);
    let column = banks(&unpadded, "down a column");
    assert_eq!((column.executed, column.wavefronts, column.ideal, column.conflicts()), (1, 32, 1, 31));
    assert_eq!(unpadded.report.stats.bank_conflicts(), 31);
    assert!(column.site.instruction.starts_with("ld.shared.b32"));
    let padded = run(&columns(132), 1, &[0; 4], 8192, 0, Config::default());
    assert_eq!(padded.report.stats.bank_conflicts(), 0);
}

#[test]
fn sectors_tell_coalesced_stores_from_scattered_ones() {
    let outcome = run(&columns(132), 1, &[0; 4], 8192, 0, Config::default());
    let sectors = |comment: &str| {
        let mut of = outcome.report.stats.sectors.iter();
        of.find(|s| s.site.comment.as_deref() == Some(comment)).expect("it was executed")
    };
    let near = sectors("coalesced");
    assert_eq!((near.requests, near.sectors, near.bytes), (1, 4, 128));
    assert_eq!((near.sectors_per_request(), near.efficiency()), (4.0, 1.0));
    let far = sectors("scattered");
    assert_eq!((far.sectors, far.efficiency()), (32, 0.125));
}

#[test]
fn the_mix_counts_warp_instructions_by_class() {
    let outcome =
        run(&columns(132), 3, &[0; 4], 8192, 0, Config { checks: Checks::NONE, ..Config::default() });
    let stats = &outcome.report.stats;
    assert_eq!(stats.mix["shared store"], 3 * 32);
    assert_eq!(stats.mix["shared load"], 3);
    assert_eq!(stats.mix["global store"], 6);
    assert_eq!(stats.warp_instructions, stats.mix.values().sum::<u64>());
    assert_eq!(stats.tensor_instructions, 0);
    assert!(stats.rate() > 0.0);
    assert!(stats.banks.is_empty(), "costs were not asked for");
}

#[test]
fn a_form_that_is_not_implemented_is_an_error_that_names_the_instruction() {
    let mut module = kernel(32, SharedLayout::new(), Target::Sm80, |k| {
        let lane = k.tid_x();
        let c: [Reg<F32>; 4] = std::array::from_fn(|_| k.mov_f32(0.0));
        k.comment("the product");
        let d = k.mma_m16n8k16(MatrixTy::F16, [lane; 4], [lane; 2], c);
        let y = k.param(Io::y);
        let py = k.mad_wide_u32(lane, 4, y);
        k.st_global(py, d[0]);
    });
    for inst in &mut module.kernels[0].body {
        if let Op::Mma { a, .. } = &mut inst.op {
            *a = MatrixTy::E4m3;
        }
    }
    let error = Program::new(&module.kernels[0]).err().expect("refused");
    let text = error.to_string();
    assert!(text.contains("mma.sync.aligned.m16n8k16"), "{text}");
    assert!(text.contains("the product") && text.contains("stats.rs"), "{text}");
    assert!(text.contains("f16 or bf16 operands"), "{text}");
}

#[test]
fn the_same_seed_gives_the_same_run_and_threads_do_not_change_results() {
    let x = u32_bytes(0..4096);
    let module = columns(132);
    let one = run(&module, 8, &x, 8192, 0, Config { threads: 1, seed: 5, ..Config::default() });
    let again = run(&module, 8, &x, 8192, 0, Config { threads: 1, seed: 5, ..Config::default() });
    let two = run(&module, 8, &x, 8192, 0, Config { threads: 2, seed: 5, ..Config::default() });
    assert_eq!(one.y, again.y);
    assert_eq!(one.y, two.y);
    assert_eq!(one.report.stats.warp_instructions, two.report.stats.warp_instructions);
    // All blocks write the same bytes: the race is found whatever the number of threads.
    assert!(one.report.of(FindingKind::GlobalRace).count() > 0);
    assert_eq!(
        one.report.of(FindingKind::GlobalRace).count(),
        two.report.of(FindingKind::GlobalRace).count()
    );
}
