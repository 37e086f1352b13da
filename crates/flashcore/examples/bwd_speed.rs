use flashcore::*;
fn main() {
    let threads = std::env::args().nth(1).unwrap_or("2".into());
    let engine = cpu::Engine::new().with_schedule(format!("threads={threads}").parse().unwrap());
    let device = Device::cpu_with(engine);
    for text in std::env::args().skip(2) {
        let problem: Problem = format!("{text} backward").parse().unwrap();
        let make = |shape: [usize; 4], i: usize| {
            let v: Vec<f32> = (0..shape.iter().product())
                .map(|n: usize| (((n * 7919 + i * 104_729) % 65_537) as f32 * 0.37).sin() * 1.4)
                .collect();
            TensorBuf::from_f32(&v, shape, problem.dtype).unwrap()
        };
        let shapes: Vec<[usize; 4]> = problem.signature().inputs().map(|p| p.shape).collect();
        let (q, k, v, d_o) = (make(shapes[0], 0), make(shapes[1], 1), make(shapes[2], 2), make(shapes[5], 3));
        let a = Attention::new().mask(problem.mask);
        let out = a.with_lse().run(&device, &q.view(), &k.view(), &v.view()).unwrap();
        let lse = out.lse.unwrap();
        let (qv, kv, vv, ov, lv, dv_) = (q.view(), k.view(), v.view(), out.o.view(), lse.view(), d_o.view());
        let given = Backward::new([&qv, &kv, &vv], &ov, &lv, &dv_);
        let (mut dq, mut dk, mut dv) = (q.clone(), k.clone(), v.clone());
        let mut times = vec![];
        let begin = std::time::Instant::now();
        while begin.elapsed().as_secs_f64() < 2.0 || times.len() < 3 {
            let start = std::time::Instant::now();
            a.backward_into(&device, &given, &mut dq.view_mut(), &mut dk.view_mut(), &mut dv.view_mut())
                .unwrap();
            times.push(start.elapsed().as_secs_f64());
        }
        times.sort_by(f64::total_cmp);
        let t = times[times.len() / 2];
        println!("{text:<34} {:9.2} ms {:8.1} GF/s", t * 1e3, problem.flops() / t / 1e9);
    }
}
