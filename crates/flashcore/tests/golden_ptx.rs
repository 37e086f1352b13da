//! The text of every kernel, as hashes: a change that is meant to leave the kernels alone leaves these alone. One that is
//! meant to change a kernel renews the snapshot (`cargo insta accept`), and the lines that differ say which kernels it
//! changed.
#![cfg(feature = "cuda")]

use std::fmt::Write;

use flashcore::plan::choose;
use flashcore_kernels::{ElementType, Kernel, Schedule, Spec, combine};
use flashcore_ptx::Target;

/// Pairs of head dims, those of the quick test first.
const DIMS: [(u32, u32); 8] =
    [(64, 64), (128, 128), (40, 72), (192, 128), (8, 8), (96, 96), (256, 256), (59, 7)];

/// Specs of a pair of head dims: none of the features, all of them, and mixtures that differ from pair to pair; with
/// `each`, also each feature alone.
fn specs((head_dim, head_dim_v): (u32, u32), each: bool) -> Vec<Spec> {
    let with = |features: u32| {
        let has = |bit: u32| features >> bit & 1 == 1;
        let dtype = if has(8) { ElementType::Bf16 } else { ElementType::F16 };
        Spec {
            head_dim_v,
            left: has(0),
            right: has(1),
            top_left: has(2) && features & 3 != 0,
            softcap: has(3),
            scaled_scores: has(4),
            key_lengths: has(5),
            grouped: has(6),
            lse: has(7),
            ..Spec::new(dtype, head_dim)
        }
    };
    let (alone, mixed) = if each { (0..9, 1..=4_u32) } else { (0..0, 1..=1) };
    let mixed = mixed.map(|i| (head_dim * 31 + head_dim_v + i).wrapping_mul(0x9e37_79b9) >> 23);
    let features = [0, 0x1ff].into_iter().chain(alone.map(|bit| 1 << bit)).chain(mixed);
    let mut specs: Vec<Spec> = features.map(with).collect();
    specs.push(Spec { dtype: ElementType::F32, ..with(0xff) });
    specs
}

/// One line per kernel, target and head dims, with the hash of all texts.
fn table(each: bool) -> String {
    let mut table = String::new();
    for kernel in Kernel::LADDER {
        let targets = [Target::Sm80, Target::Sm90a, Target::Sm89];
        for target in targets.into_iter().take(if each { 3 } else { 2 }) {
            for dims in DIMS.into_iter().take(if each { DIMS.len() } else { 4 }) {
                let (mut hasher, mut modules) = (blake3::Hasher::new(), 0);
                for spec in specs(dims, each) {
                    for schedule in choose::schedules(kernel, &spec) {
                        let Ok(module) = schedule.emit(&spec, target) else { continue };
                        hasher.update(module.to_string().as_bytes());
                        modules += 1;
                    }
                }
                if modules > 0 {
                    let ((head_dim, head_dim_v), hash) = (dims, hasher.finalize().to_hex());
                    let what = format!("{kernel} {target} {head_dim}/{head_dim_v}");
                    writeln!(table, "{what}: {modules} kernels, {}", &hash[..32]).unwrap();
                }
            }
        }
    }
    table
}

#[test]
fn neither_does_the_kernel_that_merges_parts() {
    let mut table = String::new();
    for dims in DIMS.into_iter().take(4) {
        let (mut hasher, mut modules) = (blake3::Hasher::new(), 0);
        for spec in specs(dims, true) {
            let schedule = Schedule::Combine(combine::Schedule { warps: 4, shift: 8, by_length: false });
            let Ok(module) = schedule.emit(&spec, Target::Sm90a) else { continue };
            hasher.update(module.to_string().as_bytes());
            modules += 1;
        }
        let (head_dim, head_dim_v) = dims;
        let hash = hasher.finalize().to_hex();
        writeln!(table, "combine sm_90a {head_dim}/{head_dim_v}: {modules} kernels, {}", &hash[..32])
            .unwrap();
    }
    insta::assert_snapshot!(table);
}

#[test]
fn nor_do_the_launches_whose_blocks_share_keys_by_length() {
    let mut table = String::new();
    let fwd = "sm90_fwd:warpgroups=1,block_n=32,stages=3,q_stages=2,ctas=1,split=1,pingpong=0,lazy=1,poly=0,persistent=1,pairs=0,\
               by_length=1";
    for (name, schedule) in [("sm90_fwd", fwd), ("combine", "combine:warps=2,by_length=1")] {
        let schedule: Schedule = schedule.parse().unwrap();
        for dims in DIMS.into_iter().take(4) {
            let (mut hasher, mut modules) = (blake3::Hasher::new(), 0);
            for spec in specs(dims, true) {
                let paged = Spec { page: Some(48), key_lengths: true, ..spec };
                let packed = Spec { packed_k: true, rows_per_query: 3, ..spec };
                for spec in [spec, paged, packed] {
                    let Ok(module) = schedule.emit(&spec, Target::Sm90a) else { continue };
                    hasher.update(module.to_string().as_bytes());
                    modules += 1;
                }
            }
            let ((head_dim, head_dim_v), hash) = (dims, hasher.finalize().to_hex());
            writeln!(table, "{name} {head_dim}/{head_dim_v}: {modules} kernels, {}", &hash[..32]).unwrap();
        }
    }
    insta::assert_snapshot!(table);
}

/// The launches of a backward pass, for what is made of each spec.
fn backward(of_these: impl Fn(Spec) -> Spec) -> String {
    let mut table = String::new();
    for dims in DIMS.into_iter().take(4) {
        let of = |of: &str| format!("sm80_bwd:of={of},block=64,walk=16,warps=4,stages=1,order=longest");
        let hopper = |block_m: u32| {
            let text = format!("sm90_bwd:block_m={block_m},stages=3,pingpong=1");
            let rounds = format!("{text},rounds=1");
            [text, rounds, format!("sm90_bwd_finish:block_m={block_m}")]
        };
        let ampere = ["bwd_rows:warps=4".to_string(), of("dkdv"), of("dk"), of("dv"), of("dq")];
        let wide = "sm90_bwd_wide:stages=2,pingpong=1".to_string();
        let all = ampere.into_iter().chain(hopper(64)).chain(hopper(128)).chain([wide]);
        for schedule in all.map(|text| text.parse::<Schedule>().unwrap()) {
            let (mut hasher, mut modules) = (blake3::Hasher::new(), 0);
            let target = if schedule.kernel().runs_on(Target::Sm80) { Target::Sm80 } else { Target::Sm90a };
            for spec in specs(dims, true) {
                let Ok(module) = schedule.emit(&of_these(spec), target) else { continue };
                hasher.update(module.to_string().as_bytes());
                modules += 1;
            }
            let ((head_dim, head_dim_v), hash) = (dims, hasher.finalize().to_hex());
            writeln!(table, "{schedule} {head_dim}/{head_dim_v}: {modules} kernels, {}", &hash[..32])
                .unwrap();
        }
    }
    table
}

#[test]
fn nor_do_the_launches_of_a_backward_pass() {
    let table = backward(|spec| spec);
    insta::assert_snapshot!(table);
}

#[test]
fn nor_do_those_of_packed_gradients() {
    let table = backward(|spec| Spec { packed_q: true, packed_k: true, ..spec });
    insta::assert_snapshot!(table);
}

#[test]
fn nor_do_the_kernels_for_8_bit_floats() {
    let mut table = String::new();
    let each = [
        (Kernel::Sm90Fwd, Target::Sm90a),
        (Kernel::Sm80Fwd, Target::Sm89),
        (Kernel::Sm80Decode, Target::Sm89),
        (Kernel::Sm80Decode, Target::Sm90a),
    ];
    for ((kernel, target), dims) in
        each.into_iter().flat_map(|it| DIMS.into_iter().take(2).map(move |dims| (it, dims)))
    {
        let (mut hasher, mut modules) = (blake3::Hasher::new(), 0);
        for spec in specs(dims, false).into_iter().filter(|spec| spec.dtype != ElementType::F32) {
            let scaled_scores = spec.scaled_scores || spec.softcap;
            let spec = if kernel == Kernel::Sm80Decode {
                Spec { kv: Some(ElementType::E4m3), scaled_scores, ..spec }
            } else {
                Spec { dtype: ElementType::E4m3, out: Some(spec.dtype), scaled_scores, ..spec }
            };
            for schedule in choose::schedules(kernel, &spec) {
                let Ok(module) = schedule.emit(&spec, target) else { continue };
                hasher.update(module.to_string().as_bytes());
                modules += 1;
            }
        }
        let ((head_dim, head_dim_v), hash) = (dims, hasher.finalize().to_hex());
        let what = format!("{kernel} {target} {head_dim}/{head_dim_v}");
        writeln!(table, "{what}: {modules} kernels, {}", &hash[..32]).unwrap();
    }
    insta::assert_snapshot!(table);
}

#[test]
fn no_kernel_changes_unless_it_is_meant_to() {
    insta::assert_snapshot!(table(false));
}

#[test]
#[ignore = "a minute; run it by hand before and after a change that touches all kernels"]
fn no_kernel_changes_in_any_feature_unless_it_is_meant_to() {
    insta::assert_snapshot!(table(true));
}

#[test]
fn nor_does_the_launch_that_appends_to_a_cache() {
    let mut table = String::new();
    for text in [
        "append:",
        "append:packed=1",
        "append:rotary=32",
        "append:rotary=32,interleaved=1,positions=1,packed=1",
    ] {
        let schedule: Schedule = text.parse().unwrap();
        for (target, kv) in [
            (Target::Sm80, None),
            (Target::Sm90a, None),
            (Target::Sm89, Some(ElementType::E4m3)),
            (Target::Sm90a, Some(ElementType::E4m3)),
        ] {
            let (mut hasher, mut modules) = (blake3::Hasher::new(), 0);
            let layouts = [(false, false, None), (true, true, None), (true, false, Some(16))];
            for (dims, (packed_q, packed_k, page)) in
                DIMS.into_iter().flat_map(|dims| layouts.map(|layout| (dims, layout)))
            {
                let descales = if kv.is_some() { [None, Some(32)] } else { [None; 2] };
                for (masked, descale_keys) in [false, true].into_iter().zip(descales) {
                    let spec = Spec { head_dim_v: dims.1, ..Spec::new(ElementType::Bf16, dims.0) };
                    let spec = Spec { kv, descale_keys, ..spec };
                    let spec = Spec { right: masked, key_lengths: true, packed_q, packed_k, page, ..spec };
                    let Ok(module) = schedule.emit(&spec, target) else { continue };
                    hasher.update(module.to_string().as_bytes());
                    modules += 1;
                }
            }
            let hash = hasher.finalize().to_hex();
            let of = if kv.is_some() { " of e4m3" } else { "" };
            writeln!(table, "{schedule} {target}{of}: {modules} kernels, {}", &hash[..32]).unwrap();
        }
    }
    insta::assert_snapshot!(table);
}
