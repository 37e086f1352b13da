//! First light.
use flashcore_ptx::*;
use flashcore_sim::*;

kernel_params! {
    struct P { a: f32, n: u32, x: GlobalPtr, y: GlobalPtr, }
}

#[test]
fn axpy_runs() {
    let mut k = KernelBuilder::new("axpy", Target::Sm80).params::<P>().threads(128);
    let (block, thread) = (k.ctaid_x(), k.tid_x());
    let i = k.mad_lo_u32(block, 128, thread);
    let n = k.param(P::n);
    let inside = k.setp_lt_u32(i, n);
    k.if_(inside, |k| {
        let (a, x, y) = (k.param(P::a), k.param(P::x), k.param(P::y));
        let (px, py) = (k.mad_wide_u32(i, 4, x), k.mad_wide_u32(i, 4, y));
        let vx = k.ld_global::<F32>(px);
        let vy = k.ld_global::<F32>(py);
        let sum = k.fma_f32(a, vx, vy);
        k.st_global(py, sum);
    });
    let module = Module::new(Target::Sm80).with(k.finish().unwrap());
    let mut sim = Sim::new(Config::default());
    let n = 300u32;
    let x: Vec<u8> = (0..n).flat_map(|i| (i as f32).to_le_bytes()).collect();
    let xb = sim.alloc_from("x", &x);
    let yb = sim.alloc_from("y", &x);
    let p = P { a: 2.0, n, x: GlobalPtr(xb.address), y: GlobalPtr(yb.address) };
    let report = sim.launch(&module, "axpy", LaunchDims::linear(3, 128), &p.pack()).unwrap();
    for f in &report.findings {
        println!("{f}");
    }
    assert!(report.is_clean());
    let y = sim.read(yb);
    for i in 0..n as usize {
        assert_eq!(f32::from_le_bytes(y[4 * i..4 * i + 4].try_into().unwrap()), 3.0 * i as f32);
    }
    println!("{:?}", report.stats);
}
