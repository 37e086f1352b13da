//! Blocks of a cluster that copy key tiles for each other: on the simulator, against the oracle.
#![cfg(feature = "sim")]

mod shared;

use flashcore::{
    Attention, DType, Device, TensorBuf,
    plan::{Schedule, Target},
    sim::SimGpu,
};
use flashcore_ptx::{Module, Op};
use shared::{errors, noise};

/// A schedule of clusters of two blocks.
fn schedule(warpgroups: u32, persistent: bool) -> Schedule {
    let text = format!(
        "sm90_fwd:warpgroups={warpgroups},block_n=32,stages=2,q_stages=1,ctas=1,split=1,pingpong=1,lazy=1,poly=0,\
         persistent={},pairs=0,multicast=2",
        u32::from(persistent)
    );
    text.parse().unwrap()
}

#[test]
fn blocks_that_share_key_tiles_come_to_what_attention_is() {
    for (text, warpgroups, persistent) in [
        ("1x2x512x64 f16", 2, true),
        // The second block of the last pair has no queries; keys end inside of a tile.
        ("1x3x300/333x64 bf16", 2, true),
        ("2x2x520x64 f16 causal", 2, true),
        ("1x2x700x128 bf16 causal", 3, true),
        ("1x4/2x300/600x64 f16 window(100,20)", 2, true),
        ("1x2x260/40x64 f16 causal", 2, false),
        ("1x2x512x40/72 f16 softcap=5", 2, false),
    ] {
        let (o, lse) = errors(text, schedule(warpgroups, persistent), None);
        assert!(o < 8e-3 && lse < 2e-3, "{text}: o is off by {o:.1e}, lse by {lse:.1e}");
    }
    let lengths = [0, 200, 31];
    let (o, lse) = errors("3x2x300/200x64 bf16 key-lengths", schedule(2, true), Some(&lengths));
    assert!(o < 8e-3 && lse < 2e-3, "{lengths:?}: o is off by {o:.1e}, lse by {lse:.1e}");
}

/// What the simulator says when instructions are left out.
fn without(dropped: fn(&Op) -> bool) -> Result<(), String> {
    let edit = move |module: &mut Module| module.kernels[0].body.retain(|inst| !dropped(&inst.op));
    let gpu = SimGpu::new(Target::Sm90a).with_schedule(schedule(2, true)).with_edit(edit);
    let all = TensorBuf::from_f32(&noise(512 * 64, 1), [1, 1, 512, 64], DType::F16).unwrap();
    let run = Attention::new().run(&Device::sim(gpu), &all.view(), &all.view(), &all.view());
    run.map(|_| ()).map_err(|error| error.to_string())
}

#[test]
fn blocks_that_do_not_wait_for_each_other_are_found() {
    without(|_| false).unwrap();
    let unmet = without(|op| matches!(op, Op::ClusterArrive { .. } | Op::ClusterWait { .. }));
    assert!(
        unmet.is_err(),
        "a block began before the other's barriers were there, or ended before the other"
    );
}
