//! Several launches over the same memory, the later ones started programmatically: what a thread touches while an earlier
//! launch may be in flight is found, whatever touches it, and what is ordered by a wait or concerns other memory is not.

mod common;

use common::*;
use flashcore_ptx::*;
use flashcore_sim::Launching::{Programmatic, StreamOrder};
use flashcore_sim::*;

/// One warp, unless a test says otherwise.
const THREADS: u32 = 32;

/// A kernel of [`Maps`] with this name, over the words of its threads in `x` and in `y`.
fn named(
    name: &str,
    threads: u32,
    shared: SharedLayout,
    emit: impl FnOnce(&mut KernelBuilder, Reg<B64>, Reg<B64>),
) -> Module {
    let mut k = KernelBuilder::new(name, Target::Sm90a).params::<Maps>().shared(shared).threads(threads);
    let (tid, x, y) = (k.tid_x(), k.param(Maps::x), k.param(Maps::y));
    let (px, py) = (k.mad_wide_u32(tid, 4, x), k.mad_wide_u32(tid, 4, y));
    emit(&mut k, px, py);
    Module::new(Target::Sm90a).with(k.finish().expect("the test kernel is well formed"))
}

fn plain(name: &str, emit: impl FnOnce(&mut KernelBuilder, Reg<B64>, Reg<B64>)) -> Module {
    named(name, THREADS, SharedLayout::new(), emit)
}

/// Writes `x`, and lets the next launch start at once.
fn producer() -> Module {
    plain("produce", |k, px, _| {
        k.griddepcontrol(GridDep::LaunchDependents);
        let v = k.mov_b32(7);
        k.comment("a partial result");
        k.st_global(px, v);
    })
}

/// Reads `x`.
fn reader() -> Module {
    plain("look", |k, px, _| {
        k.griddepcontrol(GridDep::LaunchDependents);
        k.comment("the last look");
        let v = k.ld_global::<B32>(px);
        let none = k.setp_eq_u32(v, 77);
        k.if_(none, |k| k.trap());
    })
}

/// Runs launches one after the other over `x` and `y`, each of 4 KiB, and returns what each has found.
fn run_all(launches: &[(&Module, Launching)], config: &Config) -> Vec<LaunchReport> {
    let mut sim = Sim::new(config.clone());
    let (x, y) = (sim.alloc_from("x", &[0; 4096]), sim.alloc_from("y", &[0; 4096]));
    let map = |address| {
        let map = flashcore_sim::TensorMap::new(TensorElement::U32, address, &[32, 32], &[128], &[32, 8]);
        flashcore_ptx::TensorMap(map.encode().expect("a valid map"))
    };
    let params = Maps {
        x_map: map(x.address),
        y_map: map(y.address),
        x: GlobalPtr(x.address),
        y: GlobalPtr(y.address),
        n: 0,
    };
    launches
        .iter()
        .map(|&(module, launching)| {
            let kernel = &module.kernels[0];
            let dims = LaunchDims::linear(1, kernel.threads.expect("it says its size").count());
            sim.launch_as(module, &kernel.name, dims, &params.pack(), launching).expect("it can be launched")
        })
        .collect()
}

/// What the last of several launches finds, the same kinds under every policy; nothing else may be found.
#[track_caller]
fn last(launches: &[(&Module, Launching)]) -> Vec<Finding> {
    let mut seen: Option<Vec<Finding>> = None;
    for config in policies() {
        let mut reports = run_all(launches, &config);
        let findings = reports.pop().expect("there are launches").findings;
        for finding in reports.iter().flat_map(|report| &report.findings).chain(&findings) {
            assert_eq!(finding.kind, FindingKind::EarlyGridAccess, "{finding}");
        }
        assert!(reports.iter().all(LaunchReport::is_clean), "only the last one may be wrong");
        let before = seen.get_or_insert_with(|| findings.clone());
        assert_eq!(before.len(), findings.len(), "under {config:?}");
    }
    seen.expect("there are policies")
}

/// The one finding of the last of several launches.
#[track_caller]
fn only(launches: &[(&Module, Launching)]) -> Finding {
    let findings = last(launches);
    assert_eq!(findings.len(), 1, "{findings:?}");
    findings[0].clone()
}

#[test]
fn memory_that_no_launch_in_flight_touches_may_be_used_before_the_wait() {
    let consumer = plain("consume", |k, px, py| {
        let early = k.ld_global::<B32>(py.at(1024));
        k.st_global(py.at(2048), early);
        k.griddepcontrol(GridDep::Wait);
        let v = k.ld_global::<B32>(px);
        k.st_global(py, v);
    });
    assert_eq!(last(&[(&producer(), StreamOrder), (&consumer, Programmatic)]), []);
}

#[test]
fn a_read_of_what_a_launch_in_flight_writes_names_its_kernel_and_comment() {
    let consumer = |early: bool| {
        plain("consume", move |k, px, py| {
            if !early {
                k.griddepcontrol(GridDep::Wait);
            }
            k.comment("merge the partial results");
            let v = k.ld_global::<B32>(px);
            if early {
                k.griddepcontrol(GridDep::Wait);
            }
            k.st_global(py, v);
        })
    };
    assert_eq!(last(&[(&producer(), StreamOrder), (&consumer(false), Programmatic)]), []);
    let found = only(&[(&producer(), StreamOrder), (&consumer(true), Programmatic)]);
    let other = found.other.as_ref().expect("both sites are known");
    assert_eq!(found.site.comment.as_deref(), Some("merge the partial results"));
    assert_eq!(other.kernel.as_deref(), Some("produce"));
    assert_eq!(other.site.comment.as_deref(), Some("a partial result"));
    assert!(other.wrote && other.site.instruction.contains("st.global"), "{found}");
    assert_eq!(found.place.as_ref().map(|p| p.description.as_str()), Some("global x + 0"));
    assert!(found.missing.as_ref().is_some_and(|m| m.contains("griddepcontrol.wait before it")), "{found}");
    // A launch in stream order that does not wait starts when the producer has completed.
    let unordered = plain("consume", |k, px, py| {
        let v = k.ld_global::<B32>(px);
        k.st_global(py, v);
    });
    assert_eq!(last(&[(&producer(), StreamOrder), (&unordered, StreamOrder)]), []);
}

#[test]
fn a_write_to_what_a_launch_in_flight_reads_or_writes_is_found_and_a_second_read_is_not() {
    let writer = plain("overwrite", |k, px, _| {
        let v = k.mov_b32(1);
        k.st_global(px, v);
        k.griddepcontrol(GridDep::Wait);
    });
    let found = only(&[(&reader(), StreamOrder), (&writer, Programmatic)]);
    let other = found.other.as_ref().expect("both sites are known");
    assert!(!other.wrote, "{found}");
    assert_eq!(other.site.comment.as_deref(), Some("the last look"));
    assert!(found.message.contains("a write of global memory that kernel `look` reads"), "{found}");
    let found = only(&[(&producer(), StreamOrder), (&writer, Programmatic)]);
    assert!(found.other.as_ref().is_some_and(|other| other.wrote), "{found}");
    assert_eq!(last(&[(&reader(), StreamOrder), (&reader(), Programmatic)]), []);
}

#[test]
fn a_kernel_that_waits_nowhere_is_found_where_it_touches_such_memory() {
    let careless = |touches: bool| {
        plain("careless", move |k, px, py| {
            let v = k.ld_global::<B32>(if touches { px } else { py });
            k.st_global(py, v);
        })
    };
    assert_eq!(last(&[(&producer(), StreamOrder), (&careless(false), Programmatic)]), []);
    let found = only(&[(&producer(), StreamOrder), (&careless(true), Programmatic)]);
    assert!(found.missing.as_ref().is_some_and(|m| m.contains("this kernel has none")), "{found}");
}

#[test]
fn one_threads_wait_helps_the_others_only_after_a_barrier() {
    let consumer = |barrier: bool| {
        named("consume", 64, SharedLayout::new(), move |k, px, py| {
            let tid = k.tid_x();
            let first = k.setp_eq_u32(tid, 0);
            k.if_(first, |k| k.griddepcontrol(GridDep::Wait));
            if barrier {
                k.bar_sync_all();
            }
            let v = k.ld_global::<B32>(px);
            k.st_global(py, v);
        })
    };
    let producer = named("produce", 64, SharedLayout::new(), |k, px, _| {
        let v = k.mov_b32(7);
        k.st_global(px, v);
    });
    assert_eq!(last(&[(&producer, StreamOrder), (&consumer(true), Programmatic)]), []);
    let found = only(&[(&producer, StreamOrder), (&consumer(false), Programmatic)]);
    assert!(found.missing.as_ref().is_some_and(|m| m.contains("a barrier")), "{found}");
}

/// A consumer that touches the first KiB of `x` by an instruction of its own, after the wait or before.
fn touch_by(how: &str, early: bool) -> Module {
    let mut shared = SharedLayout::new();
    let tile = shared.alloc("tile", 1024, 128);
    let bar = shared.alloc("bar", 8, 8);
    named("consume", THREADS, shared, move |k, px, _| {
        let (tid, x) = (k.tid_x(), k.param(Maps::x));
        let first = k.setp_eq_u32(tid, 0);
        let base = k.shared_addr(tile);
        let row = k.mad_lo_u32(tid, 32, base);
        let zero = k.mov_b32(0);
        for i in 0..2 {
            k.st_shared_vec(row.at(16 * i), [zero; 4]);
        }
        k.if_(first, |k| {
            k.mbarrier_init(bar, 1);
            k.fence_mbarrier_init();
        });
        k.fence_proxy_async(ProxySpace::Shared);
        k.bar_sync_all();
        if !early {
            k.griddepcontrol(GridDep::Wait);
        }
        let bulk = |k: &mut KernelBuilder, start: &dyn Fn(&mut KernelBuilder)| {
            k.if_(first, |k| {
                k.mbarrier_arrive_expect_tx(bar, 1024);
                start(k);
            });
            k.mbarrier_wait_parity(bar, 0, Scope::Cta);
        };
        let group = |k: &mut KernelBuilder, start: &dyn Fn(&mut KernelBuilder)| {
            k.if_(first, |k| {
                start(k);
                k.bulk_commit();
                k.bulk_wait(0);
            });
        };
        let origin = [0.into(), 0.into()];
        match how {
            "vector load" => {
                let line = k.mad_wide_u32(tid, 16, x);
                let _: [Reg<B32>; 4] = k.ld_global_vec(line);
            }
            "vector store" => {
                let line = k.mad_wide_u32(tid, 16, x);
                k.st_global_vec(line, [zero; 4]);
            }
            "atomic" => {
                k.atom_add_u32(AtomSem::Relaxed, Scope::Gpu, px, 1u32);
            }
            "copy" | "part of a copy" => {
                let from = k.mad_wide_u32(tid, 16, x);
                let to = k.mad_lo_u32(tid, 16, base);
                let bytes = if how == "copy" { 16u32 } else { 4 };
                k.cp_async_zfill(CpAsyncCache::Cg, CpAsyncBytes::B16, to, from, bytes);
                k.cp_async_commit();
                k.cp_async_wait(0);
            }
            "bulk load" => bulk(k, &|k| k.bulk_load(tile, x, 1024u32, bar, BulkHint::new())),
            "tensor load" => {
                let map = k.tensor_map(Maps::x_map);
                bulk(k, &|k| k.tensor_load(tile, map, &origin, bar, BulkHint::new()));
            }
            "bulk store" => group(k, &|k| k.bulk_store(x, tile, 1024u32, BulkHint::new())),
            "tensor store" => {
                let map = k.tensor_map(Maps::x_map);
                group(k, &|k| k.tensor_store(map, &origin, tile, BulkHint::new()));
            }
            other => panic!("no way to touch memory is called {other}"),
        }
        if early {
            k.griddepcontrol(GridDep::Wait);
        }
    })
}

#[test]
fn whatever_touches_the_memory_is_found_before_the_wait_and_not_after_it() {
    let writes = ["vector store", "atomic", "bulk store", "tensor store"];
    let reads = ["vector load", "copy", "part of a copy", "bulk load", "tensor load"];
    for how in reads.into_iter().chain(writes) {
        assert_eq!(
            last(&[(&producer(), StreamOrder), (&touch_by(how, false), Programmatic)]),
            [],
            "{how} after the wait"
        );
        let found = only(&[(&producer(), StreamOrder), (&touch_by(how, true), Programmatic)]);
        assert!(found.other.is_some_and(|other| other.wrote), "{how}");
    }
    for how in writes {
        let found = only(&[(&reader(), StreamOrder), (&touch_by(how, true), Programmatic)]);
        assert!(found.other.is_some_and(|other| !other.wrote), "{how}");
    }
    // What these instructions do themselves is remembered as well.
    for (how, wrote) in
        reads.into_iter().map(|how| (how, false)).chain(writes.into_iter().map(|how| (how, true)))
    {
        let store = plain("overwrite", |k, px, _| {
            let v = k.mov_b32(1);
            k.st_global(px, v);
        });
        let found = last(&[(&touch_by(how, false), Programmatic), (&store, Programmatic)]);
        assert!(
            found.iter().any(|f| f.other.as_ref().is_some_and(|other| other.wrote == wrote)),
            "{how}: {found:?}"
        );
    }
}

/// The launch between a producer and a consumer, which touches neither's memory.
fn between(waits: bool, releases_first: bool) -> Module {
    plain("between", move |k, _, py| {
        let release = |k: &mut KernelBuilder| k.griddepcontrol(GridDep::LaunchDependents);
        if releases_first {
            release(k);
        }
        if waits {
            k.griddepcontrol(GridDep::Wait);
        }
        if !releases_first {
            release(k);
        }
        let v = k.mov_b32(1);
        k.st_global(py.at(2048), v);
    })
}

/// A consumer of `x` before or after its wait.
fn consumer(early: bool) -> Module {
    plain("consume", move |k, px, py| {
        if !early {
            k.griddepcontrol(GridDep::Wait);
        }
        let v = k.ld_global::<B32>(px);
        if early {
            k.griddepcontrol(GridDep::Wait);
        }
        k.st_global(py, v);
    })
}

#[test]
fn a_wait_covers_an_older_launch_only_if_the_launch_between_has_waited_for_it() {
    let run = |between: &Module, consumer: &Module| {
        last(&[(&producer(), StreamOrder), (between, Programmatic), (consumer, Programmatic)])
    };
    for releases_first in [false, true] {
        assert_eq!(run(&between(true, releases_first), &consumer(false)), []);
        let found = run(&between(false, releases_first), &consumer(false));
        let [found] = &found[..] else { panic!("{found:?}") };
        assert_eq!(found.other.as_ref().and_then(|o| o.kernel.as_deref()), Some("produce"));
        let missing = found.missing.as_ref().expect("it is known");
        assert!(missing.contains("griddepcontrol.wait in kernel `between`"), "{found}");
        assert!(found.to_string().contains("2 launches before"), "{found}");
    }
}

#[test]
fn before_the_wait_an_older_launch_is_over_only_if_the_launch_between_waited_before_it_let_others_start() {
    let run = |between: &Module| {
        last(&[(&producer(), StreamOrder), (between, Programmatic), (&consumer(true), Programmatic)])
    };
    assert_eq!(run(&between(true, false)), []);
    assert_eq!(run(&between(true, true)).len(), 1, "it lets the consumer start before it waits");
    assert_eq!(run(&between(false, false)).len(), 1, "it does not wait");
}

#[test]
fn a_launch_in_stream_order_between_two_others_ends_the_first() {
    let plain = between(false, true);
    assert_eq!(
        last(&[(&producer(), StreamOrder), (&plain, StreamOrder), (&consumer(true), Programmatic)]),
        []
    );
}

#[test]
fn a_finding_names_the_launch_in_flight_that_touched_the_bytes() {
    let again = plain("again", |k, px, _| {
        k.griddepcontrol(GridDep::Wait);
        let v = k.mov_b32(8);
        k.st_global(px, v);
    });
    let found = last(&[(&producer(), StreamOrder), (&again, Programmatic), (&consumer(true), Programmatic)]);
    let kernels: Vec<_> = found.iter().filter_map(|f| f.other.as_ref()?.kernel.clone()).collect();
    assert_eq!(kernels, ["again"], "the first has completed, since `again` waited before it ended");
    let wild = plain("wild", |k, px, _| {
        let v = k.mov_b32(8);
        k.st_global(px.at(512), v);
    });
    let wide = plain("consume", |k, px, py| {
        for at in [0, 512] {
            let v = k.ld_global::<B32>(px.at(at));
            k.st_global(py.at(at), v);
        }
    });
    let found = last(&[(&producer(), StreamOrder), (&wild, Programmatic), (&wide, Programmatic)]);
    let kernels: Vec<_> = found.iter().filter_map(|f| f.other.as_ref()?.kernel.clone()).collect();
    assert_eq!(kernels, ["produce", "wild"]);
}

#[test]
fn the_first_launch_of_a_device_may_run_beside_an_unknown_grid() {
    let careless = plain("careless", |k, px, py| {
        let v = k.ld_global::<B32>(px);
        k.st_global(py, v);
    });
    assert_eq!(last(&[(&careless, StreamOrder)]), []);
    assert_eq!(last(&[(&consumer(false), Programmatic)]), []);
    assert_eq!(last(&[(&careless, Programmatic)]).len(), 2, "its load and its store");
    for launching in [StreamOrder, Programmatic] {
        let found = only(&[(&consumer(true), launching)]);
        assert!(found.site.instruction.contains("ld.global"), "{found}");
        assert!(found.other.is_none(), "{found}");
    }
    // The unknown grid stays in flight beside a second launch unless the first one has waited for it.
    let early = between(false, false);
    for config in policies() {
        let reports = run_all(&[(&early, Programmatic), (&consumer(false), Programmatic)], &config);
        let unknown = reports[1].of(FindingKind::EarlyGridAccess).next().expect("found");
        assert!(unknown.message.contains("`between`, which has not waited for it"), "{unknown}");
    }
    assert_eq!(last(&[(&between(true, false), Programmatic), (&consumer(false), Programmatic)]), []);
}
