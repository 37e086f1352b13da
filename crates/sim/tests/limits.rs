//! Launches that do not end, or that ask for too much, are refused or ended: quickly, and with the place and the reason.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

use common::*;
use flashcore_ptx::*;
use flashcore_sim::*;

fn text(body: &str) -> Module {
    let text = format!(
        ".version 7.0 .target sm_80 .address_size 64
        .visible .entry test(.param .u64 x, .param .u64 y, .param .u32 n)
        {{
            .reg .pred %p<4>;
            .reg .b32 %r<8>;
            .reg .b64 %rd<4>;
            {body}
        }}"
    );
    read::module(&text).expect("the test's text is PTX")
}

fn launch(
    module: &Module,
    grid: [u32; 3],
    block: [u32; 3],
    config: Config,
) -> Result<LaunchReport, SimError> {
    let mut sim = Sim::new(config);
    let (x, y) = (sim.alloc_from("x", &[0; 4096]), sim.alloc("y", 4096));
    let params = Io { x: GlobalPtr(x.address), y: GlobalPtr(y.address), n: 7 };
    let dims = LaunchDims { grid, block, cluster: None, dynamic_shared: None };
    sim.launch(module, "test", dims, &params.pack())
}

fn budget(budget: u64) -> Config {
    Config { budget, ..Config::default() }
}

/// A flag that nobody sets, asked for as a program would.
const SPIN: &str = "ld.param.u64 %rd1, [x];
$wait:
    ld.global.u32 %r1, [%rd1];
    setp.eq.u32 %p1, %r1, 0;
    @%p1 bra $wait;
    ret;";

#[test]
fn a_launch_that_does_not_end_is_found_with_its_kernel_block_warp_and_line() {
    for body in ["$for_ever: bra $for_ever;", SPIN, "$a: mov.u32 %r1, 0;\nbra $b;\n$b: bra $a;"] {
        for seed in [0, 1] {
            let config = Config { seed, threads: 1, ..budget(10_000) };
            let report = launch(&text(body), [2, 1, 1], [64, 1, 1], config).expect("it runs");
            let found: Vec<&Finding> = report.of(FindingKind::Budget).collect();
            let [finding] = found[..] else { panic!("{:?}", report.findings) };
            let said = finding.to_string();
            for part in
                ["kernel `test`", "10000 warp instructions", "block (", "warp ", "line ", "higher limit"]
            {
                assert!(said.contains(part), "{part} is missing in {said}");
            }
            assert!(!said.contains(".rs:"), "the text has no Rust line: {said}");
            // What was executed is what was allowed, not a slice more.
            assert!(report.stats.warp_instructions <= 10_000, "{}", report.stats.warp_instructions);
        }
    }
}

#[test]
fn a_launch_may_execute_just_as_much_as_its_budget() {
    let module =
        text("mov.u32 %r1, 0;\n$again: add.u32 %r1, %r1, 1;\nsetp.lt.u32 %p1, %r1, 100;\n@%p1 bra $again;");
    let report = launch(&module, [3, 1, 1], [32, 1, 1], Config::default()).expect("it runs");
    let executed = report.stats.warp_instructions;
    assert_eq!(executed, 3 * 301);
    // Setting up a block counts a little.
    let needed = (executed..2 * executed)
        .find(|&allowed| {
            let report = launch(&module, [3, 1, 1], [32, 1, 1], Config { threads: 1, ..budget(allowed) });
            report.expect("it runs").is_clean()
        })
        .expect("some budget is enough");
    assert!(needed < executed + 100, "{needed} for {executed}");
}

#[test]
fn a_grid_that_is_larger_than_the_budget_is_refused_before_it_takes_time_or_memory() {
    let empty = text("ret;");
    for grid in
        [[4_000_000_000, 1, 1], [2_000_000_000, 1, 1], [65_535, 65_535, 1], [2_147_483_647, 65_535, 65_535]]
    {
        let said = launch(&empty, grid, [32, 1, 1], Config::default()).expect_err("too large").to_string();
        assert!(said.contains("`test`") && said.contains("a grid of"), "{said}");
    }
    let budget =
        |error| matches!(error, SimError::Budget { blocks: 2_000_000_000, budget: 1_000_000_000, .. });
    assert!(budget(
        launch(&empty, [2_000_000_000, 1, 1], [32, 1, 1], Config::default()).expect_err("too large")
    ));
    // However much is allowed.
    let all = Config { budget: u64::MAX, ..Config::default() };
    assert!(launch(&empty, [2_147_483_647, 65_535, 65_535], [32, 1, 1], all).is_err());
    // Blocks that do nothing count, too.
    let some = Config { budget: 20_000, threads: 1, ..Config::default() };
    assert!(launch(&empty, [1000, 1, 1], [32, 1, 1], some.clone()).expect("it runs").is_clean());
    assert!(launch(&empty, [1000, 1, 1], [1024, 1, 1], some).is_err());
}

#[test]
fn sizes_whose_products_overflow_are_refused() {
    let empty = text("ret;");
    let huge = u32::MAX;
    for block in [[huge, huge, huge], [1 << 22, 1 << 21, 1 << 21], [1, 1, 65], [1025, 1, 1], [0, 1, 1]] {
        assert!(launch(&empty, [1, 1, 1], block, Config::default()).is_err(), "{block:?}");
    }
    for cluster in [[huge, huge, huge], [1 << 16, 1 << 16, 1], [17, 1, 1]] {
        let dims =
            LaunchDims { grid: cluster, block: [32, 1, 1], cluster: Some(cluster), dynamic_shared: None };
        assert!(Sim::new(Config::default()).launch(&empty, "test", dims, &[0; 64]).is_err(), "{cluster:?}");
    }
    let dims = LaunchDims { dynamic_shared: Some(huge), ..LaunchDims::linear(1, 32) };
    assert!(Sim::new(Config::default()).launch(&empty, "test", dims, &[0; 64]).is_err());
}

#[test]
fn a_kernel_with_very_many_live_registers_runs_with_fewer_blocks_at_a_time() {
    let count = 20_000;
    let set = (0..count).map(|n| format!("mov.u32 %x{n}, %tid.x;\n")).collect::<Vec<_>>().concat();
    let add = (0..count).map(|n| format!("add.u32 %r1, %r1, %x{n};\n")).collect::<Vec<_>>().concat();
    let module = text(&format!(".reg .b32 %x<{count}>; mov.u32 %r1, 0;\n{set}{add} ret;"));
    let report = launch(&module, [4, 1, 1], [32, 1, 1], Config::default()).expect("it runs");
    assert!(report.is_clean(), "{:?}", report.findings);
}

/// Each step of such a way once cost a look at the whole kernel.
#[test]
fn long_ways_backwards_through_a_kernel_are_decoded_at_once() {
    let count = 20_000;
    let lines = |line: &dyn Fn(usize) -> String| (0..count).map(line).collect::<Vec<_>>().concat();
    let chain = lines(&|n| format!("$l{n}: bra $l{};\n", n.wrapping_sub(1).min(count)));
    let ladder = lines(&|n| format!("$m{n}: add.u32 %r1, %r1, 1; @%p1 bra $m{};\n", n.saturating_sub(1)));
    let module = text(&format!(
        "setp.ne.u32 %p1, 0, 0; mov.u32 %r1, 0;\nbra $l{};\n{chain}$l{count}:\n{ladder} ret;",
        count - 1
    ));
    let report = launch(&module, [1, 1, 1], [32, 1, 1], Config::default()).expect("it runs");
    assert!(report.is_clean(), "{:?}", report.findings);
}

#[test]
fn a_launch_ends_soon_after_it_is_asked_to() {
    for (body, grid) in [("$for_ever: bra $for_ever;", 1), (SPIN, 1), ("ret;", 1_000_000)] {
        for (threads, seed) in [(1, 0), (2, 0), (1, 3)] {
            let asked = Arc::new(AtomicU64::new(0));
            let count = Arc::clone(&asked);
            // Nobody waits for the clock: the launch is asked to end after it has asked so often.
            let stop = Stop::when(move || count.fetch_add(1, SeqCst) >= 20);
            let config = Config { threads, seed, stop, ..budget(1_000_000_000) };
            let error = launch(&text(body), [grid, 1, 1], [32, 1, 1], config).expect_err("stopped");
            assert_eq!(error, SimError::Stopped { kernel: "test".into() });
            assert!(asked.load(SeqCst) < 30, "it went on after it was asked to end");
        }
    }
    let quiet = Config { stop: Stop::when(|| false), ..Config::default() };
    assert!(launch(&text("ret;"), [4, 1, 1], [32, 1, 1], quiet).expect("it runs").is_clean());
}

/// A thread's own loads and stores of `x`, with `.nc` or without.
fn read_only(load: &str, body: &str) -> Vec<Finding> {
    let body = body.replace("LOAD", load);
    let module = text(&format!(
        "ld.param.u64 %rd1, [x];
        ld.param.u64 %rd2, [y];
        mov.u32 %r1, %tid.x;
        mov.u32 %r2, %ctaid.x;
        mul.wide.u32 %rd3, %r1, 4;
        add.u64 %rd1, %rd1, %rd3;
        add.u64 %rd2, %rd2, %rd3;
        setp.eq.u32 %p1, %r2, 0;
        {body}
        ret;"
    ));
    launch(&module, [2, 1, 1], [32, 1, 1], Config { threads: 1, ..Config::default() })
        .expect("it runs")
        .findings
}

#[test]
fn memory_that_is_read_by_ld_global_nc_may_not_be_written_in_the_same_launch() {
    // Each is in order by itself: only the promise of .nc is broken.
    let wrong = [
        (
            "the thread that wrote it",
            "@!%p1 bra $end;\nst.global.u32 [%rd1], %r1;\nLOAD.u32 %r3, [%rd1];\n$end:",
        ),
        (
            "the thread that writes it",
            "@!%p1 bra $end;\nLOAD.u32 %r3, [%rd1];\nst.global.u32 [%rd1], %r3;\n$end:",
        ),
        ("a byte of it", "@!%p1 bra $end;\nst.global.u8 [%rd1+2], %r1;\nLOAD.u32 %r3, [%rd1];\n$end:"),
        (
            "vectors of it",
            "@!%p1 bra $end;\nmul.wide.u32 %rd3, %r1, 12;\nadd.u64 %rd1, %rd1, %rd3;
            st.global.v4.u32 [%rd1], {%r1, %r1, %r1, %r1};\nLOAD.v4.u32 {%r3, %r4, %r5, %r6}, [%rd1];\n$end:",
        ),
        (
            "vectors of it, the other way round",
            "@!%p1 bra $end;\nmul.wide.u32 %rd3, %r1, 12;\nadd.u64 %rd1, %rd1, %rd3;
            LOAD.v4.u32 {%r3, %r4, %r5, %r6}, [%rd1];\nst.global.v4.u32 [%rd1], {%r1, %r1, %r1, %r1};\n$end:",
        ),
    ];
    for (what, body) in wrong {
        assert_eq!(read_only("ld.global", body), [], "{what}");
        let findings = read_only("ld.global.nc", body);
        let [finding] = &findings[..] else { panic!("{what}: {findings:?}") };
        assert_eq!(finding.kind, FindingKind::ReadOnlyWritten, "{what}");
        assert!(finding.other.is_some() && finding.place.is_some(), "{what}: {finding}");
    }
    // By another block it is a race besides, whatever the load.
    let other = "@%p1 bra $writes;\nLOAD.u32 %r3, [%rd1];\nret;\n$writes:\nst.global.u32 [%rd1], %r1;";
    let kinds = |findings: Vec<Finding>| findings.iter().map(|finding| finding.kind).collect::<Vec<_>>();
    assert_eq!(kinds(read_only("ld.global", other)), [FindingKind::GlobalRace]);
    assert!(kinds(read_only("ld.global.nc", other)).contains(&FindingKind::ReadOnlyWritten));
    // What nobody writes, or others write beside it, may be read so.
    for right in [
        "LOAD.u32 %r3, [%rd1];",
        "LOAD.u32 %r3, [%rd1];\n@%p1 st.global.u32 [%rd2], %r3;",
        "LOAD.u8 %r3, [%rd1];\n@%p1 st.global.u8 [%rd1+1], %r3;",
    ] {
        assert_eq!(read_only("ld.global.nc", right), [], "{right}");
    }
}

#[test]
fn a_new_launch_may_read_by_ld_global_nc_what_the_one_before_has_written() {
    let module = text(
        "ld.param.u64 %rd1, [x];
        ld.param.u32 %r1, [n];
        setp.eq.u32 %p1, %r1, 0;
        @%p1 st.global.u32 [%rd1], 5;
        @!%p1 ld.global.nc.u32 %r2, [%rd1];
        ret;",
    );
    let mut sim = Sim::new(Config::default());
    let x = sim.alloc_from("x", &[0; 64]);
    for n in [0, 1] {
        let params = Io { x: GlobalPtr(x.address), y: GlobalPtr(0), n };
        let report = sim.launch(&module, "test", LaunchDims::linear(1, 1), &params.pack()).expect("it runs");
        assert!(report.is_clean(), "{:?}", report.findings);
    }
}

#[test]
fn atomics_and_bulk_stores_break_the_promise_of_ld_global_nc_too() {
    let mut layout = SharedLayout::new();
    let tile = layout.alloc("tile", 128, 128);
    for bulk in [false, true] {
        let module = hopper(32, layout.clone(), |k| {
            let (x, tid) = (k.param(Maps::x), k.tid_x());
            let at = k.mad_wide_u32(tid, 4, x);
            k.comment("the promise");
            let value = k.ld_global_hint::<B32>(at, MemHint::new().nc());
            let base = k.shared_addr(tile);
            let mine = k.mad_lo_u32(tid, 4, base);
            k.st_shared(mine, value);
            k.fence_proxy_async(ProxySpace::Shared);
            k.bar_sync_all();
            let first = k.setp_eq_u32(tid, 0);
            k.if_(first, |k| {
                k.comment("the write");
                if bulk {
                    k.bulk_store(x, tile, 128, BulkHint::new());
                    k.bulk_commit();
                    k.bulk_wait(0);
                } else {
                    k.red_add_u32(AtomSem::Relaxed, Scope::Gpu, x, 1);
                }
            });
        });
        let maps = |_: u64, _: u64| {
            let map = flashcore_sim::TensorMap::new(TensorElement::U32, 1 << 34, &[32, 32], &[128], &[32, 8]);
            (map.clone(), map)
        };
        let config = Config { threads: 1, ..Config::default() };
        let outcome = run_maps(&module, 1, &[1; 128], 128, 0, &maps, config.clone());
        let finding = assert_found(&outcome, &config, FindingKind::ReadOnlyWritten);
        assert_eq!(finding.site.comment.as_deref(), Some("the write"));
        assert_eq!(finding.other.expect("both sites").site.comment.as_deref(), Some("the promise"));
    }
}
